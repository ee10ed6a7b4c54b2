"""GPU streams of other libraries."""


def stream_handle(stream: object) -> int:
    """The handle (CUstream) of a stream, given as an integer or as an object with `__cuda_stream__`. Raises TypeError."""
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        raise TypeError(
            f"{stream!r} is no stream; expected its handle as an integer, such as torch's stream.cuda_stream, "
            "or an object with __cuda_stream__"
        )
    _, handle = protocol() if callable(protocol) else protocol
    return int(handle)
