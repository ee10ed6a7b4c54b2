"""The errors that the simulation raises."""


class CUDAError(Exception):
    """As cuda.core's: the name of the result, a colon, an explanation."""


class Misuse(AssertionError):
    """A use that the real driver answers with a leak, a crash or nothing at all."""
