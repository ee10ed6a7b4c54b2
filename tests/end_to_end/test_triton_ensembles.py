"""Ensembles as Triton's L0_infer, L0_infer_variable and L0_infer_zero have them, over HTTP and gRPC.

Their steps are the models of `test_triton_exact.py`, and models in ONNX in place of Triton's identity backend.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from onnx import helper

from .fixtures import served_with
from .harness import Served, configuration, serving
from .test_clients import given
from .test_triton_exact import TYPES, Types, acme, as_type, ask, check_classes, every_way, name_of, save, write

INTS, FLOATS = ("int32", "float32", "float32"), ("float32", "int32", "int32")
TEXTS, TO_TEXTS = ("object", "int32", "int32"), ("int32", "object", "object")
KINDS: list[tuple[str, Types]] = [
    *((kind, types) for kind in ("simple", "sequence", "fan") for types in (INTS, FLOATS, ("int64",) * 3)),
    *(("simple", TEXTS), ("simple", TO_TEXTS), ("sequence", TO_TEXTS)),
]
"""Triton has no others with texts either: its identity takes none."""
Step = tuple[str, dict[str, str], dict[str, str]]
"""A model, and its inputs and outputs with the names that they have in the ensemble."""
PAIR = {"INPUT0": "INPUT0", "INPUT1": "INPUT1"}
RESULTS = {"OUTPUT0": "OUTPUT0", "OUTPUT1": "OUTPUT1"}


def two_identities(root: Path, kind: str, rank: int, batch: bool = True) -> str:
    """OUTPUTn is INPUTn, for two tensors of any sizes; returns the model's name."""
    name = f"same{'' if batch else '_nobatch'}_{kind}_{rank}"
    if not (root / name).exists():
        code, stated, *_ = TYPES[kind]
        made = [
            helper.make_tensor_value_info(each, code, [*[None] * batch, *(f"{each}_{n}" for n in range(rank))])
            for each in (*PAIR, *RESULTS)
        ]
        nodes = [helper.make_node("Identity", [f"INPUT{n}"], [f"OUTPUT{n}"]) for n in range(2)]
        save(root / name, helper.make_graph(nodes, "same", made[:2], made[2:]))
        configure(root / name, 8 * batch, [stated] * 4, (-1,) * rank)
    return name


def configure(folder: Path, most: int, kinds: Sequence[str], dims: tuple[int, ...], rest: str = "") -> None:
    names = (*PAIR, *RESULTS)
    tensors = [
        f'{name[:-1].lower()} {{ name: "{name}" data_type: {kind} dims: {list(dims)} }}'
        for name, kind in zip(names, kinds, strict=True)
    ]
    (folder / "config.pbtxt").write_text("\n".join([f"max_batch_size: {most}", *tensors, rest]))


def write_ensemble(
    root: Path, name: str, types: Types, dims: tuple[int, ...], most: int, steps: Sequence[Step], label: bool = False
) -> None:
    (root / name / "1").mkdir(parents=True)
    made = []
    for model, inputs, outputs in steps:
        maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
        maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
        made.append(f'step {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}')
    text = f'platform: "ensemble"\nensemble_scheduling {{ {" ".join(made)} }}'
    configure(root / name, most, [TYPES[kind][1] for kind in (types[0], *types)], dims, text)
    if label:
        stated = (root / name / "config.pbtxt").read_text()
        output = 'name: "OUTPUT0"'
        (root / name / "config.pbtxt").write_text(stated.replace(output, f'{output} label_filename: "own.txt"'))
        (root / name / "own.txt").write_text("".join(f"own{n}\n" for n in range(16)))


def steps_of(root: Path, kind: str, types: Types, rank: int, batch: bool) -> list[Step]:
    """The model alone; behind one that passes its inputs on; and, besides, with each output passed on by another."""
    model = name_of(types, batch)
    if kind == "simple":
        return [(model, PAIR, RESULTS)]
    before = two_identities(root, types[0], rank, batch)
    passed = {"INPUT0": "passed0", "INPUT1": "passed1"}
    first = (before, PAIR, {"OUTPUT0": "passed0", "OUTPUT1": "passed1"})
    if kind == "sequence":
        return [first, (model, passed, RESULTS)]
    after = [two_identities(root, each, rank, batch) for each in types[1:]]
    return [
        first,
        (model, passed, {"OUTPUT0": "made0", "OUTPUT1": "made1"}),
        *((name, dict.fromkeys(PAIR, f"made{n}"), {f"OUTPUT{n}": f"OUTPUT{n}"}) for n, name in enumerate(after)),
    ]


def write_all(root: Path) -> None:
    for types in {types for _, types in KINDS}:
        for batch in (True, False):
            write(root, types, (16,), batch)
    for kind, types in KINDS:
        for batch in (True, False):
            steps = steps_of(root, kind, types, 1, batch)
            write_ensemble(root, f"{kind}_{name_of(types, batch)}", types, (16,), 8 * batch, steps)
    write(root, ("float32",) * 3, (-1, -1), True)
    varying = steps_of(root, "fan", ("float32",) * 3, 2, True)
    write_ensemble(root, "varying", ("float32",) * 3, (-1, -1), 8, varying)
    passing = [(two_identities(root, "float32", 2), PAIR, {"OUTPUT0": "a", "OUTPUT1": "b"})]
    passing.append((passing[0][0], {"INPUT0": "a", "INPUT1": "b"}, RESULTS))
    write_ensemble(root, "passing", ("float32",) * 3, (-1, -1), 8, passing)
    write_mixed(root)
    write_labelled(root)


def write_mixed(root: Path) -> None:
    """Types that change from step to step, and steps with and without batches."""
    through_texts: list[Step] = [
        (name_of(TO_TEXTS, True), PAIR, {"OUTPUT0": "sum", "OUTPUT1": "difference"}),
        (name_of(TEXTS, True), {"INPUT0": "sum", "INPUT1": "difference"}, {"OUTPUT0": "a", "OUTPUT1": "b"}),
        (name_of(INTS, True), {"INPUT0": "a", "INPUT1": "b"}, RESULTS),
    ]
    write_ensemble(root, "mixed_types", INTS, (16,), 8, through_texts)
    plain = two_identities(root, "float32", 2, batch=False)
    works: Step = (name_of(INTS, True), PAIR, {"OUTPUT0": "a", "OUTPUT1": "b"})
    steps = [works, (plain, {"INPUT0": "a", "INPUT1": "b"}, RESULTS)]
    write_ensemble(root, "batch_to_nobatch_nobatch", INTS, (8, 16), 0, steps)
    before: Step = (two_identities(root, "int32", 2, batch=False), PAIR, {"OUTPUT0": "c", "OUTPUT1": "d"})
    after: Step = (name_of(INTS, True), {"INPUT0": "c", "INPUT1": "d"}, RESULTS)
    write_ensemble(root, "nobatch_to_batch_nobatch", INTS, (8, 16), 0, [before, after])
    write_ensemble(root, "batch_to_nobatch", INTS, (16,), 8, steps)


def write_labelled(root: Path) -> None:
    """OUTPUT0 of `onnx_...` has labels."""
    write_ensemble(root, "labels_of_the_step", INTS, (16,), 8, [(name_of(INTS, True), PAIR, RESULTS)])
    write_ensemble(root, "labels_of_its_own", INTS, (16,), 8, [(name_of(INTS, True), PAIR, RESULTS)], label=True)
    crossed = {"OUTPUT0": "OUTPUT1", "OUTPUT1": "OUTPUT0"}
    write_ensemble(root, "labels_crossed", INTS, (16,), 8, [(name_of(INTS, True), PAIR, crossed)])


served = served_with(acme, fill=write_all)


def numbers(shape: tuple[int, ...]) -> list[Any]:
    return [np.random.default_rng(seed).integers(0, 60, shape) for seed in range(2)]


def check(served: Served, how: str, model: str, types: Types, given: list[Any], expected: list[Any]) -> None:
    result = ask(served, how, model, [as_type(each, types[0]) for each in given], (0, 0))
    for n, each in enumerate(expected):
        found = result.as_numpy(f"OUTPUT{n}")
        assert found.shape == each.shape
        assert found.astype(np.float64).tolist() == each.tolist()


@pytest.mark.parametrize(("kind", "types"), KINDS, ids=lambda value: value if isinstance(value, str) else "_".join(value))
@every_way("served")
def test_an_ensemble_answers_as_its_model(served: Served, kind: str, types: Types, how: str) -> None:
    for rows in (0, 1, 8):
        a, b = numbers((rows, 16) if rows else (16,))
        check(served, how, f"{kind}_{name_of(types, bool(rows))}", types, [a, b], [a + b, a - b])


@pytest.mark.parametrize("sizes", [(2, 8), (1, 1), (1, 0), (0, 1), (0, 0)])
@every_way("served")
def test_sizes_that_vary_and_tensors_without_elements(served: Served, sizes: tuple[int, int], how: str) -> None:
    for rows in (1, 8):
        a, b = numbers((rows, *sizes))
        check(served, how, "passing", ("float32",) * 3, [a, b], [a, b])
        check(served, how, "varying", ("float32",) * 3, [a, b], [a - b, a + b])  # The highest version swaps them.


@every_way("served")
def test_types_that_change_from_step_to_step(served: Served, how: str) -> None:
    for rows in (1, 8):
        a, b = numbers((rows, 16))
        check(served, how, "mixed_types", INTS, [a, b], [2 * a + 2 * b, 2 * a - 2 * b])


@pytest.mark.parametrize("model", ["batch_to_nobatch_nobatch", "nobatch_to_batch_nobatch"])
@every_way("served")
def test_a_step_with_batches_in_an_ensemble_without(served: Served, model: str, how: str) -> None:
    a, b = numbers((8, 16))
    check(served, how, model, INTS, [a, b], [a + b, a - b])


def test_a_step_without_batches_in_an_ensemble_with_batches_is_refused(served: Served) -> None:
    """Triton runs it, one request after another; here it would get the rows of several requests in one tensor."""
    index = httpx.post(f"{served.url}/v2/repository/index").json()
    (entry,) = (entry for entry in index if entry["name"] == "batch_to_nobatch")
    why = "step[1] (same_nobatch_float32_2) takes no batches, as it has no max_batch_size"
    assert (entry["state"], why in entry["reason"]) == ("UNAVAILABLE", True)


@pytest.mark.parametrize(
    ("model", "labels"),
    [("labels_of_the_step", ("label{}", "")), ("labels_of_its_own", ("own{}", "")), ("labels_crossed", ("", "label{}"))],
)
@every_way("served")
def test_outputs_have_the_labels_of_the_step_that_makes_them(
    served: Served, model: str, labels: tuple[str, str], how: str
) -> None:
    """As test_ensemble_label_lookup."""
    for rows in (1, 8):
        a, b = numbers((rows, 16))
        result = ask(served, how, model, [as_type(each, "int32") for each in (a, b)], (3, 3))
        expected = [a - b, a + b] if model == "labels_crossed" else [a + b, a - b]
        for n, each in enumerate(expected):
            check_classes(result.as_numpy(f"OUTPUT{n}"), each, True, labels[n])


def test_a_step_that_is_loaded_again_brings_its_labels(tmp_path: Path) -> None:
    write(tmp_path, INTS, (16,), True)
    write_labelled(tmp_path)
    with serving(configuration(tmp_path)) as mine, triton.InferenceServerClient(mine.address) as client:
        step = name_of(INTS, True)
        (tmp_path / step / "output0_labels.txt").write_text("other\n" * 16)
        client.load_model(step)
        inputs = [given(f"INPUT{n}", "INT32", np.full((1, 16), n, np.int32)) for n in range(2)]
        wanted = [triton.InferRequestedOutput("OUTPUT0", class_count=1)]
        answer = client.infer("labels_of_the_step", inputs, outputs=wanted)
        assert answer.as_numpy("OUTPUT0").tolist() == [[b"1.000000:0:other"]]
