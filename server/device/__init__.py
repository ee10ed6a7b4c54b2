"""The device side: its runtime, and the models that are loaded, bound and freed there."""
