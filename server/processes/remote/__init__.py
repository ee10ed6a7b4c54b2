"""HTTP processes and device processes as the supervisor sees them: it sends messages, and repeats to a replacement what is due.

A tenant's HTTP side is a `remote_frontend`, a device side a `remote_runtime`.
"""
