"""What of a signature is taken for an encoder, and what is filled in for texts; end_to_end/test_text.py compares results."""

import numpy as np
import pytest

from engines import Signature, TensorSpec
from engines.datatypes import DATATYPES
from server.config.text import TextOptions
from server.errors import Failed
from server.text.encoder import Encoder, cosines
from server.text.folder import NoEncoder, TextFolder
from server.text.tokenizer import Tokens

IDS = TensorSpec("input_ids", DATATYPES["INT32"], ("b", "n"))
MASK = TensorSpec("attention_mask", DATATYPES["INT64"], ("b", "n"))
PLACES = TensorSpec("position_ids", DATATYPES["INT64"], ("b", "n"))
HIDDEN = TensorSpec("last_hidden_state", DATATYPES["FP32"], ("b", "n", 4))
POOLED = TensorSpec("pooler_output", DATATYPES["FP16"], ("b", 4))
PLAIN = TextOptions()


def encoder(*inputs: TensorSpec, options: TextOptions = PLAIN, said: int = 0, output: TensorSpec = HIDDEN) -> Encoder:
    folder = TextFolder("tokenizer.json", limits=said)
    return Encoder(Signature(inputs, (POOLED, output), max_batch=4), options, folder, pad=7)


def fixed(size: int) -> TensorSpec:
    return TensorSpec("input_ids", DATATYPES["INT32"], ("b", size))


def test_a_batch_is_padded_to_a_multiple_of_eight_in_the_models_types() -> None:
    filled = encoder(IDS, MASK, PLACES).fill([Tokens([1, 2, 3]), Tokens(list(range(9)))])
    assert filled.shapes == ((2, 16),) * 3
    ids, mask, places = filled.arrays
    assert [each.dtype for each in filled.arrays] == [np.int32, np.int64, np.int64]
    assert (ids[0].tolist(), mask.sum(1).tolist()) == ([1, 2, 3, *[7] * 13], [3, 9])
    assert places[0, :4].tolist() == [0, 1, 2, 2]


def test_lengths_stay_within_what_the_engine_takes() -> None:
    ranges = TensorSpec("input_ids", DATATYPES["INT32"], ("b", "n"), limits=((1, 4), (16, 30)))
    found = encoder(ranges, said=128)
    assert found.most == 30
    assert [found.fill([Tokens([1] * size)]).shapes[0][1] for size in (3, 17, 30)] == [16, 24, 30]
    assert encoder(fixed(12)).fill([Tokens([1])]).shapes == ((1, 12),)
    assert [encoder(IDS, said=said).most for said in (0, 128)] == [512, 128]


def test_texts_of_similar_lengths_are_together() -> None:
    tokens = [Tokens([1] * size) for size in (9, 1, 5, 2, 8, 3)]
    assert encoder(IDS).batches(tokens) == [[1, 3, 5, 2], [4, 0]]


@pytest.mark.parametrize(("pooling", "expected"), [("mean", [1.5, 2.5]), ("cls", [0, 1]), ("last", [3, 4]), ("max", [3, 4])])
def test_padding_has_no_part_in_pooling(pooling: str, expected: list[float]) -> None:
    values = np.full((1, 8, 2), np.nan, np.float32)
    values[0, :2] = [[0, 1], [3, 4]]
    spec = TensorSpec("last_hidden_state", DATATYPES["FP32"], ("b", "n", 2))
    found = encoder(IDS, options=TextOptions(pooling=pooling, normalize=False), output=spec)  # type: ignore[arg-type]
    places = [((1, 4), memoryview(bytes(8))), (values.shape, memoryview(values.tobytes()))]
    assert found.result([Tokens([1, 2])], places).tolist() == [expected]


def test_an_output_may_be_named_and_pooled_already() -> None:
    values = np.array([[3, 0, 4, 0]], np.float16)
    found = encoder(IDS, options=TextOptions(output="pooler_output"))
    outputs = [(values.shape, memoryview(values.tobytes())), ((1, 1, 4), memoryview(bytes(16)))]
    assert found.result([Tokens([1])], outputs)[0].tolist() == pytest.approx([0.6, 0, 0.8, 0])


def scores(*logits: float) -> list[float]:
    spec = TensorSpec("logits", DATATYPES["FP32"], ("b", 1))
    given = np.array(logits, np.float32).reshape(-1, 1)
    outputs = [((len(logits), 4), memoryview(bytes(8))), (given.shape, memoryview(given.tobytes()))]
    found = encoder(IDS, options=TextOptions(task="rerank"), output=spec).result([Tokens([1])] * len(logits), outputs)
    assert found.dtype == np.float32
    return [float(each) for each in found[:, 0]]


def test_scores_are_sigmoids_however_far_from_zero() -> None:
    with np.errstate(over="raise"):
        assert scores(-80, -1, 0, 1, 200) == pytest.approx([0, 0.26894, 0.5, 0.73106, 1], abs=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_the_models_fault(value: float) -> None:
    values = np.full((1, 8, 4), value, np.float32)
    outputs = [((1, 4), memoryview(bytes(8))), (values.shape, memoryview(values.tobytes()))]
    for normalize in (True, False):
        with pytest.raises(Failed, match="output 'last_hidden_state' of the model has values that are no finite numbers"):
            encoder(IDS, options=TextOptions(normalize=normalize)).result([Tokens([1])], outputs)
    with pytest.raises(Failed, match="no finite numbers"):
        scores(1, float("nan"), 2)


@pytest.mark.parametrize(
    ("inputs", "options", "text"),
    [
        ([MASK], PLAIN, "it has no input 'input_ids'"),
        (
            [IDS, TensorSpec("pixels", DATATYPES["FP32"], ("b", 3))],
            PLAIN,
            r"input 'pixels' is FP32\[-1, 3\]; expected input_ids, ",
        ),
        ([IDS], TextOptions(output="none"), "it has no output 'none'; it has 'pooler_output', 'last_hidden_state'"),
        ([IDS], TextOptions(task="rerank"), r"shape \[-1, -1, 4\]; expected a score for each pair"),
    ],
)
def test_other_models_are_none(inputs: list[TensorSpec], options: TextOptions, text: str) -> None:
    with pytest.raises(NoEncoder, match=text):
        encoder(*inputs, options=options)


def test_a_cosine_is_never_above_1() -> None:
    rows = np.random.default_rng(0).normal(size=(200, 32)).astype(np.float32)
    for row in rows:
        assert 0.99999 < max(cosines(row, rows)) <= 1
