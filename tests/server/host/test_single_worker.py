"""A second worker, in processes as uvicorn's supervisor starts them."""

import errno
import multiprocessing
import os
import socket
from multiprocessing.connection import Connection

import pytest

from server.host.single_worker import AnotherWorker, alone, supervisor

SPAWN = multiprocessing.get_context("spawn")


def worker(pipe: Connection) -> None:
    """Say whether this process is the only worker of its parent, and stay until told."""
    try:
        with alone(supervisor()):
            pipe.send("alone")
            pipe.recv()
    except AnotherWorker as error:
        pipe.send(str(error))


def start() -> tuple[multiprocessing.process.BaseProcess, Connection]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=worker, args=(theirs,))
    process.start()
    return process, ours


def test_the_second_worker_of_a_supervisor_is_told_and_its_successor_is_not() -> None:
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


def test_a_process_that_nobody_started_as_a_worker_has_no_supervisor() -> None:
    assert supervisor() is None
    with alone(None), alone(None):
        pass


def test_workers_of_different_supervisors_are_no_matter_to_each_other() -> None:
    with alone(os.getpid()), alone(-1), pytest.raises(AnotherWorker), alone(-1):
        raise NotImplementedError
    with alone(-1):
        pass


def test_any_other_failure_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: str) -> None:
        raise OSError(errno.EACCES, address)

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(PermissionError), alone(1):
        raise NotImplementedError
