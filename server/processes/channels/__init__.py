"""What processes say to each other: messages by `rpc`, sockets by `handoff`, other descriptors by `descriptors`.

`messages` are those of HTTP processes, `device_messages` those of device processes; the `*_fields` mirror classes of ours in
them. `routing` decides which process a connection belongs to.
"""
