"""What a tenant needed, as the admin API shows it."""

from ..observing.need import Need
from ..protocol.json_document import Object


def shown_need(need: Need) -> Object:
    """As `schemas.Measured`."""
    return {
        "seconds": round(need.seconds, 1),
        "requests": need.requests,
        "busy": round(need.busy, 3),
        "queue_ms": milliseconds(need.queue),
        "p99_ms": None if need.p99 is None else milliseconds(need.p99),
        "turned_away": need.turned_away,
    }


def milliseconds(seconds: float) -> float:
    """The same time in milliseconds, to the microsecond."""
    return round(1e3 * seconds, 3)
