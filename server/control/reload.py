"""Reads the configuration again while it is served, and changes what can be changed: all of it, or nothing."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from partitions import PartitionError

from ..config.changes import Change, compare
from ..config.schema import Config
from ..config.tables import ConfigError
from ..errors import Conflict, RequestError, Unavailable
from ..tenants import audit
from .controller import Controller

log = logging.getLogger("greenlane.control")

ReadConfig = Callable[[], Config]
"""Reads the configuration's file, as the server was started with it. Blocks. Raises ConfigError."""
Reconfigure = Callable[[Config], Awaitable[None]]
"""Uses this configuration, as `reconfiguration.reconfigure` does."""
_SERVING = ("serving", "incomplete")
_PATIENCE = 60.0
"""Seconds after which a file that is not read, as on a disk in the network that hangs, is given up."""
_MOST_REASON = 4096
"""Characters of a refusal in the audit."""


def without_file() -> Config:
    """The `ReadConfig` of a server that was started without a file."""
    raise ConfigError(["there is no configuration file: the server was started without one; start it again with --config FILE"])


class Reloader:
    """Belongs to the event loop."""

    def __init__(self, controller: Controller, read: ReadConfig, reconfigure: Reconfigure, patience: float = _PATIENCE) -> None:
        self._controller = controller
        self._read = read
        self._reconfigure = reconfigure
        self._patience = patience
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()

    async def reload(self) -> list[Change]:
        """As `_reload`, with a line in the audit."""
        try:
            changes = await self._reload()
        except (RequestError, PartitionError) as error:
            audit.record("reload refused", reason=str(error)[:_MOST_REASON])
            raise
        audit.record("reloaded", changed=[str(change) for change in changes])
        return changes

    async def _reload(self) -> list[Change]:
        """Read the file and use it; what has changed. Nothing has after an error.

        Raises Conflict with every problem of the file, and with every key that needs a restart, or if it waits too long for
        another change; Unavailable while the server starts or ends.
        """
        async with self._controller.holding(self._lock):
            if self._controller.state not in _SERVING:
                raise Unavailable(f"the server is {self._controller.state}; reload when it serves")
            old = self._controller.config
            try:
                async with asyncio.timeout(self._patience):
                    new, changes = await asyncio.to_thread(self._read_and_compare, old)
            except ConfigError as error:
                raise Conflict(f"the file cannot be served, so nothing has changed:\n{error}") from error
            except TimeoutError:
                raise Conflict(f"nothing has changed, as the file could not be read within {self._patience:g} s") from None
            if fixed := [change for change in changes if not change.live]:
                lines = "\n".join(f"{each} needs a restart{each.why and f', as {each.why}'}" for each in fixed)
                raise Conflict(f"nothing has changed, as not all of it can while the server runs:\n{lines}")
            await self._reconfigure(new)
        log.info("reloaded %s: %s", new.source, "; ".join(map(str, changes)) or "nothing has changed")
        return changes

    def _read_and_compare(self, old: Config) -> tuple[Config, list[Change]]:
        """The file, and what has changed. Blocks, for as long as the file is large. Raises ConfigError."""
        new = self._read()
        return new, compare(old, new)

    async def reload_on_request(self) -> list[Change]:
        """As `reload`, for `POST /admin/reload`; a refusal is logged as well."""
        try:
            return await self.reload()
        except (RequestError, PartitionError) as error:
            log.warning("POST /admin/reload: %s", error)
            raise

    def on_signal(self) -> None:
        """Reload, and log what comes of it."""
        task = asyncio.get_running_loop().create_task(self._reload_and_log())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _reload_and_log(self) -> None:
        try:
            await self.reload()
        except (RequestError, PartitionError) as error:
            log.error("SIGHUP: %s", error)
        except Exception:  # POST /admin/reload is answered 500, and says so in the log.
            log.exception("SIGHUP: the configuration could not be used")
