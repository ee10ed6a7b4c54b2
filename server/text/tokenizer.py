"""A tokenizer of Hugging Face's `tokenizers` (extra `text`). Blocks for as long as its texts are long; releases the GIL."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import BadRequest

_PADS = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>")
"""Names of the padding token in files that do not say which it is."""


class Tokens(NamedTuple):
    """The tokens of a text or of a pair of texts; `types` is 1 for those of a pair's second text, and None for all 0."""

    ids: Sequence[int]
    types: Sequence[int] | None = None


class TokenizerFailed(Exception):
    """A tokenizer that cannot be used; the text says why."""


class TextTokenizer:
    """Belongs to one thread. `most` is the number of tokens that its file truncates to, 0 if it says nothing.

    Raises TokenizerFailed if the file or the library is missing or wrong.
    """

    def __init__(self, path: str) -> None:
        os.environ.setdefault(
            "TOKENIZERS_PARALLELISM", "false"
        )  # One thread a model is enough; more would be on its cores too.
        try:
            from tokenizers import Tokenizer  # It need not be installed.
        except ImportError as error:
            raise TokenizerFailed(f"tokenizers is not installed ({error.name}): pip install 'greenlane[text]'") from error
        try:
            self._tokenizer: Any = Tokenizer.from_file(path)
        except Exception as error:  # The library raises no other class.
            raise TokenizerFailed(f"tokenizer.json cannot be used: {error}") from error
        said = self._tokenizer.truncation
        self.most: int = said["max_length"] if said else 0
        self.pad = self._pad()
        self.size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._tokenizer.no_padding()
        self._limit = -1

    def __repr__(self) -> str:
        return f"<TextTokenizer of {self.size} tokens>"

    def encode(self, texts: Sequence[Any], most: int, truncate: bool, where: str) -> list[Tokens]:
        """The tokens of texts, of pairs of texts, or of lists of token ids, which are taken as they are.

        Raises BadRequest for one of more than `most` tokens, unless they are to be cut; `where` is the list's name in errors.
        """
        self._limit_to(most if truncate else 0)
        given = [(index, text) for index, text in enumerate(texts) if not isinstance(text, list)]
        encoded = self._tokenizer.encode_batch_fast([text for _, text in given])
        found: list[Tokens] = [Tokens(text) for text in texts]
        for (index, text), each in zip(given, encoded, strict=True):
            found[index] = Tokens(each.ids, each.type_ids if isinstance(text, tuple) else None)
        for index, tokens in enumerate(found):
            if len(tokens.ids) > most and truncate:
                found[index] = Tokens(tokens.ids[:most])
            elif not 0 < len(tokens.ids) <= most:
                expected = f"expected 1 to {most} (models.NAME.text: max_tokens, truncate)"
                raise BadRequest(f"{where}[{index}]: {len(tokens.ids)} tokens; {expected}")
        return found

    def _limit_to(self, most: int) -> None:
        if most != self._limit:
            self._limit = most
            if most:
                self._tokenizer.enable_truncation(most)
            else:
                self._tokenizer.no_truncation()

    def _pad(self) -> int:
        """The padding token: what the file says, or one of the usual names, or else 0, as it is masked in any case."""
        if said := self._tokenizer.padding:
            return int(said["pad_id"])
        found = (self._tokenizer.token_to_id(name) for name in _PADS)
        return next((token for token in found if token is not None), 0)
