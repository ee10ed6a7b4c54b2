"""Where the server keeps built plans and compiled kernels, and how long a build may take."""

import os
from collections.abc import Callable
from pathlib import Path

from engines import Builds, CacheFolder

from ..config.schema import ModelsConfig

CACHE_DIRECTORY = ".greenlane"
"""The default directory, in the repository; no model's name begins with a dot."""


def open_builds(models: ModelsConfig, is_idle: Callable[[], bool] = lambda: True) -> Builds:
    """The builder for this configuration; directories are created only when something is stored.

    Without `models.cache` that is a directory in the repository, or, where the repository cannot be written, in the user's
    own directory for caches: $XDG_CACHE_HOME, or else ~/.cache. `is_idle` is as in `Builds`.
    """
    own = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "greenlane")
    candidates = [models.cache] if models.cache else [models.repository / CACHE_DIRECTORY, own]
    return Builds(CacheFolder(candidates), models.build_timeout, compiles=True, is_idle=is_idle)
