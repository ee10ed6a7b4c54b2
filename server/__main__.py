"""`python -m server`: serve a configuration, or check one."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from math import ceil
from signal import SIGINT
from types import FrameType
from typing import Any

import uvicorn
import uvloop

from partitions import Device, PartitionError

from .app import Application, configuration, log_compilation, open_configured
from .check import check
from .command_line import Options, parse
from .config.schema import Config, ConfigError
from .host import logs
from .host.shutdown_timer import give_up
from .http.connection import HttpConnection
from .processes.listen import CannotListen, listen, url
from .processes.serve import serve
from .single_process import SWITCH_INTERVAL

log = logging.getLogger("greenlane")


class Server(uvicorn.Server):
    """uvicorn, ending with status 0 when it was told to stop and did, instead of by the signal that told it.

    Told again, it ends the process at once: `unanswered` says how many accepted requests that gives up. (uvicorn's own way
    would wait for the tenants' threads, which nobody closes then.)
    """

    def __init__(self, config: uvicorn.Config, unanswered: Callable[[], int]) -> None:
        super().__init__(config)
        self._unanswered = unanswered

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and frame:  # Without a frame it is no signal, but the end of a drain.
            os._exit(give_up(self._unanswered()))
        self.should_exit = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's, and return the exit status."""
    return run(parse(arguments))


def run(options: Options) -> int:
    """Serve or check, and return the exit status: 0 when all went well, 2 when the configuration is wrong."""
    try:
        if options.check:
            return check(options.check, open_configured, configuration)
        return _serve(options)
    except (ConfigError, PartitionError) as error:
        print(f"greenlane: the configuration cannot be served:\n{error}", file=sys.stderr)
        return 2
    except CannotListen as error:
        print(f"greenlane: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # Before a server was there to handle the signal, or during a check.
        return 128 + SIGINT


def _serve(options: Options) -> int:
    with ExitStack() as stack:
        path = options.config or os.environ.get("GREENLANE_CONFIG")
        config = _override(stack.enter_context(configuration(path)), options)
        logs.configure(config.server.log_format, config.server.log_level)
        device = open_configured(config)
        config.fit(device.unit, device.granules)
        sys.setswitchinterval(SWITCH_INTERVAL)
        if config.server.fronts == "inline":
            listeners, _ = listen(config)
            log_compilation()
            log.info("listening on %s", ", ".join(map(url, listeners)))
            application = Application(lambda: nullcontext(config), lambda _: device)
            server = Server(_uvicorn(config, application), application.unanswered)
            server.run(sockets=listeners)
            return 0 if server.started else 1
        return _serve_fronts(config, device)


def _serve_fronts(config: Config, device: Device) -> int:
    listeners, own = listen(config)
    log_compilation()
    status = uvloop.run(serve(config, lambda _: device, listeners, own))
    if status:
        os._exit(status)  # Nothing could be closed in order: the device is lost.
    return status


def _override(config: Config, options: Options) -> Config:
    given: dict[str, Any] = {"host": options.host, "port": options.port, "log_level": options.log_level}
    server = config.server.model_copy(update={key: value for key, value in given.items() if value is not None})
    return config.model_copy(update={"server": server})


def _uvicorn(config: Config, application: Application) -> uvicorn.Config:
    return uvicorn.Config(
        application,
        loop="uvloop",
        timeout_keep_alive=ceil(config.server.keep_alive),
        http=partial(HttpConnection, application.infer, application, None),  # type: ignore[arg-type]  # Called with what a class would be called with.
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=2048,
    )


if __name__ == "__main__":
    sys.exit(main())
