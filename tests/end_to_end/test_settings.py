"""Triton's log and trace settings: read by anybody, changed by administrators, and refused by name where they mean nothing."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from .harness import configuration, serving
from .processes import configure, running, tenant
from .wire import answered, client, until

LOGGING = {
    "log_file": "",
    "log_info": True,
    "log_warning": True,
    "log_error": True,
    "log_verbose_level": 0,
    "log_format": "default",
}


def test_the_level_of_all_processes_follows(standard: Path, tmp_path: Path) -> None:
    config = configure(tmp_path / "c.toml", standard, tenant("acme", "identity"), default_tenant='"acme"')
    with running(config) as server, client(server) as http:
        assert http.get("/v2/logging").json() == LOGGING
        quiet = {"log_info": False, "log_warning": False}
        assert http.post("/v2/logging", json=quiet).json() == {**LOGGING, **quiet}
        assert http.get("/v2/logging").json() == {**LOGGING, **quiet}
        refused = http.post("/v2/logging", json=quiet, headers={"X-Forwarded-For": "10.0.0.1"})
        assert refused.status_code == 401, "only administrators change it"
        server.kill("acme")  # Its replacement starts with the configured level, info, and is sent the other one.
        for change in (None, {"log_info": True, "log_warning": True}):
            if change:
                assert http.post("/v2/logging", json=change).json() == LOGGING
            with client(server) as fresh:
                until(lambda fresh=fresh: answered(fresh) == 200)  # type: ignore[misc]
                assert fresh.post("/v2/repository/models/identity/unload").status_code == 200
                assert fresh.post("/v2/repository/models/identity/load").status_code == 200
        server.wait_for_log("unloaded for acme")
        at = [next(at for at, line in enumerate(server.log) if text in line) for text in ("level is info now", "unloaded for")]
        assert at[0] < at[1], "the first unload was not logged"


@pytest.fixture(scope="module")
def served(standard: Path) -> Any:
    with serving(configuration(standard, tracing_ratio=0.25)) as served:
        yield served


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"log_verbose": 1}, "log_verbose: there is no such log setting"),
        ({"log_info": "yes"}, 'log_info: "yes"; expected true or false'),
        ({"log_verbose_level": 10**23}, f"log_verbose_level: {10**23}; expected a whole number"),
        ({"log_verbose_level": -1}, "log_verbose_level: -1; expected a whole number"),
        ({"log_file": "/tmp/log"}, "the log goes to standard error"),
        ({"log_format": "ISO8601"}, "set server.log_format"),
        ({"log_error": False}, "errors are always logged"),
        ({"log_warning": False}, "what is more severe than something that is logged is too"),
        (
            {"log_info": False, "log_verbose_level": 1},
            "log_error true, log_warning true, log_info false, log_verbose_level 1: errors are always",
        ),
    ],
)
def test_a_log_setting_that_means_nothing_is_refused_by_name(http: httpx.Client, given: Any, words: str) -> None:
    answer = http.post("/v2/logging", json=given)
    assert answer.status_code == 400
    assert words in answer.json()["error"]
    assert http.get("/v2/logging").json() == LOGGING


def test_the_verbose_level_is_debug(http: httpx.Client) -> None:
    assert http.post("/v2/logging", json={"log_info": False}).json() == {**LOGGING, "log_info": False}
    assert http.post("/v2/logging", json={"log_verbose_level": 2}).json() == {**LOGGING, "log_verbose_level": 1}
    assert http.post("/v2/logging", json={"log_info": False}).status_code == 400, "it is logged as long as that is"
    assert http.post("/v2/logging", json={"log_verbose_level": 0}).json() == LOGGING


@pytest.mark.parametrize("path", ["/v2/trace/setting", "/v2/models/identity/trace/setting"])
def test_trace_settings_say_what_is_configured_and_change_nothing(http: httpx.Client, path: str) -> None:
    settings = http.get(path).json()
    assert settings == {
        "trace_level": ["OFF"],
        "trace_rate": "4",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": "",
        "trace_mode": "opentelemetry",
    }
    assert http.post(path, json=settings).json() == settings
    for given, words in (
        ({"trace_rate": "1000"}, 'trace_rate: "1000"; it is "4", and is not changed while serving: set server.tracing_ratio'),
        ({"trace_level": ["TIMESTAMPS"]}, "set or leave out server.tracing_endpoint"),
        ({"trace_size": 1}, "trace_size: there is no such trace setting"),
    ):
        answer = http.post(path, json=given)
        assert answer.status_code == 400
        assert words in answer.json()["error"]


def test_trace_settings_of_a_model_that_is_not_there(http: httpx.Client) -> None:
    assert http.get("/v2/models/nothing/trace/setting").status_code == 404
