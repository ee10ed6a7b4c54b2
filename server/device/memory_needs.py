"""How much memory a model's requests need by its signature, and whether a tenant's memory is large enough."""

from dataclasses import replace

from engines import Signature, TensorSpec
from engines.signature import align

from ..config.tables import dotted
from ..config.tenant import TenantConfig
from ..link.blocks import largest_block
from ..tenants.catalog import IndexEntry
from .loaded_model import LoadedModel


def close_oversized(loaded: LoadedModel, tenant: TenantConfig) -> LoadedModel:
    """Close the executors of versions whose smallest request does not fit the tenant's memory, and return what remains.

    Each such version is a problem of the result. One whose largest request alone does not fit remains, with a warning. Blocks
    while an executor is closed.
    """
    most, key = largest_block(tenant.memory), dotted(("tenants", tenant.name, "memory"))
    served, problems, warnings, executors = [], list(loaded.problems), list(loaded.warnings), dict(loaded.executors)
    for each in loaded.served:
        least, largest = needed(each.signature, largest=False), needed(each.signature, largest=True)
        limit = f"{key} of {tenant.memory} lets one take {most}"
        if least is not None and sum(least) > most:
            reason = f"its smallest request takes {_sum(least)}, but {limit}; raise it"
            problems.append(IndexEntry(each.name, each.version, "UNAVAILABLE", reason))
            executors.pop(each.key).close()
            continue
        if largest is not None and sum(largest) > most:
            text = f"its largest request takes {_sum(largest)}, but {limit}: larger ones are answered 413"
            warnings.append(f"model {each.name} {each.version}: {text}")
        served.append(each)
    return replace(loaded, served=served, problems=problems, warnings=warnings, executors=executors)


def needed(signature: Signature, largest: bool) -> tuple[int, int] | None:
    """Bytes of the inputs and of the outputs of the largest request that the signature allows, or of the smallest.

    Tensors of BYTES and outputs whose size depends on data count as 0. A dimension without a lower limit has at least size 1.
    None for the largest request if a dimension has no upper limit.
    """
    sizes: dict[str, int] = {}
    shapes = []
    for spec in signature.inputs:
        shape = []
        for axis, dim in enumerate(spec.dims):
            size = dim if isinstance(dim, int) else _size(signature, spec, axis, largest)
            if size is None:
                return None
            if isinstance(dim, str) and dim:
                size = sizes[dim] = min(sizes.get(dim, size), size) if largest else max(sizes.get(dim, size), size)
            shape.append(size)
        shapes.append(tuple(shape))
    inputs = sum(align(spec.nbytes(shape)) for spec, shape in zip(signature.inputs, shapes, strict=True))
    return inputs, signature.output_bytes(sizes)


def _size(signature: Signature, spec: TensorSpec, axis: int, largest: bool) -> int | None:
    """The largest or smallest size of a variable dimension; None if the largest is asked for and there is no upper limit."""
    limits = spec.limits[axis] if axis < len(spec.limits) else None
    if not largest:
        return limits[0] if limits else 1
    batch = signature.max_batch if axis == 0 else 0
    mosts = [most for most in (limits and limits[1], batch) if most]
    return min(mosts, default=None)


def _sum(needs: tuple[int, int]) -> str:
    inputs, outputs = needs
    return f"{inputs + outputs} bytes of memory (inputs {inputs} + outputs {outputs})"
