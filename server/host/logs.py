"""Log records as text for people or as JSON for machines, with the tenant and the request where there are any, and with how
many like it were left out before.
"""

import json
import logging
import sys
import time

from .log_writer import Limit, Writer

_EXTRAS = ("tenant", "request_id", "left_out")


class TextFormatter(logging.Formatter):
    """`12:34:56 INFO  greenlane.runtime: text (tenant=acme)`."""

    def format(self, record: logging.LogRecord) -> str:
        extras = ", ".join(f"{name}={value}" for name, value in _extras(record).items())
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} {record.levelname:<7} {_name(record)}: {record.getMessage()}{extras and f' ({extras})'}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object a line: time (seconds since 1970), level, logger, message, and what else is known."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {"time": record.created, "level": record.levelname.lower(), "logger": _name(record)}
        fields |= {"message": record.getMessage(), **_extras(record)}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def configure(style: str, level: str) -> None:
    """Send Greenlane's records and uvicorn's to standard error, as `text` or `json`, from this level on.

    Of records that come too often some are left out, and none is waited for.
    """
    handler = Writer(sys.stderr)
    handler.addFilter(Limit())
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    for name in ("greenlane", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


def _name(record: logging.LogRecord) -> str:
    """uvicorn calls its only logger `uvicorn.error`, which looks like trouble in a line that tells of none."""
    return "uvicorn" if record.name == "uvicorn.error" else record.name


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {name: getattr(record, name) for name in _EXTRAS if hasattr(record, name)}
