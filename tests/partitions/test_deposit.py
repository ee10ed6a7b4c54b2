"""A descriptor that one process leaves for others."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from partitions.deposit import Deposit, deposit_of, open_deposit


@pytest.fixture
def deposit() -> Iterator[Deposit]:
    with closing(open_deposit()) as deposit:
        yield deposit


def left(deposit: Deposit, folder: Path, label: str) -> str:
    """The label under which is found what was left first, once a file with this label is left as well."""
    with (folder / label).open("w+") as file:
        file.write(label)
        file.flush()
        return read(deposit.leave(label, file.fileno()))


def read(found: tuple[str, int] | None) -> str:
    """The label; that of the file as well."""
    assert found
    label, descriptor = found
    with os.fdopen(descriptor) as file:
        file.seek(0)
        assert file.read() == label
        assert not os.get_inheritable(descriptor)
    return label


def test_an_empty_one_has_nothing(deposit: Deposit) -> None:
    assert deposit.look() is None


def test_all_find_what_was_left_first_as_often_as_they_look(deposit: Deposit, tmp_path: Path) -> None:
    assert [left(deposit, tmp_path, label) for label in ("one", "other")] == ["one", "one"]
    with closing(deposit_of([os.dup(each) for each in deposit.descriptors])) as copy:
        assert [read(each.look()) for each in (deposit, copy, deposit)] == ["one"] * 3


def test_one_that_is_full_of_what_others_left_gives_the_first(deposit: Deposit, tmp_path: Path) -> None:
    assert {left(deposit, tmp_path, f"{number}") for number in range(2000)} == {"0"}


def test_what_a_process_left_that_was_killed_is_there(deposit: Deposit, tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from partitions.deposit import deposit_of\n"
        "file = open(sys.argv[1], 'w+'); file.write('theirs'); file.flush()\n"
        "deposit_of([int(each) for each in sys.argv[2:]]).leave('theirs', file.fileno())\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "file"), *map(str, deposit.descriptors)]
    subprocess.run(command, pass_fds=deposit.descriptors, check=False)
    (tmp_path / "file").unlink()
    assert read(deposit.look()) == "theirs"


def test_a_descriptor_that_did_not_come_is_an_error(deposit: Deposit) -> None:
    sender = socket.socket(fileno=os.dup(deposit.descriptors[0]))
    with sender:
        sender.send(b"nothing")
    with pytest.raises(OSError, match="without its descriptor"):
        deposit.look()
