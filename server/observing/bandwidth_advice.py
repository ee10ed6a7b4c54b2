"""What a tenant draws of its device's memory beside others, and what its own share of that costs it. Pure."""

from collections.abc import Sequence

from ..config.bandwidth import in_words
from ..control.fence import FencedTenant


def advise_hog(tenant: str, drew: float, part: float, whole: int, beside: Sequence[str], estimated: bool) -> list[str]:
    """A sentence about a tenant that nothing holds, and that draws more of the device's memory than its part of the device.

    It drew so many bytes a second of `whole`; `beside` are tenants of the device that were at work meanwhile.
    """
    if not whole or not beside or drew <= part * whole:
        return []
    about = "about " if estimated else ""
    share = f"{drew / whole:.0%} of the device's memory bandwidth with {part:.0%} of its SMs"
    return [
        f"{tenant} draws {about}{_words(drew)}, {share}, which {' and '.join(beside)} may feel. "
        f'`memory_bandwidth = "auto"` would hold {tenant} to its part while others work; `greenlane prove --memory` says what '
        "they feel"
    ]


def advise_fenced(tenant: str, fence: FencedTenant, target: float | None) -> list[str]:
    """Sentences about models that slow others, or are too slow for the tenant's target in seconds where they are held."""
    found = []
    for each in fence.models:
        if each.slows:
            found.append(
                f"{each.model} runs on granules {list(fence.granules)} while others work: beside it on all of {tenant}'s share "
                f"their inferences take at least {each.slows:.2g} times as long. Any `memory_bandwidth` below 1 holds it so"
            )
        if target is not None and each.narrow_ms > target * 1e3 >= each.home_ms:
            held = f"{each.model} takes {each.narrow_ms:.3g} ms where {tenant}'s `memory_bandwidth` holds it"
            need = f"takes at least {_words(each.moved / target)}" if each.moved else "takes a larger one"
            need = "takes none" if each.slows else need
            found.append(
                f"{held}, and {each.home_ms:.3g} ms on all of its share: its target_p99 of {target * 1e3:.3g} ms while others "
                f"work {need}"
            )
    return [*found, *fence.problems]


def _words(rate: float) -> str:
    """In three digits."""
    return in_words(int(float(f"{rate:.3g}")))
