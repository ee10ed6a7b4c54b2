"""Questions to a server that are not part of a load: administration, and the metadata of models; and why there is no answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from greenlane.load import wire


class CannotProve(Exception):
    """The server cannot be asked at all: a wrong configuration, a URL that does not answer, a key that is refused."""


class ServerEnded(Exception):
    """The server that was being measured ended, or no longer answers."""


@dataclass(frozen=True, slots=True)
class Access:
    """A server on this machine: its port, and the keys by which its tenants and its administration are asked.

    A tenant without a key is named by a header.
    """

    port: int
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    admin_key: str | None = field(default=None, repr=False)

    def headers(self, tenant: str) -> dict[str, str]:
        """What says that a request is this tenant's."""
        return wire.bearer(self.keys[tenant]) if tenant in self.keys else {"X-Tenant": tenant}

    def serves(self) -> bool:
        """Whether it is ready."""
        try:
            return wire.ask(self.port, "GET", "/v2/health/ready", {}, timeout=5).status == 200
        except (OSError, HTTPException):
            return False

    @property
    def administrator(self) -> dict[str, str]:
        """What says that a request is the administrator's."""
        return wire.bearer(self.admin_key) if self.admin_key else {}

    def administer(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        """One question to the administrators' API. Raises ServerEnded, and CannotProve where it is refused."""
        status, answer = self._ask(method, path, self.administrator, body)
        if status in (401, 403):
            raise CannotProve(f"{method} {path} is refused: {answer.get('error')} (--keys FILE has `admin = KEY`)")
        if status != 200:
            raise ServerEnded(f"{method} {path} is answered with {status}: {answer.get('error')}")
        return answer

    def of(self, tenant: str, path: str) -> tuple[int, dict[str, Any]]:
        """One question as this tenant: status and JSON. Raises ServerEnded."""
        return self._ask("GET", path, self.headers(tenant))

    def _ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> tuple[int, dict[str, Any]]:
        try:
            answer = wire.ask(self.port, method, path, headers, body)
        except (OSError, HTTPException) as error:
            raise ServerEnded(f"the server on port {self.port} does not answer {method} {path}: {error}") from error
        try:
            found = json.loads(answer.body)
        except (ValueError, RecursionError):
            found = None
        return answer.status, found if isinstance(found, dict) else {"error": answer.body[:200].decode(errors="replace")}
