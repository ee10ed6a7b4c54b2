"""How another interpreter that this process starts finds the same modules."""

import os
import sys


def search_path() -> str:
    """A PYTHONPATH with which another interpreter finds the modules that this one does."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)
