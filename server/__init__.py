"""The server: tenants and their queues, HTTP and the Open Inference Protocol, the device side, and administration."""

__version__ = "0.1.0"
