"""The command line of `greenlane top`."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from greenlane.options import checked, positive

KEY = "GREENLANE_ADMIN_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
_EXAMPLES = f"""\
examples:
  {{program}}                               the server on this machine's port 8000
  {{program}} http://10.0.0.7:8000          another one, with its admin key in {KEY}
  {{program}} --once                        one table, for a pipe
  {{program}} --json | jq .tenants          an object each time, one a line

columns: SHARE cores or SMs of the tenant; USED, IDLE and LENT in percent of them; BORROWED cores or SMs of others, on average;
RUN/S runs of models; REQ/S answered requests, P99 of them from the complete body to the encoded answer; WAIT requests that
wait now; REFUSED/S refused, also for a limit, or too late; MEMORY of the device; WATTS of it by use, without its idle power.

keys: q ends, m shows and hides models, space stops and goes on.

exit status: 0 shown; 1 the server cannot be reached, or refuses; 2 the command line is wrong
"""


@dataclass(frozen=True, slots=True)
class Options:
    """What is shown of which server; `interval` in seconds."""

    url: str
    key: str | None
    interval: float
    once: bool
    json: bool
    models: bool


def parse(arguments: Sequence[str], program: str) -> Options:
    """Ends the process with status 2, and a sentence, for a wrong command line."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Show what each tenant has and uses, live.",
        epilog=_EXAMPLES.format(program=program),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, type=checked(_url), help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument(
        "--interval", type=positive, default=2.0, metavar="SECONDS", help="time between two tables (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="show one interval and end")
    parser.add_argument("--json", action="store_true", help="objects in place of tables")
    parser.add_argument("--no-models", action="store_true", help="tenants only")
    found = parser.parse_args(arguments)
    key = os.environ.get(KEY) or None
    return Options(found.url, key, found.interval, found.once, found.json, not found.no_models)


def _url(text: str) -> str:
    """Raises ValueError."""
    text = text if "://" in text else f"http://{text}"
    scheme, _, rest = text.partition("://")
    if scheme not in ("http", "https") or not rest.strip("/"):
        raise ValueError(f"{text!r}; expected the address of a server, such as {DEFAULT_URL}")
    return text.rstrip("/")
