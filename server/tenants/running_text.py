"""The tokenizer of a version that is served, and the thread that it runs on in this process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from engines import Signature

from ..config.text import TextOptions
from ..functions.thread import FunctionThread
from ..link.blocks import BlockAllocator
from ..text.encoder import Encoder
from ..text.folder import TextFolder, TokenizerFailed
from ..text.tokenizer import TextTokenizer, Tokens, needed

LOAD_SECONDS = 60.0
"""How long a tokenizer may take to load."""


class RunningText:
    """Belongs to the event loop of the tenant's HTTP process; `open_text` makes one. `name` is the model's."""

    def __init__(
        self, name: str, signature: Signature, thread: FunctionThread, folder: TextFolder, tokenizer: TextTokenizer
    ) -> None:
        self._what = f"model {name!r}: its tokenizer"
        self._signature = signature
        self._thread = thread
        self._folder = folder
        self._tokenizer = tokenizer
        self._readers = 0
        self._block: tuple[int, int] | None = None
        """Where the block is that is reserved for the library, and its size."""
        self._encoders: dict[TextOptions, Encoder] = {}

    def encoder(self, options: TextOptions) -> Encoder:
        """How the model is used with these options. Raises NoEncoder."""
        found = self._encoders.get(options)
        if found is None:
            found = Encoder(self._signature, options, self._folder, self._tokenizer.pad)
            self._encoders = {options: found}
        return found

    async def tokens(self, texts: Sequence[Any], encoder: Encoder, where: str, blocks: BlockAllocator) -> list[Tokens]:
        """As `TextTokenizer.encode`, on the thread; what that takes is counted in the tenant's memory, by `blocks`.

        Raises QueueFull and Unavailable too, as `FunctionThread` does, and TooLarge and MemoryFull.
        """
        self._thread.check_room()
        most, truncate = encoder.most, encoder.options.truncate
        with self._reserved(needed(texts, most), blocks):
            work = partial(self._tokenizer.encode, texts, most, truncate, where)
            found: list[Tokens] = await self._thread.result_of(self._what, work)
        return found

    @contextmanager
    def _reserved(self, nbytes: int, blocks: BlockAllocator) -> Iterator[None]:
        """Hold a block for one call of the library at a time: as large as the largest that waits needs."""
        if nbytes > (self._block[1] if self._block else 0):
            block = blocks.allocate(nbytes)
            if self._block:
                blocks.free(*self._block)
            self._block = block
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            if self._block and not self._readers:
                blocks.free(*self._block)
                self._block = None

    def close(self) -> None:
        """Its model is not served any more, and no request for it is left."""
        self._thread.close()


async def open_text(
    folder: TextFolder, name: str, signature: Signature, most: int, setting: str, limit: tuple[float, str]
) -> RunningText:
    """Load a tokenizer on a thread of its own. `most` requests may wait for it. Raises TokenizerFailed."""
    thread = FunctionThread(name, most, setting, *limit)
    try:
        tokenizer = await thread.result_of(f"model {name!r}: tokenizer.json", lambda: _load(folder), LOAD_SECONDS)
    except BaseException as error:
        thread.close()
        raise TokenizerFailed(str(error)) if isinstance(error, Exception) else error from error
    return RunningText(name, signature, thread, folder, tokenizer)


def _load(folder: TextFolder) -> TextTokenizer | TokenizerFailed:
    try:
        return TextTokenizer(folder)
    except TokenizerFailed as error:
        return error
