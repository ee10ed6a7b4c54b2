"""What `greenlane check` prints of tenants and models, as text."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engines import TensorSpec

from .config.changes import LIMITS_OF_TENANT, written
from .config.tenant import FENCES, TenantConfig
from .tenants.catalog import ModelVersion

SETTINGS = (
    *("burst", "lend", *FENCES, "ladder", "min_granules", "weights", "target_p99", "target_rate"),
    *LIMITS_OF_TENANT,
    *("max_execution", "device_memory", "paging", "http_processes"),
)
"""Keys of a tenant that are printed where they are set."""


def share_text(granules: tuple[int, ...] | None, cores: str) -> str:
    """A tenant's share of a device; `granules` are None where shares do not fit, or there is no device. `cores` are the numbers
    of a CPU's, with commas between; "" on a GPU.
    """
    if granules is None:
        return "no share (below), so nothing is served"
    if cores:
        return f"core{'s' * (len(granules) != 1)} {', '.join(cores.split(',')[granule] for granule in granules)}"
    return f"granules {list(granules)}"


def settings_line(tenant: TenantConfig) -> str:
    """What is set of how the tenant shares, is limited and is sized; "" if nothing is."""
    return ", ".join(written(tenant, SETTINGS))


def model_line(served: ModelVersion) -> str:
    inputs, outputs = (_tensors(specs) for specs in (served.signature.inputs, served.signature.outputs))
    most = served.signature.max_batch
    return f"{inputs} -> {outputs}{f', batches of up to {most}' if most else ''} ({served.platform})"


def execution_line(execution: Mapping[str, object]) -> str:
    """How it runs, in a line, without what is reported as a warning."""
    said = {key: value for key, value in execution.items() if key not in ("why", "notes", "counts") and value not in ("", [])}
    if said.get("graphs") == "none" and said.keys() & {
        "threads",
        "steps",
    }:  # There are none on a CPU, and none of several steps.
        del said["graphs"]
    return ", ".join(_execution_entry(key, value) for key, value in said.items())


def _execution_entry(key: str, value: Any) -> str:
    """One entry of `Executor.describe`. The steps of an ensemble are what their executors describe."""
    match key:
        case "shapes":
            return f"warmed for {' and '.join(', '.join(map(_dimensions, shapes)) for shapes in value)}"
        case "threads":
            return f"{value} thread{'s' * (value != 1)}"
        case "verified":
            words = Counter(each["verdict"] for each in value["others"])
            return "verified shapes: " + ", ".join([f"{value['right']} right", *(f"{n} {word}" for word, n in words.items())])
        case "steps":
            return f"steps: {'; '.join(map(execution_line, value))}"
        case _:
            return f"{key} {value if isinstance(value, str) else json.dumps(value)}"


def _dimensions(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"


def _tensors(specs: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {spec.datatype}{list(spec.shape)}" for spec in specs) or "nothing"
