"""ONNX models made into TensorRT engines, and their kernels compiled: in this process, or in a child of its own."""
