"""The seam between the HTTP side and the device side: slots for tensors, and small messages over rings."""
