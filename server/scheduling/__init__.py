"""A tenant's queue: which request runs next, which run together, and until when. Mostly pure; one event loop."""
