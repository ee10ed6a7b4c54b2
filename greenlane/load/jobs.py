"""The jobs of load processes and their results: plain data, as it crosses between processes."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .figures import Samples

Behaviour = Literal["flood", "churn", "slow", "drip", "knock", "once"]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as it goes over the wire, and the size of the body of a right answer where that is known."""

    data: bytes
    size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """Send `ask` whenever an arrival is due, whatever came of those before.

    `connections` are opened beforehand and `first` (None: `ask`) is answered with 200 on each; `most` is how many there may
    be: an arrival that finds none free waits for one, and its latency counts from when it was due. `spin` is to burn
    the core instead of sleeping: for a core that no other process uses. `grace` is the seconds that the last answers are waited
    for. Every `keep`th answer is brought back whole. `ask` and `others` take turns. With `fresh` each request has a new
    connection, which is made when it is due. `host` is an address.
    """

    port: int
    ask: Ask
    arrivals: list[float]
    connections: int
    most: int
    first: Ask | None = None
    others: tuple[Ask, ...] = ()
    spin: bool = False
    grace: float = 3.0
    keep: int = 64
    cores: tuple[int, ...] | None = None
    fresh: bool = False
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """Send the next of `asks` on every one of `connections` as soon as the last was answered, as hard as they can.

    `flood` keeps connections, `churn` makes a new one for each request, `slow` reads a few bytes of an answer now and then,
    `drip` sends a byte of its request every `every` seconds on each connection, `knock` opens all its connections and closes
    them without a word, every so often. What is never answered is held until the end, and opened again if the server hangs up.
    `once` asks once on each connection, and waits for the answers, which it brings back, for `grace` seconds beyond the end.
    It begins `ahead` seconds before the start that everybody is given, or after it if that is negative, and ends `seconds`
    after it.
    """

    name: str
    port: int
    asks: tuple[Ask, ...]
    connections: int
    behaviour: Behaviour
    seconds: float
    ahead: float = 0.3
    every: float = 0.0
    grace: float = 0.1
    cores: tuple[int, ...] | None = None
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class InTurn:
    """Closed loops one after another in one process, each at its time: they must not overlap. The result is a tally of each."""

    jobs: tuple[ClosedLoop, ...]
    cores: tuple[int, ...] | None = None


class SlowAnswer(NamedTuple):
    """One of the slowest answers of an open loop.

    `due` is in seconds from the start, all else in milliseconds: `latency` from then, `sent` how long after it the request was
    sent, `queued` and `executed` what the server states in Server-Timing (0: nothing).
    """

    latency: float
    due: float
    sent: float
    queued: float
    executed: float


@dataclass(slots=True)
class Seen:
    """Result of an open loop. `late` is when each request was sent after it was due, in microseconds, by the client's own
    fault: arrivals that had to wait for a connection are counted in `waited` instead. `asked` says for each of `bodies` which
    request it answers: 0 is `ask`, 1 the first of `others`. `failures` says of the first that failed when and how. `slowest`
    are a few dozen of the answers, in no order."""

    samples: Samples = field(default_factory=Samples)
    late: list[float] = field(default_factory=list)
    waited: int = 0
    connections: int = 0
    wrong: int = 0
    bodies: list[bytes] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    slowest: list[SlowAnswer] = field(default_factory=list)


@dataclass(slots=True)
class Tally:
    """Result of a closed loop: answers by status (0: the connection ended without one), connections, and bytes both ways.

    `seconds` is how long it lasted, with those before the start that everybody is given. `bodies` are those of answers, where
    the behaviour is `once`.
    """

    name: str
    seconds: float
    statuses: dict[int, int] = field(default_factory=dict)
    sent: int = 0
    received: int = 0
    opened: int = 0
    bodies: list[bytes] = field(default_factory=list)

    def count(self, status: int) -> None:
        """Note one answer."""
        self.statuses[status] = self.statuses.get(status, 0) + 1

    @property
    def answers(self) -> int:
        """Answers of any status."""
        return sum(count for status, count in self.statuses.items() if status)
