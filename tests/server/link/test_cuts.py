"""The words of cuts in a link, as both sides map them, with whatever values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.link.cuts import COUNT, Cuts
from tests.memory import arena_of

KEYS = st.tuples(
    st.sampled_from(["enc/1#1", "enc/2#7", "mob/1#1"]), st.lists(st.tuples(st.integers(1, 9)), max_size=2).map(tuple)
)
ENC = ("enc/1#1", ((128,),))
MOB = ("mob/1#1", ((3, 224, 224),))


@pytest.fixture
def ends() -> tuple[Cuts, Cuts]:
    """The device side's and the HTTP side's."""
    arena = arena_of(2)
    return Cuts(arena.cuts), Cuts(arena.cuts)


def test_a_tenant_that_borrows_nothing_has_its_batches_as_large_as_they_may_be(ends: tuple[Cuts, Cuts]) -> None:
    assert [ends[1].most(key, 8) for key in (ENC, MOB)] == [8, 8]


def test_batches_of_a_key_are_cut_until_something_else_is_written(ends: tuple[Cuts, Cuts]) -> None:
    device, http = ends
    device.write({ENC: 4, MOB: 2})
    assert [http.most(key, 8) for key in (ENC, MOB)] == [4, 2]
    assert http.most(("enc/1#1", ((64,),)), 8) == 8
    device.write({MOB: 3})
    assert [http.most(key, 8) for key in (ENC, MOB)] == [8, 3]
    device.write({})
    assert [http.most(key, 8) for key in (ENC, MOB)] == [8, 8]


def test_a_batch_never_gets_more_rows_than_its_model_takes(ends: tuple[Cuts, Cuts]) -> None:
    ends[0].write({ENC: 16})
    assert ends[1].most(ENC, 8) == 8


def test_more_keys_than_there_are_words_leave_the_others_uncut(ends: tuple[Cuts, Cuts]) -> None:
    device, http = ends
    keys = [(f"m/{number}#1", ((1,),)) for number in range(COUNT + 8)]
    device.write(dict.fromkeys(keys, 2))
    assert [http.most(key, 8) for key in keys] == [2] * COUNT + [8] * 8


def test_many_keys_are_distinguished(ends: tuple[Cuts, Cuts]) -> None:
    device, http = ends
    device.write({ENC: 4})
    assert {http.most((f"m/{number}#1", ()), 8) for number in range(1000)} == {8}
    assert http.most(ENC, 8) == 4


@given(st.lists(st.integers(0, 2**64 - 1), min_size=COUNT, max_size=COUNT), KEYS, st.integers(1, 64))
def test_whatever_a_word_holds_a_batch_has_from_one_row_to_what_its_model_takes(
    words: list[int], key: tuple[str, tuple[tuple[int, ...], ...]], most: int
) -> None:
    memory = memoryview(bytearray(8 * COUNT)).cast("Q")
    cuts = Cuts(memory)
    cuts.write({key: 3})
    for index, word in enumerate(words):
        memory[index] = word
        assert 1 <= cuts.most(key, most) <= most
    memory[0] = memory[0] | 1
    cuts.write({key: 2**32 - 1})
    assert cuts.most(key, most) == most
    memory[0] = memory[0] >> 32 << 32
    assert cuts.most(key, most) == 1
