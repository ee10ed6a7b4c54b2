"""Requests made at random, whole and damaged, to a real server, whose answers ONNX Runtime computes as well."""
