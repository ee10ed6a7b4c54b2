"""Every route that is not inference and needs no device: metadata, statistics, the repository. FastAPI lives here."""
