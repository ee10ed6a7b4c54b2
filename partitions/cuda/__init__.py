"""Partitions of an NVIDIA GPU: CUDA green contexts, and the driver calls that they need."""
