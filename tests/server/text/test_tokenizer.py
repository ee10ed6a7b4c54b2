"""Texts into tokens: what one request may ask for, and how much is read before it is refused."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from server.errors import BadRequest, TooLarge, Unavailable
from server.text.folder import TextFolder, TokenizerFailed
from server.text.tokenizer import MOST_BYTES, SLICE, TextTokenizer, most_of_text, needed
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
def library(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """The library's tokenizers that are read."""
    found: list[Watched] = []

    def from_file(path: str) -> Watched:
        found.append(Watched(Tokenizer.from_file(path)))
        return found[-1]

    monkeypatch.setattr("tokenizers.Tokenizer", SimpleNamespace(from_file=from_file))
    return found


@pytest.fixture
def watched(tmp_path: Path, library: list[Watched]) -> tuple[TextTokenizer, Watched]:
    encoders.write(tmp_path, "encoder", encoders.encoder())
    return TextTokenizer(TextFolder(str(tmp_path / "encoder" / "tokenizer.json"))), library[0]


def test_without_the_library_the_error_has_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TokenizerFailed, match=r"^tokenizers is not installed; run scripts/install text \("):
        TextTokenizer(TextFolder("tokenizer.json"))


def test_a_query_counts_with_each_of_its_documents(watched: tuple[TextTokenizer, Watched]) -> None:
    """A body of 1 MiB could ask for gigabytes of tokens."""
    tokenizer, found = watched
    query = "cat " * 2048
    pairs = [(query, "a")] * (MOST_BYTES // len(query) + 1)
    with pytest.raises(
        TooLarge, match=rf"^documents: {len(pairs) * (len(query) + 1)} bytes once normalized, the query counted with each "
    ):
        tokenizer.encode(pairs, 16, True, "documents")
    assert found.given == []


def test_texts_behind_one_that_is_too_long_are_not_read(watched: tuple[TextTokenizer, Watched]) -> None:
    tokenizer, found = watched
    texts = ["cat", "cat " * SLICE, *["cat " * 100] * 2000]
    with pytest.raises(BadRequest, match=r"^input\[1\]: at least 16386 tokens; expected 1 to 16 "):
        tokenizer.encode(texts, 16, False, "input")
    assert sum(found.given) == len(texts[0]) + most_of_text(16)


def test_texts_read_in_slices_are_the_same(watched: tuple[TextTokenizer, Watched]) -> None:
    tokenizer, found = watched
    texts = [*encoders.texts(9, 14, 1), "cat " * SLICE, [1, 2, 3], *["a cat " * 2000] * 9, ("cat", "a cat")]
    got = tokenizer.encode(texts, 1 << 30, False, "input")
    assert len(found.given) > 2
    assert got == [tokenizer.encode([each], 1 << 30, False, "input")[0] for each in texts]


def byte_level(root: Path) -> TextTokenizer:
    """A byte-level BPE that normalizes to NFKC, as GPT's and Qwen's are: U+FDFA becomes 33 tokens."""
    library = Tokenizer(models.BPE())
    library.normalizer = normalizers.NFKC()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(["a cat"], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    library.save(str(root / "tokenizer.json"))
    return TextTokenizer(TextFolder(str(root / "tokenizer.json")))


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
def test_no_more_is_read_of_a_text_than_it_may_have_tokens(
    tmp_path: Path, library: list[Watched], truncate: bool, side: str
) -> None:
    """A text of 1 MB whose characters become 18 each took 2.5 GB."""
    byte_level(tmp_path)
    tokenizer = TextTokenizer(TextFolder(str(tmp_path / "tokenizer.json"), cuts_left=side == "left"))
    text = "\ufdfa" * 349_000
    if truncate:
        (tokens,) = tokenizer.encode([text], 512, True, "input")
        (same,) = tokenizer.encode([text[:1000]], 512, True, "input")
        assert tokens.ids == same.ids
    else:
        with pytest.raises(BadRequest, match=r"^input\[0\]: at least \d{5} tokens; expected 1 to 512 "):
            tokenizer.encode([text], 512, False, "input")
    assert 33 * max(library[-1].given) <= most_of_text(512) == 65536


def test_a_text_whose_beginning_has_too_few_tokens_is_refused_and_not_cut_short(
    watched: tuple[TextTokenizer, Watched],
) -> None:
    tokenizer, found = watched
    text = "cat" + " " * 70_000 + "dog"
    for truncate in (False, True):
        with pytest.raises(TooLarge, match=r"^input\[1\]: a text of more than 65536 bytes once normalized, .* for 16 tokens$"):
            tokenizer.encode(["cat", text], 16, truncate, "input")
        with pytest.raises(TooLarge, match=r"^documents\[0\]: a text of more than 65536 bytes"):
            tokenizer.encode([("cat", text)], 16, truncate, "documents")
    assert max(found.given) <= 65536 + 3
    (tokens,) = tokenizer.encode([text[:60_000] + "dog"], 16, False, "input")
    assert len(tokens.ids) == 4


def test_bytes_once_normalized_count_for_all_texts_together(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    with pytest.raises(TooLarge, match=r"^input: 8447967 bytes once normalized, .*; the limit is 8388608$"):
        tokenizer.encode(["\ufdfa" * 999, "\ufdfa" * 255_000], 1 << 20, False, "input")


@pytest.mark.parametrize("kind", ["a ", "abcd ", "\ufdfa", " ", "漢", "é"])
def test_what_is_reserved_is_enough(tmp_path: Path, kind: str) -> None:
    """In a process of its own, as the most memory that one has had is never less again."""
    byte_level(tmp_path)
    count = 400_000 // len(kind.encode()) if kind != "\ufdfa" else 15_000
    code = f"""
import resource
from server.text.folder import TextFolder
from server.text.tokenizer import TextTokenizer, needed
tokenizer, text = TextTokenizer(TextFolder({str(tmp_path / "tokenizer.json")!r})), {kind!r} * {count}
def most(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
tokenizer.encode(["cat"], 9, True, "input")
before = most()
tokenizer.encode([text], 1 << 20, False, "input")
print(most() - before, needed([text], 1 << 20))
"""
    taken, reserved = map(int, subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.split())
    assert taken <= reserved


def test_short_texts_reserve_nothing_and_long_ones_no_more_than_is_read() -> None:
    assert needed(["a cat", [1, 2]], 512) == 0
    assert needed([], 512) == 0
    assert needed(["cat " * 100_000], 512) == 300 * 65536
    assert needed(["cat " * 1000] * 100, 512) == 300 * SLICE
    assert needed([("cat " * 100_000, "a")], 512) == 300 * 65537


def test_a_library_that_panics_is_called_less_often_as_it_writes_to_standard_error_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.text.tokenizer.PANICS", 1)
    slow = Tokenizer(models.WordLevel({"cat": 0, "[UNK]": 1}, unk_token="[UNK]"))
    slow.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    slow.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(TextFolder(str(tmp_path / "tokenizer.json")))
    for _ in range(2):
        assert tokenizer.encode(["cat"], 16, True, "input")[0].ids[0] == 0
    with pytest.raises(BaseException, match="retry-limit"):
        tokenizer.encode(["x" * 200], 16, True, "input")
    with pytest.raises(Unavailable, match="has failed inside its library too often; try again in a second"):
        tokenizer.encode(["x" * 200], 16, True, "input")
