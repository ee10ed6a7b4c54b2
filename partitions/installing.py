"""How to install an optional part of Greenlane, for the errors that ask for it."""

from pathlib import Path

_ROOT = Path(__file__).parents[1]
"""The folder that holds these packages: a checkout, or site-packages."""


def install_command(extras: str, root: Path = _ROOT) -> str:
    """The command that installs these extras, such as "cpu,rtx": the script of a checkout, or pip where there is none."""
    return f"scripts/install {extras}" if (root / "scripts" / "install").is_file() else f"pip install 'greenlane[{extras}]'"
