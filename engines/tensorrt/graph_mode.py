"""Decides whether inferences run as CUDA graphs, and whose, before an execution context is made. Pure.

There are two kinds of graphs. We capture one for each set of input shapes, which holds the engine and the copies by kernels
and costs one launch of some microseconds. The library may have graphs of its own ("native"), which hold the engine alone and
are invisible to us. The two exclude each other: a context with native graphs is never captured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ModelRefused
from ..settings import RuntimeSettings


@dataclass(frozen=True, slots=True)
class GraphMode:
    """How inferences are submitted to the GPU. With neither flag set, the engine is submitted call by call."""

    capture: bool
    """We capture a graph for each set of input shapes."""
    native: bool
    """The library's own graphs are on."""
    note: str = ""
    """Why this is not the mode that was asked for, for the operator to read; empty if it is."""

    def __str__(self) -> str:
        return "native graphs" if self.native else "captured graphs" if self.capture else "no graphs"


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """The properties of engine and library that the graph mode depends on."""

    dynamic: bool = False
    """The engine has inputs with dynamic dimensions."""
    streamed: int = 0
    """Bytes of the engine's weights that stay on the host: each inference streams them from there."""
    native: bool = False
    """The library has graphs of its own."""


class Override(NamedTuple):
    """Settings that apply instead of the engine's for a while. `capture`: graphs are captured with them."""

    settings: RuntimeSettings
    capture: bool


def decide(settings: RuntimeSettings, traits: EngineTraits) -> GraphMode:
    """The mode to start with. Raises ModelRefused where the settings require graphs and none can be captured."""
    if settings.graphs == "off":
        asked = settings.cuda_graph_strategy == "whole_graph_capture"
        return GraphMode(capture=False, native=asked and traits.native)
    if settings.copies == "engine" and traits.native and not traits.streamed:
        return GraphMode(capture=False, native=True, note=_strategy_ignored(settings))
    why = obstacle(settings, traits)
    if why and (refused := refusal(settings, why)):
        raise ModelRefused(refused)
    return fall_back(traits, why) if why else GraphMode(capture=True, native=False)


def obstacle(settings: RuntimeSettings, traits: EngineTraits) -> str:
    """Why we cannot capture a graph; empty where it may be tried.

    `IExecutionContext.is_stream_capturable` is not asked: TensorRT-RTX 1.6 answers no for streams whose capture succeeds.
    """
    if traits.streamed:
        return "its weights are streamed"
    if traits.dynamic and settings.dynamic_shapes_kernel_specialization_strategy == "lazy":
        return "its inputs are dynamic and its kernels 'lazy', and a graph would keep those of the first run"
    return ""


def refusal(settings: RuntimeSettings, why: str) -> str:
    """The error text for an engine that cannot be captured though the settings require it; empty if they do not."""
    return f"graphs are required, but it cannot be captured as one: {why}" if settings.graphs == "required" else ""


def fall_back(traits: EngineTraits, why: str) -> GraphMode:
    """The mode to continue in when nothing can be captured, for the reason `why`."""
    native = traits.native and not traits.streamed
    instead = "TensorRT's own graphs are used, without the copies" if native else "each inference costs more"
    return GraphMode(capture=False, native=native, note=f"cannot be captured as a graph ({why}), so {instead}")


def without_capture(settings: RuntimeSettings, mode: GraphMode, outputs: Sequence[str]) -> GraphMode:
    """The mode in place of `mode` for an engine with these data-dependent outputs. Raises ModelRefused."""
    why = _data_dependent(outputs)
    if refused := refusal(settings, why):
        raise ModelRefused(refused)
    return fall_back(EngineTraits(), why) if mode.capture or mode.native else mode


def captures_under_override(settings: RuntimeSettings, traits: EngineTraits, mode: GraphMode, outputs: Sequence[str]) -> bool:
    """Whether we capture graphs with these settings, on contexts that were made for `mode`.

    `outputs` are the data-dependent ones. Raises ModelRefused for settings that need other contexts.
    """
    if mode.native:
        raise ModelRefused("its contexts were made with TensorRT's own graphs and keep them; load it with other settings")
    why = _data_dependent(outputs) if outputs else obstacle(settings, traits)
    if why and (refused := refusal(settings, why)):
        raise ModelRefused(refused)
    return settings.graphs != "off" and not why


def _data_dependent(outputs: Sequence[str]) -> str:
    return f"the size of output {', '.join(map(repr, outputs))} depends on data"


def _strategy_ignored(settings: RuntimeSettings) -> str:
    if settings.cuda_graph_strategy != "disabled":
        return ""
    return "graphs are on and copies 'engine', so TensorRT's own graphs are used though cuda_graph_strategy is 'disabled'"
