"""The order in which a tenant's locks are taken, and those of a tenant that has gone."""

import asyncio

from server.device.tenant_locks import TenantLocks


async def test_changing_is_taken_before_paging() -> None:
    locks = TenantLocks(["acme"])
    entered = asyncio.Event()

    async def enter() -> None:
        async with locks.both("acme"):
            entered.set()

    async with locks.paging["acme"]:
        entering = asyncio.create_task(enter())
        await asyncio.sleep(0)
        assert locks.changing["acme"].locked()
        assert not entered.is_set()
    await entering
    assert entered.is_set()
    assert not locks.held("acme")


async def test_either_lock_counts_as_held() -> None:
    locks = TenantLocks(["acme", "globex"])
    async with locks.changing["acme"]:
        assert (locks.held("acme"), locks.held("globex")) == (True, False)
    async with locks.paging["globex"]:
        assert (locks.held("acme"), locks.held("globex")) == (False, True)


async def test_a_tenant_that_has_gone_has_no_locks_to_wait_for() -> None:
    locks = TenantLocks([])
    locks.add("acme")
    async with locks.both("acme"):
        locks.remove("acme")
        assert not locks.held("acme")
        async with asyncio.timeout(30), locks.both("acme"):
            pass
