"""Texts into tokens: what one request may ask for, and how much is read before it is refused."""

import sys
from pathlib import Path
from typing import Any

import pytest

from server.errors import BadRequest, TooLarge
from server.text.folder import TextFolder
from server.text.tokenizer import MOST_CHARACTERS, SLICE, TextTokenizer, TokenizerFailed
from tests import encoders


class Watched:
    """A tokenizer of the library that notes how many characters it was given at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.given: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[Any]) -> Any:
        self.given.append(sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts))
        return self._tokenizer.encode_batch_fast(texts)


@pytest.fixture
def watched(tmp_path: Path) -> tuple[TextTokenizer, Watched]:
    encoders.write(tmp_path, "encoder", encoders.encoder())
    tokenizer = TextTokenizer(TextFolder(str(tmp_path / "encoder" / "tokenizer.json")))
    tokenizer._tokenizer = found = Watched(tokenizer._tokenizer)
    return tokenizer, found


def test_without_the_library_the_error_has_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TokenizerFailed, match=r"^tokenizers is not installed; run scripts/install text \("):
        TextTokenizer(TextFolder("tokenizer.json"))


def test_a_query_counts_with_each_of_its_documents(watched: tuple[TextTokenizer, Watched]) -> None:
    """A body of 1 MiB could ask for gigabytes of tokens."""
    tokenizer, found = watched
    query = "cat " * 2048
    pairs = [(query, "a")] * (MOST_CHARACTERS // len(query) + 1)
    with pytest.raises(
        TooLarge, match=rf"^documents: {len(pairs) * (len(query) + 1)} characters, the query counted with each "
    ):
        tokenizer.encode(pairs, 16, True, "documents")
    assert found.given == []


def test_texts_behind_one_that_is_too_long_are_not_read(watched: tuple[TextTokenizer, Watched]) -> None:
    tokenizer, found = watched
    texts = ["cat", "cat " * SLICE, *["cat " * 100] * 2000]
    with pytest.raises(BadRequest, match=rf"^input\[1\]: {SLICE + 2} tokens; expected 1 to 16 "):
        tokenizer.encode(texts, 16, False, "input")
    assert sum(found.given) == len(texts[0]) + len(texts[1])


def test_texts_read_in_slices_are_the_same(watched: tuple[TextTokenizer, Watched]) -> None:
    tokenizer, found = watched
    texts = [*encoders.texts(9, 14, 1), "cat " * SLICE, [1, 2, 3], *["a cat " * 2000] * 9, ("cat", "a cat")]
    got = tokenizer.encode(texts, 1 << 30, False, "input")
    assert len(found.given) > 2
    assert got == [tokenizer.encode([each], 1 << 30, False, "input")[0] for each in texts]
