"""How a process begins (`spawn`, `process_setup`, `process_arguments`), and shows that it answers (`heartbeat`)."""
