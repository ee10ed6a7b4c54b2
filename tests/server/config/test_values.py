import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.config.values import (
    BATCHES,
    CORES,
    DIGEST,
    DIGESTS,
    DURATION,
    HOSTS,
    NAMES,
    SIZE,
    TEXT,
    Kind,
    one_of,
    shown,
    size_from,
    whole,
)

ANY_KIND = [
    BATCHES,
    CORES,
    DIGEST,
    DIGESTS,
    DURATION,
    HOSTS,
    NAMES,
    SIZE,
    TEXT,
    one_of("a", "b"),
    size_from(2),
    whole(0),
    whole(1, 9),
]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


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
    ],
)
def test_a_size_is_read_in_decimal_and_binary_units(text: str, count: int) -> None:
    assert SIZE.read(text) == count


@given(st.integers(min_value=0))
def test_a_whole_number_is_a_size_in_bytes(count: int) -> None:
    assert SIZE.read(count) == count


@given(st.integers(0, 10**15 - 1))
def test_a_size_in_mebibytes_is_exact_however_large(count: int) -> None:
    assert SIZE.read(f"{count}MiB") == count * 1024 * 1024


@pytest.mark.parametrize("value", [-1, True, 1.5, "64", "64mib", "1.5GiB", "-1MB", "64 MiB", "MiB", "1KiB\n", "٣MB"])
def test_what_is_no_size_is_refused_with_what_came(value: object) -> None:
    with pytest.raises(ValueError, match="is not a size") as refusal:
        SIZE.read(value)
    assert str(refusal.value).startswith(shown(value))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500us", 0.0005), ("10ms", 0.01), ("1s", 1.0), ("1.5s", 1.5), ("0s", 0.0), ("0.25ms", 0.00025), ("15min", 900.0)],
)
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert DURATION.read(text) == seconds


@given(st.integers(0, 10**9))
def test_a_millisecond_is_a_thousand_microseconds(count: int) -> None:
    assert DURATION.read(f"{count}ms") == DURATION.read(f"{count}000us")


@pytest.mark.parametrize("value", [1, 1.5, True, "1", "1m", "-1s", "s", "1.s", ".5s", "inf s", "1e3s", "1s "])
def test_a_duration_without_a_known_unit_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a duration: a text such as '500us'"):
        DURATION.read(value)


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0-7", tuple(range(8))), ("0,2-3", (0, 2, 3)), ("5", (5,)), ("4-4", (4,)), ("3, 0-1", (0, 1, 3))],
)
def test_core_ranges_are_read_as_ascending_core_numbers(text: str, cores: tuple[int, ...]) -> None:
    assert CORES.read(text) == cores


@given(st.sets(st.integers(0, 2**16 - 1), min_size=1))
def test_every_set_of_cores_can_be_written_one_by_one(cores: set[int]) -> None:
    assert CORES.read(",".join(map(str, cores))) == tuple(sorted(cores))


@pytest.mark.parametrize(
    "value", ["", ",", "0,", "7-0", "0,0", "0-3,2", "a", "-1", "0-99999999999", "0-65536", 4, [0, 1], True]
)
def test_core_numbers_that_are_backwards_repeated_or_absurd_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not core numbers"):
        CORES.read(value)


@pytest.mark.parametrize("value", [0, 10, True, 1.0, "1", None])
def test_a_whole_number_out_of_range_or_of_another_kind_is_refused_with_the_range(value: object) -> None:
    with pytest.raises(ValueError, match="is not a whole number from 1 to 9"):
        whole(1, 9).read(value)


def test_a_whole_number_may_have_no_upper_bound() -> None:
    assert whole(1).read(10**9) == 10**9
    with pytest.raises(ValueError, match=r"^0 is not a whole number of 1 or more$"):
        whole(1).read(0)


def test_the_bounds_of_a_whole_number_are_included() -> None:
    assert [whole(1, 9).read(1), whole(1, 9).read(9)] == [1, 9]


def test_a_choice_is_taken_as_it_is_and_anything_else_is_refused_with_the_choices() -> None:
    assert one_of("text", "json").read("json") == "json"
    with pytest.raises(ValueError, match=r"^'xml' is not 'text' or 'json', sorry$"):
        one_of("text", "json", why=", sorry").read("xml")


def test_a_digest_is_lower_cased() -> None:
    assert DIGEST.read("AB" * 32) == "ab" * 32
    assert DIGESTS.read(["AB" * 32, "00" * 32]) == ("ab" * 32, "00" * 32)


def test_a_key_pasted_where_its_digest_belongs_is_not_shown() -> None:
    with pytest.raises(ValueError, match=r"^<7 characters> is not a SHA-256 digest"):
        DIGEST.read("hunter2")
    with pytest.raises(ValueError, match=r"^\[<7 characters>, <1 character>, 3\] is not a list of SHA-256 digests"):
        DIGESTS.read(["hunter2", "x", 3])


def test_hosts_are_a_list_of_names_without_ports() -> None:
    assert HOSTS.read(["GPU1.example.com", "gpu2", "10.0.0.1"]) == ("gpu1.example.com", "gpu2", "10.0.0.1")
    assert HOSTS.read([]) == ()


@pytest.mark.parametrize("value", ["gpu1", [""], ["gpu1:8000"], ["http://gpu1"], ["a b"], ["gpu1."], ["*"], [1]])
def test_hosts_that_are_no_names_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="a list of host names"):
        HOSTS.read(value)


def test_names_are_a_list_of_names_or_a_star_alone() -> None:
    assert NAMES.read(["a", "b"]) == ("a", "b")
    assert NAMES.read(["*"]) == ("*",)


@pytest.mark.parametrize("value", ["resnet50", [], ["a", "*"], [""], [1], {"a": 1}])
def test_names_that_are_no_list_or_hold_a_star_among_others_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a list of one or more model names"):
        NAMES.read(value)


def test_batch_sizes_ascend() -> None:
    assert BATCHES.read([4, 8]) == (4, 8)
    assert BATCHES.read([]) == ()


@pytest.mark.parametrize("value", [4, [8, 4], [4, 4], [0], [True], [1.0], ["4"], "4"])
def test_batch_sizes_that_descend_repeat_or_are_no_sizes_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a list of batch sizes, each 1 or more and above the one before it"):
        BATCHES.read(value)


@pytest.mark.parametrize("value", ["x" * 1000, ["x"] * 1000, 16**300])
def test_only_the_beginning_of_a_long_value_is_shown(value: object) -> None:
    assert len(shown(value)) == 63
    assert shown(value).endswith("...")


def test_values_are_shown_as_the_file_has_them() -> None:
    assert shown(["a", True, 3, {"b": 1}]) == "['a', true, 3, a table]"


@given(kind=st.sampled_from(ANY_KIND), value=ANYTHING)
def test_any_value_is_read_or_refused_with_what_was_expected(kind: Kind[object], value: object) -> None:
    refusal = _refusal(kind, value)
    assert refusal is None or refusal.endswith(f" is not {kind.expected}")


def _refusal(kind: Kind[object], value: object) -> str | None:
    try:
        kind.read(value)
    except ValueError as error:
        return str(error)
    return None
