"""`greenlane top`: a live table of what each tenant has and uses, from a running server's GET /admin/usage and /metrics.

It is a client: it imports nothing of the server.
"""
