"""Many tenants on one GPU: in one device process, and in one each under MPS."""
