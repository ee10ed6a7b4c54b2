"""What is loaded onto a device beside what is served there: how it gives way, and who may hurry it."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Loads(Protocol):
    """A device's loads. Any thread may call any method."""

    def open(self) -> None:
        """Have loads in the background give way from now on. Calling it again does nothing. Raises DeviceUnavailable."""

    def background(self) -> AbstractContextManager[None]:
        """What the calling thread loads in the block may take its time: what is served does not wait for it."""

    def hurrying(self) -> AbstractContextManager[None]:
        """In the block nothing takes its time, as something waits for a load, unless that is in the background too."""

    def hurry(self) -> None:
        """Nothing takes its time any more: the device is about to be closed."""

    def waited(self) -> float:
        """The seconds for which loads have waited so far, to give way."""


class UnpacedLoads:
    """The loads of a device whose work does not wait for them."""

    def open(self) -> None:
        """Nothing gives way."""

    @contextmanager
    def background(self) -> Iterator[None]:
        yield

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        yield

    def hurry(self) -> None:
        """Nothing takes its time."""

    def waited(self) -> float:
        return 0.0
