"""Why nothing could be tried, or not to the end. The text of each is for people."""


class CannotProve(Exception):
    """The server cannot be asked at all: a wrong configuration, a URL that does not answer, a key that is refused."""


class ServerEnded(Exception):
    """The server that was being measured ended, or no longer answers."""
