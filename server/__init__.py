"""Whose turn, and over which wire: tenants, lanes, the Open Inference Protocol and its administration."""

__version__ = "0.1.0"
