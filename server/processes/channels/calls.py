"""Calls between processes, as a Protocol declares them: `proxy` has its methods at one end of a channel, `serve` at the other.

What arrives of a method's arguments is checked by its annotations, bounds included; so are results. Methods with `async` are
calls, all others are notifications. A process may call what it is served, no more.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from types import GenericAlias, SimpleNamespace
from typing import Any, NamedTuple, Protocol, TypeVar, get_type_hints

from msgspec.msgpack import Decoder

from .message_fields import decode_hook
from .rpc import Handler, Handlers

_P = TypeVar("_P")


class Caller(Protocol):
    """What carries calls: a `Channel`, or an object that finds the channel of the process that serves now."""

    def notify(self, method: str, arguments: Sequence[Any]) -> None: ...
    def call(self, method: str, arguments: Sequence[Any], result: Any) -> Any: ...


def send(call: Awaitable[Any]) -> None:
    """Let a call go on whose answer nothing waits for; what goes wrong is in the other process's log."""
    asyncio.ensure_future(call).add_done_callback(lambda answer: answer.cancelled() or answer.exception())


class _Method(NamedTuple):
    """`name` has the Protocol that declares it, `arguments` decodes them, and `awaited` says whether it is a call."""

    name: str
    signature: inspect.Signature
    arguments: "Decoder[tuple[Any, ...]]"
    result: Any
    awaited: bool


def proxy(protocol: Callable[..., _P], caller: Caller, *of: str) -> _P:
    """The methods of this Protocol in another process. Errors that they raise there are raised here, as `rpc` says.

    A call over a channel is sent at once, and not when it is awaited. `of` are names of what serves it there, if that is one of
    several, such as tenants.
    """
    found: Any = SimpleNamespace(**{name: partial(_send, method, caller, of) for name, method in _methods(protocol).items()})
    return found  # type: ignore[no-any-return]


def serve(protocol: Callable[..., _P], names: int = 0) -> Callable[[Callable[..., _P]], Handlers]:
    """Give this the function that returns the implementation: it returns a channel's handlers for calls of the Protocol.

    The function is called for each call, with so many `names`. The Protocol has no methods with keyword-only arguments.
    """
    methods = _methods(protocol, names).items()
    return lambda implementation: {
        each.name: Handler(each.arguments, each.awaited, partial(_run, name, implementation, names)) for name, each in methods
    }


def _send(method: _Method, caller: Caller, of: tuple[str, ...], *given: Any, **named: Any) -> Any:
    bound = method.signature.bind(None, *given, **named)
    bound.apply_defaults()
    arguments = (*of, *bound.args[1:])
    return caller.call(method.name, arguments, method.result) if method.awaited else caller.notify(method.name, arguments)


def _run(name: str, implementation: Callable[..., Any], names: int, *arguments: Any) -> Any:
    return getattr(implementation(*arguments[:names]), name)(*arguments[names:])


@cache
def _methods(protocol: Any, names: int = 0) -> dict[str, _Method]:
    functions = inspect.getmembers(protocol, inspect.isfunction)
    return {name: _method(each, names) for name, each in functions if not name.startswith("_")}


def _method(function: Any, names: int) -> _Method:
    signature, hints = inspect.signature(function), get_type_hints(function, include_extras=True)
    types = GenericAlias(tuple, (str,) * names + tuple(hints[each] for each in list(signature.parameters)[1:]))
    arguments: Decoder[tuple[Any, ...]] = Decoder(types, dec_hook=decode_hook)
    return _Method(function.__qualname__, signature, arguments, hints["return"], inspect.iscoroutinefunction(function))
