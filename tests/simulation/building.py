"""The real TensorRT-RTX builder, which needs no GPU, for the simulated library: its plans compute what they were built from."""

from typing import Any

from .gpu import Gpu

NAMES = ("ILogger", "IProgressMonitor", "IBuilderConfig", "IOptimizationProfile", "BuilderFlag", "ComputeCapability")


def building(gpu: Gpu, real: Any) -> dict[str, Any]:
    """What `tensorrt.library` takes as `others`; `real` is the module of the library."""
    parsed: list[bytes] = []

    class OnnxParser:
        def __init__(self, network: Any, logger: Any) -> None:
            self._real = real.OnnxParser(network, logger)

        def parse(self, model: bytes, path: str | None = None) -> bool:
            parsed.append(model)
            return bool(self._real.parse(model, path))

    class Builder:
        def __init__(self, logger: Any) -> None:
            self._real = real.Builder(logger)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def build_serialized_network(self, network: Any, config: Any) -> Any:
            plan = self._real.build_serialized_network(network, config)
            gpu.plans[bytes(memoryview(plan))] = parsed[-1]
            return plan

    return {"Builder": Builder, "OnnxParser": OnnxParser, **{name: getattr(real, name) for name in NAMES}}
