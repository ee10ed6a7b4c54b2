"""Everything that is not inference: FastAPI routes, who asks, and which web pages may. Knows no device."""
