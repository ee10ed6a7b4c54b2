"""What a tenant's HTTP process writes into its link is malformed: it is killed and replaced, and others do not notice."""

import os
import struct
from functools import partial
from pathlib import Path

import httpx
import pytest

from server.link import arena

from .fixtures import server_with
from .harness import cores
from .processes import Load, Running, running_module, tenant
from .wire import SMALL, answered, client, infer, until

pytestmark = pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")

HEAD = 44
"""Bytes of a ticket's page before what it says of its model and shapes."""
MALFORMED = "malformed message in the link of tenant acme; replacing its HTTP process"


server = server_with(
    tenant("acme", "identity") + tenant("globex", "identity"), partial(running_module, "tests.end_to_end.stubborn_server")
)


def arena_of(server: Running, http: httpx.Client) -> tuple[str, int]:
    """The file of the arena in which this client's requests are put, and how many slots that has."""
    folder = Path(f"/proc/{server.popen.pid}/fd")
    every = [str(each) for each in folder.iterdir() if os.readlink(each).startswith("/memfd:greenlane (")]
    files = list({os.stat(each).st_ino: each for each in every}.values())
    counts = [next(count for count in range(1, 1 << 20) if arena.nbytes(count) == os.stat(file).st_size) for file in files]
    before = [total(file, count) for file, count in zip(files, counts, strict=True)]
    for _ in range(3):
        assert infer(http, "identity", SMALL).status_code == 200
    found = [each for each, was in zip(zip(files, counts, strict=True), before, strict=True) if total(*each) > was]
    assert len(found) == 1
    return found[0]


def total(file: str, count: int) -> int:
    """How many tickets were put into this arena."""
    with open(file, "rb", buffering=0) as found:
        return int(struct.unpack("=I", os.pread(found.fileno(), 4, 2 * count * 4))[0])


@pytest.mark.parametrize("what", ["a slot that does not exist", "no ticket"])
def test_a_process_that_sends_what_it_may_not_is_replaced_and_others_do_not_notice(server: Running, what: str) -> None:
    """The test writes in its place, again and again, as the process itself writes right messages meanwhile."""
    with client(server, "acme") as acme:
        until(lambda: infer(acme, "identity", SMALL).status_code == 200)
        file, count = arena_of(server, acme)
    with Load(server, "globex") as other:
        before = len(server.log)
        device, process = server.pid("dev 0"), server.pid("acme")
        descriptor = os.open(file, os.O_RDWR)
        pages = os.fstat(descriptor).st_size - count * 2 * arena.MESSAGE
        places = [pages + slot * 2 * arena.MESSAGE + HEAD for slot in range(8)] if what == "no ticket" else [0]
        damage = b"\xff" * 8 if what == "no ticket" else b"\xff" * 4 * count
        try:
            with Load(server, "acme"):
                while not any(MALFORMED in line for line in server.log[before:]):
                    for place in places:
                        os.pwrite(descriptor, damage, place)
        finally:
            os.close(descriptor)
        with client(server, "acme") as again:
            until(lambda: answered(again) == 200)
        other.more()
    assert other.wrong == []
    assert (server.pid("dev 0"), server.pid("acme") != process) == (device, True)
