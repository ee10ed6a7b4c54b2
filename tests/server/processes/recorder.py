"""The test at the other end of a channel, in place of one of our processes."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from inspect import isawaitable
from typing import Any

from server.processes.channels.calls import serve
from server.processes.channels.rpc import Handler, Handlers


class Recorder:
    """Keeps calls of these Protocols as tuples of the method's name and its arguments, and answers them as `answers` says.

    An answer that is an exception is raised, and one that is a coroutine awaited. While `gates` has an event of a method's
    name, that is answered once the event is set.
    """

    def __init__(self, *protocols: Any, answers: Mapping[str, Any], gates: Mapping[str, asyncio.Event] | None = None) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.answers = dict(answers)
        self.gates = dict(gates or {})
        self._protocols = protocols

    def __repr__(self) -> str:
        return f"<Recorder {self.names()}>"

    def handlers(self) -> Handlers:
        served = {name: handler for each in self._protocols for name, handler in serve(each)(lambda: None).items()}
        return {name: each._replace(run=partial(self._run(each), name.split(".")[1])) for name, each in served.items()}

    def names(self) -> list[str]:
        return [name for name, *_ in self.heard]

    def of(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of the calls of this method."""
        return [tuple(arguments) for called, *arguments in self.heard if called == name]

    async def hears(self, name: str, *arguments: Any) -> None:
        """Wait until this method is called, with these arguments if there are any."""
        while name not in self.names() or (arguments and (name, *arguments) not in self.heard):
            await asyncio.sleep(0)

    def hear(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Keep a call; returns its answer."""
        self.heard.append((name, *arguments))
        return self._answer_later(name) if name in self.gates else self._answer(name)

    def _run(self, handler: Handler) -> Callable[..., Any]:
        async def call(name: str, *arguments: Any) -> Any:
            found = self.hear(name, arguments)
            return await found if isawaitable(found) else found

        return call if handler.awaited else lambda name, *arguments: self.hear(name, arguments)

    async def _answer_later(self, name: str) -> Any:
        await self.gates[name].wait()
        return self._answer(name)

    def _answer(self, name: str) -> Any:
        answer = self.answers.get(name)
        if isinstance(answer, Exception):
            raise answer
        return answer
