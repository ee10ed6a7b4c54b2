"""Model files: engine files, ONNX files, and the directory that caches plans and kernels."""
