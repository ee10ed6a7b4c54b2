"""A server of the configuration as it is, for as long as it is measured: on a free port, with keys of its own.

What differs from the file is nothing that tenants share. It listens on the loopback interface only and has neither the tenants'
own ports nor gRPC, so that it can start beside another server. It moves no granules by itself and writes no account. Keys of
tenants are replaced, as the file has digests of them only. Limits of tenants (rates, connections, large bodies) are lifted.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_urlsafe
from time import perf_counter
from urllib.parse import urlsplit

from greenlane.load.server_process import becomes_ready, free_port, logging_process

from ..options import server_url
from .access import Access, CannotProve, ServerEnded

PATIENCE = 1800.0
"""Seconds after which a server that does not get ready is given up: on a GPU models are built and compiled meanwhile."""
SAY = 5.0
"""Seconds between two reports that it is not ready yet."""
DRAIN = 20.0


@dataclass(frozen=True, slots=True)
class Started:
    """A server that is ready: how to ask it, why it ended (empty while it runs), and the id of its main process.

    `lend` is for how many seconds each lender does, `burst` who may borrow: as the file says, also where this server does not.
    """

    access: Access
    alive: Callable[[], str]
    pid: int
    tenants: Sequence[str] = ()
    lend: Mapping[str, float] = field(default_factory=dict)
    burst: Sequence[str] = ()


@contextmanager
def started(config: str | None, report: Callable[[str], None], lends: bool = True) -> Iterator[Started]:
    """Start it, wait until it is ready, and end it after the block. Without `lends` no tenant lends or borrows there.

    `config` is a file; None is what `greenlane serve` takes then. Raises CannotProve with what the server says of the
    configuration, or if it ends before it is ready.
    """
    admin, port = token_urlsafe(), free_port()
    with tempfile.TemporaryDirectory(prefix="greenlane-prove-") as folder:
        log, given = Path(folder, "server.log"), Path(folder, "keys.json")
        words = json.dumps({"config": config, "port": port, "admin": admin, "keys": str(given), "lends": lends}).encode()
        with logging_process([sys.executable, "-m", "greenlane.prove.child"], log, DRAIN, words) as process:

            def ended() -> str:
                status = process.poll()
                return "" if status is None else f"the server ended with status {status}{_last(log)}"

            _wait(port, process, log, report)
            said = json.loads(given.read_text())
            access = Access(port, said["keys"], admin)
            yield Started(access, ended, process.pid, said["tenants"], said["lend"], said["burst"])


def _wait(port: int, process: "subprocess.Popen[bytes]", log: Path, report: Callable[[str], None]) -> None:
    began = said = perf_counter()
    access = Access(port)

    def serves() -> bool:
        nonlocal said
        if perf_counter() - said > SAY:
            said = perf_counter()
            report(f"the server starts and loads its models, for {said - began:.0f} s so far")
        return access.serves()

    if becomes_ready(process, serves, PATIENCE):
        return
    if (status := process.poll()) is None:
        raise CannotProve(f"the server was not ready after {PATIENCE:g} s{_last(log)}")
    text = log.read_text(errors="replace").strip()
    early = f"the server ended with status {status} before it was ready:\n{text[-3000:]}"
    raise CannotProve(text.removeprefix("greenlane: ") if status == 2 else early)


def _last(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"; its last words: {lines[-1]}" if lines else ""


def running(url: str, keys: dict[str, str], admin: str | None) -> tuple[Access, Callable[[], str]]:
    """A server that runs already. Raises CannotProve if it is on another machine, or not ready."""
    port = _port(url)
    access = Access(port, keys, admin)

    def gone() -> str:
        return "" if access.serves() else f"{url} is not ready any more"

    if not access.serves():
        raise CannotProve(f"{url} does not answer GET /v2/health/ready with 200; is it running, and ready?")
    try:
        answer = access.administer("GET", "/admin/tenants")
    except ServerEnded as error:
        raise CannotProve(f"{url} has no administration of Greenlane's: {error}") from error
    if "tenants" not in answer:
        raise CannotProve(f"{url} answered something else at /admin/tenants; is it a Greenlane of this version?")
    return access, gone


def _port(url: str) -> int:
    try:
        parts = urlsplit(server_url(url, "--keys FILE"))
    except ValueError as error:
        raise CannotProve(f"--url: {error}") from error
    if parts.scheme != "http" or parts.hostname not in ("127.0.0.1", "localhost"):
        raise CannotProve(f"--url {url!r}: expected http://127.0.0.1:PORT, as the clients have to run on the server's machine")
    return parts.port or 80
