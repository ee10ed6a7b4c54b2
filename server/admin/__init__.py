"""Routes that need the process which owns the device: partitions, loading and unloading models, metrics."""
