"""The words of `greenlane prove`, read without importing what they start."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from greenlane.options import checked, positive
from partitions.strain import STRAINS, Strain
from server.command_line import DEFAULT_CONFIGURATION, file_name, only_options

_DESCRIPTION = """\
Starts a server of a configuration on a free port, and finds out in minutes whether its tenants are isolated from each
other on this machine: each tenant is timed alone, beside an aggressor of another tenant, and beside the same aggressor in its
own partition, which must be felt, or nothing is proven.
"""
_STATUS = """\
examples:
  {program} --config greenlane.toml
  {program} --config greenlane.toml --html isolation.html --json isolation.json
  {program} --url http://127.0.0.1:8000      a server that runs; its tenants will feel it

exit status: 0 every pair is isolated; 1 something leaks; 2 the command line or the configuration is wrong, or there is no such
server; 3 something could not be judged: not exercised, not tried, or too noisy
"""
SECONDS = 60.0
LEAST = 8.0


@dataclass(frozen=True, slots=True)
class Options:
    """What to prove, for how long, and where to write it."""

    config: str | None = None
    url: str | None = None
    keys: str | None = None
    seconds: float = SECONDS
    only: str | None = None
    json: str | None = None
    html: str | None = None
    lending: bool = False
    memory: bool = False
    strains: tuple[Strain, ...] = STRAINS


def spelled(kind: Strain) -> str:
    """As it is on the command line."""
    return kind.lower().replace(" ", "-")


def _strains(text: str) -> tuple[Strain, ...]:
    found = {spelled(kind): kind for kind in STRAINS}
    names = text.lower().split(",")
    if unknown := [name for name in names if name not in found]:
        raise ValueError(f"{unknown[0]!r}; expected some of {', '.join(found)}, with commas between")
    return tuple(found[name] for name in dict.fromkeys(names))


def parse(arguments: Sequence[str], program: str) -> Options:
    """Read a command line. Raises SystemExit."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=_DESCRIPTION,
        epilog=_STATUS.format(program=program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    config = f"TOML configuration; default: {DEFAULT_CONFIGURATION}"
    parser.add_argument("--config", metavar="FILE", type=file_name, help=config)
    parser.add_argument("--url", help="a server that runs on this machine, in place of a new one")
    keys = "with --url: TOML with `admin = KEY` and, in [tenants], `NAME = KEY`"
    parser.add_argument("--keys", metavar="FILE", type=file_name, help=keys)
    about = "seconds from when the server is ready, and up to as many again where that is too noisy for a verdict"
    about += f"; default: {SECONDS:g}, at least {LEAST:g}"
    parser.add_argument("--seconds", type=positive, default=SECONDS, help=about)
    parser.add_argument("--only", metavar="TENANT", help="only this tenant as the victim")
    about = "what lending costs lenders: two servers, of which one lends nothing; run it before tenants may `lend`"
    parser.add_argument("--lending", action="store_true", help=about)
    about = "let strains of memory, caches and PCIe count, which no partition fences: for every pair, in as many seconds more; "
    about += "without it they are tried with one pair, in a third of that, and only reported"
    parser.add_argument("--memory", action="store_true", help=about)
    about = f"only some of {', '.join(map(spelled, STRAINS))}, each of which has more rounds then"
    parser.add_argument("--strains", metavar="NAMES", type=checked(_strains), default=STRAINS, help=about)
    parser.add_argument("--json", metavar="FILE", type=file_name, help="write everything there, for programs")
    parser.add_argument("--html", metavar="FILE", type=file_name, help="write a page for people there")
    words = only_options(parser, arguments)
    if words.config and words.url is not None:
        parser.error("--config starts a server and --url asks one that runs; give one of them")
    if words.keys and words.url is None:
        parser.error("--keys is for --url: a server that is started here has keys of its own")
    if words.lending and words.url is not None:
        parser.error("--lending starts two servers of its own; it takes --config, not --url")
    if words.lending and (words.memory or words.strains != STRAINS):
        parser.error("--lending measures what lending costs, and no strains of memory; leave out --memory and --strains")
    if words.seconds < LEAST:
        parser.error(f"--seconds {words.seconds:g}: expected at least {LEAST:g}")
    return Options(**vars(words))
