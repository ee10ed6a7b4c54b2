"""What an executor takes of the GPU's memory through the driver, as far as that was measured: kernels and graphs.

See `partitions.cuda.driver_memory` for how. Any thread may call; no library is called.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence

from partitions.cuda.driver_memory import Taken

from ..memory import added
from .instance import Instance


def graph_memory(graphs: Iterable[Taken]) -> dict[str, int]:
    """As `Executor.memory`: nothing if the driver was not seen to take anything."""
    nbytes = sum(taken.nbytes for taken in graphs)
    return {"graphs": nbytes} if nbytes else {}


def kernel_memory(instance: Instance) -> dict[Hashable, Mapping[str, int]]:
    """As `Sharing.shared_memory`: the kernels of each cache, from which all engines of one structure run."""
    taken = {cache: cache.taken.nbytes for cache in instance.kernel_caches() if cache.taken}
    return {cache: {"kernels": nbytes} for cache, nbytes in taken.items() if nbytes}


def described(instance: Instance, graphs: Sequence[Taken]) -> Mapping[str, object]:
    """`kernels` of `Executor.describe`, and `driver_memory` if there is anything to say."""
    cached = instance.kernels()
    kernels = {"found": cached.found, "saved": cached.saved, "refused": cached.refused}
    parts = [*graphs, *(cache.taken for cache in instance.kernel_caches() if cache.taken)]
    unmeasured = sum(taken.unmeasured for taken in parts)
    found = {**added(kernel_memory(instance).values()), **graph_memory(graphs)}
    said = {"driver_memory": {**found, "unmeasured": unmeasured}} if found or unmeasured else {}
    return {"kernels": kernels, **said}
