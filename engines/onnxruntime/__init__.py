"""ONNX models on ONNX Runtime: one session a partition, its threads on that partition's cores."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # Read by the library's import; from 1.29 on it sends telemetry.
