"""Calls between processes, as a Protocol declares them: `proxy` has its methods at one end of a channel, `serve` at the other.

Each method is a message of its name and its arguments. What arrives is checked by the method's annotations, bounds included;
so are results. Methods with `async` are calls, all others are notifications. A process may call what it is served, no more.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, TypeVar, get_type_hints

import msgspec

from .rpc import Message

_P = TypeVar("_P")
Handlers = dict[type[Message], Callable[[Any], Any]]


class Caller(Protocol):
    """What carries calls: a `Channel`, or an object that finds the channel of the process that serves now."""

    def notify(self, message: Message) -> None: ...
    def call(self, message: Message, result: Any) -> Any: ...


def send(call: Awaitable[Any]) -> None:
    """Let a call go on whose answer nothing waits for; what goes wrong is in the other process's log."""
    asyncio.ensure_future(call).add_done_callback(lambda answer: answer.cancelled() or answer.exception())


class _Method(NamedTuple):
    """`message` is the class of its messages, `result` the type of its result, and `awaited` says whether it is a call."""

    message: Any
    signature: inspect.Signature
    result: Any
    awaited: bool


class _Proxy:
    """Has the methods of a Protocol."""


def proxy(protocol: Callable[..., _P], caller: Caller) -> _P:
    """The methods of this Protocol in another process. Errors that they raise there are raised here, see `remote_errors`.

    A call over a channel is sent at once, and not when it is awaited.
    """
    found: Any = _Proxy()
    for name, method in _methods(protocol).items():
        setattr(found, name, partial(_send, method, caller))
    return found  # type: ignore[no-any-return]


def serve(protocol: Callable[..., _P]) -> Callable[[Callable[[], _P]], Handlers]:
    """Give this the function that returns the implementation: it returns a channel's handlers for calls of the Protocol.

    The function is called for each call. The Protocol has no methods with keyword-only arguments.
    """
    methods = _methods(protocol)
    return lambda implementation: {each.message: partial(_receive, name, implementation) for name, each in methods.items()}


def _send(method: _Method, caller: Caller, *given: Any, **named: Any) -> Any:
    arguments = method.signature.bind(None, *given, **named)
    arguments.apply_defaults()
    message = method.message(*arguments.args[1:])
    return caller.call(message, method.result) if method.awaited else caller.notify(message)


def _receive(name: str, implementation: Callable[[], Any], message: Message) -> Any:
    return getattr(implementation(), name)(*msgspec.structs.astuple(message))


@cache
def _methods(protocol: Any) -> dict[str, _Method]:
    functions = inspect.getmembers(protocol, inspect.isfunction)
    return {name: _method(each) for name, each in functions if not name.startswith("_")}


def _method(function: Any) -> _Method:
    signature, hints = inspect.signature(function), get_type_hints(function, include_extras=True)
    fields = [(each, hints[each]) for each in list(signature.parameters)[1:]]
    name = function.__qualname__  # With the Protocol that declares it.
    message = msgspec.defstruct(name, fields, bases=(Message,), tag=name)
    return _Method(message, signature, hints["return"], inspect.iscoroutinefunction(function))
