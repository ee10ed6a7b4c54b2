"""Which CUDA graphs an executor uses, decided before its execution context is made; pure.

There are two kinds. Ours is captured once for a shape, over the copies by kernels and the engine, and costs one launch of
some microseconds. The library's own, where it has any, stands around the engine only and is invisible to us. They do not
go together: a context with graphs of its own is never captured.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ModelRefused
from ..settings import RuntimeSettings


@dataclass(frozen=True, slots=True)
class Way:
    """How inferences reach the GPU. `notice`, unless empty, is what whoever runs the engine is to be warned of."""

    capture: bool
    """By a graph of ours for each shape."""
    native: bool
    """By the library's."""
    notice: str = ""

    def __str__(self) -> str:
        return "graphs of its own" if self.native else "captured graphs" if self.capture else "no graphs"


@dataclass(frozen=True, slots=True)
class Situation:
    """What decides besides the settings: of the engine, that inputs are dynamic or weights streamed; of the library,
    that it has graphs of its own.
    """

    dynamic: bool = False
    streaming: bool = False
    native: bool = False


def decide(settings: RuntimeSettings, situation: Situation) -> Way:
    """The way to begin with. Raises ModelRefused where graphs are required and there can be none."""
    if settings.graphs == "off":
        asked = settings.cuda_graph_strategy == "whole_graph_capture"
        return Way(capture=False, native=asked and situation.native)
    if settings.copies == "engine" and situation.native and not situation.streaming:
        return Way(capture=False, native=True, notice=_overridden(settings))
    why = obstacle(settings, situation)
    if why and (refused := refusal(settings, why)):
        raise ModelRefused(refused)
    return fall_back(situation, why) if why else Way(capture=True, native=False)


def obstacle(settings: RuntimeSettings, situation: Situation) -> str:
    """Why no graph of ours can be captured; empty where it may be tried.

    What the library itself says of a stream is not asked: TensorRT-RTX 1.6 denies what then succeeds.
    """
    if situation.streaming:
        return "its weights are streamed"
    if situation.dynamic and settings.dynamic_shapes_kernel_specialization_strategy == "lazy":
        return "its inputs are dynamic and its kernels 'lazy', and a graph would keep those of the first run"
    return ""


def refusal(settings: RuntimeSettings, why: str) -> str:
    """What to refuse an engine with that cannot be captured; empty where it may run all the same."""
    return f"graphs are required, but it cannot be captured as one: {why}" if settings.graphs == "required" else ""


def fall_back(situation: Situation, why: str) -> Way:
    """The way to go on when `why` says that nothing can be captured."""
    native = situation.native and not situation.streaming
    instead = "TensorRT's own graphs stand around the engine alone" if native else "each inference costs more"
    return Way(capture=False, native=native, notice=f"cannot be captured as a graph ({why}), so {instead}")


def unsized(settings: RuntimeSettings, way: Way, outputs: Sequence[str]) -> Way:
    """The way instead of this one for an engine with outputs whose size depends on data. Raises ModelRefused."""
    why = f"the size of output {', '.join(map(repr, outputs))} depends on data"
    if refused := refusal(settings, why):
        raise ModelRefused(refused)
    return fall_back(Situation(), why) if way.capture or way.native else way


def captures_instead(settings: RuntimeSettings, situation: Situation, way: Way, outputs: Sequence[str]) -> bool:
    """Whether graphs of ours are captured with these settings, by contexts that were made for another `way`.

    `outputs` are those whose size depends on data. Raises ModelRefused for what would need other contexts.
    """
    if way.native:
        raise ModelRefused("its contexts were made with graphs of the library's own, which stay; load it with other settings")
    why = f"the size of output {', '.join(map(repr, outputs))} depends on data" if outputs else obstacle(settings, situation)
    if why and (refused := refusal(settings, why)):
        raise ModelRefused(refused)
    return settings.graphs != "off" and not why


def _overridden(settings: RuntimeSettings) -> str:
    if settings.cuda_graph_strategy != "disabled":
        return ""
    return "graphs are on and copies 'engine', so TensorRT's own graphs are used though cuda_graph_strategy is 'disabled'"
