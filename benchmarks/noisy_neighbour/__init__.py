"""The noisy-neighbour benchmark, for any server of the Open Inference Protocol: docs/noisy-neighbour.md has the method."""
