"""ONNX models on ONNX Runtime: one session a partition, its threads on that partition's cores."""
