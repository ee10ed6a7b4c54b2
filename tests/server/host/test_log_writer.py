"""Floods of log records, and readers that do not read."""

import fcntl
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import pytest

from server.host.log_writer import AT_ONCE, MAX_KINDS, MAX_TEXT, RateLimit, Writer, write
from tests.passing_time import Clock

SMALL = 4096
"""Bytes of a pipe that is soon full."""


def record(text: str = "bad %s", name: str = "uvicorn.error", **extras: Any) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.WARNING, "file.py", 1, text, ("x",) if "%" in text else (), None)
    made.__dict__.update(extras)
    return made


def test_a_flood_is_written_up_to_a_burst_and_then_once_a_second_with_a_count() -> None:
    clock = Clock()
    limit = RateLimit(clock)
    assert sum(limit.filter(record()) for _ in range(AT_ONCE + 100)) == AT_ONCE
    clock.now += 1
    first, second = record(), record()
    assert limit.filter(first)
    assert first.__dict__["left_out"] == 100
    assert not limit.filter(second)
    clock.now += 5
    after = [record() for _ in range(6)]
    assert [limit.filter(each) for each in after] == [True] * 5 + [False]
    assert [getattr(each, "left_out", 0) for each in after] == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    "other", [record("worse %s"), record(name="greenlane"), record(tenant="globex")], ids=["text", "logger", "tenant"]
)
def test_a_flood_of_one_kind_leaves_out_no_other(other: logging.LogRecord) -> None:
    limit = RateLimit(Clock())
    for _ in range(AT_ONCE + 1):
        limit.filter(record(tenant="acme"))
    assert not limit.filter(record(tenant="acme"))
    assert limit.filter(other)


def test_the_number_of_remembered_kinds_is_bounded() -> None:
    limit = RateLimit(Clock())
    for _ in range(AT_ONCE + 1):
        limit.filter(record())
    for number in range(MAX_KINDS):
        assert limit.filter(record(f"kind {number}"))
    assert limit.filter(record()), "the oldest was forgotten"


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """The descriptor to read from, and a stream that goes there and is soon full."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, SMALL)
    with os.fdopen(writer, "w") as stream:
        yield reader, stream
    os.close(reader)


def say(writer: Writer, text: str) -> None:
    writer.handle(logging.LogRecord("greenlane", logging.INFO, "file.py", 1, text, (), None))


def test_lines_are_dropped_and_counted_while_the_reader_does_not_read(
    pipe: tuple[int, TextIO],
) -> None:
    reader, stream = pipe
    writer = Writer(stream)
    sent = [f"{number:4} {'x' * 94}" for number in range(100)]
    for line in sent:
        say(writer, line)
    received = os.read(reader, 2 * SMALL).decode()
    say(writer, "after")
    received += os.read(reader, 2 * SMALL).decode()
    *lines, count, last = received.splitlines()
    assert lines == sent[: len(lines)]
    assert 0 < len(lines) < len(sent)
    assert (count, last) == (f"{len(sent) - len(lines)} log lines were dropped because standard error was not read", "after")
    assert os.get_blocking(stream.fileno()), "its mode is others' as well"


def test_a_partly_written_line_is_completed_before_the_next(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    writer = Writer(stream)
    long = "a" * 2 * SMALL
    say(writer, long)
    say(writer, "dropped")
    received = b""
    for _ in range(3):
        received += os.read(reader, 4 * SMALL)
        say(writer, "b")
    received += os.read(reader, 4 * SMALL)
    assert received.decode().splitlines() == [long, "2 log lines were dropped because standard error was not read", "b", "b"]


def test_a_reader_that_is_gone_does_not_raise(pipe: tuple[int, TextIO]) -> None:
    reader, stream = pipe
    (gone, _), (another, theirs) = os.pipe(), os.pipe()
    os.dup2(gone, reader)
    writer = Writer(stream)
    for _ in range(3):
        say(writer, "hello")
    os.dup2(theirs, stream.fileno())
    say(writer, "after")
    assert os.read(another, SMALL) == b"3 log lines were dropped because standard error was not read\nafter\n"


def test_sockets_and_files_are_written_to(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open(tmp_path / "log", "w") as file:
        assert write(ours.fileno(), b"hello") == 5
        assert theirs.recv(10) == b"hello"
        assert write(file.fileno(), b"hello") == 5
        ours.setblocking(False)
        with suppress(BlockingIOError):
            while ours.send(b"x" * 1000):
                pass
        ours.setblocking(True)
        with pytest.raises(BlockingIOError):
            write(ours.fileno(), b"x" * 1000)
    assert (tmp_path / "log").read_text() == "hello"


def test_a_pipe_of_another_user_is_written_to_while_there_is_room(
    pipe: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    reader, stream = pipe
    monkeypatch.setattr("server.host.log_writer.os.open", refuse)
    assert write(stream.fileno(), b"x" * 2 * SMALL) == SMALL
    with pytest.raises(BlockingIOError):
        write(stream.fileno(), b"x")
    assert os.read(reader, 2 * SMALL) == b"x" * SMALL


def test_a_record_without_end_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    say(Writer(sys.stderr), "x" * (MAX_TEXT + 5))
    assert capsys.readouterr().err == f"{'x' * MAX_TEXT}... (5 characters more)\n"
