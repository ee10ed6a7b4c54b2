"""How to install an optional part of Greenlane, for the errors that ask for it."""

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[1]
"""The folder that holds these packages: a checkout, or site-packages."""


def install_command(extras: str, root: Path = _ROOT) -> str:
    """The command that installs these extras, such as "cpu,rtx": the script of a checkout, or pip where there is none.

    pip is that of this Python. It keeps the installed Greenlane, wherever that came from, and adds what the extras need.
    """
    if (root / "scripts" / "install").is_file():
        return f"scripts/install {extras}"
    return f"{sys.executable} -m pip install 'greenlane[{extras}]'"
