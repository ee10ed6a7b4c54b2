"""What the files of Hugging Face and sentence-transformers beside a tokenizer say, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engines import Signature, TensorSpec
from engines.datatypes import DATATYPES
from server.config.text import TextOptions
from server.text.encoder import Encoder
from server.text.folder import NoEncoder, TextFolder, read_folder
from server.text.tokenizer import TextTokenizer
from tests import encoders

IDS = TensorSpec("input_ids", DATATYPES["INT64"], ("b", "n"))
HIDDEN = TensorSpec("last_hidden_state", DATATYPES["FP32"], ("b", "n", 4))
POOLED = TensorSpec("sentence_embedding", DATATYPES["FP32"], ("b", 4))
KINDS = ("Transformer", "Pooling", "Normalize")


def modules(*kinds: str) -> list[dict[str, Any]]:
    """A modules.json of these, as sentence-transformers writes it."""
    prefix = "sentence_transformers.models."
    paths = ["" if kind == "Transformer" else f"{index}_{kind}" for index, kind in enumerate(kinds)]
    return [
        {"idx": index, "name": str(index), "path": path, "type": prefix + kind}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]


def pooling(*on: str) -> dict[str, Any]:
    words = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {"word_embedding_dimension": 4, **{f"pooling_mode_{word}": word in on for word in words}, "include_prompt": True}


def read(root: Path, files: dict[str, Any], truncated: int = 0) -> TextFolder:
    """The folder of a model with these files beside its tokenizer."""
    (root / "1").mkdir(exist_ok=True)
    encoders.write_tokenizer(root / "tokenizer.json", truncated)
    for name, content in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(content if isinstance(content, str) else json.dumps(content))
    folder = read_folder(root, "1")
    assert folder is not None
    return folder


def used(folder: TextFolder, options: TextOptions = TextOptions(), output: TensorSpec = HIDDEN) -> Encoder:  # noqa: B008
    return Encoder(Signature((IDS,), (output,), max_batch=4), options, folder)


def refusal(folder: TextFolder, options: TextOptions = TextOptions(), output: TensorSpec = HIDDEN) -> str:  # noqa: B008
    with pytest.raises(NoEncoder) as caught:
        used(folder, options, output)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "kinds", "expected"),
    [
        (["cls_token"], KINDS, ("cls", True)),
        (["mean_tokens"], KINDS[:2], ("mean", False)),
        (["max_tokens"], KINDS, ("max", True)),
        (["lasttoken"], KINDS, ("last", True)),
    ],
)
def test_pooling_and_normalization_are_the_folders(
    tmp_path: Path, words: list[str], kinds: list[str], expected: tuple[str, bool]
) -> None:
    folder = read(tmp_path, {"modules.json": modules(*kinds), "1_Pooling/config.json": pooling(*words)})
    found = used(folder)
    assert (found.pooling, found.normalize, found.notes) == (*expected, ())
    assert "1_Pooling" in folder.folders


def test_newer_folders_name_the_pooling_in_a_word(tmp_path: Path) -> None:
    for word, expected in (("cls", "cls"), ("lasttoken", "last"), ("mean", "mean")):
        files = {"modules.json": modules(*KINDS), "1_Pooling/config.json": {"pooling_mode": word}}
        assert used(read(tmp_path, files)).pooling == expected


def test_without_files_beside_the_tokenizer_it_is_the_mean_of_length_1_and_512_tokens(tmp_path: Path) -> None:
    found = used(read(tmp_path, {}))
    assert (found.pooling, found.normalize, found.most) == ("mean", True, 512)


@pytest.mark.parametrize(
    ("files", "truncated", "most"),
    [
        ({"sentence_bert_config.json": {"max_seq_length": 256}}, 128, 256),
        ({"sentence_bert_config.json": {"max_seq_length": None}, "config.json": {"max_position_embeddings": 32}}, 0, 32),
        ({"config.json": {"max_position_embeddings": 8192}}, 0, 8192),
        ({"tokenizer_config.json": {"model_max_length": 8192}}, 0, 8192),
        ({"tokenizer_config.json": {"model_max_length": 1000000000000000019884624838656}}, 0, 512),
        ({"tokenizer_config.json": {"model_max_length": 64}, "config.json": {"max_position_embeddings": 512}}, 100, 64),
        ({}, 100, 100),
        ({"config.json": {"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}}, 0, 512),
        ({"config.json": {"model_type": "nomic_bert", "n_positions": 2048}}, 0, 2048),
        ({"sentence_roberta_config.json": {"max_seq_length": 75}}, 0, 75),
    ],
)
def test_the_longest_text_is_what_the_files_say(tmp_path: Path, files: dict[str, Any], truncated: int, most: int) -> None:
    assert used(read(tmp_path, files, truncated)).most == most


def test_files_beside_the_version_go_before_the_models(tmp_path: Path) -> None:
    folder = read(tmp_path, {"config.json": {"max_position_embeddings": 64}})
    (tmp_path / "1" / "config.json").write_text('{"max_position_embeddings": 32}')
    assert (folder.most, used(read(tmp_path, {})).most) == (64, 32)


def test_what_the_configuration_says_goes_first_and_is_said(tmp_path: Path) -> None:
    files = {
        "modules.json": modules(*KINDS),
        "1_Pooling/config.json": pooling("cls_token"),
        "sentence_bert_config.json": {"max_seq_length": 64},
    }
    folder = read(tmp_path, files)
    found = used(folder, TextOptions(pooling="mean", normalize=False, max_tokens=100))
    assert (found.pooling, found.normalize, found.most) == ("mean", False, 100)
    goes = "which goes before what the files beside tokenizer.json say"
    assert found.notes == (
        f'text.pooling is "mean", {goes}, "cls"',
        f"text.normalize is false, {goes}, true",
        f"text.max_tokens is 100, {goes}, 64",
    )
    assert used(folder, TextOptions(pooling="cls", normalize=True, max_tokens=8)).notes == ()


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            {"modules.json": modules(*KINDS)},
            "modules.json names 1_Pooling, and there is no 1_Pooling/config.json: copy it too",
        ),
        ({"modules.json": "[{"}, "modules.json is not JSON (Expecting property name"),
        ({"modules.json": {"a": 1}}, "modules.json is no list of modules with their types"),
        ({"modules.json": [{"type": "Pooling", "path": "../../x"}]}, "modules.json has the path '../../x'; expected a folder"),
        ({"config.json": "[]"}, "config.json is no object of JSON"),
        ({"config.json": "[" * 100_000}, "config.json is not JSON"),
        (
            {"config_sentence_transformers.json": {"prompts": {"query": "query: "}, "default_prompt_name": "query"}},
            "config_sentence_transformers.json puts the prompt 'query' before each text, which is not done here: set its ",
        ),
        (
            {"modules.json": modules("Transformer", "Pooling", "Dense"), "1_Pooling/config.json": pooling("mean_tokens")},
            "modules.json has Dense, which output 'last_hidden_state' is without; export the model with its sentence_embedding",
        ),
        (
            {"modules.json": modules(*KINDS), "1_Pooling/config.json": pooling("weightedmean_tokens")},
            "its pooling is weightedmean, which is not done here; set text.pooling to another one",
        ),
        (
            {"modules.json": modules(*KINDS), "1_Pooling/config.json": pooling("cls_token", "mean_tokens")},
            "its pooling is cls and mean, which is not done here",
        ),
    ],
)
def test_what_is_said_and_not_done_is_refused(tmp_path: Path, files: dict[str, Any], reason: str) -> None:
    assert refusal(read(tmp_path, files)).startswith(reason)


def test_an_output_that_is_pooled_has_the_modules_in_the_graph(tmp_path: Path) -> None:
    kinds = modules("Transformer", "Pooling", "Dense", "Normalize")
    folder = read(tmp_path, {"modules.json": kinds, "1_Pooling/config.json": pooling("weightedmean_tokens")})
    assert used(folder, output=POOLED).normalize


def test_a_classifier_gives_scores(tmp_path: Path) -> None:
    folder = read(tmp_path, {"config.json": {"architectures": ["BertForSequenceClassification"]}})
    logits = TensorSpec("logits", DATATYPES["FP32"], ("b", 1))
    assert "BertForSequenceClassification, which gives scores; set text.task = 'rerank'" in refusal(folder, output=logits)
    used(folder, TextOptions(task="rerank"), logits)
    used(folder, TextOptions(output="logits"), logits)


def words_of(folder: TextFolder, text: str, most: int = 512) -> list[str]:
    (found,) = TextTokenizer(folder).encode([text], most, True, "input")
    library = Tokenizer.from_file(folder.tokenizer)
    return [library.id_to_token(token) for token in found.ids]


def test_texts_are_made_lower_case_where_the_folder_says_so(tmp_path: Path) -> None:
    assert words_of(read(tmp_path, {}), "The CAT") == ["[CLS]", "[UNK]", "[UNK]", "[SEP]"]
    folder = read(tmp_path, {"sentence_bert_config.json": {"max_seq_length": 16, "do_lower_case": True}})
    assert words_of(folder, "The CAT") == ["[CLS]", "the", "cat", "[SEP]"]
    (pair,) = TextTokenizer(folder).encode([("The CAT", "A Dog")], 16, False, "documents")
    assert pair == TextTokenizer(folder).encode([("the cat", "a dog")], 16, False, "documents")[0]


def test_the_side_that_is_cut_is_the_folders(tmp_path: Path) -> None:
    text = "the cat sat on the mat"
    assert words_of(read(tmp_path, {}), text, 4) == ["[CLS]", "the", "cat", "[SEP]"]
    folder = read(tmp_path, {"tokenizer_config.json": {"truncation_side": "left", "do_lower_case": False}})
    assert words_of(folder, text, 4) == ["[CLS]", "the", "mat", "[SEP]"]
    (ids,) = TextTokenizer(folder).encode([[1, 2, 3, 4, 5]], 3, True, "input")
    assert list(ids.ids) == [3, 4, 5]


def test_a_folder_without_a_tokenizer_is_none(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(modules(*KINDS)))
    assert read_folder(tmp_path, "1") is None
