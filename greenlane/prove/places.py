"""On which cores the load processes run. Pure.

Where there are cores that no tenant has, on those. On a machine whose cores are all given away, each client runs on its own
tenant's: a neighbour brings its noise along to its own share, and none is on another's. In the control the aggressor's client
stays where it was, so that what the control shows is the server's partition and not the client.
"""

from collections.abc import Mapping, Sequence

from .confinement import Located
from .measure import Places
from .plan import Pair

ENOUGH = 2
"""Cores without a tenant from which clients run there: one for the victim's, and the others."""


def place(pair: Pair, located: Sequence[Located], served: Mapping[str, frozenset[int]], every: Sequence[int]) -> Places:
    """The cores of this pair's clients; `served` are those that the tenants' processes may use, `every` this process's."""
    of = {each.tenant: each.units for each in located if each.unit == "core"}
    taken = {core for cores in (*of.values(), *served.values()) for core in cores}
    left = tuple(core for core in every if core not in taken)
    if len(left) >= ENOUGH:
        return Places(left[:1], left[1:], apart=True)
    mine, others = (tuple(core for core in of.get(name, ()) if core in every) for name in (pair.victim, pair.aggressor))
    return Places(mine[:1] or None, others or None)
