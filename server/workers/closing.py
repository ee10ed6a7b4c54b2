"""Closes what is not used any more, where a failure cannot be undone: after a move or an unload, and at the end."""

import logging
from collections.abc import Iterable

from engines import EngineError
from partitions import PartitionError
from partitions.base import Closing

log = logging.getLogger("greenlane.worker")


def close_all(things: Iterable[Closing]) -> None:
    """Close each, in order, even if others fail. Blocks.

    Failures are logged: what cannot be closed, as on a lost device, is not used again either.
    """
    for thing in things:
        try:
            thing.close()
        except (EngineError, PartitionError) as error:
            log.warning("closing %r: %s", thing, error)
