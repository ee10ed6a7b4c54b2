"""`python -m server`: serve a configuration, or check one."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from math import ceil
from signal import SIGINT
from types import FrameType

import uvicorn
import uvloop

from partitions import Device, PartitionError

from .app import Application, configuration, open_configured
from .check import check
from .config.schema import Config, ConfigError
from .config.tables import nearest
from .config.values import whole
from .host import logs
from .host.compiled import Outdated, announce, ensure_current
from .host.shutdown_timer import give_up
from .http.connection import HttpConnection
from .processes.listen import Taken, address, listen
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
    """Run a command line and return the exit status: 0 when all went well, 2 when the configuration is wrong."""
    options = _options(arguments)
    try:
        ensure_current()
        if options.command == "check":
            return check(options.file or options.config, open_configured, configuration)
        return _serve(options)
    except (ConfigError, PartitionError) as error:
        print(f"greenlane: the configuration cannot be served:\n{error}", file=sys.stderr)
        return 2
    except (Taken, Outdated) as error:
        print(f"greenlane: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # Before a server was there to handle the signal, or during a check.
        return 128 + SIGINT


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    if problem := _misread(options):
        parser.error(problem)
    return options


def _misread(options: argparse.Namespace) -> str | None:
    """What is wrong with words that are each right."""
    command, file = options.command, options.file
    if command == "check":
        overrides = options.host, options.port, options.log_level
        alone = not any(given is not None for given in overrides) and (file is None) != (options.config is None)
        return None if alone else "check takes one FILE and no other options, as in: check greenlane.toml"
    if command and not file and os.path.exists(command):
        return f"{command!r} is not a command; did you mean --config {command}?"
    return f"{command!r} is not a command; {nearest(command, ['check'])}" if command else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m server", description="Serve models to tenants, each on its own share.")
    parser.add_argument("--config", metavar="FILE", help="TOML configuration; default: $GREENLANE_CONFIG, or else the demo")
    parser.add_argument("--host", type=_address, help="address to listen on, instead of server.host")
    parser.add_argument("--port", type=_port, help="port to listen on, instead of server.port")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], help="instead of server.log_level")
    about = "check: print what the configuration in FILE would serve, and everything that is wrong with it; without it: serve"
    parser.add_argument("command", metavar="COMMAND", nargs="?", help=about)
    parser.add_argument("file", metavar="FILE", nargs="?", help="what to check; the same as --config FILE")
    return parser


def _port(text: str) -> int:
    try:
        return whole(0, 65535).parse(int(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}; expected 0 to 65535") from None


def _address(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("empty, which would be every address of this machine; write 0.0.0.0 for that")
    return text


def _serve(options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        path = options.config or os.environ.get("GREENLANE_CONFIG")
        config = _override(stack.enter_context(configuration(path)), options)
        logs.configure(config.server.log_format, config.server.log_level)
        device = open_configured(config)
        config.fit(device.unit, device.granules)
        sys.setswitchinterval(SWITCH_INTERVAL)
        if config.server.fronts == "inline":
            listeners, _ = listen(config)
            announce()
            log.info("listening on %s", ", ".join(map(address, listeners)))
            application = Application(lambda: nullcontext(config), lambda _: device)
            server = Server(_uvicorn(config, application), application.unanswered)
            server.run(sockets=listeners)
            return 0 if server.started else 1
        return _serve_fronts(config, device)


def _serve_fronts(config: Config, device: Device) -> int:
    listeners, own = listen(config)
    announce()
    status = uvloop.run(serve(config, lambda _: device, listeners, own))
    if status:
        os._exit(status)  # Nothing could be closed in order: the device is lost.
    return status


def _override(config: Config, options: argparse.Namespace) -> Config:
    given = {"host": options.host, "port": options.port, "log_level": options.log_level}
    return replace(config, server=replace(config.server, **{key: value for key, value in given.items() if value is not None}))


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
