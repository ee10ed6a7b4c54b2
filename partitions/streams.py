"""Streams of a GPU as other libraries give them."""


def stream_handle(stream: object) -> int:
    """The handle (CUstream) of a stream that is given as such, or as an object with `__cuda_stream__`. Raises TypeError."""
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    given = getattr(stream, "__cuda_stream__", None)
    if given is None:
        raise TypeError(
            f"{stream!r} is no stream; expected its handle as an integer, such as torch's stream.cuda_stream, "
            "or an object with __cuda_stream__"
        )
    _, handle = given() if callable(given) else given
    return int(handle)
