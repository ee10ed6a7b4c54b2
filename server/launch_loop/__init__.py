"""Launches captured graphs between tickets and completions without the interpreter; see `server.launch_loop.loop`."""
