"""The configuration: its schema, the TOML file, and everything that can be wrong with it."""
