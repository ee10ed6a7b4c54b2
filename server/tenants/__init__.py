"""Who the tenants are and which models each may call, as the HTTP side knows them. Knows no HTTP and no device."""
