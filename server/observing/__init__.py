"""What watches a server, as a client of its controller: the account, the health of devices, the autopilot, the page's data."""
