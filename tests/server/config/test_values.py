from functools import cache
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, create_model

from server.config.file import read
from server.config.forms import form_of, shown, write_duration, write_size
from server.config.schema import ModelOptions
from server.config.tables import Section
from server.config.values import (
    Batches,
    Cores,
    Digest,
    Digests,
    Duration,
    Hosts,
    KeepAlive,
    Memory,
    Names,
    Origins,
    Profiles,
    Size,
    SizeOr0,
    Text,
    WarmUp,
)

ONE_TO_NINE = Annotated[int, Field(ge=1, le=9)]
ANY_TYPE = [
    Batches,
    Cores,
    Digest,
    Digests,
    Duration,
    Hosts,
    KeepAlive,
    Literal["a", "b"],
    Memory,
    Names,
    ONE_TO_NINE,
    Origins,
    Profiles,
    Size,
    Text,
    WarmUp,
    bool,
]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@cache
def model(annotation: Any) -> type[Section]:
    return create_model("One", __base__=Section, key=(annotation, ...))


def one(annotation: Any, value: object) -> Any:
    """A value of this type as a file gives it. Raises ValueError."""
    return read(model(annotation), "key", value)


READ: list[tuple[Any, dict[str, Any]]] = [
    (
        Size,
        {
            "1B": 1,
            "3KB": 3000,
            "1KiB": 1024,
            "10MB": 10_000_000,
            "64MiB": 2**26,
            "2GB": 2 * 10**9,
            "2GiB": 2**31,
            "1TB": 10**12,
            "1TiB": 2**40,
        },
    ),
    (Duration, {"500us": 0.0005, "10ms": 0.01, "1s": 1.0, "1.5s": 1.5, "0s": 0.0, "0.25ms": 0.00025, "15min": 900.0}),
    (Cores, {"0-7": tuple(range(8)), "0,2-3": (0, 2, 3), "5": (5,), "4-4": (4,), "3, 0-1": (0, 1, 3)}),
    (Literal["text", "json"], {"json": "json"}),
    (Digest, {"AB" * 32: "ab" * 32}),
]
OTHERS: list[tuple[Any, Any, Any]] = [
    (Digests, ["AB" * 32, "00" * 32], ("ab" * 32, "00" * 32)),
    (Hosts, ["GPU1.example.com", "gpu2", "10.0.0.1"], ("gpu1.example.com", "gpu2", "10.0.0.1")),
    (Hosts, [], ()),
    (ONE_TO_NINE, 1, 1),
    (ONE_TO_NINE, 9, 9),
    (Annotated[int, Field(ge=1)], 10**9, 10**9),
    (Names, ["a", "b"], ("a", "b")),
    (Names, ["*"], ("*",)),
    (Batches, [4, 8], (4, 8)),
    (Batches, [], ()),
]
BATCHES = "a list of batch sizes, each 1 or more and above the one before it"
WRONG: list[tuple[Any, str, list[Any]]] = [
    (Size, "a size", [-1, 0, "0B", True, 1.5, "64", "64mib", "1.5GiB", "-1MB", "64 MiB", "MiB", "1KiB\n", "٣MB"]),
    (
        Duration,
        "a duration: a text such as '500us'",
        [1, 1.5, True, "1", "1m", "-1s", "s", "1.s", ".5s", "inf s", "1e3s", "1s "],
    ),
    (Cores, "core numbers", ["", ",", "0,", "7-0", "0,0", "0-3,2", "a", "-1", "0-99999999999", "0-65536", 4, [0, 1], True]),
    (ONE_TO_NINE, "a whole number from 1 to 9", [0, 10, True, 1.0, "1", None]),
    (Annotated[int, Field(ge=1)], "a whole number of 1 or more", [0]),
    (Literal["text", "json"], "'text' or 'json'", ["xml"]),
    (Hosts, "a list of host names", ["gpu1", [""], ["gpu1:8000"], ["http://gpu1"], ["a b"], ["gpu1."], ["*"], [1]]),
    (Names, "a list of one or more model names", ["resnet50", [], ["a", "*"], [""], [1], {"a": 1}]),
    (Batches, BATCHES, [4, [8, 4], [4, 4], [0], [True], [1.0], ["4"], "4"]),
]


@pytest.mark.parametrize(
    ("annotation", "written", "value"), [*OTHERS, *((kind, *row) for kind, rows in READ for row in rows.items())]
)
def test_a_value_is_read(annotation: Any, written: object, value: object) -> None:
    assert one(annotation, written) == value


@pytest.mark.parametrize(("annotation", "expected", "value"), [(*kind, each) for *kind, wrong in WRONG for each in wrong])
def test_a_wrong_value_is_refused_with_what_came_and_what_was_expected(annotation: Any, expected: str, value: object) -> None:
    with pytest.raises(ValueError, match=" is not ") as refusal:
        one(annotation, value)
    assert str(refusal.value).startswith(f"{shown(value)} is not {expected}")


@given(st.integers(min_value=1))
def test_a_whole_number_is_a_size_in_bytes(count: int) -> None:
    assert one(Size, count) == count


def test_some_sizes_may_be_0() -> None:
    assert ModelOptions(weight_budget=0).weight_budget == one(SizeOr0, "0MB") == 0


@given(st.integers(1, 10**15 - 1))
def test_a_size_in_mebibytes_is_exact_however_large(count: int) -> None:
    assert one(Size, f"{count}MiB") == count * 1024 * 1024


@given(st.integers(0, 10**9))
def test_a_millisecond_is_a_thousand_microseconds(count: int) -> None:
    assert one(Duration, f"{count}ms") == one(Duration, f"{count}000us")


@given(st.sets(st.integers(0, 2**16 - 1), min_size=1))
def test_every_set_of_cores_can_be_written_one_by_one(cores: set[int]) -> None:
    assert one(Cores, ",".join(map(str, cores))) == tuple(sorted(cores))


def test_a_key_pasted_where_its_digest_belongs_is_not_shown() -> None:
    with pytest.raises(ValueError, match=r"^<7 characters> is not a SHA-256 digest"):
        one(Digest, "hunter2")
    with pytest.raises(ValueError, match=r"^\[<7 characters>, <1 character>, 3\] is not a list of SHA-256 digests"):
        one(Digests, ["hunter2", "x", 3])


@pytest.mark.parametrize("value", ["x" * 1000, ["x"] * 1000, 16**300])
def test_only_the_beginning_of_a_long_value_is_shown(value: object) -> None:
    assert len(shown(value)) == 63
    assert shown(value).endswith("...")


def test_values_are_shown_as_the_file_has_them() -> None:
    assert shown(["a", True, 3, {"b": 1}]) == "['a', true, 3, { b = 1 }]"


@given(annotation=st.sampled_from(ANY_TYPE), value=ANYTHING)
def test_any_value_is_read_or_refused_with_what_was_expected(annotation: Any, value: object) -> None:
    refusal = _refusal(annotation, value)
    assert refusal is None or refusal.endswith(f" is not {form_of(model(annotation).model_fields['key']).expected}")


def _refusal(annotation: Any, value: object) -> str | None:
    try:
        one(annotation, value)
    except ValueError as error:
        return str(error)
    return None


@given(st.integers(1, 10**15 - 1))
def test_a_size_is_written_as_it_is_read(count: int) -> None:
    assert one(Size, write_size(count)) == count


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0005, "500us"), (0.001, "1ms"), (0.2, "200ms"), (1.5, "1.5s"), (75, "75s"), (900, "15min")],
)
def test_a_duration_is_written_as_it_is_read(seconds: float, text: str) -> None:
    assert write_duration(seconds) == text
    assert one(Duration, text) == seconds


def test_code_gives_durations_cores_and_paths_as_the_program_has_them() -> None:
    made = model(Duration | Cores)
    assert [made(key=value).key for value in (1.5, (0, 2))] == [1.5, (0, 2)]  # type: ignore[attr-defined]
