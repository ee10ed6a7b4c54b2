"""One request after another on a kept connection, each waited for: for questions, and for the time of a single request."""

from time import perf_counter

from .jobs import Ask
from .wire import Answer, Broken, Connection


class Caller:
    """A connection to a port of the loopback interface, made when it is first needed and again after it ended. One thread."""

    def __init__(self, port: int, timeout: float = 30.0) -> None:
        self._port = port
        self._timeout = timeout
        self._connection: Connection | None = None

    @property
    def own_port(self) -> int | None:
        """The port at this end of the connection; None while there is none."""
        return int(self._connection.socket.getsockname()[1]) if self._connection else None

    def ask(self, ask: Ask) -> Answer:
        """Send one request; the answer with its body. Raises Broken, also where it takes longer than the timeout."""
        if self._connection is None:
            self._connection = Connection(self._port)
            self._connection.open()
        try:
            answer = self._exchange(self._connection, ask)
        except Broken:
            self.close()
            raise
        if answer.last:
            self.close()
        return answer

    def timed(self, ask: Ask) -> tuple[Answer, float]:
        """The same, and the seconds that it took. Raises Broken."""
        began = perf_counter()
        answer = self.ask(ask)
        return answer, perf_counter() - began

    def close(self) -> None:
        """End the connection, if there is one."""
        if self._connection:
            self._connection.close()
        self._connection = None

    def _exchange(self, connection: Connection, ask: Ask) -> Answer:
        connection.send(ask.data, keep=True)
        end = perf_counter() + self._timeout
        while (left := end - perf_counter()) > 0:
            if answer := connection.step(left):
                return answer
        raise Broken(f"no answer within {self._timeout:g} s")
