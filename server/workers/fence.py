"""Whether a work of a fenced tenant goes to its narrow placement, so that it draws no more than its tenant's bandwidth. Pure.

It does while another tenant of the device is at work, if works of its model draw more than that at home: the bytes that such a
work moves, over the time that it takes there, both averages of the model. What is not known goes home. On the narrow placement,
a part of the home, no work can draw more, whatever its kernels do, or works are paced (`pace`).

A neighbour is at work while it has a request open, and until it has had none for SETTLED, so that its pauses between requests
move nothing. Meanwhile a work that could draw too much on a wide partition does not go there either: its lenders rest, but not
all neighbours do. The launch loop decides by the same rules (launch_loop/fence.h); a test compares both. Times are nanoseconds.
"""

from collections.abc import Iterable

from ..link.activity import ENDED, OPEN
from .stretching import SETTLED

SECOND = 10**9


def at_work(processes: Iterable[memoryview], now: int) -> bool:
    """Whether one of these HTTP processes of neighbours, by its words on its page, has a request open or had one just now."""
    since = now - SETTLED if now > SETTLED else 0
    for words in processes:  # Twice as fast as `any`.
        if not words[OPEN] and words[ENDED] <= since:
            continue
        return True
    return False


def could_exceed(moved: int, home: int, rate: int, units: int, wide: int) -> bool:
    """As `exceeds`, if they were as much faster on a wide partition as it has more units than their home."""
    return home > 0 and (moved < 0 or moved * SECOND * wide > rate * home * units)


def exceeds(moved: int, home: int, rate: int) -> bool:
    """Whether works that move so many bytes, and take so long at home, draw more than `rate` bytes a second. 0 is unknown;
    bytes below 0 are held whatever they are.
    """
    return home > 0 and (moved < 0 or moved * SECOND > rate * home)
