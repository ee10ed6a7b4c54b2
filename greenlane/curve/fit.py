"""Whether the shares that tenants need fit a device, what is left, and what is too much. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fit:
    """Granules by tenant on a device that has `total`."""

    needs: Mapping[str, int]
    total: int

    @property
    def left(self) -> int:
        """Granules that no tenant needs; below 0: so many are missing."""
        return self.total - sum(self.needs.values())

    @property
    def largest(self) -> str:
        """The tenant that needs most, the first of several. Raises ValueError without tenants."""
        return max(self.needs, key=lambda name: self.needs[name])
