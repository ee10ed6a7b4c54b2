"""`python -m benchmarks.embedding`: texts through /v1/embeddings against the same engine through binary tensors.

One server with one tenant on one core, asked in turns: for the embeddings of 8 texts, and for an inference of the same 8 texts
as tokens that are ready, padded alike, all tensors binary. Twice: for an encoder that gives the features of all tokens, which
the server pools and the binary client gets as they are, and for one that gives the pooled features itself. "CPU ratio" is of
the CPU time that the server took for a request: a tenant whose cores are busy is served as fast as that allows.

`--neighbour` compares a victim alone with a victim whose neighbour has texts tokenized as fast as it can, in turns.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from tokenizers import Tokenizer

from greenlane.options import count, positive
from tests import encoders

from .cases import Request
from .client import Load, client, drive
from .servers import Server, launch

ROWS = 8
WARM_UP = 1.0
MODELS = ("tokens", "pooled")
CONDITIONS = ("alone", "tokens ready", "texts")


def main() -> int:
    """Run a command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.embedding", description="Texts against tokens that are ready.")
    parser.add_argument("--rounds", type=count, default=7, help="default: 7")
    parser.add_argument("--seconds", type=positive, default=2.0, help="length of a round; default: 2")
    parser.add_argument("--words", type=count, default=30, help="of each text; default: 30")
    parser.add_argument("--hidden", type=count, default=256, help="features; default: 256")
    parser.add_argument("--layers", type=count, default=4, help="default: 4")
    parser.add_argument("--connections", type=count, default=2, help="default: 2")
    parser.add_argument("--neighbour", action="store_true", help="what a tenant notices of a neighbour that tokenizes")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="greenlane-embedding-") as folder:
        root = Path(folder, "models")
        for name in MODELS:
            file = encoders.encoder(options.layers, options.hidden, pooled=name == "pooled")
            encoders.write(root, name, file, ROWS)
        encoders.write(root, "small", encoders.encoder(1, 16, pooled=True), ROWS)
        (neighbour if options.neighbour else compare)(options, Path(folder), root)
    return 0


def compare(options: argparse.Namespace, folder: Path, root: Path) -> None:
    """The throughput of both ways."""
    print(f"{ROWS} texts of {options.words} words, {options.layers} layers of {options.hidden} features; client: {client()}")
    with launch(folder, configuration(root, "acme")) as server:
        for model in MODELS:
            texts = encoders.texts(ROWS, options.words)
            ways = [tensors(root, model, texts, "acme"), embeddings(model, texts, "acme")]
            check(server, ways)
            for way in ways:
                drive(server.port, way, options.connections, WARM_UP)
            rounds = [
                [measure(server, way, options.connections, options.seconds) for way in ways] for _ in range(options.rounds)
            ]
            rates, cpu = ([median(each[way][n] for each in rounds) for way in (0, 1)] for n in (0, 1))
            row = {
                "model": model,
                "binary 1/s": round(rates[0], 1),
                "texts 1/s": round(rates[1], 1),
                "ratio": round(median(text[0] / binary[0] for binary, text in rounds), 3),
                "binary CPU ms": round(cpu[0], 2),
                "texts CPU ms": round(cpu[1], 2),
                "CPU ratio": round(median(binary[1] / text[1] for binary, text in rounds), 3),
            }
            print(json.dumps(row), flush=True)


def measure(server: Server, way: Request, connections: int, seconds: float) -> tuple[float, float]:
    """Requests a second, and milliseconds of the server's CPU for each, which are less noisy on a machine that others use."""
    before = server.cpu_seconds()
    load = drive(server.port, way, connections, seconds)
    return load.rate, (server.cpu_seconds() - before) / load.requests * 1e3


def neighbour(options: argparse.Namespace, folder: Path, root: Path) -> None:
    """A victim's latency alone, beside a neighbour that sends tokens, and beside one that sends texts to be tokenized."""
    words = encoders.texts(ROWS, 500)
    ways = {"tokens ready": tensors(root, "small", words, "globex"), "texts": embeddings("small", words, "globex")}
    victim = tensors(root, "small", encoders.texts(1, 5), "acme")
    print(
        f"victim: 1 text as tokens; neighbour: {ROWS} texts of 500 words, {options.connections} connections; client: {client()}"
    )
    text = '[models.small]\nbatch_delay = "0s"\n[models.small.text]\nmax_tokens = 1024\n'
    with launch(folder, configuration(root, "acme", "globex") + text) as server:
        drive(server.port, victim, 1, WARM_UP)
        found: dict[str, list[Load]] = {name: [] for name in CONDITIONS}
        busy: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, loads in found.items():
                if name == "alone":
                    loads.append(drive(server.port, victim, 1, options.seconds))
                    continue
                with get_context("spawn").Pool(1) as pool:
                    beside = pool.apply_async(
                        drive, (server.port, ways[name], options.connections, options.seconds + 2 * WARM_UP)
                    )
                    drive(server.port, victim, 1, WARM_UP)
                    loads.append(drive(server.port, victim, 1, options.seconds))
                    busy[name].append(beside.get().rate)
        for name, loads in found.items():
            row = {
                "neighbour": name,
                "p50 us": round(median(each.p50 for each in loads)),
                "p99 us": round(median(each.p99 for each in loads)),
            }
            print(json.dumps({**row, **({"its 1/s": round(median(busy[name]), 1)} if name in busy else {})}), flush=True)


def configuration(root: Path, *tenants: str) -> str:
    """A core for each tenant."""
    lines = [
        "[server]",
        f'default_tenant = "{tenants[0]}"',
        "[models]",
        f'repository = "{root}"',
        "[device]",
        'backend = "cpu"',
    ]
    for name in tenants:
        lines += [f"[tenants.{name}]", "cores = 1", 'models = ["*"]']
    return "\n".join([*lines, ""])


def embeddings(model: str, texts: Sequence[str], tenant: str) -> Request:
    """As OpenAI's client sends it."""
    body = json.dumps({"model": model, "input": texts, "encoding_format": "base64"}).encode()
    return Request("/v1/embeddings", {"Content-Type": "application/json", "X-Tenant": tenant}, body)


def tensors(root: Path, model: str, texts: Sequence[str], tenant: str) -> Request:
    """The same texts as tokens, padded as the server pads them."""
    encoded = Tokenizer.from_file(str(root / model / "tokenizer.json")).encode_batch(texts)
    length = -(-max(len(each.ids) for each in encoded) // 8) * 8
    ids, mask = np.zeros((len(texts), length), np.int64), np.zeros((len(texts), length), np.int64)
    for row, each in enumerate(encoded):
        ids[row, : len(each.ids)] = each.ids
        mask[row, : len(each.ids)] = 1
    given = dict(zip(encoders.NAMES, (ids, mask, np.zeros_like(ids)), strict=True))
    inputs = [
        {"name": name, "datatype": "INT64", "shape": list(array.shape), "parameters": {"binary_data_size": array.nbytes}}
        for name, array in given.items()
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "X-Tenant": tenant}
    return Request(f"/v2/models/{model}/infer", headers, head + b"".join(array.tobytes() for array in given.values()))


def check(server: Server, ways: Sequence[Request]) -> None:
    """Ask once in each way. Raises RuntimeError for an answer other than 200."""
    for way in ways:
        server.ask(way)


if __name__ == "__main__":
    sys.exit(main())
