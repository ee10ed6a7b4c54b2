"""The answer to an inference that was refused or failed, for any protocol."""

import logging
import uuid

from ..errors import Answer, Failed, answer

log = logging.getLogger("greenlane.infer")


def refuse(error: Exception, tenant: str | None) -> Answer:
    """The answer to this error of a tenant's request, which has an id if its status is 500; logs those, with the id."""
    request_id = uuid.uuid4().hex
    refused = answer(error, request_id)
    if refused.status == 500:
        unexpected = error if not isinstance(error, Failed) else None
        log.error("%s", error, exc_info=unexpected, extra={"tenant": tenant or "-", "request_id": request_id})
    return refused
