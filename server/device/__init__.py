"""The process that owns the device: its runtime, and the models that are loaded, bound and freed there."""
