"""The control groups of Linux that this process is in: where what they allow it can be read."""

from collections.abc import Iterator
from pathlib import Path


def groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the groups that limit this process by this controller, such as `cpu`: its own, and those around it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        if not controllers or controller in controllers.split(","):
            group = base / path.lstrip("/")
            yield from (parent for parent in (group, *group.parents) if parent.is_relative_to(base))
