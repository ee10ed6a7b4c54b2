"""Schemathesis makes requests from /openapi.json, always the same: answers are as described, and none is a server error."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests import encoders

from .processes import configure, running, tenant

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
KNOWN = """[parameters]
name = "identity"
version = "1"
[[operations]]
include-path = "/v1/models/{name}"
parameters = { name = "minilm" }
[[operations]]
include-path-regex = "^/v1/(embeddings|rerank)$"
checks.not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 504]
"""
"""Names that are served, so that requests get beyond a 404; the examples of bodies have `minilm`. A timeout of 1 us is 504."""


def test_answers_are_as_openapi_describes_them(standard: Path, tmp_path: Path) -> None:
    """Without unloading: what has been unloaded is answered 503, rightly."""
    root = Path(shutil.copytree(standard, tmp_path / "models"))
    encoders.write(root, "minilm", encoders.encoder(1, 16), 4)
    (tmp_path / "schemathesis.toml").write_text(KNOWN)
    program = Path(sys.executable).parent / "schemathesis"
    with running(configure(tmp_path / "greenlane.toml", root, tenant(), default_tenant='"acme"')) as server:
        words = [program, "--config-file", tmp_path / "schemathesis.toml", "run", f"{server.url}/openapi.json"]
        words += ["--checks", CHECKS, "--phases", "examples,coverage,fuzzing", "--exclude-path-regex", "unload$"]
        words += ["--generation-deterministic", "--max-examples", "8", "--continue-on-failure", "--no-color"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " generated, " in done.stdout
