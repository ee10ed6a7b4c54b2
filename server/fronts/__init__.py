"""HTTP in processes of its own: one for each tenant, one for what is nobody's, one for strangers, and a doorman.

A connection is its tenant's from its first headers on: whatever it brings is parsed, decoded and answered in that tenant's
process. The device's process sees tickets and completions, and now and then a question over a channel.
"""
