"""What an encoder model takes and gives for texts: which tensors, padded batches, pooling. Pure."""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from engines import Signature, TensorSpec

from ..config.text import TextOptions
from ..errors import Failed
from .folder import NoEncoder, TextFolder
from .tokenizer import Tokens

_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
_OUTPUTS = ("sentence_embedding", "logits", "last_hidden_state", "token_embeddings")
"""The outputs that are looked for, in this order, if the configuration names none."""
_MOST_TOKENS = 512
_POOLINGS = ("mean", "cls", "last", "max")
_ANY = 1 << 30
_STEP = 8
"""Lengths are padded to a multiple of this, so that requests have few different shapes and join into batches."""


class Filled(NamedTuple):
    """A batch: the shape of each input, and its array, in the signature's order."""

    shapes: tuple[tuple[int, ...], ...]
    arrays: list[Any]


class Encoder:
    """A model for texts. Raises NoEncoder for a model of another kind.

    `rows` is the most texts in a run, `most` the most tokens of one. What the `options` leave open is as the `folder` says, and
    `notes` are lines on what they have otherwise.
    """

    def __init__(self, signature: Signature, options: TextOptions, folder: TextFolder, pad: int = 0) -> None:
        if folder.refusal:
            raise NoEncoder(folder.refusal)
        self.options = options
        self._pad = pad
        self._inputs = signature.inputs
        for spec in self._inputs:
            if spec.name not in _INPUTS or spec.datatype.name not in ("INT64", "INT32") or len(spec.dims) != 2:
                known = ", ".join(_INPUTS)
                raise NoEncoder(f"input {spec.name!r} is {spec.datatype}{list(spec.shape)}; expected {known}, of integers")
        if _INPUTS[0] not in [spec.name for spec in self._inputs]:
            raise NoEncoder("it has no input 'input_ids'")
        self._output, self._rank = self._find_output(signature)
        self.unasked = signature.unasked((self._output.position,))
        """As in `Room`: all outputs but the one that is read."""
        self.rows = signature.max_batch or 1
        self._least, self._fixed, most = self._lengths()
        self.most = min(options.max_tokens or folder.most or _MOST_TOKENS, most)
        self.pooling = options.pooling or folder.pooling or _POOLINGS[0]
        self.normalize = next((each for each in (options.normalize, folder.normalize) if each is not None), True)
        self.notes = _notes(options, folder, self._rank)
        if options.task == "embed":
            self._check_modules(folder)

    @property
    def is_free(self) -> bool:
        """Whether no shape of the model limits the length of texts."""
        return self.most < _ANY and not self._fixed and all(len(spec.limits) < 2 for spec in self._inputs)

    def batches(self, tokens: Sequence[Tokens]) -> list[list[int]]:
        """The numbers of texts for each run: those of similar lengths together, as each is padded to the longest."""
        order = sorted(range(len(tokens)), key=lambda index: len(tokens[index].ids))
        return [order[start : start + self.rows] for start in range(0, len(order), self.rows)]

    def fill(self, tokens: Sequence[Tokens]) -> Filled:
        """The inputs of one run."""
        length = max(len(each.ids) for each in tokens)
        length = self._fixed or min(max(-(-length // _STEP) * _STEP, self._least), self.most)
        ids = np.full((len(tokens), length), self._pad, np.int64)
        mask, types = np.zeros_like(ids), np.zeros_like(ids)
        for row, each in enumerate(tokens):
            size = len(each.ids)
            ids[row, :size] = each.ids
            mask[row, :size] = 1
            if each.types is not None:
                types[row, :size] = each.types
        found = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        if any(spec.name == "position_ids" for spec in self._inputs):
            found["position_ids"] = np.maximum(mask.cumsum(1) - 1, 0)
        arrays = [found[spec.name].astype(spec.datatype.numpy, copy=False) for spec in self._inputs]
        return Filled(tuple([array.shape for array in arrays]), arrays)

    def longest(self) -> Filled:
        """The inputs of one run of a text of `most` tokens."""
        return self.fill([Tokens([self._pad] * self.most)])

    def result(self, tokens: Sequence[Tokens], outputs: Sequence[tuple[tuple[int, ...], memoryview]]) -> Any:
        """A row of float32 for each text, of an array of its own: its embedding, or its score alone.

        Raises Failed if the model gave NaN or an infinity: JSON has no such numbers, and NaN has no place in an order.
        """
        shape, data = outputs[self._output.position]
        values = np.frombuffer(data, self._output.spec.datatype.numpy).reshape(shape)
        if self.options.task == "rerank":
            logits = self._numbers(values.reshape(len(tokens), -1)[:, -1:].astype(np.float32))
            return np.exp(-np.logaddexp(np.float32(0), -logits))  # 1 / (1 + exp(-logits)), where that would overflow.
        pooled = self._numbers(self._pooled(tokens, values) if self._rank == 3 else values.astype(np.float32))
        if self.normalize:
            pooled /= np.maximum(np.sqrt((pooled * pooled).sum(1, keepdims=True)), 1e-12)
        return pooled

    def _numbers(self, rows: Any) -> Any:
        if not np.isfinite(rows).all():
            raise Failed(f"output {self._output.spec.name!r} of the model has values that are no finite numbers")
        return rows

    def _pooled(self, tokens: Sequence[Tokens], values: Any) -> Any:
        sizes = [len(each.ids) for each in tokens]
        if self.pooling == "cls":
            return values[:, 0].astype(np.float32)
        if self.pooling == "last":
            return values[range(len(sizes)), [size - 1 for size in sizes]].astype(np.float32)
        if self.pooling == "max":
            return np.stack([values[row, :size].max(0) for row, size in enumerate(sizes)]).astype(np.float32)
        pooled = np.empty((len(sizes), values.shape[2]), np.float32)
        for row, size in enumerate(sizes):
            values[row, :size].mean(0, dtype=np.float32, out=pooled[row])
        return pooled

    def _check_modules(self, folder: TextFolder) -> None:
        """Raise NoEncoder for what the folder says of embeddings and is not done here. Pooled outputs have it in the graph."""
        name = self._output.spec.name
        if folder.classifies and name == "logits" and not self.options.output:
            raise NoEncoder(f"config.json says that it is a {folder.classifies}, which gives scores; set text.task = 'rerank'")
        if self._rank != 3:
            return
        if folder.modules:
            those = " and ".join(folder.modules)
            raise NoEncoder(
                f"modules.json has {those}, which output {name!r} is without; export the model with its sentence_embedding, as "
                "optimum-cli does for a model of sentence-transformers"
            )
        if self.pooling not in _POOLINGS:
            raise NoEncoder(f"its pooling is {self.pooling}, which is not done here; set text.pooling to another one")

    def _find_output(self, signature: Signature) -> "tuple[_Output, int]":
        named = {spec.name: _Output(index, spec) for index, spec in enumerate(signature.outputs)}
        wanted = [self.options.output] if self.options.output else [*_OUTPUTS, *named]
        if (found := next((named[name] for name in wanted if name in named), None)) is None:
            raise NoEncoder(f"it has no output {self.options.output!r}; it has {', '.join(map(repr, named))}")
        rank, name = len(found.spec.dims), found.spec.name
        if found.spec.datatype.name not in ("FP32", "FP16", "FP64"):
            raise NoEncoder(f"output {name!r} is {found.spec.datatype}; expected FP32, FP16 or FP64")
        if self.options.task == "rerank" and (rank != 2 or found.spec.dims[1] not in (1, *_names(found.spec))):
            raise NoEncoder(f"output {name!r} has shape {list(found.spec.shape)}; expected a score for each pair, [-1, 1]")
        if self.options.task == "embed" and rank not in (2, 3):
            raise NoEncoder(f"output {name!r} has shape {list(found.spec.shape)}; expected tokens or texts by features")
        return found, rank

    def _lengths(self) -> tuple[int, int, int]:
        """The shortest and the only length that the model takes, 0 for any, and the longest."""
        least, fixed, most = 0, 0, _ANY
        for spec in self._inputs:
            size = spec.dims[1]
            if isinstance(size, int):
                fixed, most = size, min(most, size)
            elif len(spec.limits) > 1:
                least, most = max(least, spec.limits[1][0]), min(most, spec.limits[1][1])
        return least, fixed, most


def _names(spec: TensorSpec) -> list[str]:
    return [dim for dim in spec.dims if isinstance(dim, str)]


def _notes(options: TextOptions, folder: TextFolder, rank: int) -> tuple[str, ...]:
    """Where the configuration has it otherwise than the model's files, or more tokens: it is followed."""
    said = {
        "pooling": (options.pooling or None, folder.pooling if rank == 3 and folder.pooling else None),
        "normalize": (options.normalize, folder.normalize),
        "max_tokens": (options.max_tokens or None, min(options.max_tokens or 0, folder.most) or None),
    }
    return tuple(
        f"text.{key} is {json.dumps(ours)}, which goes before what the files beside tokenizer.json say, {json.dumps(theirs)}"
        for key, (ours, theirs) in said.items()
        if None not in (ours, theirs) and ours != theirs
    )


class _Output(NamedTuple):
    position: int
    spec: TensorSpec


def cosines(one: Any, others: Any) -> list[float]:
    """The cosine of an embedding and each of others."""
    norms = np.maximum(np.linalg.norm(others, axis=1) * math.sqrt(float(one @ one)), 1e-12)
    found: list[float] = np.clip(np.einsum("ij,j->i", others, one) / norms, -1, 1).tolist()
    return found
