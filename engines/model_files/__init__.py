"""Files that models come from or are kept in: engine files, ONNX files, and the directory that caches both."""
