"""The servers of the isolation experiment: real ones, each in its own process, configured by a TOML file."""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from greenlane.load import wire
from greenlane.load.server_process import becomes_ready, free_port, logging_process

from .watched_server import restricted

PATIENCE = 300.0
"""Seconds after which a server that does not get ready is given up: a GPU's engines are compiled meanwhile."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant's granules and models, and the cores that its HTTP process runs on; none are any.

    `settings` are further lines of its section.
    """

    name: str
    granules: int
    models: tuple[str, ...]
    front_cores: tuple[int, ...] = ()
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Deployment:
    """A server: its device, its tenants, the cores it may use, and those that a CPU device carves; none are any.

    `program` is what `python -m` runs. `settings` are further lines of `[server]`. `mps` is as in the configuration.
    `log_level` is the lowest level that its log has. `options` are further lines at the end, as tables of models.
    """

    name: str
    device: str
    tenants: tuple[Tenant, ...]
    cores: tuple[int, ...] = ()
    carved: tuple[int, ...] = ()
    program: tuple[str, ...] = ("server",)
    settings: tuple[str, ...] = ()
    log_level: str = "warning"
    mps: str = "off"
    options: tuple[str, ...] = ()

    def config(self, repository: Path) -> str:
        """The configuration file."""
        server = ['max_body = "64MiB"', f'log_level = "{self.log_level}"', 'drain_grace = "0s"', *self.settings]
        device = [f'backend = "{self.device}"', f'mps = "{self.mps}"']
        device += [f'cores = "{_list(self.carved)}"'] if self.carved and self.device == "cpu" else []
        lines = ["[server]", *server, "[device]", *device, "[models]", f'repository = "{repository}"']
        for tenant in self.tenants:
            models = ", ".join(f'"{model}"' for model in tenant.models)
            lines += [f"[tenants.{tenant.name}]", f"granules = {tenant.granules}", "queue = 1024", f"models = [{models}]"]
            lines += tenant.settings
            lines += [f'front_cores = "{_list(tenant.front_cores)}"'] if tenant.front_cores else []
        return "\n".join([*lines, *self.options, ""])


class NotServed(Exception):
    """A server that did not start; its log says why."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server process that was started; `wait_ready` says when it serves."""

    deployment: Deployment
    port: int
    process: "subprocess.Popen[bytes]"
    log: Path

    def wait_ready(self) -> None:
        """Wait until every tenant's models are. Blocks, on a GPU for as long as it compiles kernels. Raises NotServed."""
        for tenant in self.deployment.tenants:
            for model in tenant.models:
                self._wait_for(f"{model} of {tenant.name}", f"/v2/models/{model}/ready", {"X-Tenant": tenant.name}, PATIENCE)

    def wait_serving(self, patience: float) -> None:
        """Wait until every tenant's models were tried, whatever came of it. Blocks. Raises NotServed after `patience` s."""
        self._wait_for("the server", "/v2/health/ready", {}, patience)

    def reload(self, deployment: Deployment, repository: Path) -> None:
        """Have it take over another configuration. Blocks. Raises NotServed if it refuses."""
        self.log.with_suffix(".toml").write_text(deployment.config(repository))
        status, text = ask(self.port, "POST", "/admin/reload", {})
        if status != 200:
            raise NotServed(f"a reload was answered with {status}: {text!r:.300}")

    def _wait_for(self, what: str, path: str, headers: Mapping[str, str], patience: float) -> None:
        """Ask until the answer is a 200. Raises NotServed if the server ends, or after `patience` seconds."""
        if not becomes_ready(self.process, lambda: ask(self.port, "GET", path, headers)[0] == 200, patience):
            status, text = ask(self.port, "GET", path, headers)
            state = "running" if self.process.poll() is None else f"ended with {self.process.poll()}"
            log = self.log.read_text(errors="replace")[-3000:]
            raise NotServed(f"{what} is not ready ({state}; {status}: {text!r:.300}):\n{log}")


@contextmanager
def launched(deployment: Deployment, folder: Path, repository: Path) -> Iterator[Server]:
    """Start a server on a port of the loopback interface, its files in `folder`; it is ended after the block."""
    config, log, port = folder / f"{deployment.name}.toml", folder / f"{deployment.name}.log", free_port()
    config.write_text(deployment.config(repository))
    command = [sys.executable, "-m", *deployment.program, "--config", str(config), "--port", str(port)]
    with ExitStack() as started:
        with restricted(deployment.cores):
            process = started.enter_context(logging_process(command, log))
        yield Server(deployment, port, process, log)


def granules(device: str, cores: Sequence[int]) -> int:
    """How many granules a device has; asked in another process, which may split a GPU while this one does not.

    `cores` are what a CPU device carves. Raises NotServed if there is no such device.
    """
    chosen = list(cores) if device == "cpu" else None
    code = f"""\
import sys
from partitions import DeviceUnavailable, open_device
try:
    print(len(open_device({device!r}, {chosen!r}).granules))
except DeviceUnavailable as error:
    sys.exit(str(error))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise NotServed(done.stderr.strip().splitlines()[-1])
    return int(done.stdout)


def ask(port: int, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> tuple[int, bytes]:
    """One request; the status and body, or 0 and why there were none."""
    try:
        answer = wire.ask(port, method, path, headers, body, timeout=60)
    except (OSError, HTTPException) as error:
        return 0, str(error).encode()
    return answer.status, answer.body


def _list(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))
