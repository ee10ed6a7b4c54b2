"""What each tenant can be asked for: its models, a small and a large request for each, and how long one takes alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any
from urllib.parse import quote

from greenlane.load.jobs import Ask
from greenlane.load.wire import Broken, Caller

from .access import Access
from .inputs import Form, Model, binary, described

FORMS = tuple(Form(free=free, number=number) for number in (1, 0) for free in (8, 1, 32, 224))
"""Tried in this order until one is answered with 200."""
LONG = 0.02
"""Seconds of a large request at which it is large enough: four of them in a queue end before the next phase begins."""
LARGEST = 4 << 20
"""Bytes of a large request's body at which it is large enough."""
PATIENCE = 30.0
"""Seconds for which an answer is waited for; and by which a tenant may take longer if none of its models was answered yet."""
TIMES = 5
"""Requests of which the median is the time of one."""
MOST_FREE = 1 << 20


@dataclass(frozen=True, slots=True)
class Timed:
    """A request's form, and the seconds that one takes alone, from the client's socket to the client's socket."""

    form: Form
    seconds: float


@dataclass(frozen=True, slots=True)
class Drivable:
    """A model that can be asked, by a small request and by a large one."""

    model: Model
    small: Timed
    large: Timed


@dataclass(slots=True)
class Surveyed:
    """A tenant: the models that can be driven, and why the others cannot. `size` is its share in units."""

    name: str
    device: str = "0"
    size: int = 0
    drivable: list[Drivable] = field(default_factory=list)
    undriven: dict[str, str] = field(default_factory=dict)

    @property
    def quickest(self) -> Drivable:
        """The model whose small request is the shortest: it feels a delay first, and can be asked most often."""
        return min(self.drivable, key=lambda each: each.small.seconds)

    @property
    def heaviest(self) -> Drivable:
        """The model whose large request is the longest."""
        return max(self.drivable, key=lambda each: each.large.seconds)

    def model(self, name: str) -> Drivable | None:
        """The model of this name, if it can be driven."""
        return next((each for each in self.drivable if each.model.name == name), None)


def survey(
    access: Access, seconds: float, report: Callable[[str], None], longest: Mapping[str, float] | None = None
) -> list[Surveyed]:
    """Every tenant of this server, in the order of its configuration; takes about so many seconds. Blocks.

    `longest` are the most seconds of each tenant's large request; without it about LONG. Raises CannotProve, ServerEnded.
    """
    found = access.administer("GET", "/admin/tenants")["tenants"]
    partitions = access.administer("GET", "/admin/partitions")["partitions"]
    tenants = []
    for each in found:
        name = each["name"]
        share = partitions.get(name, {})
        tenant = Surveyed(name, share.get("device", "0"), share.get("size", 0))
        report(f"asking for the models of {name}")
        _survey_models(tenant, each["models"], access, perf_counter() + seconds / len(found), (longest or {}).get(name))
        tenants.append(tenant)
    return tenants


def _survey_models(
    tenant: Surveyed, index: Sequence[dict[str, Any]], access: Access, end: float, longest: float | None
) -> None:
    """Small requests of every model; then, in the time that is left, larger ones, until one model is heavy enough."""
    ready = {entry["name"] for entry in index if entry["state"] == "READY"}
    with closing(Caller(access.port, PATIENCE)) as caller:
        for name in dict.fromkeys(entry["name"] for entry in index):
            if name not in ready:
                tenant.undriven[name] = "it is not ready"
            elif perf_counter() >= (end if tenant.drivable else end + PATIENCE):
                tenant.undriven[name] = "there was no time left; more --seconds has time for more models"
            elif isinstance(found := _drive(caller, tenant.name, name, access), Drivable):
                tenant.drivable.append(found)
            else:
                tenant.undriven[name] = found
        for each in sorted(tenant.drivable, key=lambda each: -each.small.seconds):
            if perf_counter() >= end or tenant.heaviest.large.seconds >= LONG:
                break
            larger = _large(caller, each.model, each.small, access.headers(tenant.name), end, longest)
            tenant.drivable[tenant.drivable.index(each)] = replace(each, large=larger)


def _drive(caller: Caller, tenant: str, name: str, access: Access) -> Drivable | str:
    """A model by a small request, or why it cannot be driven."""
    path = f"/v2/models/{quote(name, safe='')}"
    (status, metadata), (_, config) = access.of(tenant, path), access.of(tenant, f"{path}/config")
    if status == 401:
        return f'tenant {tenant} has keys: give --keys FILE, TOML with [tenants] and {tenant} = "KEY"'
    if status != 200:
        return f"its metadata is answered with {status}: {metadata.get('error')}"
    model = described(name, metadata, config)
    if why := model.unknown():
        return why
    first = _first(caller, model, access.headers(tenant))
    if isinstance(first, str):
        return first
    try:
        small = Timed(first, timed(caller, [binary(model, first, access.headers(tenant))]))
    except Broken as broken:
        return f"it does not answer: {broken}"
    return Drivable(model, small, small)


def _first(caller: Caller, model: Model, headers: dict[str, str]) -> Form | str:
    """A form that the model accepts; what it says of the first one that was tried if there is none."""
    said = ""
    forms = FORMS if model.varies else [form for form in FORMS if form.free == FORMS[0].free]
    for form in forms:
        try:
            answer = caller.ask(binary(model, form, headers))
        except Broken as broken:
            return f"it does not answer: {broken}"
        if answer.status == 200:
            return form
        said = said or f"it answers {answer.status}: {(answer.body or b'')[:200].decode(errors='replace')}"
    return said


def _large(caller: Caller, model: Model, small: Timed, headers: dict[str, str], end: float, longest: float | None) -> Timed:
    """The small request made larger as long as that is answered, until it takes LONG, or before it takes `longest`."""
    found = small
    for form in _larger(model, small.form):
        if perf_counter() > end or found.seconds >= LONG or model.nbytes(form) > LARGEST:
            break
        try:
            ask = binary(model, form, headers)
            if caller.ask(ask).status != 200:
                break
            larger = Timed(form, timed(caller, [ask], 3 if longest else 2))
            if longest and larger.seconds > longest:
                break
            found = larger
        except Broken:
            break
    return found


def _larger(model: Model, form: Form) -> Iterator[Form]:
    """First larger batches, up to the largest, then larger dimensions."""
    while form.rows < model.max_batch:
        form = replace(form, rows=min(model.max_batch, form.rows * 4))
        yield form
    while model.varies and form.free < MOST_FREE:
        form = replace(form, free=form.free * 2)
        yield form


def timed(caller: Caller, asks: Sequence[Ask], times: int = TIMES) -> float:
    """The median of the seconds that these requests take one after another. Raises Broken."""
    return median(caller.timed(ask)[1] for _ in range(times) for ask in asks)
