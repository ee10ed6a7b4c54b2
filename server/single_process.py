"""`uvicorn server.app:app`: refuses or warns of settings that cannot be honoured in one process on uvicorn's socket.

`python -m server` opens the sockets itself and gives each tenant its own HTTP process.
"""

import logging
import sys
from collections.abc import Iterator

from partitions.mps import stay_outside

from .config.schema import Config
from .config.server import ServerConfig
from .config.tables import ConfigError, dotted
from .http.uvicorn_install import install

log = logging.getLogger("greenlane")

SWITCH_INTERVAL = 0.001
"""Seconds after which a thread must release the GIL if another waits: the longest wait of a completion while the event loop is
busy. Python's default is 5 ms. Below 1 ms the waiting itself costs more, as each wait takes a timer."""


def prepare(config: Config) -> None:
    """Configure this process, and log one warning with all settings that are ignored; at the start, and at each reload.

    Raises ConfigError for several devices, and for a tenant's own port, which must not be ignored: it keeps other clients away
    from the tenant.
    """
    if problems := list(_refused(config)):
        raise ConfigError(problems)
    sys.setswitchinterval(SWITCH_INTERVAL)
    stay_outside()
    install()
    if lines := list(_not_honoured(config)):
        log.warning("%s", "\n  ".join([f"not all of {config.source} is honoured by uvicorn server.app:app:", *lines]))


def _refused(config: Config) -> Iterator[str]:
    if len(config.named_devices) > 1:
        names = ", ".join(dotted(("devices", name)) for name in config.named_devices)
        why = "uvicorn server.app:app is one process, which has one device"
        yield f"{config.source}: {names}: {len(config.named_devices)} devices, but {why}; serve them with python -m server"
    if any(each.mps == "on" for each in config.named_devices.values()):
        why = "uvicorn server.app:app is one process for all tenants"
        yield f'{config.source}: device.mps: "on", but {why}; serve them with python -m server, or leave it out'
    if config.models.python and len(config.tenants) > 1:
        why = "functions of models run in the process of their tenant, and uvicorn server.app:app has one for all tenants"
        yield f"{config.source}: models.python: true, but {why}; serve them with python -m server, or leave it out"
    for name, tenant in config.tenants.items():
        if tenant.port is not None:
            key = dotted(("tenants", name, "port"))
            why = "uvicorn server.app:app listens on uvicorn's own socket alone, so the tenant has none of its own"
            yield f"{config.source}: {key}: {tenant.port}, but {why}; serve it with python -m server, or leave it out"


def _not_honoured(config: Config) -> Iterator[str]:
    server, default = config.server, ServerConfig()
    if len(config.tenants) > 1:
        yield (
            "tenants: the HTTP of all of them shares one process and one event loop here, so that large or many requests of "
            "one delay the others'; python -m server gives each an HTTP process of its own"
        )
    assigned = [dotted(("tenants", name, "front_cores")) for name, tenant in config.tenants.items() if tenant.front_cores]
    if server.front_cores != default.front_cores:
        assigned.insert(0, "server.front_cores")
    if assigned:
        yield f"{', '.join(assigned)}: there are no HTTP processes to put on cores"
    if several := [name for name, tenant in config.tenants.items() if tenant.http_processes not in (1, "auto")]:
        keys = ", ".join(dotted(("tenants", name, "http_processes")) for name in several)
        yield f"{keys}: here all HTTP is in one process; python -m server starts several on a GPU"
    if limited := [
        dotted(("tenants", name, "max_connections")) for name, each in config.tenants.items() if each.max_connections
    ]:
        yield f"{', '.join(limited)}: connections belong to no tenant in one process; uvicorn's --limit-concurrency is for all"
    if server.keep_alive != default.keep_alive:
        yield "server.keep_alive: uvicorn closes idle connections after its --timeout-keep-alive, which is 5 s by default"
    if (server.host, server.port) != (default.host, default.port):
        yield f"server.host and server.port, {server.host}:{server.port}: uvicorn listens where its --host and --port say"
