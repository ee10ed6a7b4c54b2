"""Log records as text or as JSON, with the tenant and the request id if there are any, and the number of similar records that
were left out before.
"""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

from .log_writer import LineFile, RateLimit, Writer

_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069]")
"""Control characters, and those that change the direction of a text; ends of lines and tabs are none of them."""
_EXTRAS = ("tenant", "request_id", "left_out", "left_out_of")


class TextFormatter(logging.Formatter):
    """`2026-11-26T12:34:56.789Z INFO    greenlane.runtime: text (tenant=acme)`.

    What clients, files and libraries put into a text looks like no other line and controls no terminal: further lines of it are
    indented, and control characters are written as numbers.
    """

    def format(self, record: logging.LogRecord) -> str:
        extras = ", ".join(f"{name}={value}" for name, value in _extras(record).items())
        begin = f"{_time(record)} {record.levelname:<7} {_name(record)}"
        line = f"{begin}: {_shown(record.getMessage())}{extras and f' ({_shown(extras)})'}"
        return f"{line}\n{_visible(self.formatException(record.exc_info))}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object a line: time (RFC 3339, UTC), level, logger, message, and the fields that a record has besides."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {"time": _time(record), "level": record.levelname.lower(), "logger": _name(record)}
        fields |= {"message": record.getMessage(), **_extras(record)}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def configure(style: str, level: str, audit: Path | None = None) -> None:
    """Send records of Greenlane and uvicorn of at least this level to standard error, as `text` or `json`, and what libraries
    log that have no handler.

    The audit's go to this file as JSON, which may be moved away at any time; beside the others if its name is `-`.

    Some of the records that come too often are left out. Logging never waits for the reader of standard error.
    """
    handler = Writer(sys.stderr)
    handler.addFilter(RateLimit())
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    for name in ("greenlane", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False
    logging.lastResort = handler
    _configure_audit(audit, handler)


def _configure_audit(path: Path | None, others: logging.Handler) -> None:
    logger = logging.getLogger("greenlane.audit")
    logger.propagate = False
    logger.setLevel(logging.CRITICAL if path is None else logging.INFO)
    if path is None or path.name == "-":
        logger.handlers = [others]
        return
    file = LineFile(path)
    file.addFilter(RateLimit())
    file.setFormatter(JsonFormatter())
    logger.handlers = [file]


def _shown(text: str) -> str:
    return _visible(text).replace("\n", "\n  ") if not text.isprintable() else text


def _visible(text: str) -> str:
    """The text with its control characters, but for ends of lines and tabs, as `\\x1b`."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def set_level(level: str) -> None:
    """Log records of this level, `debug` to `error`, and of all that are more severe, from now on."""
    for name in ("greenlane", "uvicorn"):
        logging.getLogger(name).setLevel(level.upper())


def level() -> str:
    """The level of this process."""
    return logging.getLevelName(logging.getLogger("greenlane").level).lower()


def _time(record: logging.LogRecord) -> str:
    """RFC 3339, in UTC, to the millisecond."""
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _name(record: logging.LogRecord) -> str:
    """The logger's name; uvicorn's, `uvicorn.error`, looks like an error in lines that report none."""
    return "uvicorn" if record.name == "uvicorn.error" else record.name


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {**getattr(record, "audit", {}), **{name: getattr(record, name) for name in _EXTRAS if hasattr(record, name)}}
