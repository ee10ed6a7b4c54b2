"""The extensions of the Open Inference Protocol that are served, under Triton's names."""

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
