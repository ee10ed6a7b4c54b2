"""The small engine that shared caches of kernels are made of.

The library makes a cache of an engine's configuration, and the cache must not outlive that engine. An engine that serves would
have to keep its weights in the GPU's memory until the last engine that shares its cache is closed. This one has no weights.
"""

import logging
from typing import Any

from ..errors import Cancelled, EngineError
from ..model_files.artifact import read_plan
from ..model_files.atomic import replace_file
from ..model_files.onnx_writer import FLOAT, model, node, value
from .api import TensorRT
from .building.builder import BuildOptions
from .building.builds import Builds

log = logging.getLogger("greenlane.engines")

MODEL = model("kernels", [node("Add", ["x", "x"], ["y"])], [value("x", FLOAT, [1])], [value("y", FLOAT, [1])], [])


def load_cache_maker(api: TensorRT, builds: Builds, gpu: int) -> Any:
    """The library's engine, or None for a reason that is logged. A context must be current.

    Blocks for seconds if its plan is not in the cache of `builds` yet. Raises Cancelled once these are closed.
    """
    if builds.cache is None:
        return None
    path = builds.cache.path() / "kernels.onnx"
    try:
        if not path.exists():
            replace_file(path, MODEL)
        plan = builds.plan(path, BuildOptions(), api.library, api.version, gpu=gpu)
        return api.deserialize(read_plan(plan).plan, str(plan))
    except Cancelled:
        raise
    except (EngineError, OSError) as error:
        log.info("models of one structure do not share their kernels: %s", error)
        return None
