"""What the deployments send each other: which servers there are, and the shares in force. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shares:
    """Granules by tenant that were set while serving; those of the configuration where `revision` is 0.

    A later change has a higher revision. `version`: of which configuration.
    """

    version: str
    revision: int = 0
    granules: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Listed:
    """A server that serves. `number`: its rank among the servers, which its replacement gets too. `key`: its admin key."""

    id: str
    number: int
    url: str
    key: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The servers that serve, by number. While it is not `complete` there may be more, which have not reported yet.

    `gone`: ids of servers that said that they stop.
    """

    servers: tuple[Listed, ...]
    complete: bool
    gone: frozenset[str] = frozenset()
