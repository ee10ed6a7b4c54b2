"""Limits of encoders that only the model knows: the longest text is run once when it is loaded."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engines import load_engine
from partitions.cpu import CpuPartition
from server.config.schema import ModelOptions
from server.device.loaded_model import LoadedModel
from server.device.model_loader import ModelLoader
from server.repository.model_repository import Repository
from tests import encoders

Load = Callable[..., LoadedModel]


@pytest.fixture
def load(tmp_path: Path, partition: CpuPartition) -> Iterator[Load]:
    """Loads an encoder of 32 positions, with such a table `text` and these files beside its tokenizer."""
    encoders.write(tmp_path, "encoder", encoders.encoder(positions=32))
    loaders: list[ModelLoader] = []
    executors: list[Any] = []

    def loaded(files: dict[str, Any] | None = None, **text: Any) -> LoadedModel:
        for name, content in (files or {}).items():
            (tmp_path / "encoder" / name).write_text(json.dumps(content))
        options = {"encoder": ModelOptions.model_validate({"text": text})} if text else {}
        loaders.append(ModelLoader(Repository(tmp_path, options), lambda path, *_: load_engine(path)))
        found = loaders[-1].attempt("encoder", partition)
        executors.extend(found.executors.values())
        return found

    yield loaded
    for executor in executors:
        executor.close()
    for loader in loaders:
        with closing(loader):
            pass


def test_a_text_that_the_model_does_not_take_is_found_when_it_is_loaded(load: Load) -> None:
    (problem,) = load().problems
    assert problem.reason.startswith("a text of 512 tokens, the longest that requests may have, fails: ")
    assert "32 by 512" in problem.reason
    assert problem.reason.endswith("; set max_tokens of the table text in [models.encoder] to the most that the model takes")


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, {"max_tokens": 32}),
        ({"config.json": {"max_position_embeddings": 32}}, {}),
        ({"tokenizer_config.json": {"model_max_length": 32}}, {"pooling": "cls"}),
        ({"config.json": {"max_position_embeddings": 8192}}, {}),
    ],
)
def test_what_the_files_or_the_configuration_say_is_run_up_to_1024_tokens(
    load: Load, files: dict[str, Any], text: dict[str, Any]
) -> None:
    loaded = load(files, **text)
    assert (loaded.problems, loaded.warnings, len(loaded.served)) == ([], [], 1)


def test_a_model_that_takes_no_texts_says_why_and_is_served(load: Load) -> None:
    loaded = load({"config_sentence_transformers.json": {"default_prompt_name": "query"}})
    assert len(loaded.served) == 1
    (line,) = loaded.warnings
    assert line.startswith("model encoder 1 does not take texts: config_sentence_transformers.json puts the prompt 'query'")


def test_keys_that_contradict_the_files_are_said(load: Load) -> None:
    files = {"sentence_bert_config.json": {"max_seq_length": 16}}
    (line,) = load(files, max_tokens=32).warnings
    assert line.startswith(
        "model encoder 1: text.max_tokens is 32, which goes before what the files beside tokenizer.json say, 16"
    )
