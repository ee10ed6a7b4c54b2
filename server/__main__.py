"""`python -m server`: serve a configuration, or check one."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from types import FrameType

import uvicorn
import uvloop

from partitions import PartitionError, PartitionManager

from . import logs
from .app import Application, configuration, open_configured
from .check import check
from .config import Config, ConfigError
from .front import Front
from .fronts.serve import serve
from .listen import Taken, listen

SWITCH_INTERVAL = 0.001
"""Seconds after which a thread must let another have the interpreter: what a completion may wait for while the event loop is
busy. Python's own is 5 ms; shorter than 1 ms the waiting itself costs more, a timer for each."""


class Server(uvicorn.Server):
    """uvicorn, ending with status 0 when it was told to stop and did, instead of by the signal that told it."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status: 0 when all went well, 2 when the configuration is wrong."""
    options = _parser().parse_args(arguments)
    try:
        return check(options.file, open_configured, configuration) if options.command == "check" else _serve(options)
    except (ConfigError, PartitionError) as error:
        print(f"greenlane: the configuration cannot be served:\n{error}", file=sys.stderr)
        return 2
    except Taken as error:
        print(f"greenlane: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m server", description="Serve models to tenants, each on its own share.")
    parser.add_argument("--config", metavar="FILE", help="TOML configuration; default: $GREENLANE_CONFIG, or else the demo")
    parser.add_argument("--host", type=_address, help="address to listen on, instead of server.host")
    parser.add_argument(
        "--port", type=int, choices=range(65536), metavar="PORT", help="port to listen on, instead of server.port"
    )
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], help="instead of server.log_level")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    check = commands.add_parser("check", help="print what a configuration would serve, or everything that is wrong with it")
    check.add_argument("file", metavar="FILE")
    return parser


def _address(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("empty, which would be every address of this machine; write 0.0.0.0 for that")
    return text


def _serve(options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        path = options.config or os.environ.get("GREENLANE_CONFIG")
        config = _override(stack.enter_context(configuration(path)), options)
        _plan(config)
        sys.setswitchinterval(SWITCH_INTERVAL)
        if config.server.fronts == "inline":
            server = Server(_uvicorn(config))
            server.run()
            return 0 if server.started else 1
        return _serve_fronts(config)


def _serve_fronts(config: Config) -> int:
    listeners, own = listen(config)
    logs.configure(config.server.log_format, config.server.log_level)
    status = uvloop.run(serve(config, open_configured, listeners, own))
    if status:
        os._exit(status)  # Nothing could be closed in order: the device is lost.
    return status


def _override(config: Config, options: argparse.Namespace) -> Config:
    given = {"host": options.host, "port": options.port, "log_level": options.log_level}
    return replace(config, server=replace(config.server, **{key: value for key, value in given.items() if value is not None}))


def _uvicorn(config: Config) -> uvicorn.Config:
    application = Application(lambda: nullcontext(config))
    return uvicorn.Config(
        application,
        host=config.server.host,
        port=config.server.port,
        loop="uvloop",
        http=partial(Front, application.infer, application, None),  # type: ignore[arg-type]  # Called with what a class would be called with.
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=2048,
    )


def _plan(config: Config) -> dict[str, tuple[int, ...]]:
    """Who would hold which granules. Raises ConfigError or PartitionError."""
    device = open_configured(config)
    counts = {name: tenant.share(device.unit, device.granules) for name, tenant in config.tenants.items()}
    return dict(PartitionManager(device).plan(counts).after)


if __name__ == "__main__":
    sys.exit(main())
