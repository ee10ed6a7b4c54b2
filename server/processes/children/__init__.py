"""How a process begins (`spawn`, `process_setup`), and shows that it answers (`heartbeat`)."""
