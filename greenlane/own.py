"""Makes sure that `server`, `engines` and `partitions` are Greenlane's, before anything imports them.

These names are common, and Python takes the first package of a name on its path. A folder `server/` where `python -m` is
started, or one in PYTHONPATH, would be imported in place of ours and fail with an error that explains nothing.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("server", "engines", "partitions")

HOME = Path(__file__).parents[1].resolve()
"""The folder that holds these packages and this one: site-packages, or a checkout."""


class ForeignPackage(ImportError):
    """Python would import another package in place of one of Greenlane's."""


def require_own_packages() -> None:
    """Raise ForeignPackage unless each of the packages that `import` would give, or gave, lies beside this one.

    Imports nothing.
    """
    for name in PACKAGES:
        found = _find(name)
        if found is None:
            raise ForeignPackage(f"the package {name!r} is missing from {HOME}; install greenlane again", name=name)
        if found != HOME / name:
            raise ForeignPackage(
                f"{found} hides Greenlane's package {name!r}, which is {HOME / name}; start the command `greenlane` or "
                "`python -P -m greenlane`, which leave the current folder out of Python's path, or take it out of PYTHONPATH, "
                "or rename what is in the way",
                name=name,
            )


def protect_children() -> None:
    """Keep the current folder off the path of the processes that the server starts, unless Greenlane is imported from it.

    The process that forks the HTTP processes begins as `python -c`, which would put that folder first.
    """
    if Path.cwd() != HOME:
        os.environ.setdefault("PYTHONSAFEPATH", "1")


def _find(name: str) -> Path | None:
    """What `import name` gives: the folder of a package or the file of a module. None if there is neither."""
    try:
        spec = find_spec(name)
    except ValueError:  # Imported already, and without a specification: a program made this module by itself.
        return Path(getattr(sys.modules[name], "__file__", None) or f"<{name}>")
    if spec is None:
        return None
    if spec.submodule_search_locations is None:
        return Path(spec.origin or name)
    return Path(next(iter(spec.submodule_search_locations))).resolve()
