"""A tokenizer of Hugging Face's `tokenizers` (extra `text`). Blocks for as long as its texts are long; releases the GIL."""

import os
import time
import unicodedata
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from partitions.installing import install_command

from ..errors import BadRequest, TooLarge, Unavailable
from ..scheduling.limits import TokenBucket
from .folder import TextFolder, TokenizerFailed

_PADS = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>")
"""Names of the padding token in files that do not say which it is."""
MOST_BYTES = 8 << 20
"""Of the texts of one request, as `weight` counts. A query is read again with each document, so a small body could ask for
gigabytes.
"""
SLICE = 32 << 10
"""Bytes to read at a time, unless one text has more: a call of the library cannot be stopped."""
BYTES_PER_BYTE = 300
"""What the library takes for each byte that it reads, until it is done with all of a call (measured: 33 to 290)."""
LEAST_RESERVED = 1 << 20
"""Bytes. Less is not counted: most requests take less."""
PANICS = 20
"""Times that the library may panic at once; after that, once a second."""
_PANIC = "PanicException"
"""The class of the library's panics, which it does not give a name that can be imported."""
_MOST_OF_CHARACTER = 33
"""Bytes of a character once normalized, in UTF-8, at most: U+FDFA becomes 18 letters."""
_AT_ONCE = 1024
"""Characters to normalize at a time, with the interpreter's lock held."""


class Tokens(NamedTuple):
    """The tokens of a text or of a pair of texts; `types` is 1 for those of a pair's second text, and None for all 0."""

    ids: Sequence[int]
    types: Sequence[int] | None = None


class TextTokenizer:
    """Belongs to one thread. Raises TokenizerFailed if the file or the library is missing or wrong."""

    def __init__(self, folder: TextFolder) -> None:
        os.environ.setdefault(
            "TOKENIZERS_PARALLELISM", "false"
        )  # One thread a model is enough; more would be on its cores too.
        try:
            from tokenizers import Tokenizer  # It need not be installed.
        except ImportError as error:
            raise TokenizerFailed(f"tokenizers is not installed; run {install_command('text')} ({error})") from error
        try:
            self._tokenizer: Any = Tokenizer.from_file(folder.tokenizer)
        except Exception as error:  # The library raises no other class.
            raise TokenizerFailed(f"tokenizer.json cannot be used: {error}") from error
        said: Any = self._tokenizer.truncation
        left = bool(said) and said["direction"] == "left" if folder.cuts_left is None else folder.cuts_left
        self._side = "left" if left else "right"
        self._lowers = folder.lowers
        normalizer = self._tokenizer.normalizer
        if folder.lowercase is not None and hasattr(normalizer, "lowercase"):  # tokenizer_config.json goes first.
            normalizer.lowercase = folder.lowercase
        self.pad = self._pad()
        self.size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._tokenizer.no_padding()
        self._limit = -1
        self._panics = TokenBucket(1, PANICS)

    def encode(self, texts: Sequence[Any], most: int, truncate: bool, where: str) -> list[Tokens]:
        """The tokens of texts, of pairs of texts, or of lists of token ids, which are taken as they are.

        Of a text no more than `most_of_text` is read. Raises BadRequest for one of more than `most` tokens, unless they are to
        be cut, and for an id that the tokenizer does not have; TooLarge for more than `MOST_BYTES` in all, or if what was read
        of a text has fewer tokens. `where` is the list's name in errors.
        """
        self._limit_to(most if truncate else 0)
        read = [self._cut(text, most_of_text(most)) for text in texts]
        if (total := sum(each.weight for each in read)) > MOST_BYTES:
            raise TooLarge(
                f"{where}: {total} bytes once normalized, the query counted with each document; the limit is {MOST_BYTES}"
            )
        found: list[Tokens] = []
        while len(found) < len(texts):
            start = end = len(found)
            room = SLICE
            while end < len(texts) and (end == start or read[end].weight <= room):
                room -= read[end].weight
                end += 1
            found += self._encode([each.text for each in read[start:end]])
            for index in range(start, end):
                found[index] = self._checked(found[index], read[index], most, truncate, f"{where}[{index}]")
        return found

    def _called(self, texts: list[Any]) -> Any:
        """The library's encodings. Raises Unavailable where the library has panicked too often: it writes lines of its own to
        standard error each time, past the log's limits.
        """
        if self._panics.wait(1, time.monotonic_ns() // 1000):
            raise Unavailable("the tokenizer has failed inside its library too often; try again in a second")
        try:
            return self._tokenizer.encode_batch_fast(texts)
        except Exception:
            raise
        except BaseException as error:
            if type(error).__name__ == _PANIC:
                self._panics.take(1)
            raise

    def _checked(self, tokens: Tokens, read: "_Read", most: int, truncate: bool, where: str) -> Tokens:
        """The tokens of a text, cut to `most`. Raises BadRequest or TooLarge."""
        if isinstance(read.text, list) and (highest := max(tokens.ids)) >= self.size:
            raise BadRequest(f"{where}: token {highest}; the model's tokenizer has tokens 0 to {self.size - 1}")
        size = len(tokens.ids)
        if read.is_cut and size < most + (not truncate):
            limit = most_of_text(most)
            raise TooLarge(f"{where}: a text of more than {limit} bytes once normalized, which is the limit for {most} tokens")
        if size > most and truncate:
            return Tokens(tokens.ids[-most:] if self._side == "left" else tokens.ids[:most])
        if not 0 < size <= most:
            expected = f"expected 1 to {most} (models.NAME.text: max_tokens, truncate)"
            raise BadRequest(f"{where}: {'at least ' if read.is_cut else ''}{size} tokens; {expected}")
        return tokens

    def _cut(self, text: Any, most: int) -> "_Read":
        """What is read of a text, or of a pair of texts. Tokens have no weight."""
        if isinstance(text, list):
            return _Read(text, 0, False)
        if isinstance(text, tuple):
            parts = [self._cut(part, most) for part in text]
            return _Read(
                tuple(each.text for each in parts), sum(each.weight for each in parts), any(each.is_cut for each in parts)
            )
        if text.isascii():
            end = weight = min(len(text), most)
        else:
            end, weight = self._end(text, most)
        left = self._side == "left"
        return _Read(text if end == len(text) else text[len(text) - end :] if left else text[:end], weight, end < len(text))

    def _end(self, text: str, most: int) -> tuple[int, int]:
        """How many characters of a text, from the side that is kept, have at most so many bytes, and these bytes."""
        weight = 0
        for start in range(0, len(text), _AT_ONCE):
            end = min(start + _AT_ONCE, len(text))
            part = text[len(text) - end : len(text) - start] if self._side == "left" else text[start:end]
            if weight + (more := _weight(part)) > most:
                return start, weight
            weight += more
        return len(text), weight

    def _encode(self, texts: Sequence[Any]) -> list[Tokens]:
        given = [(index, text) for index, text in enumerate(texts) if not isinstance(text, list)]
        encoded = self._called([_lower(text) if self._lowers else text for _, text in given])
        found: list[Tokens] = [Tokens(text) for text in texts]
        for (index, text), each in zip(given, encoded, strict=True):
            types = array("B", each.type_ids) if isinstance(text, tuple) else None
            found[index] = Tokens(array("I", each.ids), types)  # A list takes nine times as much.
        return found

    def _limit_to(self, most: int) -> None:
        if most != self._limit:
            self._limit = most
            if most:
                self._tokenizer.enable_truncation(most, direction=self._side)
            else:
                self._tokenizer.no_truncation()

    def _pad(self) -> int:
        """The padding token: what the file says, or one of the usual names, or else 0, as it is masked in any case."""
        if said := self._tokenizer.padding:
            return int(said["pad_id"])
        found = (self._tokenizer.token_to_id(name) for name in _PADS)
        return next((token for token in found if token is not None), 0)


def _lower(text: Any) -> Any:
    return text.lower() if isinstance(text, str) else tuple(map(str.lower, text))


class _Read(NamedTuple):
    """What is read of a text or of a pair, its bytes once normalized, and whether that is not all of it."""

    text: Any
    weight: int
    is_cut: bool


def most_of_text(most: int) -> int:
    """Bytes of a text, once normalized, that are read for `most` tokens: far more than such texts have."""
    return max(64 << 10, 16 * most)


def needed(texts: Sequence[Any], most: int) -> int:
    """Bytes that reading these takes at most, for the largest call of the library; 0 for less than `LEAST_RESERVED`."""
    sizes = [_bound(text, most_of_text(most)) for text in texts]
    found = BYTES_PER_BYTE * max(min(sum(sizes), SLICE), max(sizes, default=0))
    return found if found >= LEAST_RESERVED else 0


def _bound(text: Any, most: int) -> int:
    """A bound for the weight of a text."""
    if isinstance(text, list):
        return 0
    if isinstance(text, tuple):
        return sum(_bound(part, most) for part in text)
    return min(most, len(text) * (1 if text.isascii() else _MOST_OF_CHARACTER))


def _weight(text: str) -> int:
    """Bytes of a text once normalized. It is what a tokenizer's usual normalizers make of it at most."""
    return len(unicodedata.normalize("NFKC", text).encode("utf-8", "surrogatepass"))
