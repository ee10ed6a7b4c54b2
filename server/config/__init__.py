"""What may be configured: the schema, the TOML file, and everything that can be wrong with it."""
