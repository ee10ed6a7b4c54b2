"""The turns of `engines.cuda.turns` in Python: the same steps, each of which something may come between.

A generator yields one step of a block's thread at a time, and is sent what that gives. tests/engines/cuda/test_turns.py
compares it with the source.
"""

from collections.abc import Generator
from typing import NamedTuple

PATIENCE, MOST = 1 << 21, 8


class Step(NamedTuple):
    """`what` is "add", "look" or "swap" a word, 0 or 1 of a turn, read the "clock", "sleep" or "fence"."""

    what: str
    word: int = 0
    old: int = 0
    new: int = 0


NEXT, SERVING = 0, 1
Steps = Generator[Step, int, int]


def take_turn() -> Steps:
    """Returns the ticket once it is served."""
    mine = yield Step("add", NEXT, new=1)
    seen, passed = (yield Step("look", SERVING)), 0
    since = yield Step("clock")
    while behind(seen, mine):
        yield Step("sleep")
        found = yield Step("look", SERVING)
        now = yield Step("clock")
        if found != seen:
            seen, since = found, now
        elif now - since >= PATIENCE:
            passed += 1
            yield Step("swap", SERVING, seen, word(seen + 1) if passed < MOST else mine)
            since = now
    if seen != mine:
        seen = yield Step("look", SERVING)
        yield Step("fence")
        if behind((yield Step("look", NEXT)), seen):
            yield Step("swap", SERVING, seen, mine)
    return mine


def pass_turn(mine: int) -> Steps:
    yield Step("swap", SERVING, mine, word(mine + 1))
    return mine


def behind(one: int, other: int) -> bool:
    """Whether a ticket comes before another; they go round."""
    return word(one - other) >= 1 << 31


def word(value: int) -> int:
    """As a word of memory has it."""
    return value % (1 << 32)
