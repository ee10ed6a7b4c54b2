"""A second worker, in processes as uvicorn's supervisor starts them."""

import errno
import multiprocessing
import os
import socket
from multiprocessing.connection import Connection

import pytest

from server.single_process import AnotherWorker, only_worker, worker_parent

SPAWN = multiprocessing.get_context("spawn")


def worker(pipe: Connection) -> None:
    """Say whether this process is the only worker of its parent, and stay until a message arrives."""
    try:
        with only_worker(worker_parent()):
            pipe.send("alone")
            pipe.recv()
    except AnotherWorker as error:
        pipe.send(str(error))


def start() -> tuple[multiprocessing.process.BaseProcess, Connection]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=worker, args=(theirs,))
    process.start()
    return process, ours


def test_the_second_worker_is_refused_and_a_later_one_is_not() -> None:
    first, held = start()
    assert held.recv() == "alone"
    second, refused = start()
    assert "start one: without --workers" in refused.recv()
    second.join()
    first.kill()
    first.join()
    third, freed = start()
    assert freed.recv() == "alone"
    freed.send("go")
    third.join()
    assert [first.exitcode, second.exitcode, third.exitcode] == [-9, 0, 0]


def test_a_process_that_is_no_worker_has_no_parent() -> None:
    assert worker_parent() is None
    with only_worker(None), only_worker(None):
        pass


def test_workers_of_different_parents_do_not_conflict() -> None:
    with only_worker(os.getpid()), only_worker(-1), pytest.raises(AnotherWorker), only_worker(-1):
        raise NotImplementedError
    with only_worker(-1):
        pass


def test_any_other_failure_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: str) -> None:
        raise OSError(errno.EACCES, address)

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(PermissionError), only_worker(1):
        raise NotImplementedError
