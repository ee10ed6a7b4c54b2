"""The Open Inference Protocol v2 on bytes: requests into slots, slots into answers. No sockets, no framework."""
