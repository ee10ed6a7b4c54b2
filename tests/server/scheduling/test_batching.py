"""`choose` over queues written by hand and drawn by hypothesis: which requests run as one batch, and which wait."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import DATATYPES, Signature, TensorSpec
from engines.signature import obstacle
from server.link.messages import Ticket
from server.scheduling.batching import NOTHING, Choice, Queued, batchable, choose, largest_batch
from server.scheduling.queue_policy import Batching

FP32 = DATATYPES["FP32"]
SIGNATURE = Signature((TensorSpec("x", FP32, ("b", "n")),), (TensorSpec("y", FP32, ("b", "n")),), 8)
PLAIN = Batching(SIGNATURE, 8)
PATIENT = Batching(SIGNATURE, 8, delay=1.0)
CHOOSY = Batching(SIGNATURE, 8, preferred=(2, 4))
LATE = 99.0
ENOUGH = 2


def queue(*rows: int, batching: Batching | None = PLAIN) -> list[Queued]:
    """Requests of so many rows for one model, which arrived at 0, 1, 2 ... seconds."""
    return [entry(place, count, batching) for place, count in enumerate(rows)]


def entry(place: int, rows: int = 1, batching: Batching | None = PLAIN, model: str = "m", width: int = 3) -> Queued:
    ticket = Ticket(place, place, model, ((rows, width),), float("inf"), 64)
    return 0, place, ticket, batchable(batching, ticket, float(place)) if batching else None


def slots(choice: Choice) -> list[int]:
    return [ticket.slot for _, _, ticket, _ in choice.members]


def chosen(waiting: Sequence[Queued], running: int = 0, now: float = LATE) -> list[int]:
    return slots(choose(waiting, running, ENOUGH, now))


def test_a_batch_that_could_grow_waits_behind_enough_works_and_a_full_one_does_not() -> None:
    for running in (ENOUGH, ENOUGH + 3):
        assert choose(queue(1, 1), running, ENOUGH, LATE) is NOTHING
        assert chosen(queue(4, 4), running) == [0, 1]
        assert chosen(queue(4, 5), running) == [0]


def test_a_batch_is_not_held_back_before_requests_of_another_batch_key() -> None:
    waiting = [entry(0), entry(1, model="other"), entry(2, width=4), entry(3), entry(4, batching=None)]
    assert chosen(waiting, ENOUGH) == [0, 3]


def test_several_requests_on_an_idle_partition_wait_for_the_delay_of_the_first() -> None:
    waiting = queue(1, 1, batching=PATIENT)
    assert choose(waiting, 0, ENOUGH, now=0.5) == Choice(due=1.0)
    assert chosen(waiting, now=1.0) == [0, 1]
    assert choose(waiting[::-1], 0, ENOUGH, now=0.5).due == 1.0  # The second has the higher priority.
    assert chosen(queue(7, 1, batching=PATIENT), now=0.0) == [0, 1]


def test_a_batch_of_the_largest_preferred_size_is_launched_at_once() -> None:
    assert chosen(queue(1, 1, batching=CHOOSY), running=ENOUGH) == [0, 1]
    assert chosen(queue(1, 1, 1, batching=CHOOSY), running=ENOUGH) == [0, 1]
    assert chosen(queue(*[1] * 8, batching=CHOOSY), running=ENOUGH) == [0, 1, 2, 3]


def test_the_largest_batch_is_what_the_engine_was_built_for() -> None:
    assert largest_batch(SIGNATURE) == 8
    limited = TensorSpec("x", FP32, ("b",), limits=((1, 4),))
    assert largest_batch(Signature((limited,), (), 8)) == 4


@pytest.mark.parametrize(
    ("inputs", "outputs", "why"),
    [
        ([("b", 3), ("b", "n")], [("b", "n")], None),
        ([("", 3)], [("b",)], None),
        ([("b",)], [("",)], None),
        ([("b", "b")], [], "'x' has the batch dimension 'b' in another place too: [b, b]"),
        ([("b", "")], [("b", "b")], "'y' has the batch dimension 'b' in another place too: [b, b]"),
        ([("b", "")], [("m", "")], "output 'y' has 'm' for a first dimension, which no input has: [m, ?]"),
        ([], [("b",)], "it has no inputs"),
    ],
)
def test_obstacle_names_why_a_model_cannot_be_batched(
    inputs: list[tuple[int | str, ...]], outputs: list[tuple[int | str, ...]], why: str | None
) -> None:
    specs = [tuple(TensorSpec(name, FP32, dims) for dims in each) for name, each in (("x", inputs), ("y", outputs))]
    assert obstacle(Signature(specs[0], specs[1], 8)) == why


KINDS = [PLAIN, PATIENT, CHOOSY, Batching(SIGNATURE, 8, 0.5, (3, 8)), None]
REQUESTS = st.tuples(st.integers(1, 8), st.sampled_from("ab"), st.integers(3, 4), st.sampled_from([1, 2, 1 << 64]))


@st.composite
def queues(draw: st.DrawFn) -> list[Queued]:
    how = {model: draw(st.sampled_from(KINDS)) for model in "ab"}
    drawn = draw(st.lists(REQUESTS, min_size=1, max_size=12))
    made = [
        (priority, *entry(place, rows, how[model], model, width)[1:])
        for place, (rows, model, width, priority) in enumerate(drawn)
    ]
    return sorted(made, key=lambda each: each[:2])


@given(queues(), st.integers(0, ENOUGH + 1), st.floats(0, 14))
def test_choose_takes_the_head_and_its_batch_key_in_order_and_no_more_than_fit(
    waiting: list[Queued], running: int, now: float
) -> None:
    members = list(choose(waiting, running, ENOUGH, now).members)
    places = [waiting.index(each) for each in members]
    assert places == sorted(set(places))
    assert not members or places[0] == 0
    assert sum(ticket.shapes[0][0] for _, _, ticket, _ in members) <= 8
    kinds = {part.key if part else None for _, _, _, part in members}
    assert len(kinds) <= 1
    if None in kinds:
        assert len(members) == 1
    between = [each for each in waiting[: places[-1]] if each[3] and each[3].key in kinds] if members else []
    assert between == [each for each in members[:-1] if each[3]]  # No request of the same batch key was passed over.


@given(queues(), st.integers(0, ENOUGH - 1), st.floats(0, 14))
def test_every_request_is_launched_once_and_no_later_than_its_delay_behind_few_works(
    waiting: list[Queued], running: int, now: float
) -> None:
    left, gone = list(waiting), list[Queued]()
    while left:
        choice = choose(left, running, ENOUGH, now)
        if not choice.members:
            assert choice.due is not None
            assert now < choice.due <= min(each[3].due for each in left if each[3])
            assert len(left) > 1 or running
            now = choice.due
        gone += choice.members
        left = [each for each in left if each not in choice.members]
    assert sorted(gone, key=lambda each: each[:2]) == waiting


@given(queues(), st.integers(0, ENOUGH - 1))
def test_behind_few_works_something_is_launched_once_every_delay_is_over(waiting: list[Queued], running: int) -> None:
    assert choose(waiting, running, ENOUGH, LATE).members
