"""A tokenizer of Hugging Face's `tokenizers` (extra `text`). Blocks for as long as its texts are long; releases the GIL."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from partitions.installing import install_command

from ..errors import BadRequest, TooLarge
from .folder import TextFolder

_PADS = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>")
"""Names of the padding token in files that do not say which it is."""
MOST_CHARACTERS = 8 << 20
"""Characters of one request. A query is read again with each document, so a small body could ask for gigabytes."""
SLICE = 32 << 10
"""Characters to read at a time, unless one text has more: the library takes some 100 bytes for each until it is done with all,
and a call of it cannot be stopped.
"""


class Tokens(NamedTuple):
    """The tokens of a text or of a pair of texts; `types` is 1 for those of a pair's second text, and None for all 0."""

    ids: Sequence[int]
    types: Sequence[int] | None = None


class TokenizerFailed(Exception):
    """A tokenizer that cannot be used; the text says why."""


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

    def __repr__(self) -> str:
        return f"<TextTokenizer of {self.size} tokens>"

    def encode(self, texts: Sequence[Any], most: int, truncate: bool, where: str) -> list[Tokens]:
        """The tokens of texts, of pairs of texts, or of lists of token ids, which are taken as they are.

        Raises BadRequest for one of more than `most` tokens, unless they are to be cut, and TooLarge for more than
        `MOST_CHARACTERS` in all; `where` is the list's name in errors.
        """
        self._limit_to(most if truncate else 0)
        sizes = [_characters(text) for text in texts]
        if (total := sum(sizes)) > MOST_CHARACTERS:
            raise TooLarge(f"{where}: {total} characters, the query counted with each document; the limit is {MOST_CHARACTERS}")
        found: list[Tokens] = []
        while len(found) < len(texts):
            start = end = len(found)
            room = SLICE
            while end < len(texts) and (end == start or sizes[end] <= room):
                room -= sizes[end]
                end += 1
            found += self._encode(texts[start:end])
            for index in range(start, end):
                size = len(found[index].ids)
                if size > most and truncate:
                    ids = found[index].ids
                    found[index] = Tokens(ids[-most:] if self._side == "left" else ids[:most])
                elif not 0 < size <= most:
                    expected = f"expected 1 to {most} (models.NAME.text: max_tokens, truncate)"
                    raise BadRequest(f"{where}[{index}]: {size} tokens; {expected}")
        return found

    def _encode(self, texts: Sequence[Any]) -> list[Tokens]:
        given = [(index, text) for index, text in enumerate(texts) if not isinstance(text, list)]
        encoded = self._tokenizer.encode_batch_fast([_lower(text) if self._lowers else text for _, text in given])
        found: list[Tokens] = [Tokens(text) for text in texts]
        for (index, text), each in zip(given, encoded, strict=True):
            found[index] = Tokens(each.ids, each.type_ids if isinstance(text, tuple) else None)
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


def _characters(text: Any) -> int:
    """Of a text, or of a pair of texts; tokens have none."""
    return 0 if isinstance(text, list) else len(text) if isinstance(text, str) else sum(map(len, text))
