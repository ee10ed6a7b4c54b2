"""Loads of a model by several devices: what they publish, and when."""

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from server.errors import BadRequest
from server.processes.remote.agreements import Agreements, Published
from server.tenants.catalog import ModelVersion


class Site:
    """Two devices that load `m`, and what was published of it."""

    def __init__(self) -> None:
        self.published: list[list[str]] = []
        self.agreements = Agreements(self._publish, self._check)
        self.why = ""
        self.checked: list[str] = []
        for device in ("a", "b"):
            self.agreements.begin("m", device)

    async def _publish(self, name: str, published: Mapping[str, Published]) -> bool:
        assert name == "m"
        self.published.append(sorted(published))
        return True

    async def _check(self, name: str, served: Sequence[ModelVersion]) -> str:
        self.checked.append(name)
        return self.why

    def agree(self, device: str, name: str = "m") -> "asyncio.Task[str]":
        return asyncio.create_task(self.agreements.agree(name, device, []))

    async def publish(self, device: str) -> bool:
        """A device that has agreed publishes it, and its load ends."""
        settled = self.agreements.published("m", device, ([], []))
        assert settled is not None
        found = await settled
        self.agreements.end("m", device, None)
        return found


@pytest.fixture
async def site() -> Site:
    return Site()


async def test_all_publish_at_once_when_all_have_loaded_it(site: Site) -> None:
    first = site.agree("a")
    await asyncio.sleep(0)
    assert not first.done()
    assert await site.agree("b") == await first == ""
    one = asyncio.create_task(site.publish("b"))
    await asyncio.sleep(0)
    assert site.published == []
    assert await asyncio.gather(one, site.publish("a")) == [True, True]
    assert site.published == [["a", "b"]]
    assert repr(site.agreements) == "<Agreements on nothing>"


async def test_one_that_cannot_load_it_refuses_it_for_all(site: Site) -> None:
    first = site.agree("a")
    await asyncio.sleep(0)
    site.agreements.end("m", "b", BadRequest("failed to load 'm': no memory"))
    assert await first == "device b: failed to load 'm': no memory"
    assert site.agreements.published("m", "a", ([], [])) is None, "that it is not served there is published at once"
    site.agreements.end("m", "a", BadRequest("failed to load 'm'"))
    site.agreements.begin("m", "a")
    assert await site.agree("a") == "", "the next load begins from the beginning"


async def test_one_that_cannot_load_it_refuses_it_before_others_have_loaded_it(site: Site) -> None:
    site.agreements.end("m", "b", BadRequest("no file"))
    assert await site.agree("a") == "device b: no file"


async def test_one_that_ends_when_it_has_agreed_leaves_the_others_to_publish(site: Site) -> None:
    assert await asyncio.gather(site.agree("a"), site.agree("b")) == ["", ""]
    one = asyncio.create_task(site.publish("a"))
    await asyncio.sleep(0)
    site.agreements.end("m", "b", BadRequest("its process has ended"))
    assert await one
    assert site.published == [["a"]]


async def test_what_is_not_loaded_on_request_needs_no_agreement(site: Site) -> None:
    assert await site.agree("a", "a step of m") == ""
    assert site.agreements.published("a step of m", "a", ([], [])) is None


async def test_a_load_whose_caller_has_gone_decides_nothing_for_the_others(site: Site) -> None:
    site.agreements.begin("m", "c")
    first = site.agree("a")
    await asyncio.sleep(0)
    site.agreements.end("m", "b", None)
    await asyncio.sleep(0)
    assert not first.done(), "c has not loaded it yet"
    assert await site.agree("c") == await first == ""


async def test_what_all_have_loaded_is_checked_once_and_refused_for_all(site: Site) -> None:
    site.why = "m/1/model.py, line 1: NameError"
    first = site.agree("a")
    await asyncio.sleep(0)
    assert site.checked == []
    assert await site.agree("b") == await first == site.why
    for device in ("a", "b"):
        assert site.agreements.published("m", device, ([], [])) is None
        site.agreements.end("m", device, BadRequest(site.why))
    assert (site.checked, site.published) == (["m"], [])
    assert repr(site.agreements) == "<Agreements on nothing>"


async def test_what_is_not_loaded_on_request_is_checked_too(site: Site) -> None:
    site.why = "n/1/model.py, line 1: NameError"
    assert await site.agree("a", "n") == site.why
