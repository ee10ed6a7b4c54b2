"""Which versions a tenant is served, in the process that serves it: they come with functions that run, and go when idle."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ..config.tables import dotted
from ..functions.definition import Functions, FunctionsFailed
from ..text.folder import TextFolder, TokenizerFailed
from .catalog import IndexEntry, ModelVersion, ServedModel
from .service import Tenant

if TYPE_CHECKING:
    from .running_functions import RunningFunctions
    from .running_text import RunningText

log = logging.getLogger("greenlane")

FINISH_SECONDS = 30.0
"""How long answers in parts go on after their model was unloaded or replaced."""


async def publish(tenant: Tenant, name: str, versions: list[ModelVersion], problems: list[IndexEntry]) -> None:
    """Serve exactly these versions of a model; return when no request is left for those that they replace.

    An answer in parts goes on for `FINISH_SECONDS` at most: its client decides how long it takes, and the model's next load
    waits for it, and a repartition too. Functions are run before, if `agree` has not; a version whose `model.py` fails is not
    served.
    """
    async with tenant.publishing[name]:  # What came first is not to take the place of what came later.
        before = [item for item in tenant.catalog.served() if item.name == name]
        staged = tenant.staged.pop(name, [])
        try:
            served, problems = await _with_functions(tenant, versions, problems, before, staged)
        finally:
            _close(staged)
        kept = {item.key for item in served}
        left = [item for item in before if item.key not in kept]
        tenant.catalog.put(name, served, problems)
    for key in [item.key for item in left]:
        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_SECONDS):
                await tenant.lane.model_drained(key)
        tenant.lane.end_parts(key, f"model {name!r} was unloaded or replaced while it answered; send the request again")
        await tenant.lane.model_drained(key)
    _close(left)


async def agree(tenant: Tenant, name: str, served: Sequence[ModelVersion]) -> str:
    """Run the functions of versions that are about to be published, all or none: "", or why one of them cannot be run.

    `publish` takes them over; `withdraw` ends them if it is not called.
    """
    opened: list[ServedModel] = []
    try:
        for item in served:
            if item.functions:
                opened.append(ServedModel.of(item, await _functions(tenant, item.functions, item.name)))
    except BaseException as error:
        _close(opened)
        if isinstance(error, FunctionsFailed):
            return str(error)
        raise
    withdraw(tenant, name)
    if opened:
        tenant.staged[name] = opened
    return ""


def withdraw(tenant: Tenant, name: str) -> None:
    """What `agree` has run for this model will not be published. Does nothing if there is nothing."""
    _close(tenant.staged.pop(name, ()))


async def _with_functions(
    tenant: Tenant, served: list[ModelVersion], problems: list[IndexEntry], before: list[ServedModel], staged: list[ServedModel]
) -> tuple[list[ServedModel], list[IndexEntry]]:
    """The versions with their functions running, and the problems of all. What runs already goes on."""
    there = {item.key: item for item in before}
    found, problems = list[ServedModel](), list(problems)
    for item in served:
        try:
            running, text = (old.running, old.text) if (old := there.get(item.key)) else (None, None)
            if item.functions and running is None:
                running = _take(staged, item) or await _functions(tenant, item.functions, item.name)
            if item.folder and text is None:
                text = await _text(tenant, item, item.folder)
            found.append(ServedModel.of(item, running, text))
        except FunctionsFailed as error:
            log.error("model %s %s is unavailable: %s", item.name, item.version, error)
            problems.append(IndexEntry(item.name, item.version, "UNAVAILABLE", str(error)))
    return found, problems


def _take(staged: list[ServedModel], item: ModelVersion) -> "RunningFunctions | None":
    """The functions of a version that run already, which are not `staged` then."""
    for each in staged:
        if (each.version, each.functions) == (item.version, item.functions):
            staged.remove(each)
            return each.running
    return None


async def _functions(tenant: Tenant, functions: Functions, name: str) -> "RunningFunctions":
    """Raises FunctionsFailed."""
    from .running_functions import open_functions

    return await open_functions(functions, name, tenant.config.queue, _setting(tenant), tenant.execution_limit)


async def _text(tenant: Tenant, item: ModelVersion, folder: TextFolder) -> "RunningText | None":
    """The tokenizer of a version; None, with a line in the log, if it cannot be used: the model is served all the same."""
    from .running_text import open_text

    queue, limit = tenant.config.queue, tenant.execution_limit
    try:
        return await open_text(folder, item.name, item.signature, queue, _setting(tenant), limit)
    except TokenizerFailed as error:
        log.warning("model %s %s does not take texts: %s", item.name, item.version, error)
        return None


def _setting(tenant: Tenant) -> str:
    return dotted(("tenants", tenant.name, "queue"))


def _close(staged: Iterable[ServedModel]) -> None:
    """End what runs of them."""
    for running in [each for item in staged for each in (item.running, item.text) if each]:
        running.close()
