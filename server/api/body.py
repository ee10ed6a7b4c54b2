"""Reading the small bodies of requests that are not inferences: at most 1 MiB, and counted while they are on their way."""

from fastapi import Request
from starlette.requests import ClientDisconnect

from ..errors import ClientGone, TooLarge
from ..http.body import content_length
from ..http.compression import decompress, encoding_of
from ..protocol.json_document import Object, parse
from ..tenants.uploads import Uploads

MAX_BODY = 1 << 20
"""Bytes."""


async def read_object(request: Request, uploads: Uploads) -> Object:
    """The JSON object in a request's body; an empty one if there is no body. `uploads` is as in `read_body`.

    Raises BadRequest for anything but a JSON object, and what `read_body` raises.
    """
    body = await read_body(request, uploads)
    return parse(body, tensors=False) if body.strip() else {}


async def read_body(request: Request, uploads: Uploads) -> bytes:
    """A request's body. It counts against `uploads` while it arrives: its tenant's, or the service's for administration.

    It is returned decompressed. Raises UnsupportedEncoding, or BadRequest if it is not encoded as the headers say; TooLarge
    over `MAX_BODY`; QueueFull, TooSlow or Unavailable while the body is on its way; and ClientGone if the client closes its
    connection before the body is complete.
    """
    encoding = encoding_of(request.headers.get("content-encoding"))
    length = content_length(request.headers.get("content-length"))
    _check(length)
    body = bytearray()
    with uploads.expect(length) as upload:
        try:
            async for chunk in request.stream():
                upload.add_received(len(chunk))
                body += chunk
                _check(len(body))
        except ClientDisconnect:
            raise ClientGone("the client closed its connection before the body was whole") from None
        upload.complete()
        return await decompress(bytes(body), encoding, MAX_BODY, upload.reserve_more, "here")


def _check(length: int) -> None:
    if length > MAX_BODY:
        raise TooLarge(f"a body of more than {MAX_BODY} bytes, which is the limit here")
