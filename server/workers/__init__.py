"""The device side of each tenant: the threads that enqueue its inferences, and what watches and replaces them."""
