"""Small encoder models with random weights, and tokenizers that are trained on the spot: nothing is downloaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, pre_tokenizers, processors, trainers
from tokenizers import models as tokenizer_models

WORDS = [
    "the",
    "cat",
    "dog",
    "car",
    "sat",
    "ran",
    "sleeps",
    "on",
    "under",
    "mat",
    "road",
    "tree",
    "red",
    "old",
    "brown",
    "over",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
NAMES = ("input_ids", "attention_mask", "token_type_ids")


def texts(count: int, words: int, seed: int = 0) -> list[str]:
    """Texts of so many words each."""
    chosen = np.random.default_rng(seed).choice(WORDS, (count, words))
    return [" ".join(row) for row in chosen]


def write_tokenizer(path: Path, most: int = 0) -> None:
    """Train a tokenizer of words, with [CLS] and [SEP] around texts and pairs. `most`: it truncates to that."""
    tokenizer = Tokenizer(tokenizer_models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(vocab_size=256, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(texts(200, 12), trainer)
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    if most:
        tokenizer.enable_truncation(most)
    tokenizer.save(str(path))


def encoder(
    layers: int = 2,
    hidden: int = 32,
    scores: bool = False,
    pooled: bool = False,
    vocabulary: int = 256,
    seed: int = 0,
    positions: int = 0,
) -> bytes:
    """An ONNX file: token embeddings and layers of attention and a feed-forward part, as BERT has them.

    It gives `last_hidden_state`, or `pooled` the mean of that as `sentence_embedding`, or for a cross-encoder `logits`, one a
    row, from the first token. With `positions` it has a table of so many, and fails for longer texts.
    """
    random, nodes, weights = np.random.default_rng(seed), list[Any](), list[Any]()

    def weight(name: str, *shape: int, scale: float = 0.3) -> str:
        weights.append(numpy_helper.from_array(random.normal(0, scale, shape).astype(np.float32), name))
        return name

    def constant(name: str, value: Any) -> str:
        weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(kind: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    there = mask = node("Cast", ["attention_mask"], "mask", to=TensorProto.FLOAT)
    mask = node("Sub", [constant("one", np.float32(1)), mask], "absent")
    mask = node("Mul", [mask, constant("much", np.float32(-1e9))], "far")
    mask = node("Unsqueeze", [mask, constant("axis", np.array([1]))], "bias")
    x = node("Gather", [weight("words", vocabulary, hidden), "input_ids"], "embedded")
    types = node("Gather", [weight("types", 2, hidden), "token_type_ids"], "typed")
    x = node("Add", [x, types], "begin")
    if positions:
        length = node(
            "Slice",
            [node("Shape", ["input_ids"], "shape"), constant("i1", np.array([1])), constant("i2", np.array([2]))],
            "length",
        )
        used = node("Slice", [weight("positions", positions, hidden), constant("i0", np.array([0])), length], "used")
        x = node("Add", [x, used], "placed")
    scale, bias = constant("gamma", np.ones(hidden, np.float32)), constant("beta", np.zeros(hidden, np.float32))
    root = constant("root", np.float32(hidden**-0.5))
    for n in range(layers):
        q, k, v = (node("MatMul", [x, weight(f"w{n}{p}", hidden, hidden, scale=hidden**-0.5)], f"{p}{n}") for p in "qkv")
        turned = node("Transpose", [k], f"t{n}", perm=[0, 2, 1])
        found = node("Mul", [node("MatMul", [q, turned], f"qk{n}"), root], f"s{n}")
        found = node("Softmax", [node("Add", [found, mask], f"m{n}")], f"p{n}", axis=-1)
        x = node("Add", [x, node("MatMul", [found, v], f"a{n}")], f"r{n}")
        x = node("LayerNormalization", [x, scale, bias], f"l{n}")
        wide = node("MatMul", [x, weight(f"up{n}", hidden, 4 * hidden, scale=hidden**-0.5)], f"u{n}")
        wide = node("Relu", [wide], f"z{n}")
        x = node("Add", [x, node("MatMul", [wide, weight(f"down{n}", 4 * hidden, hidden, scale=0.1)], f"d{n}")], f"f{n}")
        x = node("LayerNormalization", [x, scale, bias], f"e{n}" if n < layers - 1 or scores or pooled else "last_hidden_state")
    output = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "length", hidden])
    if scores:
        x = node("Gather", [x, constant("first", np.int64(0))], "cls", axis=1)
        node("MatMul", [x, weight("head", hidden, 1)], "logits")
        output = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1])
    if pooled:
        last = constant("last", np.array([2]))
        parts = node("Mul", [x, node("Unsqueeze", [there, last], "column")], "parts")
        summed = node("ReduceSum", [parts, "axis"], "summed", keepdims=0)
        node("Div", [summed, node("ReduceSum", [there, "axis"], "sizes", keepdims=1)], "sentence_embedding")
        output = helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, ["batch", hidden])
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in NAMES]
    graph = helper.make_graph(nodes, "encoder", inputs, [output], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    found_bytes: bytes = model.SerializeToString()
    return found_bytes


def write(root: Path, name: str, file: bytes, max_batch: int = 8, most: int = 0) -> None:
    """Put an encoder and a tokenizer into a repository."""
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(file)
    write_tokenizer(root / name / "tokenizer.json", most)
    (root / name / "config.pbtxt").write_text(f"max_batch_size: {max_batch}")
