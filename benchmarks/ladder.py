"""`python -m benchmarks.ladder`: moves of a tenant between one core and two under load, with a ladder and without. Two cores.

The tenant has an MLP and a ResNet-18, and is asked for the MLP by one client back to back. Every move is asked for with
`PUT /admin/partitions`, in turn to two cores and to one. Prints medians and the most, over all moves.
"""

import argparse
import http.client
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from greenlane.load import machine
from greenlane.load.server_process import ServerProcess, server_process

from .subjects import SUBJECTS, write

MODELS = ("mlp", "resnet")


class Client:
    """Asks for the MLP back to back, and keeps when each answer came and how long it took."""

    def __init__(self, port: int) -> None:
        self.answers: list[tuple[float, float]] = []
        self._port = port
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Client":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        x = np.zeros((1, *SUBJECTS["mlp"].row), np.float32)
        tensor = {"name": "x", "shape": x.shape, "datatype": "FP32", "data": x.ravel().tolist()}
        body = json.dumps({"inputs": [tensor]})
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._stopped.is_set():
            began = time.monotonic()
            connection.request("POST", "/v2/models/mlp/infer", body, {"X-Tenant": "acme"})
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status} during a move")
            self.answers.append((time.monotonic(), time.monotonic() - began))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ladder", description="Moves with a ladder and without.")
    parser.add_argument("--moves", type=int, default=20)
    options = parser.parse_args(arguments)
    print(*(f"{name}: {text}" for name, text in machine.describe(machine.command("benchmarks.ladder")).items()), sep="\n")
    print("\n| | whole request | models made ready | paused | worst answer during a move | median answer |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="greenlane-ladder-") as folder:
        write(Path(folder, "models"), set(MODELS), plans=False)
        for label, ladder in (("without a ladder", ""), ("with a ladder", "ladder = [1, 2]\n"), ("without, again", "")):
            _print(label, *_measure(Path(folder), ladder, options.moves))
    return 0


def _measure(folder: Path, ladder: str, count: int) -> tuple[list[float], ...]:
    """Milliseconds: of each move's request, its preparation and pause, its worst answer, and of all answers."""
    config = folder / "greenlane.toml"
    tenant = f'[tenants.acme]\ncores = 1\nmodels = ["*"]\n{ladder}'
    config.write_text(f'[server]\nport = 0\ndrain_grace = "0s"\n[models]\nrepository = "{folder}/models"\n{tenant}')
    took, worst = list[float](), list[float]()
    with server_process([sys.executable, "-m", "server", "--config", str(config)]) as server, Client(server.port) as client:
        for number in range(count):
            if ladder:
                server.wait_for_log("acme can switch to granules", number + 1)
            time.sleep(0.5)
            began = time.monotonic()
            _ask(server, "PUT", "/admin/partitions", {"acme": 2 - number % 2})
            ended = time.monotonic()
            time.sleep(0.2)
            took.append(1e3 * (ended - began))
            worst.append(max(1e3 * each for at, each in client.answers if began < at and at - each < ended))
        moves = _ask(server, "GET", "/admin/moves")["moves"]
        wrong = [each for each in moves if each["paused"]["acme"]["ladder"] != bool(ladder)]
        if wrong or len(moves) != count:
            raise RuntimeError(f"not moved as expected: {wrong}")
        prepared = [each["prepared_ms"] for each in moves]
        paused = [each["paused"]["acme"]["ms"] for each in moves]
        return took, prepared, paused, worst, [1e3 * each for _, each in client.answers]


def _ask(server: ServerProcess, method: str, path: str, body: object = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(method, path, None if body is None else json.dumps(body))
    answer = connection.getresponse()
    found: Any = json.loads(answer.read())
    if answer.status != 200:
        raise RuntimeError(f"{method} {path}: {answer.status} {found}")
    return found


def _print(label: str, *columns: Sequence[float]) -> None:
    *durations, answers = columns
    cells = [f"{median(each):.1f} ms (most {max(each):.1f})" for each in durations]
    print(f"| {label} | {' | '.join(cells)} | {median(answers):.1f} ms |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
