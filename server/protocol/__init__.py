"""The Open Inference Protocol v2 on bytes: requests decoded into slots, answers encoded from slots. No sockets."""
