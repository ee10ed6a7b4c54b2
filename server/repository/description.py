"""The JSON of `GET /v2/models/NAME/config`: the whole configuration, in Triton's form.

Like Triton, we complete what a configuration leaves out before we show it: from the model, or with Triton's defaults where
they are true here too.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engines.signature import Signature, TensorSpec

from ..scheduling.queue_policy import Batching
from .model_config import ModelConfig
from .model_settings import EXECUTION
from .triton_schema import MESSAGE, as_json

Object = dict[str, Any]


def describe(
    name: str,
    config: ModelConfig,
    signature: Signature,
    platform: str,
    filename: str = "model.onnx",
    batching: Batching | None = None,
    execution: Mapping[str, object] | None = None,
    on_gpu: bool = False,
) -> Object:
    """The whole configuration of a model that is served.

    `signature` is the one that clients see, `platform` is `<project>_<format>`, and `filename` is the model's file in the
    version's directory. `execution` is an executor's `describe` from when the model was loaded; its counts are left out, as
    they change.
    """
    stated = as_json(config.message)
    most = signature.max_batch
    filled = {
        "name": name,
        "platform": platform,
        "backend": platform.partition("_")[0],
        "version_policy": config.versions.describe(),
        "max_batch_size": most,
        "input": list(_tensors(stated["input"], _blank("input"), signature.inputs, most)),
        "output": list(_tensors(stated["output"], _blank("output"), signature.outputs, most)),
        "optimization": {**as_json(MESSAGE().optimization), **_PINNED, **stated.get("optimization", {})},
        "dynamic_batching": batching and _batching(stated.get("dynamic_batching"), batching),
        "instance_group": _groups(stated["instance_group"], name, on_gpu),
        "default_model_filename": filename,
        "model_transaction_policy": {"decoupled": True} if signature.in_parts else stated.get("model_transaction_policy"),
        "parameters": {**stated["parameters"], **_execution(execution or {})},
    }
    whole = {**stated, **filled}
    order = [field.name for field in MESSAGE.DESCRIPTOR.fields]
    return {key: whole[key] for key in order if whole.get(key) is not None}


_PINNED: Mapping[str, Object] = {"input_pinned_memory": {"enable": True}, "output_pinned_memory": {"enable": True}}


def _blank(field: str) -> Object:
    """An input or output with no field set, as JSON."""
    return as_json(getattr(MESSAGE(), field).add())


def _tensors(stated: Sequence[Object], blank: Object, specs: Sequence[TensorSpec], most: int) -> Iterator[Object]:
    """The tensors that the configuration lists, in its order, and then the others."""
    named = {spec.name: spec for spec in specs}
    entries = {entry["name"]: entry for entry in stated if entry["name"] in named}
    for name in dict.fromkeys([*entries, *named]):
        spec = named[name]
        dims = list(spec.shape[1:] if most else spec.shape)
        kind = spec.datatype.config_name
        yield {**entries.get(name, blank), "name": name, "data_type": kind, "dims": dims}


def _batching(stated: Object | None, batching: Batching) -> Object:
    """`dynamic_batching`. Without preferred sizes it is the largest batch, as Triton fills it in too."""
    shown = as_json(MESSAGE().dynamic_batching) if stated is None else stated
    sizes = list(batching.preferred) or [batching.most]
    delay = min(round(batching.delay * 1e6), 2**64 - 1)  # As it is stated; a duration may be longer.
    return {**shown, "preferred_batch_size": sizes, "max_queue_delay_microseconds": delay}


def _groups(stated: Sequence[Object], name: str, on_gpu: bool) -> list[Object]:
    """The instance group as configured, if it is one of one instance, as there is; otherwise that."""
    kind = "KIND_GPU" if on_gpu else "KIND_CPU"
    groups = [{**group, "count": group["count"] or 1, "name": group["name"] or f"{name}_{n}"} for n, group in enumerate(stated)]
    if sum(group["count"] for group in groups) != 1:
        groups = [{**as_json(MESSAGE().instance_group.add()), "name": name, "count": 1}]
    return [{**group, "kind": kind if group["kind"] == "KIND_AUTO" else group["kind"]} for group in groups]


def _execution(execution: Mapping[str, object]) -> Object:
    lasting = {key: value for key, value in execution.items() if key != "counts"}
    return {EXECUTION: {"string_value": json.dumps(lasting)}} if lasting else {}
