"""What a device process does before it opens its device, and when the other end of a link is replaced."""

import os
import select
from contextlib import closing

import pytest

from partitions import DeviceUnavailable
from partitions.deposit import open_deposit
from server.config.schema import DeviceConfig
from server.link import ring
from server.processes.device_side.device_process import LinkedFrontend, as_client, enter
from server.tenants.frontend import HttpSide
from tests.fakes import FakeDevice
from tests.memory import MEMORY
from tests.server.link.test_listener import SLOTS, fill


class Shared(FakeDevice):
    shared = True


def test_a_process_that_has_not_become_a_client_serves_nothing() -> None:
    device, alone = Shared(), FakeDevice()
    assert as_client(lambda _: device)(DeviceConfig()) is device
    with pytest.raises(DeviceUnavailable, match=r"^this process is no client of the MPS daemon that was started for it"):
        as_client(lambda _: alone)(DeviceConfig())
    assert (device.closed, alone.closed) == (False, True)


def test_a_client_s_device_gets_the_deposit_that_it_has_with_others() -> None:
    device = Shared()
    assert as_client(lambda _: device)(DeviceConfig()) is device
    assert device.deposit is None
    with closing(open_deposit()) as deposit:
        copies = tuple(map(os.dup, deposit.descriptors))
        as_client(lambda _: device, copies)(DeviceConfig())
    assert device.deposit
    assert device.deposit.descriptors == copies
    device.deposit.close()


def test_nothing_of_an_operator_s_mps_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/theirs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    enter({"CUDA_MPS_PIPE_DIRECTORY": "/ours", "CUDA_VISIBLE_DEVICES": "GPU-5ea1"})
    found = {name: value for name, value in os.environ.items() if name.startswith("CUDA_")}
    assert found == {"CUDA_MPS_PIPE_DIRECTORY": "/ours", "CUDA_VISIBLE_DEVICES": "GPU-5ea1"}
    enter({})
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def test_a_worker_that_waits_to_write_into_the_old_link_goes_on_once_that_is_replaced() -> None:
    """The process that has ended had filled the descriptor."""
    first = ring.create(SLOTS, MEMORY)
    frontend = LinkedFrontend(first, HttpSide())
    fill(first.completions)
    old = frontend.use(second := ring.renew(first))
    assert old == first
    looked = select.poll()
    looked.register(first.completions, select.POLLOUT)
    writable = looked.poll(0)
    for descriptors in (first, second):
        descriptors.close()
    assert writable
