"""`python -m tests.fuzz.guided PARSER`: bytes from atheris, which looks for new paths through the parsers of what clients send.

It runs inside this process, without a server, ten thousands of times a second, and keeps inputs that reach lines which none
before has reached. A parser may refuse bytes in the way that it documents. Any other error is a finding: libFuzzer prints it,
writes the bytes to the working directory, and the exit status is not 0. With `--seed` it makes the same bytes again.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["server", "engines"]):
    from .parsers import PARSERS, seeds


def main(arguments: Sequence[str] | None = None) -> None:
    """Fuzz one parser; ends the process."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description="Bytes from atheris for one parser.")
    options.add_argument("parser", choices=PARSERS)
    options.add_argument("--seconds", type=int, default=60, help="default: 60")
    options.add_argument("--seed", type=int, default=1, help="from 1; default: 1")
    chosen = options.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="greenlane-corpus-") as folder:
        for number, data in enumerate(seeds(chosen.parser)):
            Path(folder, str(number)).write_bytes(data)
        limits = [f"-max_total_time={chosen.seconds}", f"-seed={chosen.seed}", "-max_len=4096", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *limits, folder], PARSERS[chosen.parser])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
