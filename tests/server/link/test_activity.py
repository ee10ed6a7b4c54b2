"""Pages of a tenant that lends: what each side writes, the other reads, and no other process can write."""

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import pytest

from server.config.tenant import TenantConfig
from server.launch_loop.structures import address
from server.link import activity
from server.link.activity import ENDED, OPEN, Activity, ActivityPage, LenderPage, words_of


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = activity.create(1000)
    yield made
    os.close(made)


def test_a_borrower_sees_what_the_lender_writes(descriptor: int) -> None:
    lender: Activity = activity.attach(descriptor)
    page = LenderPage(descriptor, 3)
    assert not page.rests()
    lender.set_lends(True)
    assert page.rests()
    lender.begin()
    lender.begin()
    assert (page.processes[0][OPEN], page.processes[0][ENDED]) == (2, 0)
    lender.end()
    assert not page.rests()
    assert page.processes[0][ENDED] == 0
    lender.end()
    assert page.rests()
    assert page.processes[0][ENDED] > 0
    lender.set_lends(False)
    assert not page.rests()


def test_a_neighbour_sees_and_cannot_change_what_a_tenant_has_open(descriptor: int) -> None:
    tenant: Activity = activity.attach(descriptor)
    page = ActivityPage(descriptor)
    (words,) = page.processes
    tenant.begin()
    assert words[OPEN] == 1
    assert ctypes.c_uint64.from_address(address(words)).value == 1
    tenant.end()
    assert (words[OPEN], words[ENDED] > 0) == (0, True)
    tenant.begin()
    activity.reset(descriptor)  # Its process has ended.
    assert (words[OPEN], words[ENDED]) == (0, 0)
    with pytest.raises(TypeError, match="read-only"):
        words[OPEN] = 0


def test_the_lender_sees_those_who_may_borrow_from_it(descriptor: int) -> None:
    lender = activity.attach(descriptor)
    pages = [LenderPage(descriptor, number) for number in (0, 999)]
    lender.expect([999])
    pages[0].own[0] = 1
    assert not lender.is_met()
    pages[1].own[0] = 1
    assert lender.is_met()
    LenderPage(descriptor, 999)  # That of a process that replaces another.
    assert not lender.is_met()


def test_the_words_are_at_their_addresses(descriptor: int) -> None:
    lender, page = activity.attach(descriptor), LenderPage(descriptor, 7)
    lender.begin()
    theirs, own = map(ctypes.c_uint64.from_address, map(address, (*page.processes, page.own)))
    own.value = 1
    assert (theirs.value, page.own[0]) == (1, 1)


def test_pages_whose_process_has_ended_are_at_rest_again(descriptor: int) -> None:
    lender, page = activity.attach(descriptor), LenderPage(descriptor, 0)
    lender.begin()
    activity.reset(descriptor)
    assert page.rests()
    activity.attach(descriptor).begin()
    assert page.processes[0][OPEN] == 1


def test_a_lender_with_several_processes_rests_when_all_do() -> None:
    descriptor = activity.create(2, processes=3)
    lenders = [activity.attach(descriptor, number) for number in (1, 2, 3)]
    page = LenderPage(descriptor, 1)
    for lender in lenders:
        assert not page.rests()
        lender.set_lends(True)
    assert page.rests()
    assert len(set(map(address, words_of([page])))) == 3
    lenders[2].begin()
    lenders[0].begin()
    lenders[0].end()
    assert not page.rests()
    activity.reset(descriptor, 3)
    assert page.rests()
    os.close(descriptor)


@pytest.mark.parametrize(
    ("keys", "with_pages"),
    [
        ({"acme": {}, "globex": {"lend": 0.001}}, ["acme"]),
        ({"acme": {"burst": 4}, "globex": {"lend": 0.001}, "initech": {}}, ["acme", "globex"]),
        ({"acme": {}, "globex": {}, "initech": {"burst": 4}}, ["acme"]),
        ({"acme": {"pcie": 0.4}, "globex": {}, "initech": {}}, ["acme"]),
        ({"acme": {}, "globex": {"pcie": 0.4}, "initech": {}}, ["acme", "globex", "initech"]),
    ],
)
def test_there_are_pages_of_those_that_others_may_look_at(keys: dict[str, dict[str, Any]], with_pages: list[str]) -> None:
    tenants = {name: TenantConfig(name=name, granules=1, models=("*",), **each) for name, each in keys.items()}
    pages = activity.open_pages(tenants, {"globex": 3}, on_cores=("globex", "initech"))
    assert [*pages] == with_pages
    for name, page in pages.items():
        assert len(LenderPage(page, 0).processes) == (3 if name == "globex" else 1)
        os.close(page)
