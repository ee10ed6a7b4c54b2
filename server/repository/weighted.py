"""Weights in the configuration for versions that the repository does not serve."""

from collections.abc import Iterable, Iterator, Mapping

from ..config.schema import ModelOptions
from ..config.tables import KeyPath
from ..config.tenant import TenantConfig
from .model_repository import Repository, some


def unserved_weights(
    options: Mapping[str, ModelOptions], tenants: Iterable[TenantConfig], repository: Repository
) -> Iterator[tuple[KeyPath, str]]:
    """Each such key, and what is wrong with it. Blocks."""
    given = [(("models", name, "weights"), name, dict(each.weights or ())) for name, each in options.items()]
    for tenant in tenants:
        given += [(("tenants", tenant.name, "weights"), name, dict(weights)) for name, weights in tenant.weights or ()]
    for path, name, weights in given:
        served = [str(file.version) for file in repository.read(name).files]
        missing = [version for version, weight in weights.items() if weight and version not in served]
        if missing:
            there = f"of {name} there is {some(served)}" if served else f"{name} has none"
            why = f"not served: {there}, by version_policy in {name}/config.pbtxt, whose default is the newest alone"
            yield path, f"version {some(missing)} is {why}"
