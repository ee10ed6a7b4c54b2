"""Finds the smallest share that keeps a target with few measurements: doubles until one does, then halves the gap. Pure.

It takes for granted that what a share keeps, larger shares keep too.
"""

from collections.abc import Mapping


def candidate(known: Mapping[int, bool], most: int) -> int | None:
    """The share to measure next; None once the smallest of 1 to `most` that keeps the target is known, or that none does.

    `known` says of the shares that were measured whether they do.
    """
    kept = min((share for share, keeps in known.items() if keeps), default=None)
    missed = max((share for share, keeps in known.items() if not keeps and (kept is None or share < kept)), default=0)
    if kept is None:
        return None if missed >= most else min(most, max(1, 2 * missed))
    return None if kept - missed == 1 else (kept + missed) // 2


def doubling(most: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, and `most` itself."""
    powers = [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent < most]
    return (*powers, most)
