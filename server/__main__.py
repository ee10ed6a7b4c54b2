"""`python -m server`: serve a configuration, or check one."""

import gc

from .command_line import Options, configuration_file, parse
from .host import forkserver, signals

if __name__ == "__main__":
    signals.exit_on_interrupt()  # The imports below take a while.
    options = parse()
    if options.check is None:
        forkserver.start_early()

gc.disable()  # Hardly anything that the imports make is garbage; looking for it takes a sixth of their time.

import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from signal import SIGINT
from typing import Any

import uvloop

from partitions import DeviceUnavailable, DoesNotFit, PartitionError, Unsupported

from .app import configuration, log_compilation, log_configuration, on_host_cores, open_alone, open_configured
from .config.file import load
from .config.schema import Config
from .config.tables import ConfigError
from .control.reload import ReadConfig, without_file
from .host import logs
from .host.leaving import end_now, leave
from .processes.serve import serve
from .processes.supervision.listen import CannotListen, listen, reserve

gc.freeze()  # Modules stay for good, so the collector need not look at them again.
gc.enable()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's, and return the exit status."""
    return run(parse(arguments))


def run(options: Options, adjust: Callable[[Config], Config] | None = None) -> int:
    """Serve or check, and return the exit status: 0 when all went well, 2 when the configuration is wrong.

    `adjust` changes the configuration that is served, for programs that start a server for themselves.
    """
    signals.raise_keyboard_interrupt()
    try:
        if options.check:
            from .check import check  # What serves needs none of it.

            return check(options.check, open_alone, configuration)
        return _serve(options, adjust)
    except (ConfigError, DeviceUnavailable, DoesNotFit, Unsupported) as error:
        print(f"greenlane: the configuration cannot be served:\n{error}", file=sys.stderr)
        return 2
    except (CannotListen, PartitionError) as error:  # Another try may succeed.
        print(f"greenlane: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # During a check, or before the server handles signals.
        return 128 + SIGINT


def _serve(options: Options, adjust: Callable[[Config], Config] | None) -> int:
    with ExitStack() as stack:
        path = configuration_file(options.config)
        config = _override(stack.enter_context(configuration(path)), options)
        config = adjust(config) if adjust else config

        def read() -> Config:
            again = _override(load(Path(path)) if path else without_file(), options)
            return adjust(again) if adjust else again

        logs.configure(config.server.log_format, config.server.log_level, config.server.audit)

        def abandon(status: int) -> None:
            try:
                stack.close()  # The demo's models are in a folder that this removes.
            finally:
                end_now(status)

        return _serve_processes(config, read, abandon)


def _serve_processes(config: Config, read: ReadConfig, abandon: Callable[[int], object]) -> int:
    ports = {name: tenant.port for name, tenant in config.tenants.items() if tenant.port}
    listeners, own = listen(config.server.host, config.server.port, ports)
    grpc = {name: tenant.grpc_port for name, tenant in config.tenants.items() if tenant.grpc_port}
    reserved = reserve(config.server.host, grpc)  # Until the server ends, as replaced processes listen there again.
    log_configuration(config)
    log_compilation()
    with ExitStack() as stack:
        for each in chain(listeners, *own.values(), reserved):
            stack.enter_context(each)
        hosted = [name for name, device in config.named_devices.items() if on_host_cores(device)]
        run = serve(
            _on_cores(config, hosted),
            open_configured,
            listeners,
            own,
            abandon,
            hosted=hosted,
            read=lambda: _on_cores(read(), hosted),
        )
        try:
            return uvloop.run(run)
        finally:
            run.close()  # Where SIGINT came before its first step, Python would warn that it was never awaited.


def _on_cores(config: Config, hosted: Collection[str]) -> Config:
    """The same, with what "auto" means for these devices: so the processes do not find that out, and log it, once more."""
    devices = dict(config.named_devices)
    for name in hosted:
        if name in devices and devices[name].backend == "auto":
            devices[name] = devices[name].model_copy(update={"backend": "cpu"})
    return config.with_devices(devices)


def _override(config: Config, options: Options) -> Config:
    keys = "host", "port", "log_level", "autopilot"
    given: dict[str, Any] = {key: getattr(options, key) for key in keys}
    server = config.server.model_copy(update={key: value for key, value in given.items() if value is not None})
    return config.model_copy(update={"server": server})


if __name__ == "__main__":
    leave(run(options))
