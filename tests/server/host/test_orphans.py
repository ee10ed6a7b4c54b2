"""What is below a process, and its end, also where the processes between have ended."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from server.host import orphans

ADOPTS = """
import os, signal, sys
from server.host import orphans
orphans.adopt()
read, write = os.pipe()
between = os.fork()
if not between:
    if not os.fork():
        os.setsid()
        os.write(write, b"%d\\n" % os.getpid())
        signal.pause()
    os._exit(0)
os.waitpid(between, 0)
stays = os.fork()
if not stays:
    signal.pause()
print(os.read(read, 99).decode().strip(), stays, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def family() -> Iterator[tuple[int, int, int]]:
    """A process, a grandchild whose parent has ended, and a child."""
    with subprocess.Popen([sys.executable, "-c", ADOPTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        grandchild, child = map(int, parent.stdout.readline().split())
        yield parent.pid, grandchild, child
        orphans.end_below(parent.pid)
        parent.kill()


def test_what_is_left_of_a_process_that_has_ended_is_below_the_one_that_adopts_it(family: tuple[int, int, int]) -> None:
    parent, grandchild, child = family
    assert sorted(orphans.below(parent)) == sorted((grandchild, child))
    assert orphans.below(parent, [grandchild]) == [child]
    assert {parent, grandchild, child} <= {*orphans.below(os.getpid())}


def test_all_but_what_is_known_is_ended(family: tuple[int, int, int]) -> None:
    parent, _, child = family
    assert orphans.end_below(parent, [child]) == 1
    assert orphans.below(parent) == [child]
    assert orphans.end_below(parent) == 1
    assert orphans.below(parent) == []
