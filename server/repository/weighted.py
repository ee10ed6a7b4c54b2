"""Weights in the configuration for versions that the repository does not serve."""

from collections.abc import Iterator

from ..config.schema import Config
from ..config.tables import KeyPath
from .model_repository import Repository, some


def unserved_weights(config: Config, repository: Repository) -> Iterator[tuple[KeyPath, str]]:
    """Each such key, and what is wrong with it. Blocks."""
    given = [(("models", name, "weights"), name, dict(each.weights or ())) for name, each in config.models.options.items()]
    for tenant in config.tenants.values():
        given += [(("tenants", tenant.name, "weights"), name, dict(weights)) for name, weights in tenant.weights or ()]
    for path, name, weights in given:
        served = [str(file.version) for file in repository.read(name).files]
        missing = [version for version, weight in weights.items() if weight and version not in served]
        if missing:
            there = f"of {name} there is {some(served)}" if served else f"{name} has none"
            why = f"not served: {there}, by version_policy in {name}/config.pbtxt, whose default is the newest alone"
            yield path, f"version {some(missing)} is {why}"
