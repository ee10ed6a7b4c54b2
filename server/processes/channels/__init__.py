"""What processes say to each other: calls by `rpc`, sockets by `handoff`, other descriptors by `descriptors`.

`calls` makes them of Protocols: those in `http_protocols` and `device_protocols`, and those of `server.control.device_runtime`.
`message_fields` has what msgspec does not know to encode. `routing` decides which process a connection belongs to.
"""
