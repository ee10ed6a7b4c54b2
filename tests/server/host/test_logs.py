import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from server.host.logs import JsonFormatter, TextFormatter, configure

NAMES = ("greenlane", "uvicorn")


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """The loggers, put back as they were."""
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in map(logging.getLogger, NAMES)]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def record(*args: object, text: str = "it happened", level: int = logging.INFO, **extras: Any) -> logging.LogRecord:
    made = logging.LogRecord("greenlane.runtime", level, "file.py", 1, text, args, None)
    made.created = 1_700_000_000.5
    for name, value in extras.items():
        setattr(made, name, value)
    return made


def raised() -> logging.LogRecord:
    try:
        raise ValueError("wrong")
    except ValueError:
        return record(exc_info=sys.exc_info())


def clock() -> str:
    return "2023-11-14T22:13:20.500Z"


def test_text_is_one_line_for_people() -> None:
    assert TextFormatter().format(record(3, text="%d models")) == f"{clock()} INFO    greenlane.runtime: 3 models"


def test_text_has_the_tenant_and_the_request_where_there_are_any() -> None:
    line = TextFormatter().format(record(level=logging.WARNING, request_id="r1", tenant="acme", other="x"))
    assert line == f"{clock()} WARNING greenlane.runtime: it happened (tenant=acme, request_id=r1)"


def test_text_ends_in_the_traceback() -> None:
    first, *traceback = TextFormatter().format(raised()).splitlines()
    assert first == f"{clock()} INFO    greenlane.runtime: it happened"
    assert traceback[0] == "Traceback (most recent call last):"
    assert traceback[-1] == "ValueError: wrong"


def test_json_is_one_object_a_line_for_machines() -> None:
    line = JsonFormatter().format(record("a\nb", text="said %s", tenant="acme"))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.500Z",
        "level": "info",
        "logger": "greenlane.runtime",
        "message": "said a\nb",
        "tenant": "acme",
    }


def test_json_takes_extras_of_any_kind() -> None:
    assert json.loads(JsonFormatter().format(record(request_id=1 + 2j)))["request_id"] == "(1+2j)"


def test_json_holds_the_traceback_on_the_same_line() -> None:
    line = JsonFormatter().format(raised())
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: wrong")


@pytest.mark.parametrize(("name", "shown"), [("greenlane.infer", "greenlane.infer"), ("uvicorn.error", "uvicorn")])
def test_what_is_logged_goes_to_standard_error_once(name: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure("text", "info")
    configure("text", "info")
    logging.getLogger(name).info("hello")
    logged = capsys.readouterr().err
    assert logged.count("hello") == 1
    assert logged.endswith(f"INFO    {shown}: hello\n")


def test_what_goes_well_is_not_called_an_error_to_machines_either(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json", "info")
    logging.getLogger("uvicorn.error").info("hello")
    assert json.loads(capsys.readouterr().err)["logger"] == "uvicorn"


def test_json_is_logged_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json", "info")
    logging.getLogger("greenlane").error("hello", extra={"tenant": "acme"})
    logged = json.loads(capsys.readouterr().err)
    assert (logged["message"], logged["level"], logged["tenant"]) == ("hello", "error", "acme")


def test_what_is_below_the_level_is_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    configure("text", "warning")
    logging.getLogger("greenlane.infer").info("quiet")
    logging.getLogger("greenlane.infer").warning("loud")
    assert capsys.readouterr().err.splitlines()[0].endswith("WARNING greenlane.infer: loud")


@pytest.mark.parametrize("library", ["asyncio", "opentelemetry.sdk"])
def test_what_libraries_log_by_themselves_has_the_same_form_and_limit(
    library: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of spans whose receiver is away: lines of their own form are no JSON, and there may be thousands."""
    monkeypatch.setattr(logging, "lastResort", logging.lastResort)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    configure("json", "info")
    for number in range(1000):
        logging.getLogger(library).error("failed: %s", number)
    logging.getLogger(library).info("quiet")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (lines[0]["logger"], lines[0]["level"], lines[0]["message"]) == (library, "error", "failed: 0")
    assert 100 < len(lines) < 500


def test_loggers_of_others_are_left_alone() -> None:
    before = logging.getLogger().handlers[:], logging.getLogger().level
    configure("text", "debug")
    assert (logging.getLogger().handlers[:], logging.getLogger().level) == before


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("evil\n10:00:00 INFO    greenlane.control: forged", "evil\n  10:00:00 INFO    greenlane.control: forged"),
        ("\x1b[2Jred\r\x00\x9b\x85", r"\x1b[2Jred\r\x00\x9b\x85"),
        ("\u202egnp.exe\u2028", r"\u202egnp.exe\u2028"),
        ("naïve ✓\ttab", "naïve ✓\ttab"),
    ],
    ids=["line", "controls", "direction", "harmless"],
)
def test_a_text_from_outside_looks_like_no_other_line(name: str, shown: str) -> None:
    assert TextFormatter().format(record(name, text="copied: %s")) == f"{clock()} INFO    greenlane.runtime: copied: {shown}"
    assert TextFormatter().format(record(tenant=name)).endswith(f"it happened (tenant={shown})")
    assert json.loads(JsonFormatter().format(record(name, text="copied: %s")))["message"] == f"copied: {name}"
