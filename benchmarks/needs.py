"""Imported before all else by every command: says in one line what is not installed, rather than by a traceback, or late."""

import sys
from importlib.util import find_spec

MISSING = [name for name in ("matplotlib", "onnx", "onnxruntime") if find_spec(name) is None]

if MISSING:
    sys.exit(f"this needs greenlane[test]: scripts/install cpu,rtx,test ({', '.join(MISSING)} not found)")
