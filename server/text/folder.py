"""What the files beside a tokenizer.json say of how its model is used: those of Hugging Face and of sentence-transformers.

Blocks to read them. What they say and nothing here does is a refusal, as an embedding made otherwise would be wrong.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from partitions.regular_file import open_regular, read_regular

from ..protocol.json_document import short


class NoEncoder(Exception):
    """A model that texts cannot be given to; the text says why."""


class TokenizerFailed(Exception):
    """A tokenizer that cannot be used; the text says why."""


TOKENIZER = "tokenizer.json"
_POOLING = "1_Pooling"
_MOST_BYTES = 4 << 20
_HEAD = 4096
_CUT_AT = re.compile(r'"truncation"\s*:\s*\{[^}]*"max_length"\s*:\s*(\d{1,9})\b')
"""At the beginning of a tokenizer.json; the rest may have megabytes."""
_MOST_SAID = 1 << 20
"""A model_max_length above this stands for none: transformers writes 1e30 then."""
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_AFTER_PADDING = frozenset(
    ("camembert", "data2vec-text", "esm", "ibert", "longformer", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta",
     "xlm-roberta-xl", "xmod")
)  # fmt: skip
"""Types of models that number positions from behind the padding token's, so that they take fewer tokens."""

Object = Mapping[str, Any]


class TextFolder(NamedTuple):
    """A tokenizer.json, by its path, and what is said of its model; "", 0 and None where nothing is.

    - `pooling`: as in the configuration, or another word that is not done here; `modules` are others than the usual ones
    - `longest`: tokens of a text, special ones included, that sentence-transformers cuts to; `limits`: what other files say
    - `positions`: for how many tokens the model has positions
    - `lowers`: texts are made lower case; `lowercase`: the tokenizer's normalizer does that; `cuts_left`: the side that is cut
    - `classifies`: its architecture, if it gives scores; `refusal`: why it takes no texts; `folders`: which others were read
    """

    tokenizer: str
    pooling: str = ""
    normalize: bool | None = None
    modules: tuple[str, ...] = ()
    longest: int = 0
    limits: int = 0
    positions: int = 0
    lowers: bool = False
    lowercase: bool | None = None
    cuts_left: bool | None = None
    classifies: str = ""
    refusal: str = ""
    folders: tuple[str, ...] = ()

    @property
    def most(self) -> int:
        """The most tokens of a text, as far as the files say."""
        return min([each for each in (self.longest or self.limits, self.positions) if each], default=0)


class _Unread(ValueError):
    """A file that cannot be used; the text says which, why, and what to do."""


def read_folder(model: Path, version: str) -> TextFolder | None:
    """What is said of a version of the model in this folder; None without a tokenizer. A file beside the version's model goes
    before one in the model's folder. What is wrong becomes the `refusal`; raises nothing.
    """
    folders = (model / version, model)
    tokenizer = next((folder / TOKENIZER for folder in folders if os.path.isfile(folder / TOKENIZER)), None)
    if tokenizer is None:
        return None
    try:
        return _read(str(tokenizer), _Files(folders))
    except _Unread as error:
        return TextFolder(str(tokenizer), refusal=str(error))


class _Files:
    """The JSON files of these folders, the first of them first; None for one that is nowhere. Raises _Unread."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def object(self, name: str) -> Object:
        found = self._read(name)
        if found is not None and not isinstance(found, dict):
            raise _Unread(f"{name} is no object of JSON: mend it, or take it away")
        return found or {}

    def modules(self) -> list[tuple[str, str]] | None:
        """The type and the folder of each module."""
        found = self._read("modules.json")
        if found is None:
            return None
        try:
            modules = [(str(each["type"]).rpartition(".")[2], str(each.get("path") or "").strip("/")) for each in found]
        except (TypeError, KeyError, AttributeError):
            raise _Unread("modules.json is no list of modules with their types: mend it, or take it away") from None
        if outside := [path for _, path in modules if ".." in path.split("/") or not path.isprintable()]:
            raise _Unread(f"modules.json has the path {short(repr(outside[0]))}; expected a folder of the model's")
        return modules

    def has(self, name: str) -> bool:
        return any(os.path.isfile(folder / name) for folder in self._folders)

    def named(self, pattern: str) -> list[str]:
        return sorted({path.name for folder in self._folders for path in folder.glob(pattern)})

    def _read(self, name: str) -> Any:
        path = next((folder / name for folder in self._folders if os.path.isfile(folder / name)), None)
        if path is None:
            return None
        try:
            return json.loads(read_regular(path, _MOST_BYTES).decode("utf-8-sig"))
        except OSError as error:
            raise _Unread(f"{name}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise _Unread(f"{name} is not JSON ({error}): mend it, or take it away") from None


def _read(tokenizer: str, files: _Files) -> TextFolder:
    modules = files.modules()
    paths = dict(modules or ())
    of_tokenizer, of_model = files.object("tokenizer_config.json"), files.object("config.json")
    at = paths.get("Transformer", "")
    sentence = next((files.object(name) for name in files.named("sentence_*_config.json")), {})
    if at:
        sentence = files.object(f"{at}/sentence_bert_config.json") or sentence
        of_model = files.object(f"{at}/config.json") or of_model
    prompts = files.object("config_sentence_transformers.json")
    if prompt := prompts.get("default_prompt_name"):
        raise _Unread(
            f"config_sentence_transformers.json puts the prompt {short(repr(prompt))} before each text, which is not done "
            "here: set its default_prompt_name to null, and let clients send the prompt"
        )
    side = of_tokenizer.get("truncation_side")
    lower = of_tokenizer.get("do_lower_case")
    return TextFolder(
        tokenizer,
        pooling=_pooling(files, modules, paths.get("Pooling", _POOLING)),
        normalize=None if modules is None else "Normalize" in paths,
        modules=tuple(short(kind) for kind, _ in modules or () if kind not in ("Transformer", "Pooling", "Normalize")),
        longest=_count(sentence.get("max_seq_length")),
        limits=min([each for each in (_count(of_tokenizer.get("model_max_length")), _cut_at(tokenizer)) if each], default=0),
        positions=_positions(of_model),
        lowers=sentence.get("do_lower_case") is True,
        lowercase=lower if isinstance(lower, bool) else None,
        cuts_left=None if side is None else side == "left",
        classifies=next((short(each) for each in _names(of_model) if each.endswith("ForSequenceClassification")), ""),
        folders=tuple(path.split("/")[0] for path in ("1_Pooling", *paths.values()) if path),
    )


def _pooling(files: _Files, modules: list[tuple[str, str]] | None, path: str) -> str:
    name = f"{path}/config.json"
    if modules is not None and any(kind == "Pooling" for kind, _ in modules) and not files.has(name):
        raise _Unread(f"modules.json names {path}, and there is no {name}: copy it too")
    said = files.object(name)
    if isinstance(mode := said.get("pooling_mode"), str):
        return {"lasttoken": "last"}.get(mode, short(mode))
    return " and ".join(word for key, word in _MODES.items() if said.get(key) is True)


def _positions(said: Object) -> int:
    """For how many tokens a model has positions, by its config.json."""
    most = _count(said.get("max_position_embeddings")) or _count(said.get("n_positions"))
    behind = _count(said.get("pad_token_id")) + 1 if said.get("model_type") in _AFTER_PADDING else 0
    return max(0, most - behind)


def _names(said: Object) -> list[str]:
    found = said.get("architectures")
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def _cut_at(tokenizer: str) -> int:
    """What a tokenizer.json truncates to, by its beginning."""
    try:
        with open_regular(tokenizer) as file:
            found = _CUT_AT.search(file.read(_HEAD).decode(errors="replace"))
    except OSError:  # The library says it when it reads the file.
        return 0
    return int(found[1]) if found else 0


def _count(value: object) -> int:
    """A number of tokens, 0 for anything else."""
    return value if type(value) is int and 0 < value <= _MOST_SAID else 0
