from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.datatypes import DATATYPES
from engines.errors import ModelRefused
from engines.inspect import file_rows
from engines.model_files.artifact import FIELDS, FILE, Artifact, PlanFile, read_artifact, read_plan, this_platform, unpack
from engines.model_files.profiles import Profile, Range
from engines.signature import Signature, TensorSpec

TEXT = st.text(max_size=8)
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
SPECS = st.builds(
    TensorSpec, TEXT, st.sampled_from(list(DATATYPES.values())), st.lists(st.integers(0) | TEXT, max_size=4).map(tuple)
)
SIGNATURES = st.builds(Signature, st.lists(SPECS, max_size=3).map(tuple), st.lists(SPECS, max_size=3).map(tuple))
PROFILES = st.builds(
    Profile,
    st.dictionaries(TEXT, st.builds(Range, SHAPES, SHAPES, SHAPES), max_size=2),
    st.none() | st.integers(1),
    st.booleans(),
)
ARTIFACTS = st.builds(
    Artifact,
    library=TEXT,
    version=TEXT,
    targets=st.lists(st.sampled_from(["8.6", "12.0"]), max_size=2).map(tuple),
    source=TEXT,
    signature=SIGNATURES,
    profiles=st.lists(PROFILES, max_size=3).map(tuple),
    options=st.dictionaries(TEXT, st.none() | st.integers() | st.lists(TEXT, max_size=2), max_size=3),
    layers=st.integers(0),
    facts=st.none() | st.dictionaries(TEXT, st.integers(), max_size=3),
    platform=TEXT,
    structure=TEXT,
)
ONE = Artifact("tensorrt_rtx", "1.6.1.120", ("8.6",), "5ea1", Signature((), ()), (Profile(),))


@given(ARTIFACTS, st.binary())
def test_unpacking_reverses_packing(artifact: Artifact, plan: bytes) -> None:
    assert unpack(artifact.pack(plan), "model.plan") == PlanFile(memoryview(plan), artifact)


def test_the_plan_is_not_copied() -> None:
    data = ONE.pack(b"plan")
    assert unpack(data, "model.plan").plan.obj is data


@given(ARTIFACTS, st.binary(max_size=20))
def test_a_file_cut_at_any_byte_is_refused(artifact: Artifact, plan: bytes) -> None:
    """F68."""
    whole = artifact.pack(plan)
    for length in range(len(whole)):
        with pytest.raises(ModelRefused, match=r"^model.plan: (the engine file is truncated: |empty)"):
            unpack(whole[:length], "model.plan")


@given(ARTIFACTS, st.data())
def test_a_changed_byte_anywhere_after_the_magic_is_refused(artifact: Artifact, data: st.DataObject) -> None:
    whole = bytearray(artifact.pack(b"plan"))
    whole[data.draw(st.integers(len(FILE.magic), len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ModelRefused, match=r"^model.plan: the engine file is "):
        unpack(bytes(whole), "model.plan")


@given(st.binary(min_size=1).filter(lambda data: not FILE.owns(data)))
def test_a_file_without_the_magic_is_a_bare_plan(data: bytes) -> None:
    assert unpack(data, "model.plan") == PlanFile(memoryview(data), None)


def packed(**changes: bytes) -> bytes:
    """An engine file with fields that `pack` never writes."""
    fields = dict(zip(FIELDS, FILE.unpack(ONE.pack(b"plan")), strict=True))
    return FILE.pack(list((fields | changes).values()))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"has_facts": b"2"}, "has_facts is '2'; expected '0' or '1'"),
        ({"has_facts": b"1"}, "Expecting value"),
        ({"layers": b"many"}, "invalid literal for int"),
        ({"library": b"\xff"}, "can't decode"),
        ({"signature": b"[]"}, "not enough values"),
        ({"signature": b'[[["x", "FP99", []]], []]'}, "FP99"),
        ({"profiles": b'[{"ranges": {}}]'}, "sms"),
        ({"profiles": b'[{"ranges": {"x": [[1]]}}]'}, "missing 2 required"),
        ({"profiles": b'[{"ranges": []}]'}, "no attribute 'items'"),
        ({"options": b"[1]"}, "cannot convert dictionary"),
    ],
)
def test_fields_that_do_not_read_are_refused(changes: dict[str, bytes], why: str) -> None:
    with pytest.raises(ModelRefused, match=f"^model.plan: the engine file's fields cannot be read: .*{why}"):
        unpack(packed(**changes), "model.plan")


def test_facts_are_ignored_unless_the_flag_says_that_they_were_written() -> None:
    """F69."""
    artifact = unpack(packed(facts=b'{"layers": 1}'), "model.plan").artifact
    assert artifact is not None
    assert artifact.facts is None


def test_another_number_of_fields_is_refused_with_both_numbers() -> None:
    """F68."""
    with pytest.raises(ModelRefused, match="it has 1 fields; expected 13"):
        unpack(FILE.pack([b""]), "model.plan")


def test_a_file_is_read_and_a_missing_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.plan"
    with pytest.raises(ModelRefused, match=r"model.plan: No such file"):
        read_plan(path)
    path.write_bytes(ONE.pack(b"plan"))
    assert read_plan(path) == PlanFile(memoryview(b"plan"), ONE)
    path.write_bytes(b"")
    with pytest.raises(ModelRefused, match=r"model.plan: empty"):
        read_plan(path)


def test_a_description_is_read_without_the_plan_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "model.plan"
    whole = ONE.pack(b"plan" * 1000)
    description = len(ONE.pack(b"")) - 32 - 8  # Without the plan's length, and the checksum.
    path.write_bytes(whole[:description])
    assert read_artifact(path) == ONE


@pytest.mark.parametrize(
    "data", [b"", b"a bare plan", ONE.pack(b"")[:60], b"\x89GLPLAN\n" + bytes(16) + b"\xff" * 20, FILE.pack([b"x"] * 13)]
)
def test_of_what_has_no_whole_description_there_is_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.plan"
    assert read_artifact(path) is None
    path.write_bytes(data)
    assert read_artifact(path) is None


def test_a_plan_that_fits_is_let_through() -> None:
    ONE.check("model.plan", "tensorrt_rtx", "1.6.1.120")
    ONE.check("model.plan", "tensorrt_rtx", "1.6.1.120", "8.6")


def test_a_plan_without_targets_is_for_the_library_to_judge() -> None:
    Artifact("tensorrt_rtx", "1", (), "", Signature((), ()), ()).check("model.plan", "tensorrt_rtx", "1", "9.0")


def test_only_a_portable_plan_may_come_from_another_platform() -> None:
    def made(library: str, platform: str) -> Artifact:
        return Artifact(library, "1", (), "", Signature((), ()), (), platform=platform)

    made("tensorrt_rtx", "windows amd64").check("model.plan", "tensorrt_rtx", "1")
    made("tensorrt", this_platform()).check("model.plan", "tensorrt", "1")
    with pytest.raises(ModelRefused, match=f"built on windows amd64, but this is {this_platform()}"):
        made("tensorrt", "windows amd64").check("model.plan", "tensorrt", "1")


@given(ARTIFACTS, st.binary(min_size=1))
def test_everything_that_is_printed_of_a_file_has_a_name(artifact: Artifact, plan: bytes) -> None:
    """F71."""
    assert all(FIELDS)
    assert len(set(FIELDS)) == len(FIELDS)
    assert all(label for label, _ in file_rows(unpack(artifact.pack(plan), "model.plan")))


def test_the_kernels_depend_on_the_structure_and_how_it_was_built_and_not_on_the_weights() -> None:
    one = replace(ONE, structure="layers")
    others = [
        replace(one, structure="other layers"),
        replace(one, profiles=(Profile(sms=8),)),
        replace(one, options={"optimization_level": 1}),
    ]
    assert replace(one, source="other weights").kernels_digest() == one.kernels_digest()
    assert len({each.kernels_digest() for each in (one, *others)}) == 4
    assert ONE.kernels_digest() == "", "its structure is unknown"
