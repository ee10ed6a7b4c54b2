"""`python -m tests.fuzz.guided [PARSER ...]`: bytes from atheris, which looks for new paths through what parses clients' bytes.

It runs inside this process, without a server, ten thousands of times a second, and keeps inputs that reach lines which none
before has reached. A parser may refuse bytes in the way that it documents. Any other error is a finding: libFuzzer prints it,
writes the bytes to the working directory, and the exit status is not 0. With `--seed` it makes the same bytes again.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["server", "engines"]):
    from .parsers import PARSERS, seeds


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz one parser after another, each in a process of its own; 1 where one of them failed."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description="Bytes from atheris for parsers.")
    options.add_argument("parser", nargs="*", help=f"some of {', '.join(PARSERS)}; default: all")
    options.add_argument("--seconds", type=int, default=60, help="for each; default: 60")
    options.add_argument("--runs", type=int, default=-1, help="for each, at most; default: as many as there is time for")
    options.add_argument("--seed", type=int, default=1, help="from 1; default: 1")
    chosen = options.parse_args(arguments)
    if unknown := set(chosen.parser) - PARSERS.keys():
        options.error(f"there is no parser {', '.join(sorted(unknown))}; expected some of {', '.join(PARSERS)}")
    statuses = []
    for parser in chosen.parser or PARSERS:
        with tempfile.TemporaryDirectory(prefix="greenlane-corpus-") as folder:
            if not (child := os.fork()):  # libFuzzer ends its process.
                _fuzz(parser, Path(folder), f"-max_total_time={chosen.seconds}", f"-runs={chosen.runs}", f"-seed={chosen.seed}")
            statuses.append(os.waitpid(child, 0)[1])
    return int(any(statuses))


def _fuzz(parser: str, folder: Path, *limits: str) -> None:
    """Fuzz this parser with a corpus in this folder, and end the process."""
    print(f"== {parser}", file=sys.stderr, flush=True)
    for number, data in enumerate(seeds(parser)):
        (folder / str(number)).write_bytes(data)
    atheris.Setup([sys.argv[0], *limits, "-max_len=4096", "-print_final_stats=1", str(folder)], PARSERS[parser])
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
