"""What processes say to each other: calls by `rpc`, sockets by `handoff`, other descriptors by `descriptors`.

`calls` makes them of the Protocols in `device_protocols`, and of those of `server.control.device_runtime`. `messages` are those
of HTTP processes; the `*_fields` mirror classes of ours in them. `routing` decides which process a connection belongs to.
"""
