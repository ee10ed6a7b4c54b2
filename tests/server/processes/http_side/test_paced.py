import asyncio
from typing import Any

from server.http.connection_limits import REFUSAL_RATE, Refusals
from server.processes.http_side.connection_handoff import MAX_WAITING, Paced


class Site:
    """A paced application that answers with the status in the path, and what it has sent."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        refusals = Refusals(lambda: 1000.0)
        for _ in range(REFUSAL_RATE):
            refusals.wait()
        self.paced = Paced(self._answer, refusals)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": scope["status"], "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def _receive(self) -> Any:
        raise AssertionError("it asks for no body")

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.sent.append(message["status"])

    def ask(self, status: int) -> "asyncio.Task[None]":
        """Begin to answer."""
        return asyncio.ensure_future(self.paced({"status": status}, self._receive, self._send))


async def test_of_an_applications_answers_only_401_waits() -> None:
    site = Site()
    refused, served = site.ask(401), site.ask(200)
    await asyncio.gather(refused, served)
    assert site.sent == [200, 401]


async def test_answers_beyond_those_that_may_wait_go_at_once_and_a_client_that_left_counts_no_more() -> None:
    site = Site()
    waiting = [site.ask(401) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    assert (site.sent, repr(site.paced)) == ([], f"<Paced, {MAX_WAITING} answers wait>")
    await site.ask(401)
    assert site.sent == [401]
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert repr(site.paced) == "<Paced, 0 answers wait>"
