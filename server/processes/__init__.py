"""HTTP in processes of its own: a dispatcher that accepts, one process a tenant, and the supervisor that starts them."""
