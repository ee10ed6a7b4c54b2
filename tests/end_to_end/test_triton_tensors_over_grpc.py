"""The tensors of `test_triton_tensors.py` over gRPC, in a call and in a stream, as Triton's tests send them too."""

from collections.abc import Iterator

import numpy as np
import pytest

from .harness import Served, configuration, serving
from .test_triton_exact import acme, ask_over_grpc
from .test_triton_tensors import RESHAPES, SENT, SOME_ZEROS, TEXTS, ZEROS, Shapes, some, write_all

pytestmark = pytest.mark.parametrize("how", ["grpc", "stream"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(configuration(write_all(tmp_path_factory.mktemp("models")), acme())) as served:
        yield served


def check_identities(served: Served, how: str, model: str, datatype: str, shapes: Shapes, answered: Shapes) -> None:
    arrays = {f"INPUT{n}": some(datatype, shape) for n, shape in enumerate(shapes)}
    found = ask_over_grpc(served, how, model, arrays)
    for n, (array, shape) in enumerate(zip(arrays.values(), answered, strict=True)):
        output = found.as_numpy(f"OUTPUT{n}")
        assert (output.shape, output.ravel().tolist()) == (shape, array.ravel().tolist())


@pytest.mark.parametrize("name", list(RESHAPES))
def test_shapes_are_those_of_the_configuration(served: Served, how: str, name: str) -> None:
    datatype, *_, only_batch = RESHAPES[name]
    sent, answered = SENT[name]
    for rows in (1, 8):
        with_batch = [tuple((rows, *shape) for shape in shapes) for shapes in (sent, answered)]
        check_identities(served, how, f"reshape_{name}", datatype, *with_batch)
    if not only_batch:
        check_identities(served, how, f"reshape_{name}_nobatch", datatype, sent, answered)


@pytest.mark.parametrize(("name", "shapes"), SOME_ZEROS)
def test_tensors_without_elements_come_back(served: Served, how: str, name: str, shapes: Shapes) -> None:
    for rows in (1, 8):
        with_batch = tuple((rows, *shape) for shape in shapes)
        check_identities(served, how, f"zero_{name}", ZEROS[name][0], with_batch, with_batch)
    check_identities(served, how, f"zero_{name}_nobatch", ZEROS[name][0], shapes, shapes)


@pytest.mark.parametrize(("model", "shape"), [("onnx_scalar_1dim", (1,)), ("onnx_scalar_2dim", (1, 1))])
def test_scalar_io(served: Served, how: str, model: str, shape: tuple[int, ...]) -> None:
    found = ask_over_grpc(served, how, model, {"INPUT": np.ones(shape, np.float32)}).as_numpy("OUTPUT")
    assert (found.shape, found.ravel().tolist()) == (shape, [1])


def test_bytes_of_any_kind(served: Served, how: str) -> None:
    found = ask_over_grpc(served, how, "string_identity", {"INPUT0": np.array(TEXTS, object)})
    assert found.as_numpy("OUTPUT0").tolist() == TEXTS


def test_nan_and_infinity(served: Served, how: str) -> None:
    found = ask_over_grpc(served, how, "nan_inf_output", {"INPUT0": np.zeros(1, np.float32)})
    np.testing.assert_array_equal(found.as_numpy("OUTPUT0"), np.array([np.nan, np.inf, -np.inf, 1, 2, 3], np.float32))
