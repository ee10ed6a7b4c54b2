"""What ONNX Runtime says when it fails, in words for those who run the model."""

import re
from pathlib import Path

# What only the authors of ONNX Runtime need, and what is left of it: codes; a source file with the function or its whole
# signature, and the condition that failed; how a failed node is announced.
_NOISE = (
    (r"\[ONNXRuntimeError\] : \d+ : [A-Z_]+ : ", ""),
    (r"^Failed to load model because ", ""),
    (r"^Load model from \S+ failed: ?", ""),
    (
        r"(?:/\S+/)?\w+\.(?:cc|h):\d+ (?:(?:[\w:]+(?:<[^()]*>)?[ *&]+)*[\w:~<>]+\(.*?\)(?: const)?(?: \[with [^]]*\])?|\w+) "
        r"(?:.*? was false\. )?",
        "",
    ),
    (r"Non-zero status code returned while running (\w+) node\. Name:'' Status Message: ", r"\1: "),
    (r"Non-zero status code returned while running (\w+) node\. Name:('.*?') Status Message: ", r"\1 \2: "),
)


def is_wrong_shape(error: Exception) -> bool:
    text = str(error)
    return "invalid dimensions for output" in text or "provided for output" in text


def tidy(error: Exception, folder: Path | None = None) -> str:
    """What the library said, in one line, without codes, source files, C++ signatures, conditions that failed, and `folder`."""
    said = " ".join(str(error).split()) or type(error).__name__
    text = said[:2000].replace(f"{folder}/", "") if folder else said[:2000]
    for pattern, left in _NOISE:
        text = re.sub(pattern, left, text)
    return text
