"""Features of Triton that Greenlane does not serve, and what to do instead, which is in the error that refuses such a model."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

_TORCH = "export it to ONNX (torch.onnx.export) and serve that"
_TENSORFLOW = "convert it to ONNX (python -m tf2onnx.convert) and serve that"

_BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "python": "export what it computes to ONNX and serve that, or let the client do it around a request",
        "pytorch": _TORCH,
        "pytorch_libtorch": _TORCH,
        "pytorch_aoti": _TORCH,
        "tensorflow": _TENSORFLOW,
        "tensorflow_graphdef": _TENSORFLOW,
        "tensorflow_savedmodel": _TENSORFLOW,
        "openvino": "serve the ONNX file that it was converted from",
        "dali": "let the client decode and resize, or export that to ONNX and serve it",
        "fil": "export the trees to ONNX (onnxmltools) and serve that",
        "vllm": "serve language models with vLLM or Triton, beside this server",
        "tensorrtllm": "serve language models with TensorRT-LLM or Triton, beside this server",
    }
)
"""What to do with models of other backends and platforms."""

_FILES: Mapping[str, str] = MappingProxyType(
    {
        "model.py": "python",
        "model.pt": "pytorch",
        "model.pt2": "pytorch_aoti",
        "model.savedmodel": "tensorflow",
        "model.graphdef": "tensorflow",
        "model.safetensors": "pytorch",
        "pytorch_model.bin": "pytorch",
        "saved_model.pb": "tensorflow",
        "model.xml": "openvino",
        "model.dali": "dali",
    }
)
"""Files by which Triton recognizes the backend of a model without a configuration, and as libraries save them."""


def alternative(backend: str) -> str:
    """What to do with a model of this backend or platform, as the end of a sentence; "" for unknown ones."""
    advice = _BACKENDS.get(backend, "")
    return advice and f"; {advice}"


def unserved_backend(filenames: Iterable[str]) -> str:
    """Which backend a version's files are for, as the end of a sentence that says it has no model; "" if unknown."""
    found = next((name for name in sorted(filenames) if name in _FILES), None)
    return f": {found} is of the backend {_FILES[found]}, which is not served{alternative(_FILES[found])}" if found else ""


def unserved(message: Any) -> str | None:
    """Why a configuration cannot be served: a feature that would change the meaning of requests or answers. None if it can."""
    if message.HasField("sequence_batching"):
        return (
            "sequence_batching is not served, as every request stands alone; make the state an input and an output of the "
            "model and let the client send it back"
        )
    if message.model_transaction_policy.decoupled:
        return (
            "model_transaction_policy.decoupled is not served, as there are no backends that need it; a model that is run step "
            "by step answers in parts with the parameter greenlane.loop"
        )
    for field in ("batch_input", "batch_output"):
        if getattr(message, field):
            return f"{field} is not served, as a model sees what its requests say; make it an input that the client sends"
    if ragged := [each.name for each in message.input if each.allow_ragged_batch]:
        return f"input {ragged[0]!r}: allow_ragged_batch is not served; pad to one shape, or have requests run one by one"
    return None
