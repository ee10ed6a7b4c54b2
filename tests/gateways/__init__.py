"""Two tenants through gateways and pools of others, which share their connections to the server."""
