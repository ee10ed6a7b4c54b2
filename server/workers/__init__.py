"""The worker threads of each tenant, which enqueue its inferences, and what halts, watches and restarts them."""
