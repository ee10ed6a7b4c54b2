"""What is configured for few servers is loaded by those alone."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

PROCESSES = (
    "server.__main__",
    "server.processes.device_side.device_process",
    "server.processes.dispatching.dispatcher",
    "server.processes.http_side.http_process",
    "server.processes.tenant_process",
)


def test_no_process_loads_functions_tokenizers_spans_or_remote_repositories_by_itself() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = [each for each in project["contracts"] if each["name"].startswith("functions, tokenizers, spans")]
    script = f"import json, sys, {', '.join(PROCESSES)}; print(json.dumps([*sys.modules]))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    assert set(PROCESSES) <= set(loaded)
    assert not set(contract["forbidden_modules"]) & set(loaded)
