"""Routes of the process that has the controller: partitions, loading and unloading of models, metrics."""
