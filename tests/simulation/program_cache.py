"""`cuda.core.utils` as far as `partitions.cuda.kernels` uses it."""


class ProgramCacheResource:
    """What `Program.compile` looks in, and puts code into."""

    def __getitem__(self, key: bytes) -> bytes:
        raise NotImplementedError

    def __setitem__(self, key: bytes, value: object) -> None:
        raise NotImplementedError

    def get(self, key: bytes, default: bytes | None = None) -> bytes | None:
        try:
            return self[key]
        except KeyError:
            return default
