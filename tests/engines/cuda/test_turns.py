"""Turns of blocks that may be killed at any step: the model, and that the source makes its steps."""

import ctypes
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.cuda.turns import TURN_BYTES, TURNS
from tests.simulation.turns import MOST, NEXT, PATIENCE, SERVING, Step, Steps, behind, pass_turn, take_turn, word

NAMES = ["add", "look", "swap", "clock", "sleep", "fence"]
"""Of steps, as they are numbered in turns_on_host.c."""
RANDOM = st.randoms(use_true_random=True)
TICK = PATIENCE // 64
"""What a step of each takes, in `Memory.finish`."""
WAIT = PATIENCE + 16 * TICK
"""The most that a dead block may cost: the steps between two looks at the clock count too."""
WORDS = st.integers(0, 2**32 - 1)
HERE = Path(__file__).parent


class Block:
    """Has its turn so many times, for so many steps."""

    def __init__(self, turns: int, long: int = 2) -> None:
        self.ticket: int | None = None
        self.in_turn = False
        self.left = turns
        self.long = long
        self.alive = True
        self.waited = 0
        """Of the clock, in its longest wait."""
        self.began = 0
        """When it took its last ticket."""
        self._busy = 0
        self._steps: Steps | None = None

    @property
    def done(self) -> bool:
        return not self.alive or self.left == 0

    def step(self, gpu: "Memory") -> None:
        if self._busy:
            self._busy -= 1
            return
        if self._steps is None:
            self._steps, self.began = take_turn(), gpu.clock
            self._asked = next(self._steps)
        answer = gpu.do(self._asked)
        if self._asked.what == "add":
            self.ticket = answer
        try:
            self._asked = self._steps.send(answer)
        except StopIteration as end:
            if self.in_turn:
                self._steps, self.in_turn, self.ticket, self.left = None, False, None, self.left - 1
                return
            self.in_turn, self._busy = True, self.long
            self.waited = max(self.waited, gpu.clock - self.began)
            gpu.served.append(end.value)
            self._steps = pass_turn(end.value)
            self._asked = next(self._steps)


class Memory:
    """A turn, the blocks, and the clock."""

    def __init__(self, blocks: list[Block], first: int = 0, serving: int | None = None) -> None:
        self.words = [first, first if serving is None else serving]
        self.blocks = blocks
        self.clock = 0
        self.served: list[int] = []
        self.most = 0
        """Of those that live, at a time in their turn."""
        self._since = 0
        """When the turn was passed on last."""

    @property
    def alive(self) -> list[Block]:
        return [each for each in self.blocks if not each.done]

    def do(self, step: Step) -> int:
        """Make this step, which nothing comes between; returns what it gives."""
        found = self.words[step.word]
        if step.what == "add":
            self.words[NEXT] = word(found + step.new)
        elif step.what == "swap" and found == step.old:
            self.words[SERVING] = step.new
            self._since = self.clock
        return self.clock if step.what == "clock" else found

    def step(self, block: Block) -> None:
        block.step(self)
        self.most = max(self.most, sum(each.in_turn for each in self.alive))

    def pass_time(self, cycles: int) -> None:
        """So much, or less where the block whose turn it is lives: it passes on within PATIENCE."""
        for each in self.alive:
            if each.ticket == self.words[SERVING]:
                cycles = min(cycles, max(0, max(self._since, each.began) + PATIENCE - 1 - self.clock))
        self.clock += cycles

    def finish(self) -> None:
        """All go on in turn until they are done, while time passes; each step takes some of it."""
        for _ in range(200_000):
            if not self.alive:
                return
            for each in self.alive:
                self.step(each)
            self.pass_time(TICK)
        raise AssertionError(f"{self.words} after {self.clock}: blocks wait for ever")


def any_order(gpu: Memory, chance: random.Random, kills: int, steps: int, honest: bool = True) -> None:
    """Steps in any order, some blocks killed and time passed in between."""
    for _ in range(steps):
        if not gpu.alive:
            return
        one = chance.choice(gpu.alive)
        kind = chance.random()
        if kind < 0.02 and kills:
            kills -= 1
            one.alive = False
        elif kind < 0.15:
            passed = chance.choice([1, PATIENCE // 3, PATIENCE, 2 * PATIENCE])
            if honest:
                gpu.pass_time(passed)
            else:
                gpu.clock += passed
        else:
            gpu.step(one)


@settings(max_examples=300, deadline=None)
@given(RANDOM, st.integers(1, 7), st.integers(0, MOST - 1), WORDS)
def test_no_two_have_the_turn_at_once_and_all_that_live_get_it_in_order(
    chance: random.Random, count: int, kills: int, first: int
) -> None:
    gpu = Memory([Block(chance.randint(1, 4), chance.randint(0, 3)) for _ in range(count)], first)
    any_order(gpu, chance, kills, chance.randint(0, 400))
    gpu.finish()
    assert gpu.most == bool(gpu.served)
    assert [word(each - first) for each in gpu.served] == sorted(word(each - first) for each in gpu.served)
    assert max(Counter(gpu.served).values(), default=1) == 1
    assert not behind(gpu.words[NEXT], gpu.words[SERVING])


@settings(max_examples=300, deadline=None)
@given(RANDOM, st.integers(1, 6), WORDS, WORDS, st.booleans())
def test_whatever_the_words_are_nothing_waits_for_ever_and_they_become_right(
    chance: random.Random, count: int, first: int, serving: int, honest: bool
) -> None:
    """Also where blocks that live are taken for dead, as they had the turn for too long."""
    gpu = Memory([Block(chance.randint(1, 3)) for _ in range(count)], first, serving)
    any_order(gpu, chance, 3, chance.randint(0, 300), honest)
    gpu.finish()
    gpu.blocks = [Block(1)]
    gpu.finish()
    assert gpu.words[NEXT] == gpu.words[SERVING]
    assert gpu.blocks[0].waited <= MOST * WAIT
    gpu.most, gpu.blocks = 0, [Block(2) for _ in range(4)]
    any_order(gpu, chance, 0, 400)
    gpu.finish()
    assert gpu.most == 1


@pytest.mark.parametrize("at", range(12))
def test_a_block_that_is_killed_holds_up_the_next_one_by_the_patience_once(at: int) -> None:
    """Whatever step it comes to: before its ticket, in the queue, in its turn, after it."""
    gpu = Memory([Block(1), Block(1)])
    for _ in range(at):
        if not gpu.blocks[0].done:
            gpu.step(gpu.blocks[0])
    gpu.blocks[0].alive = False
    gpu.finish()
    assert gpu.blocks[1].left == 0
    assert gpu.blocks[1].waited <= WAIT


def test_a_process_killed_with_all_its_blocks_in_the_queue_holds_up_others_for_no_longer_than_most_times_the_patience() -> None:
    gpu = Memory([Block(1) for _ in range(3 * MOST)] + [Block(1)])
    for each in gpu.blocks:
        gpu.step(each)
    for each in gpu.blocks[:-1]:
        each.alive = False
    gpu.finish()
    assert gpu.blocks[-1].left == 0
    assert gpu.blocks[-1].waited <= MOST * WAIT


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not (compiler := shutil.which("cc")):
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("turns")
    (folder / "turns.inc").write_text(TURNS)
    command = [compiler, "-O1", "-shared", "-fPIC", "-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{folder}"]
    subprocess.run([*command, "-o", folder / "turns.so", HERE / "turns_on_host.c"], check=True)
    library = ctypes.CDLL(str(folder / "turns.so"))
    library.take.restype = ctypes.c_uint32
    return library


ASKED = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint32)


def answers(chance: random.Random) -> Callable[[Step], int]:
    """What steps may give: words near each other, or not; a clock that goes on by anything; an end after some time."""
    clock, count, mine = 0, 0, chance.choice([0, 5, 2**31, 2**32 - 3, chance.getrandbits(32)])

    def answer(step: Step) -> int:
        nonlocal clock, count
        count += 1
        if step.what == "clock":
            clock += chance.choice([0, 100, PATIENCE - 1, PATIENCE, 3 * PATIENCE])
            return clock
        if step.what == "add" or count > 80:
            return mine
        return chance.choice([mine, word(mine - 1), word(mine - 1), word(mine - 2), word(mine + 3), word(mine + 2**31)])

    return answer


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**64), st.booleans())
def test_the_source_makes_the_steps_of_the_model(on_host: Any, seed: int, taking: bool) -> None:
    steps: list[Step] = []
    answer = answers(random.Random(seed))

    def asked(what: int, at: int, old: int, new: int) -> int:
        steps.append(Step(NAMES[what], at, old, new))
        return answer(steps[-1])

    returned = on_host.take(ASKED(asked)) if taking else on_host.pass_(ASKED(asked), 2**32 - 1)
    found, ticket = driven(take_turn() if taking else pass_turn(2**32 - 1), answers(random.Random(seed)))
    assert steps == found
    if taking:
        assert returned == ticket


def driven(model: Steps, answer: Callable[[Step], int]) -> tuple[list[Step], int]:
    steps = [next(model)]
    while True:
        try:
            steps.append(model.send(answer(steps[-1])))
        except StopIteration as end:
            return steps, end.value


def test_turns_lie_apart_in_lines_of_the_cache() -> None:
    assert f"struct Turn {{ unsigned next, serving, apart[{TURN_BYTES // 4 - 2}]; }};" in TURNS
