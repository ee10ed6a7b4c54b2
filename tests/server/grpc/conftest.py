"""The port of tenant `acme` for a test."""

from collections.abc import AsyncIterator
from functools import partial

import pytest

from greenlane.load.server_process import free_port
from tests.lanes import opened_tenant

from .bench import Bench, configuration


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    config = configuration(free_port())
    with opened_tenant(partial(Bench, config), **dict(config.tenants["acme"])) as bench:
        await bench.server.start()
        yield bench
        await bench.client.close()
        await bench.server.stop()
