"""A tenant's helpers, given up before they have started."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from server.config.schema import Config, ModelsConfig
from server.config.tenant import TenantConfig
from server.processes.channels import descriptors
from server.processes.remote.remote_frontend import open_remote
from server.processes.supervision.helper_processes import HelperProcesses
from server.processes.supervision.restarts import Restarts
from server.processes.supervision.supervised import Current, SupervisedProcess
from server.processes.supervision.supervised_dispatcher import SupervisedDispatcher


class Failing(Restarts):
    """Says when an attempt has failed."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.failed.set()
        await super().sleep(seconds or 0.001)


async def unused(*_: Any) -> None:
    """The lead takes no helper, so none is started."""


async def test_helpers_whose_start_is_given_up_are_not_started_any_more() -> None:
    tenant = TenantConfig(name="acme", granules=1, models=("*",))
    config = Config(models=ModelsConfig(repository=Path()), tenants={"acme": tenant}, source="test")
    lead, restarts = SupervisedProcess("acme", open_remote(tenant)), Failing()
    lead.descriptors, theirs = descriptors.pair()
    lead.helpers = [SupervisedProcess("acme", None, number=number) for number in (2, 3)]
    dispatcher = SupervisedDispatcher([], {}, Current(config), restarts)
    helpers = HelperProcesses(lead, unused, lambda _: None, dispatcher, restarts)
    before = asyncio.all_tasks()
    starting = asyncio.create_task(helpers.start())
    await restarts.failed.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert asyncio.all_tasks() == before
    lead.descriptors.close()
    theirs.close()
    assert lead.frontend
    lead.frontend.close()
