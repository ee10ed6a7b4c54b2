"""The port of tenant `acme` for a test."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from greenlane.load.server_process import free_port
from server.link import ring as links
from server.tenants.service import slots

from .bench import Bench, configuration


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    config = configuration(free_port())
    descriptors = links.create(slots(config.tenants["acme"]), config.tenants["acme"].memory)
    bench = Bench(config, descriptors)
    bench.tenant.lane.open(asyncio.get_running_loop())
    await bench.server.start()
    yield bench
    await bench.client.close()
    await bench.server.stop()
    bench.tenant.lane.close(asyncio.get_running_loop())
    descriptors.close()
