"""An HTTP process: its listener and connections, its tenant, and its requests for the supervisor (`proxy`)."""
