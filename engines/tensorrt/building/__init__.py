"""Builds ONNX models into TensorRT plans, in this process or in a child process."""
