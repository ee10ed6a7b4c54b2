"""The server: tenants and their queues, HTTP and the Open Inference Protocol, the device side, and administration."""

__version__ = "0.1.0"

EXTENSIONS = [
    "binary_tensor_data",
    "classification",
    "generate",
    "logging",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
    "trace",
]
"""The extensions of the Open Inference Protocol that are served, under Triton's names."""
