"""Partitions of an NVIDIA GPU: CUDA green contexts, and the calls of the driver that they need."""
