"""What a tenant on several devices is served: each device loads its models for itself, and clients see one of each version.

Pure: nothing here awaits or blocks.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..link.messages import ModelKey
from .catalog import IndexEntry, ModelVersion

log = logging.getLogger("greenlane")


class Merged(NamedTuple):
    """What the catalog is to have of one model, and `keys`: by each key there, the key that the version has on each device."""

    served: list[ModelVersion]
    problems: list[IndexEntry]
    keys: dict[ModelKey, dict[str, ModelKey]]


@dataclass(frozen=True, slots=True)
class _Version:
    """A version as it is in the catalog, and its keys on the devices that serve it."""

    served: ModelVersion
    keys: Mapping[str, ModelKey]


class MergedModels:
    """The models of one tenant on `devices`. A version is served if at least one device serves it.

    Its key in the catalog is another one whenever a device begins or ceases to serve it, or has loaded it again: so a device
    may free what it has replaced once no request for the old key is left. Devices whose tensors differ from those of the
    device that served the version first are left out until it is loaded again.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = tuple(devices)
        self._published: dict[str, dict[str, tuple[Sequence[ModelVersion], Sequence[IndexEntry]]]] = {
            name: {} for name in devices
        }
        self._versions: dict[str, dict[str, _Version]] = {}
        self._loads = 0

    def __repr__(self) -> str:
        return f"<MergedModels of {', '.join(self._devices)}, {len(self._versions)} models>"

    def of(self, device: str) -> list[ModelVersion]:
        """What this device has published."""
        return [each for served, _ in self._published[device].values() for each in served]

    def put(self, published: Mapping[str, tuple[Sequence[ModelVersion], Sequence[IndexEntry]]], name: str) -> Merged:
        """These devices serve these versions of a model, and no others, and have these problems with it."""
        for device, each in published.items():
            self._published[device][name] = each
        return self.merged(name)

    def drop(self, device: str) -> list[str]:
        """This device serves nothing any more. Returns the models of which a version is not served by any other one."""
        self._published[device] = {}
        lost: list[str] = []
        for name, versions in self._versions.items():
            for version, each in list(versions.items()):
                if device in each.keys:
                    versions[version] = replace(each, keys={at: key for at, key in each.keys.items() if at != device})
                    lost += [name] if len(each.keys) == 1 else []
        return list(dict.fromkeys(lost))

    def merged(self, name: str) -> Merged:
        """What the catalog is to have of this model now."""
        before = self._versions.get(name, {})
        there: dict[str, dict[str, ModelVersion]] = {}
        for device in self._devices:
            for each in self._published[device].get(name, ((), ()))[0]:
                there.setdefault(each.version, {})[device] = each
        now = {version: self._version(each, before.get(version)) for version, each in there.items()}
        self._versions[name] = now
        keys = {each.served.key: dict(each.keys) for each in now.values()}
        return Merged([each.served for each in now.values()], self._problems(name, now), keys)

    def _version(self, there: Mapping[str, ModelVersion], before: _Version | None) -> _Version:
        if before and before.keys and {device: each.key for device, each in there.items()} == before.keys:
            return before
        stays = [device for device in there if before and before.keys.get(device) == there[device].key]
        first = there[(stays or list(there))[0]]
        alike = {device: each.key for device, each in there.items() if _tensors(each) == _tensors(first)}
        for device in there.keys() - alike.keys():
            log.warning("model %s %s has other tensors on device %s; load it again to use it there", *_name(first), device)
        self._loads += 1
        return _Version(replace(first, key=f"{first.name}/{first.version}#{self._loads}"), alike)

    def _problems(self, name: str, served: Mapping[str, _Version]) -> list[IndexEntry]:
        """Those of versions that no device serves, each once; of the whole model only if nothing of it is served.

        And those of devices that say why they go on with what they served before.
        """
        found: dict[str, IndexEntry] = {}
        for device in self._devices:
            own, problems = self._published[device].get(name, ((), ()))
            goes_on = {each.version for each in own} | ({""} if own else set())
            for problem in problems:
                nowhere = problem.version not in served and (problem.version or not served)
                if nowhere or problem.version in goes_on:
                    found.setdefault(problem.version, problem)
        return list(found.values())


def _tensors(served: ModelVersion) -> object:
    return served.signature, served.functions


def _name(served: ModelVersion) -> tuple[str, str]:
    return served.name, served.version
