"""Models that move bytes: they do so on ONNX Runtime as well, as much as they say, and not once beforehand."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks import hogs, subjects
from benchmarks.kinds import KINDS, UNFENCED, Kind
from tests.gpu.networks import Network

NUMBER = np.full((1, 1), 0.5, np.float32)
PASSES: dict[str, Callable[[int, int], Network]] = {
    "reading": hogs.reading,
    "writing": hogs.writing,
    "copying": hogs.copying,
    "random": hogs.random,
    "cached": hogs.cached,
}


def session(network: Network) -> Any:
    """On one core, with all that ONNX Runtime does to a model beforehand."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(network.onnx, options, providers=["CPUExecutionProvider"])


def least(*networks: Network) -> list[float]:
    """Seconds of an inference of each. They take turns, so that other programs meet all of them."""
    models = [session(network) for network in networks]

    def once(model: Any) -> float:
        began = perf_counter()
        model.run(["y"], {"x": NUMBER})
        return perf_counter() - began

    return [min(times) for times in zip(*[[once(model) for model in models] for _ in range(15)], strict=True)]


@pytest.mark.parametrize("name", PASSES)
def test_time_grows_with_the_bytes_that_move(name: str) -> None:
    """What was computed beforehand, left out or made one would take no longer."""
    make, mib = PASSES[name], 64 if name == "writing" else 32  # Few channels are written in another way.
    once, again, larger = least(make(mib, 1), make(mib, 4), make(4 * mib, 1))
    assert again > 1.6 * once
    assert larger > 1.6 * once


@pytest.mark.parametrize("name", PASSES)
def test_the_answer_depends_on_the_input_in_every_pass(name: str) -> None:
    model = session(PASSES[name](16, 2))
    assert model.run(["y"], {"x": NUMBER}) != model.run(["y"], {"x": NUMBER + 4})


def test_an_output_is_there_that_clients_need_not_ask_for() -> None:
    model = session(hogs.outgoing())
    first, second = model.run(None, {"x": np.ones((1, 16), np.float32)})
    assert (first.shape, second.nbytes) == ((1, 8), 4 << 20)
    (ask,) = KINDS["pcie-out"].asks("acme", 1)
    assert b'"outputs":[{"name":"y"}]' in ask.data


@pytest.mark.parametrize("kind", [KINDS[name] for name in UNFENCED], ids=lambda kind: kind.name)
def test_a_kind_s_model_is_made_for_cores_and_larger_for_a_gpu_where_it_reads_or_writes_memory(kind: Kind) -> None:
    subject = subjects.SUBJECTS[kind.model]
    network = subjects.gemm(64, 2) if kind.model == "streamed" else subject.network()  # That one has 512 MiB.
    onnx.checker.check_model(network.onnx)
    assert bool(subject.on_gpu) == (not kind.name.startswith("pcie"))
