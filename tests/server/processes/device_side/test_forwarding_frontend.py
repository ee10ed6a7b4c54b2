"""The device process's view of a tenant's HTTP side."""

import select
from typing import Any

from server.link import ring
from server.processes.device_side.forwarding_frontend import ForwardingFrontend
from tests.memory import MEMORY
from tests.server.link.test_listener import SLOTS, fill


def test_a_worker_that_waits_to_write_into_the_old_link_goes_on_once_that_is_replaced() -> None:
    """The process that has ended had filled the descriptor."""
    no_channel: Any = None
    first = ring.create(SLOTS, MEMORY)
    frontend = ForwardingFrontend("acme", first, no_channel)
    fill(first.completions)
    old = frontend.use(second := ring.renew(first))
    assert old == first
    looked = select.poll()
    looked.register(first.completions, select.POLLOUT)
    writable = looked.poll(0)
    for descriptors in (first, second):
        descriptors.close()
    assert writable
