"""The noisy-neighbour benchmark, for any server of the Open Inference Protocol: its README.md has the method."""
