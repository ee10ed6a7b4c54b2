"""Error texts of ONNX Runtime, without what only its authors need."""

import re
from pathlib import Path

# Patterns and their replacements: codes; a source file with the function or its whole signature, and the condition that
# failed; the introduction of a failed node.
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

_OPERATORS = "the library has no such operator: export the model with standard ones, or compute it before or after the model"
_NEWER = "export it with an older opset_version, or install a newer onnxruntime"
# What of an error says why a model cannot be loaded, and what to do.
_CURES = (
    (" is not a registered function/op", _OPERATORS),
    ("No Op registered for ", _OPERATORS),
    ("Unsupported model IR version", _NEWER),
    (" is under development and support for this is limited", _NEWER),
    ("MLDataType for: ", "convert tensors of that type within the model"),
)


def is_wrong_shape(error: Exception) -> bool:
    """Whether a run failed because an output's memory has another shape than the output."""
    text = str(error)
    return "invalid dimensions for output" in text or "provided for output" in text


def with_cure(text: str) -> str:
    """The text of an error that a model could not be loaded for, with what to do about it where that is known."""
    return next((f"{text.rstrip('.')}; {cure}" for said, cure in _CURES if said in text), text)


def clean_message(error: Exception, folder: Path | None = None) -> str:
    """The library's error in one line, without codes, source files, C++ signatures, failed conditions, and `folder`."""
    said = " ".join(str(error).split()) or type(error).__name__
    text = said[:2000].replace(f"{folder}/", "") if folder else said[:2000]
    for pattern, left in _NOISE:
        text = re.sub(pattern, left, text)
    return text
