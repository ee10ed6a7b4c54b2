"""What processes say to each other: calls by `rpc`, sockets by `handoff`, other descriptors by `descriptors`.

`calls` makes them of Protocols: those in `http_protocols` and `device_protocols`, and those of `server.control.device_runtime`.
`message_fields` mirrors classes of ours whose annotations are lost when they are compiled. `routing` decides which process a
connection belongs to.
"""
