"""Repositories on a real disk: which versions are served, problems and warnings."""

import json
import os

import pytest

from server.config.schema import ModelOptions
from server.repository.model_repository import Problem, Repository

LINK = "a link to what is not there; mend the link, or take it away"
ABSENT = (Problem("", "not in the repository"),)


@pytest.fixture
def add(tmp_path):
    """Put files into the repository, by paths below its root; model files are empty.

    A path that ends in a slash is a folder, and "a -> b" a link.
    """

    def add(*paths, **texts):
        for path in paths:
            path, _, target = path.partition(" -> ")
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            if target:
                (tmp_path / path).symlink_to(target)
            elif path.endswith("/"):
                (tmp_path / path).mkdir()
            else:
                (tmp_path / path).touch()
        for model, text in texts.items():
            (tmp_path / model).mkdir(exist_ok=True)
            (tmp_path / model / "config.pbtxt").write_bytes(text.encode("utf-8", "surrogateescape"))

    return add


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path, {})


def versions(listing):
    return [file.version for file in listing.files]


def problem(listing):
    (found,) = listing.problems
    return found


def test_models_are_the_directories_sorted_without_hidden_ones_and_files(repository, add):
    add("b/1/model.onnx", "a/1/model.onnx", ".git/1/model.onnx", "README.md")
    assert repository.names() == ["a", "b"]


def test_directories_whose_names_cannot_be_shown_are_no_models(repository, tmp_path, add):
    add("a/1/model.onnx", "b\nc/1/model.onnx")
    os.mkdir(os.fsencode(tmp_path) + b"/\xff")
    assert repository.names() == ["a"]


def test_a_root_that_is_not_there_raises_naming_it(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        Repository(tmp_path / "nowhere", {}).names()


def test_a_model_needs_no_configuration(repository, tmp_path, add):
    add("m/1/model.onnx", "m/labels.txt", "m/.cache/x")
    listing = repository.read("m")
    (file,) = listing.files
    assert (listing.name, listing.problems, listing.warnings) == ("m", (), ())
    assert (file.name, file.version, file.path) == ("m", 1, tmp_path / "m/1/model.onnx")
    assert file.config.max_batch is None


SYSTEMS = "Too many levels of symbolic links"
PLACED = "no version in it; expected m/1/model.onnx"
NONE = "no model.onnx or model.plan in m"
NAMED = "or give its name as default_model_filename"
EXPORT = "which is not served; export it to ONNX (torch.onnx.export) and serve that"
CONVERT = "which is not served; convert it to ONNX (python -m tf2onnx.convert) and serve that"
HAS_CONFIG = "m/config.pbtxt: "
LISTINGS = [
    # Files, and config.pbtxt; the versions that are served, and the problem.
    (["m/2/model.onnx", "m/10/model.onnx", "m/9/model.onnx"], "", [10], None),
    (["m/2/model.onnx", "m/10/model.onnx", "m/9/model.onnx"], "version_policy { all {} }", [2, 9, 10], None),
    (
        ["m/2/model.onnx"],
        "version_policy { specific { versions: [ 2, 7 ] } }",
        [2],
        Problem("7", HAS_CONFIG + "version_policy names version 7, which is not there"),
    ),
    (["m/1/model.onnx", "m/2/notes", "m/3/notes"], "version_policy { specific { versions: [ 1 ] } }", [1], None),
    (["m/1/model.onnx", "m/2/notes"], "", [1], Problem("2", f"{NONE}/2")),
    (
        ["m/1/model.onnx", "m/2", "m/3 -> gone"],
        "version_policy { all {} }",
        [1],
        Problem("3", f"{NONE}/3"),
    ),
    (["m/1/model.onnx", "m/2/model.onnx -> model.onnx"], "", [1], Problem("2", f"m/2/model.onnx/model.onnx: {SYSTEMS}")),
    (["m/1/model.onnx/other.bin"], "", [], Problem("1", "m/1/model.onnx: Is a directory")),
    (["m/1/model.onnx", "m/configs/other.pbtxt", "m/warmup/input", "m/initial_state/zeros"], "", [1], None),
    (["m.onnx", "m/1/model.onnx", ".hidden.onnx", "notes.txt"], "", [1], None),
    (["m/1/model.onnx"], 'name: "m"', [1], None),
    (["m/1/model.onnx"], 'name: "n"', [], Problem("", HAS_CONFIG + "name is 'n'; expected 'm' as the directory, or none")),
    (["m/1/model.onnx"], "# \udcff", [], Problem("", HAS_CONFIG + "not UTF-8 at byte 2")),
    (["m/1/model.onnx", "m/config.pbtxt/"], None, [], Problem("", HAS_CONFIG + "Is a directory")),
    (["m/1/model.onnx"], "#" * (1 << 20) + "\n", [], Problem("", HAS_CONFIG + "has 1048577 bytes; at most 1048576 are read")),
    (["m/config.pbtxt"], "", [], Problem("", PLACED)),
    (["m.onnx"], None, [], Problem("", "m.onnx is not in a folder of its own; move it to m/1/model.onnx")),
    (["m.plan"], None, [], Problem("", "m.plan is not in a folder of its own; move it to m/1/model.plan")),
    (["m/model.onnx"], None, [], Problem("", f"{PLACED}; m/model.onnx is there: move it to m/1/model.onnx")),
    (["m/m.plan"], None, [], Problem("", f"{PLACED}; m/m.plan is there: move it to m/1/model.plan")),
    (["m/onnx/model.onnx"], None, [], Problem("", f"{PLACED}; m/onnx/model.onnx is there: move it to m/1/model.onnx")),
    (["m/1"], None, [], Problem("", f"{PLACED}; m/1 is a file, and a version is a folder")),
    (["m/1/my.onnx"], None, [], Problem("1", f"{NONE}/1; my.onnx is there: rename it to model.onnx, {NAMED}")),
    (["m/1/my.plan"], None, [], Problem("1", f"{NONE}/1; my.plan is there: rename it to model.plan, {NAMED}")),
    (["m/1/MODEL.ONNX"], None, [], Problem("1", f"{NONE}/1; MODEL.ONNX is there: rename it to model.onnx")),
    (["m/1/onnx/b.onnx", "m/1/a"], None, [], Problem("1", f"{NONE}/1; onnx/b.onnx is there: move it to model.onnx")),
    (["m/1/model.safetensors"], None, [], Problem("1", f"{NONE}/1: model.safetensors is of the backend pytorch, {EXPORT}")),
    (["m/1/saved_model.pb"], None, [], Problem("1", f"{NONE}/1: saved_model.pb is of the backend tensorflow, {CONVERT}")),
    (["m/1/model.onnx -> gone"], None, [], Problem("1", f"{NONE}/1; model.onnx is {LINK}")),
    (["m -> gone"], None, [], Problem("", f"m is {LINK}")),
    (
        ["m/1/model.onnx"],
        'default_model_filename: "best.onnx"',
        [],
        Problem("1", f"no best.onnx in m/1; model.onnx is there: rename it to best.onnx, {NAMED}"),
    ),
]


@pytest.mark.parametrize(("files", "config", "served", "problem"), LISTINGS)
def test_versions_are_served_or_are_a_problem_with_what_to_do(repository, add, files, config, served, problem):
    add(*files, **({} if config is None else {"m": config}))
    assert repository.names() == ["m"]
    listing = repository.read("m")
    assert (versions(listing), listing.problems) == (served, (problem,) if problem else ())
    assert problem or listing.warnings == ()


def test_the_folder_of_one_model_is_no_repository_and_the_folder_above_is_named(repository, add):
    add("1/model.onnx")
    (found,) = repository.read("1").problems
    assert found.reason == (
        "no version in it; expected 1/1/model.onnx; 1/model.onnx is there: if 1 is a version, models.repository has to be the "
        "folder above its model's"
    )


def test_a_directory_that_cannot_be_read_is_a_problem_with_the_systems_reason(repository, add):
    add("m -> m")
    assert problem(repository.read("m")) == Problem("", f"m: {SYSTEMS}")


def test_an_onnx_file_goes_before_a_plan_unless_the_platform_says_otherwise(repository, tmp_path, add):
    add("m/1/model.plan", "m/1/model.onnx")
    assert repository.read("m").files[0].path.name == "model.onnx"
    add(m='platform: "tensorrt_plan"')
    assert repository.read("m").files[0].path.name == "model.plan"


def test_a_byte_order_mark_is_skipped(repository, tmp_path, add):
    add("m/1/model.onnx")
    (tmp_path / "m" / "config.pbtxt").write_text(
        'max_batch_size: 4 output { name: "y" data_type: TYPE_FP32 dims: 1 label_filename: "labels.txt" }', encoding="utf-8-sig"
    )
    (tmp_path / "m" / "labels.txt").write_text("cat", encoding="utf-8-sig")
    (file,) = repository.read("m").files
    assert (file.config.max_batch, file.labels) == (4, {"y": b"cat"})


@pytest.mark.parametrize("directory", ["one", "1.0", "-1", "01", "0", "\u0661"])
def test_a_directory_that_is_no_version_is_skipped_with_a_warning(repository, add, directory):
    add("m/1/model.onnx", f"m/{directory}/model.onnx")
    listing = repository.read("m")
    assert (versions(listing), listing.problems) == ([1], ())
    warning = f"m: not looked into: {directory}; a version is a number above 0 without leading zeros"
    assert listing.warnings == (warning,)


def test_long_lists_of_skipped_directories_are_shortened(repository, add):
    add("m/1/model.onnx", *(f"m/x{number:03}/notes" for number in range(100)))
    (warning,) = repository.read("m").warnings
    named = ", ".join(f"x{number:03}" for number in range(16))
    assert warning.startswith(f"m: not looked into: {named} and 84 more; a version is")


def test_missing_versions_of_the_policy_are_one_problem(repository, add):
    add("m/2/model.onnx")
    asked = {"version_policy": {"specific": {"versions": [2, *range(1000, 2000)]}}}
    (found,) = repository.read("m", json.dumps(asked)).problems
    assert found.version == "1000"
    named = ", ".join(map(str, range(1000, 1016)))
    reason = f"the config parameter: version_policy names versions {named} and 984 more, which are not there"
    assert found.reason == reason


def test_broken_configuration_leaves_nothing_to_serve_and_one_problem(repository, add):
    add("m/1/model.onnx", m="\nmax_batch_size: many")
    listing = repository.read("m")
    assert (listing.files, problem(listing).version) == ((), "")
    assert problem(listing).reason.startswith("m/config.pbtxt:2:")


def test_an_override_takes_the_place_of_the_file_even_of_a_broken_one(repository, add):
    add("m/1/model.onnx", "m/2/model.onnx", m="max_batch_size: many")
    listing = repository.read("m", json.dumps({"max_batch_size": 4, "version_policy": {"all": {}}}))
    assert [(file.version, file.config.max_batch) for file in listing.files] == [(1, 4), (2, 4)]


def test_override_cannot_change_how_a_model_runs(repository, add):
    add(
        "m/1/model.onnx",
        m="optimization { cuda { graphs: true } } parameters { key: 'greenlane.copies' value { string_value: 'sm' } }",
    )
    asked = {"optimization": {"cuda": {"graphs": False}}, "instance_group": [{"count": 2}]}
    listing = repository.read("m", json.dumps(asked))
    (file,) = listing.files
    assert {field: said.value for field, said in file.config.settings.items()} == {"graphs": "on", "copies": "sm"}
    ignored = "optimization.cuda.graphs, instance_group.count"
    assert listing.warnings == (f"the config parameter: ignored, as they mean nothing here: {ignored}",)
    ours = {"parameters": {"greenlane.copies": {"string_value": "engine"}}}
    assert problem(repository.read("m", json.dumps(ours))).reason == (
        "the config parameter: parameters greenlane.copies: how a model runs is for the server's operator to say, "
        "in m/config.pbtxt or as [models.m]"
    )


def test_server_configuration_overrules_batching_of_files(tmp_path, add):
    add("m/1/model.onnx", m="dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 500 }")
    for options, delay, preferred in (
        (ModelOptions(), 0.0005, (4,)),
        (ModelOptions(batch_delay=0.0), 0.0, (4,)),
        (ModelOptions(preferred_batches=(2, 8)), 0.0005, (2, 8)),
    ):
        (file,) = Repository(tmp_path, {"m": options}).read("m").files
        assert (file.config.max_batch, file.config.batch_delay, file.config.preferred_batches) == (None, delay, preferred)


def test_server_configuration_overrules_settings_of_files(tmp_path, add):
    text = "instance_group { count: 2 } parameters { key: 'greenlane.copies' value { string_value: 'sm' } }"
    add("m/1/model.onnx", m=text)
    repository = Repository(tmp_path, {"m": ModelOptions(copies="engine", warm_up=(1, 4))}, "greenlane.toml")
    (file,) = repository.read("m").files
    assert {field: (said.value, said.where) for field, said in file.config.settings.items()} == {
        "instances": (2, "m/config.pbtxt: instance_group.count"),
        "copies": ("engine", "greenlane.toml: models.m.copies"),
        "warm_up": ((1, 4), "greenlane.toml: models.m.warm_up"),
    }


def test_server_configuration_overrules_max_batch_of_files(tmp_path, add):
    add("m/1/model.onnx", "n/1/model.onnx", m="max_batch_size: 8", n="max_batch_size: 8")
    repository = Repository(tmp_path, {"m": ModelOptions(max_batch=0)})
    (m,), (n,) = repository.read("m").files, repository.read("n").files
    assert (m.config.max_batch, m.config.stated_max_batch) == (0, 8)
    assert (n.config.max_batch, n.config.stated_max_batch) == (8, 8)
    assert (m.config.max_batch_key, n.config.max_batch_key) == ("models.m.max_batch", "n/config.pbtxt: max_batch_size")


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../outside", "m/1", "/etc", "m\0", "a\nb", "\ud800", ".hidden", "x" * 256, "\u00fc" * 128],
)
def test_a_name_that_is_no_directory_of_the_root_never_leaves_it(tmp_path, name):
    for model in ("inside/m", "outside", "inside/.hidden"):
        (tmp_path / model / "1").mkdir(parents=True)
        (tmp_path / model / "1" / "model.onnx").touch()
    assert Repository(tmp_path / "inside", {}).read(name).problems == ABSENT


def test_a_file_in_the_root_is_no_model(repository, add):
    add("README.md")
    assert repository.read("README.md").problems == ABSENT


def test_links_are_followed(repository, tmp_path, add):
    add("m/1/model.onnx")
    (tmp_path / "linked").symlink_to("m")
    assert repository.names() == ["linked", "m"]
    assert versions(repository.read("linked")) == [1]


def test_the_folders_of_modules_are_read_and_no_warning(repository, tmp_path, add):
    add("a/1/model.onnx")
    for name in ("1_Pooling", "2_Normalize", "onnx"):
        (tmp_path / "a" / name).mkdir()
    (tmp_path / "a" / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    modules = [{"type": "x.Pooling", "path": "1_Pooling"}, {"type": "x.Normalize", "path": "2_Normalize"}]
    (tmp_path / "a" / "modules.json").write_text(json.dumps(modules))
    assert "1_Pooling, 2_Normalize, onnx" in repository.read("a").warnings[0]
    (tmp_path / "a" / "tokenizer.json").touch()
    listing = repository.read("a")
    assert listing.files[0].text.pooling == "cls"
    assert [line.partition(";")[0] for line in listing.warnings] == ["a: not looked into: onnx"]


def test_a_tokenizer_that_cannot_be_looked_at_is_none(repository, tmp_path, add):
    add("a/1/model.onnx")
    (tmp_path / "a" / "tokenizer.json").symlink_to("x" * 300)
    assert [file.text for file in repository.read("a").files] == [None]


def test_a_model_of_several_files_may_be_a_directory(repository, add):
    add("m/1/model.onnx/model.onnx")
    add("n/1/big/model.onnx", n='default_model_filename: "big" backend: "onnxruntime"')
    (m,), (n,) = repository.read("m").files, repository.read("n").files
    assert [(m.path.parent.name, m.filename), (n.path.parent.name, n.filename)] == [
        ("model.onnx", "model.onnx/model.onnx"),
        ("big", "big/model.onnx"),
    ]


LABELLED = 'output { name: "y" data_type: TYPE_FP32 dims: 4 label_filename: "labels.txt" }'


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "m/labels.txt: No such file or directory; it is a label_filename"),
        (b"a\xff", "m/labels.txt: not UTF-8 at byte 1, as labels have to be"),
        (b"a" * (1 << 20) + "é".encode(), "m/labels.txt: has 1048578 bytes; at most 1048576 are read; it is a label_filename"),
    ],
)
def test_labels_that_cannot_be_read_are_refused(repository, add, tmp_path, content, reason):
    add("m/1/model.onnx", m=LABELLED)
    if content is not None:
        (tmp_path / "m/labels.txt").write_bytes(content)
    assert problem(repository.read("m")).reason == reason


@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("m/config.pbtxt", "m/config.pbtxt"),
        ("m/labels.txt", "m/labels.txt"),
        ("m/1/model.onnx", "m/1/model.onnx"),
        ("m/model.py", "m/model.py"),
        ("m/1/model.py", "m/1/model.py"),
    ],
)
@pytest.mark.parametrize(
    ("make", "what"), [(os.mkfifo, "a named pipe"), (lambda path: path.symlink_to("/dev/zero"), "a device")]
)
def test_what_is_no_file_is_a_problem_and_is_not_waited_for(repository, add, tmp_path, path, where, make, what):
    add("m/1/model.onnx", m=LABELLED)
    (tmp_path / "m/labels.txt").write_text("fig")
    (tmp_path / path).unlink(missing_ok=True)
    make(tmp_path / path)
    assert problem(repository.read("m")).reason.startswith(f"{where}: is {what}; expected a file")


@pytest.mark.parametrize("path", ["/etc/passwd", "../n/labels.txt", "a/../../labels.txt", r"a\000b"])
def test_labels_cannot_leave_the_models_directory(repository, add, path):
    add("m/1/model.onnx", m=LABELLED.replace("labels.txt", path))
    assert "expected the name of a file in the model's directory" in problem(repository.read("m")).reason


def test_override_cannot_name_other_label_files(repository, add, tmp_path):
    add("m/1/model.onnx", m=LABELLED)
    (tmp_path / "m/labels.txt").write_text("fig")
    outputs = [{"name": "y", "data_type": "TYPE_FP32", "dims": [4], "label_filename": "labels.txt"}]
    (file,) = repository.read("m", json.dumps({"output": outputs})).files
    assert file.labels == {"y": b"fig"}
    outputs[0]["label_filename"] = "1/model.onnx"
    assert problem(repository.read("m", json.dumps({"output": outputs}))).reason == (
        "the config parameter: label_filename is '1/model.onnx'; expected one that m/config.pbtxt names, or none"
    )
