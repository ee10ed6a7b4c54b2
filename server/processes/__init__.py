"""The processes of a server: the supervisor, the dispatcher, the HTTP processes and the device processes.

`composition` puts the supervisor together, and `serve` runs it. A package for each kind of process, `tenant_process` for those
that have both sides, and three that several use: `children`, `channels`, and `remote`.
"""
