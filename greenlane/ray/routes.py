"""Which server gets a request: by its tenant, then the one with the fewest requests. Pure."""

import hashlib
import tomllib
from collections.abc import Collection, Mapping

from .coordinator import Listed, Listing


class Tenants:
    """Finds the tenant of a request by its headers, as the servers do, which then decide whether it is served."""

    def __init__(self, toml: str) -> None:
        document = tomllib.loads(toml)
        self._default = document.get("server", {}).get("default_tenant")
        self._by_key = {
            digest.lower(): name for name, each in document["tenants"].items() for digest in each.get("keys_sha256", ())
        }

    def identify(self, authorization: str | None, name: str | None) -> str | None:
        """Its name, or None where the request shows none, or a key that no tenant has."""
        if authorization and self._by_key:
            return self._by_key.get(digest_of_bearer(authorization))
        return name or self._default


def digest_of_bearer(authorization: str) -> str:
    """The digest of the key in a header `Authorization: Bearer KEY`; of no key where it is something else."""
    scheme, _, key = authorization.partition(" ")
    return hashlib.sha256(key.strip().encode("latin-1", "replace")).hexdigest() if scheme.lower() == "bearer" else ""


class Routes:
    """The servers as one ingress sees them. `places`: numbers of the servers of a tenant, all where it is not named."""

    def __init__(self, places: Mapping[str, Collection[int]]) -> None:
        self._places = places
        self._servers: dict[str, Listed] = {}
        self._in_flight: dict[str, int] = {}
        self._unreachable: set[str] = set()
        self._failed: set[str] = set()
        self._turn = 0

    def update(self, listing: Listing) -> None:
        """Use these servers, and those of before while the listing is not complete; those that were not reached too."""
        listed = {server.id: server for server in listing.servers}
        kept = {} if listing.complete else {id: each for id, each in self._servers.items() if id not in listing.gone}
        self._servers = kept | listed
        self._unreachable.clear()
        self._failed &= self._servers.keys()

    def servers_of(self, tenant: str | None) -> list[Listed]:
        """Where a tenant is served, whether reachable or not."""
        numbers = self._places.get(tenant or "")
        return [server for server in self._servers.values() if numbers is None or server.number in numbers]

    def choose(self, tenant: str | None, tried: Collection[str] = ()) -> Listed | None:
        """The server with the fewest requests of those that were not tried, in turn where these are equal."""
        found = [server for server in self.servers_of(tenant) if server.id not in tried]
        found = [server for server in found if server.id not in self._unreachable] or found
        if not found:
            return None
        self._turn += 1
        start = self._turn % len(found)
        return min(found[start:] + found[:start], key=lambda server: self._in_flight.get(server.id, 0))

    def begin(self, server: Listed) -> None:
        """Count a request to it."""
        self._in_flight[server.id] = self._in_flight.get(server.id, 0) + 1

    def end(self, server: Listed) -> None:
        """The same once it has ended."""
        self._in_flight[server.id] -= 1
        if not self._in_flight[server.id]:
            del self._in_flight[server.id]

    def could_not_reach(self, server: Listed) -> bool:
        """Choose others before it, until the next list. Returns whether it is the first time since it was listed."""
        first = server.id not in self._failed
        self._unreachable.add(server.id)
        self._failed.add(server.id)
        return first
