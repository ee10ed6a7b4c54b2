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


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1B", 1),
        ("3KB", 3000),
        ("1KiB", 1024),
        ("10MB", 10_000_000),
        ("64MiB", 2**26),
        ("2GB", 2 * 10**9),
        ("2GiB", 2**31),
        ("1TB", 10**12),
        ("1TiB", 2**40),
    ],
)
def test_a_size_is_read_in_decimal_and_binary_units(text: str, count: int) -> None:
    assert one(Size, text) == count


@given(st.integers(min_value=1))
def test_a_whole_number_is_a_size_in_bytes(count: int) -> None:
    assert one(Size, count) == count


def test_some_sizes_may_be_0() -> None:
    assert ModelOptions(weight_budget=0).weight_budget == one(SizeOr0, "0MB") == 0


@given(st.integers(1, 10**15 - 1))
def test_a_size_in_mebibytes_is_exact_however_large(count: int) -> None:
    assert one(Size, f"{count}MiB") == count * 1024 * 1024


@pytest.mark.parametrize("value", [-1, 0, "0B", True, 1.5, "64", "64mib", "1.5GiB", "-1MB", "64 MiB", "MiB", "1KiB\n", "٣MB"])
def test_a_wrong_size_is_refused_with_what_came(value: object) -> None:
    with pytest.raises(ValueError, match="is not a size") as refusal:
        one(Size, value)
    assert str(refusal.value).startswith(shown(value))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500us", 0.0005), ("10ms", 0.01), ("1s", 1.0), ("1.5s", 1.5), ("0s", 0.0), ("0.25ms", 0.00025), ("15min", 900.0)],
)
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert one(Duration, text) == seconds


@given(st.integers(0, 10**9))
def test_a_millisecond_is_a_thousand_microseconds(count: int) -> None:
    assert one(Duration, f"{count}ms") == one(Duration, f"{count}000us")


@pytest.mark.parametrize("value", [1, 1.5, True, "1", "1m", "-1s", "s", "1.s", ".5s", "inf s", "1e3s", "1s "])
def test_a_duration_without_a_known_unit_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a duration: a text such as '500us'"):
        one(Duration, value)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-7", tuple(range(8))), ("0,2-3", (0, 2, 3)), ("5", (5,)), ("4-4", (4,)), ("3, 0-1", (0, 1, 3))],
)
def test_core_ranges_become_ascending_core_numbers(text: str, cores: tuple[int, ...]) -> None:
    assert one(Cores, text) == cores


@given(st.sets(st.integers(0, 2**16 - 1), min_size=1))
def test_every_set_of_cores_can_be_written_one_by_one(cores: set[int]) -> None:
    assert one(Cores, ",".join(map(str, cores))) == tuple(sorted(cores))


@pytest.mark.parametrize(
    "value", ["", ",", "0,", "7-0", "0,0", "0-3,2", "a", "-1", "0-99999999999", "0-65536", 4, [0, 1], True]
)
def test_core_numbers_that_are_backwards_repeated_or_absurd_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not core numbers"):
        one(Cores, value)


@pytest.mark.parametrize("value", [0, 10, True, 1.0, "1", None])
def test_a_wrong_whole_number_is_refused_with_the_range(value: object) -> None:
    with pytest.raises(ValueError, match="is not a whole number from 1 to 9"):
        one(ONE_TO_NINE, value)


def test_a_whole_number_may_have_no_upper_bound() -> None:
    at_least_one = Annotated[int, Field(ge=1)]
    assert one(at_least_one, 10**9) == 10**9
    with pytest.raises(ValueError, match=r"^0 is not a whole number of 1 or more$"):
        one(at_least_one, 0)


def test_the_bounds_of_a_whole_number_are_included() -> None:
    assert [one(ONE_TO_NINE, 1), one(ONE_TO_NINE, 9)] == [1, 9]


def test_a_choice_is_accepted_as_it_is_and_anything_else_refused_with_the_choices() -> None:
    assert one(Literal["text", "json"], "json") == "json"
    with pytest.raises(ValueError, match=r"^'xml' is not 'text' or 'json'$"):
        one(Literal["text", "json"], "xml")


def test_a_digest_is_lower_cased() -> None:
    assert one(Digest, "AB" * 32) == "ab" * 32
    assert one(Digests, ["AB" * 32, "00" * 32]) == ("ab" * 32, "00" * 32)


def test_a_key_pasted_where_its_digest_belongs_is_not_shown() -> None:
    with pytest.raises(ValueError, match=r"^<7 characters> is not a SHA-256 digest"):
        one(Digest, "hunter2")
    with pytest.raises(ValueError, match=r"^\[<7 characters>, <1 character>, 3\] is not a list of SHA-256 digests"):
        one(Digests, ["hunter2", "x", 3])


def test_hosts_are_a_list_of_names_without_ports() -> None:
    assert one(Hosts, ["GPU1.example.com", "gpu2", "10.0.0.1"]) == ("gpu1.example.com", "gpu2", "10.0.0.1")
    assert one(Hosts, []) == ()


@pytest.mark.parametrize("value", ["gpu1", [""], ["gpu1:8000"], ["http://gpu1"], ["a b"], ["gpu1."], ["*"], [1]])
def test_wrong_host_names_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="a list of host names"):
        one(Hosts, value)


def test_names_are_a_list_of_names_or_a_star_alone() -> None:
    assert one(Names, ["a", "b"]) == ("a", "b")
    assert one(Names, ["*"]) == ("*",)


@pytest.mark.parametrize("value", ["resnet50", [], ["a", "*"], [""], [1], {"a": 1}])
def test_wrong_model_names_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a list of one or more model names"):
        one(Names, value)


def test_batch_sizes_ascend() -> None:
    assert one(Batches, [4, 8]) == (4, 8)
    assert one(Batches, []) == ()


@pytest.mark.parametrize("value", [4, [8, 4], [4, 4], [0], [True], [1.0], ["4"], "4"])
def test_wrong_batch_sizes_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a list of batch sizes, each 1 or more and above the one before it"):
        one(Batches, value)


@pytest.mark.parametrize("value", ["x" * 1000, ["x"] * 1000, 16**300])
def test_only_the_beginning_of_a_long_value_is_shown(value: object) -> None:
    assert len(shown(value)) == 63
    assert shown(value).endswith("...")


def test_values_are_shown_as_the_file_has_them() -> None:
    assert shown(["a", True, 3, {"b": 1}]) == "['a', true, 3, a table]"


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
