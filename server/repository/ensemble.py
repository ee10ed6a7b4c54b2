"""Ensembles: models of one tenant that run one after another as a single model (`ensemble_scheduling` in `config.pbtxt`).

A request for an ensemble is one unit of work: its steps run back to back, on a GPU in one graph, with no other request in
between. Requests for an ensemble are batched up to its own `max_batch_size`; the batching settings of its steps apply only to
requests for these models themselves.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from engines import Engine, ModelRefused, Signature, Step, TensorSpec

from ..protocol.json_document import short
from ..tenants.catalog import ModelVersion

PLATFORM = "ensemble"

SETTINGS = ("graphs", "copies", "warm_up", "verify")
"""The settings that an ensemble may have. The engines of its steps are loaded with all others."""

NO_OWN_SETTINGS = "an ensemble has no such setting, its steps have: set it for them"


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """A step as configured: a model, and a version or None for the highest that is served.

    `inputs` and `outputs` map names of the model's tensors to names in the ensemble. `where` names the step in errors.
    """

    model: str
    version: int | None
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    where: str


class StepModel(NamedTuple):
    """The model of a step: what the tenant is served under this name, and its engine."""

    served: ModelVersion
    engine: Engine


def read_steps(message: Any) -> tuple[EnsembleStep, ...]:
    """The steps of an ensemble, each after those whose outputs it takes; an empty tuple for other models.

    `message` is one of `triton_schema.MESSAGE`. Raises ValueError naming the step and what is wrong with it.
    """
    is_one = message.HasField("ensemble_scheduling")
    platform = message.backend or message.platform
    if is_one and platform != PLATFORM:
        raise ValueError(f"ensemble_scheduling with platform {short(repr(platform))}; expected platform: {PLATFORM!r}")
    if platform != PLATFORM:
        return ()
    steps = [_step(index, step) for index, step in enumerate(message.ensemble_scheduling.step)]
    if not steps:
        raise ValueError(f"platform is {PLATFORM!r}, but ensemble_scheduling has no step; expected one or more")
    if not message.output:
        raise ValueError("an ensemble has to list its output: which of its steps' tensors it gives")
    return tuple(_in_order(steps))


def as_triton(config: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of an ensemble's configuration as Triton shows it: without batching, backend, file and instances."""
    rest = {key: value for key, value in config.items() if key != "dynamic_batching"}
    steps = [{**step, "model_version": step["model_version"] or -1} for step in config["ensemble_scheduling"]["step"]]
    none = {"backend": "", "default_model_filename": "", "instance_group": []}
    return {**rest, **none, "ensemble_scheduling": {**config["ensemble_scheduling"], "step": steps}}


def chain_steps(steps: Sequence[EnsembleStep], parts: Sequence[StepModel], max_batch: int) -> list[Step]:
    """The steps as `engines.chain` takes them.

    Raises ModelRefused if a step takes smaller batches than the ensemble, or if a tensor of a step has a `reshape`.
    """
    for step, part in zip(steps, parts, strict=True):
        if part.served.functions:
            raise ModelRefused(f"{step.where} has functions (model.py), which are not served within an ensemble")
        specs = (*part.served.signature.inputs, *part.served.signature.outputs)
        if reshaped := [spec.name for spec in specs if spec.form]:
            why = "has a reshape, which is not served within an ensemble; leave it out and use the model's own shape"
            raise ModelRefused(f"{step.where}: {short(repr(reshaped[0]))} {why}")
        most = part.served.signature.max_batch
        if max_batch > most:
            those = f"batches of up to {most}" if most else "no batches, as it has no max_batch_size"
            raise ModelRefused(f"the ensemble's largest batch is {max_batch}, but {step.where} takes {those}; lower it")
    return [
        Step(part.engine, step.inputs, step.outputs, _batched(part.served.signature, not max_batch), step.where)
        for step, part in zip(steps, parts, strict=True)
    ]


def identity(links: Sequence[Step]) -> Hashable:
    """A key that is equal for equal chains, as long as their engines live."""
    return tuple(
        (id(link.engine), link.signature, tuple(sorted(link.inputs.items())), tuple(sorted(link.outputs.items())))
        for link in links
    )


def step_warnings(steps: Sequence[EnsembleStep], parts: Sequence[StepModel]) -> Iterator[str]:
    """A warning for each step with batching settings, which have no effect within the ensemble."""
    for step, part in zip(steps, parts, strict=True):
        if (how := part.served.batching) and (how.delay or how.preferred):
            yield (
                f"{step.where} has a batch delay or preferred batches, which apply to requests for that model only: requests "
                "for the ensemble are batched as a whole, up to its own largest batch"
            )


def step_labels(steps: Sequence[EnsembleStep], parts: Sequence[StepModel], outputs: Collection[str]) -> dict[str, bytes]:
    """The labels of the ensemble's outputs: those of the steps' outputs that they are, as in Triton."""
    return {
        tensor: part.served.labels.files[output]
        for step, part in zip(steps, parts, strict=True)
        for output, tensor in step.outputs.items()
        if tensor in outputs and output in part.served.labels.files
    }


def _step(index: int, message: Any) -> EnsembleStep:
    where = f"ensemble_scheduling.step[{index}]"
    if not message.model_name:
        raise ValueError(f"{where} has no model_name")
    where = f"{where} ({short(message.model_name)})"
    version = message.model_version if message.HasField("model_version") else -1
    if version < 1 and version != -1:
        raise ValueError(f"{where}: model_version is {version}; expected 1 or more, or -1 for the highest that is served")
    for key, tensors in (("input_map", message.input_map), ("output_map", message.output_map)):
        if unnamed := [name for name in sorted(tensors) if not tensors[name]]:
            raise ValueError(f"{where}: {key} {short(repr(unnamed[0]))} has no value; expected the name of a tensor")
    if not message.output_map:
        raise ValueError(f"{where} has no output_map, so nothing comes of it")
    inputs, outputs = dict(message.input_map), dict(message.output_map)
    return EnsembleStep(message.model_name, version if version > 0 else None, inputs, outputs, where)


def _in_order(steps: Sequence[EnsembleStep]) -> list[EnsembleStep]:
    """The steps sorted so that each follows those whose outputs it takes; stable. Raises ValueError for a cycle, and for a
    tensor that two steps give.
    """
    makers: dict[str, EnsembleStep] = {}
    for step in steps:
        for tensor in step.outputs.values():
            if makers.setdefault(tensor, step) is not step:
                raise ValueError(f"{step.where} gives {short(repr(tensor))}, which {makers[tensor].where} gives too")
    waiting, done = list(steps), list[EnsembleStep]()
    while waiting:
        ready = next((step for step in waiting if not _missing(step, makers, done)), None)
        if ready is None:
            raise ValueError(_cycle(waiting[0], makers, done))
        waiting.remove(ready)
        done.append(ready)
    return done


def _missing(step: EnsembleStep, makers: Mapping[str, EnsembleStep], done: Sequence[EnsembleStep]) -> str:
    """An input of this step that a step not yet in `done` makes; "" if there is none."""
    return next((tensor for tensor in step.inputs.values() if tensor in makers and makers[tensor] not in done), "")


def _cycle(step: EnsembleStep, makers: Mapping[str, EnsembleStep], done: Sequence[EnsembleStep]) -> str:
    """The error text for a cycle, found by following from `step` to the steps it waits for until one comes up again."""
    path: list[EnsembleStep] = []
    while step not in path:
        path.append(step)
        step = makers[_missing(step, makers, done)]
    links = [f"{each.where} takes {short(repr(_missing(each, makers, done)))}" for each in path[path.index(step) :]]
    return f"the steps wait for each other: {', which is of '.join(links)}, which is of {step.where}"


def _batched(signature: Signature, limit: bool) -> Signature:
    """The signature with one name for the batch dimension of all tensors, if the step takes batches.

    With `limit` the batch dimension of inputs is also limited to the largest batch.
    """
    if not signature.max_batch:
        return signature
    firsts = {spec.dims[0] for spec in (*signature.inputs, *signature.outputs)}
    taken = {dim for spec in (*signature.inputs, *signature.outputs) for dim in spec.dims[1:]}
    named = sorted(dim for dim in firsts if isinstance(dim, str) and dim)
    batch = next(iter(named), "batch" if "batch" not in taken else "the batch")

    def renamed(spec: TensorSpec) -> TensorSpec:
        dims = tuple(batch if dim in named else dim for dim in spec.dims[1:])
        return replace(spec, dims=(batch, *dims))

    def limited(spec: TensorSpec) -> TensorSpec:
        if not limit:
            return renamed(spec)
        least, most = spec.limits[0] if spec.limits else (1, signature.max_batch)
        return replace(renamed(spec), limits=((least, min(most, signature.max_batch)), *spec.limits[1:]))

    return replace(signature, inputs=tuple(map(limited, signature.inputs)), outputs=tuple(map(renamed, signature.outputs)))
