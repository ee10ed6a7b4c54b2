"""Routes of the process that owns the device: partitions, loading and unloading of models, metrics."""
