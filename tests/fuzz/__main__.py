"""`python -m tests.fuzz`: requests made at random against each form of the server, for as long as one likes.

Every status from 500 on (over gRPC every one that does not say that the message is wrong), an answer that does not come, a
process that ends, a traceback in the log and an answer that is not ONNX Runtime's is a finding; the exit status is 1 if there
was one. The seed is printed: with it the same requests are made again, though not at the same time.
"""

import argparse
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from time import monotonic

from greenlane.load.server_process import free_port
from tests.end_to_end.processes import Running, configure, running, running_asgi, running_plain, tenant

from .attack import Attack, Found
from .cases import Maker
from .grpc_attack import GrpcAttack
from .grpc_cases import MessageMaker
from .models import Oracle, repository

FORMS = {"module": running, "uvicorn": running_plain, "asgi": running_asgi}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; the exit status."""
    options = _parser().parse_args(arguments)
    print(f"seed: {options.seed}", flush=True)
    failed = False
    for form in FORMS if options.form == "all" else [options.form]:
        with tempfile.TemporaryDirectory(prefix="greenlane-fuzz-") as folder:
            found = fuzz(form, Path(folder), options.seed, options.seconds, options.threads, over_grpc=options.grpc)
        failed = failed or bool(found.findings)
        print(f"{form}: {table(found)}", flush=True)
        print(*found.findings, sep="\n")
    return int(failed)


def fuzz(
    form: str,
    folder: Path,
    seed: str,
    seconds: float,
    threads: int = 2,
    most: int | None = None,
    make_oracle: Callable[[Path], Oracle] = Oracle,
    over_grpc: bool = False,
) -> Found:
    """Attack a server of this form for so long, or with so many requests a thread; what came of it. Blocks.

    `make_oracle` gives each thread what answers are compared with.
    """
    root, grpc_port = repository(folder / "models"), free_port()
    config = configure(folder / "c.toml", root, tenant(grpc_port=grpc_port), default_tenant='"acme"')
    found = Found()
    with FORMS[form](config) as server:
        before = {process.pid for process in server.family()}
        until = monotonic() + seconds
        attacks = []
        for number in range(threads):
            oracle = make_oracle(root)
            attacks.append(
                _attack(server.port, grpc_port if over_grpc else None, oracle, f"{seed}/{number}", found, until, most)
            )
            attacks[-1].start()
        for attack in attacks:
            attack.join()
        found.findings += _what_ended(server, before)
        found.findings += [f"in the log: {line}" for line in list(server.log) if "Traceback" in line]
    return found


def _attack(
    port: int, grpc_port: int | None, oracle: Oracle, seed: str, found: Found, until: float, most: int | None
) -> Thread:
    if grpc_port is None:
        return Attack(port, Maker(oracle, seed), oracle, found, until, most)
    return GrpcAttack(f"127.0.0.1:{grpc_port}", MessageMaker(oracle, seed), oracle, found, until, most)


def _what_ended(server: Running, before: set[int]) -> list[str]:
    """Processes that ended meanwhile, and an exit of the server."""
    gone = before - {process.pid for process in server.family()}
    ended = [f"process {pid} has ended" for pid in sorted(gone)]
    return ended + ([f"the server ended with {server.popen.poll()}"] if server.popen.poll() is not None else [])


def table(found: Found) -> str:
    """Answers by what was done to the requests."""
    damages = sorted({damage for damage, _ in found.answers})
    lines = [f"{found.answers.total()} requests, {len(found.findings)} findings"]
    for damage in damages:
        counts = {status: count for (what, status), count in sorted(found.answers.items()) if what == damage}
        text = ", ".join(f"{status or 'closed'}: {count}" for status, count in counts.items())
        lines.append(f"  {damage or 'whole':20} {text}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Requests made at random, against a real server.")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each form; default: 60")
    parser.add_argument("--seed", default=secrets.token_hex(4), help="default: a new one")
    parser.add_argument("--threads", type=int, default=2, help="connections at a time; default: 2")
    parser.add_argument("--form", choices=("all", *FORMS), default="all", help="default: all")
    parser.add_argument("--grpc", action="store_true", help="messages of ModelInfer over gRPC, in place of HTTP")
    return parser


if __name__ == "__main__":
    sys.exit(main())
