"""Divides what was measured of a whole device among those who used it. Pure."""

from collections.abc import Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def divide(amount: int, weights: Mapping[K, int]) -> dict[K, int]:
    """Integers in proportion to the weights, which have a sum above 0; together exactly `amount`. Largest remainders first."""
    total = sum(weights.values())
    parts = {key: amount * weight // total for key, weight in weights.items()}
    left = amount - sum(parts.values())
    for key in sorted(weights, key=lambda key: amount * weights[key] % total, reverse=True)[:left]:
        parts[key] += 1
    return parts
