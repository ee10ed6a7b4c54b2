import pytest

from engines import DATATYPES, Signature, TensorSpec
from server.errors import NotFound, Unavailable
from server.tenants.catalog import Catalog, IndexEntry, ServedModel

SIGNATURE = Signature((TensorSpec("x", DATATYPES["FP32"], ("n",)),), ())


def served(name: str, version: str, load: int = 1) -> ServedModel:
    return ServedModel(name, version, f"{name}/{version}#{load}", SIGNATURE, "onnxruntime_onnx", {})


def catalog(*models: ServedModel) -> Catalog:
    made = Catalog()
    for name in dict.fromkeys(model.name for model in models):
        made.put(name, [model for model in models if model.name == name], [])
    return made


def unavailable(name: str, version: str = "", reason: str = "broken") -> IndexEntry:
    return IndexEntry(name, version, "UNAVAILABLE", reason)


@pytest.mark.parametrize(
    ("name", "version", "what"),
    [
        ("foo", None, "'foo'"),
        ("foo", "1", "'foo'"),
        ("m", "99", "'m' version 99"),
        ("m", "01", "'m' version 01"),
        ("", None, "''"),
    ],
)
def test_find_of_an_unknown_model_raises_not_found_in_tritons_words(name: str, version: str | None, what: str) -> None:
    with pytest.raises(NotFound) as refusal:
        catalog(served("m", "1")).find(name, version)
    assert str(refusal.value) == f"Request for unknown model: {what} is not found"


@pytest.mark.parametrize(
    ("names", "asked", "hint"),
    [
        (["stripes", "identity"], "stripe", "; did you mean 'stripes'?"),
        (["ResNet50", "bert"], "resnet50", "; did you mean 'ResNet50'?"),
        (["bert-small", "bert-smalls", "gpt"], "bert-smal", "; did you mean 'bert-small' or 'bert-smalls'?"),
        (["stripes", "identity"], "x", ""),
        (["m"], "m" * 10_000, ""),
        ([f"classifier-{number}" for number in range(500)], "classifier-440x", "; did you mean 'classifier-440', "),
        ([*(f"a{number}" for number in range(500)), "stripes"], "stripe", "; did you mean 'stripes'?"),
    ],
)
def test_an_unknown_model_with_a_name_like_others_is_refused_with_up_to_three_of_these(
    names: list[str], asked: str, hint: str
) -> None:
    with pytest.raises(NotFound) as refusal:
        catalog(*(served(name, "1") for name in names)).find(asked)
    found = str(refusal.value).removeprefix(f"Request for unknown model: {asked!r} is not found")
    assert found.startswith(hint)
    assert bool(found) == bool(hint)
    assert found.count("'") <= 6


def test_an_unknown_model_is_refused_with_those_that_cannot_be_served_too() -> None:
    made = Catalog()
    made.put("stripes", [], [unavailable("stripes")])
    with pytest.raises(NotFound, match="did you mean 'stripes'"):
        made.find("stripe")


def test_before_the_models_are_known_only_names_that_the_tenant_may_call_are_unavailable() -> None:
    made = Catalog()
    made.expected = {"m", "n"}.__contains__
    made.announce("n")
    with pytest.raises(Unavailable, match=r"^model 'm': the server is starting, and does not know yet which models there are;"):
        made.route("m", "1")
    with pytest.raises(NotFound):
        made.find("other")
    with pytest.raises(Unavailable, match=r"^model 'n' is loading"):
        made.find("n")
    assert made.index(["m", "n"]) == [IndexEntry("m", "", "LOADING"), IndexEntry("n", "", "LOADING")]
    made.expected = None
    with pytest.raises(NotFound):
        made.find("m")
    assert made.index(["m"])[0] == IndexEntry("m", "", "UNAVAILABLE", "not loaded")


def test_a_model_whose_device_side_has_ended_is_loading_until_it_is_put_again_and_keeps_its_counts() -> None:
    made = catalog(served("m", "1"), served("m", "2"), served("n", "1"))
    made.weigh({"m": {"1": 1.0, "2": 1.0}})
    made.paged.add("n/1#1")
    counts = made.find("n").statistics
    made.lose()
    for name, version in (("m", None), ("m", "1"), ("n", None)):
        for look_up in (made.find, made.route):
            with pytest.raises(Unavailable, match=rf"^model '{name}' is loading: try again soon$"):
                look_up(name, version)
    made.announce("m")
    assert made.index() == [IndexEntry("m", "", "LOADING"), IndexEntry("n", "", "LOADING")]
    assert made.listing() == [("m", [], []), ("n", [], [])], "a process that comes now serves none of them either"
    assert [each.name for each in made.served()] == ["m", "m", "n"], "what they counted is reported"
    made.put("n", [served("n", "1")], [])  # Each process counts its loads from one on: it may have the same key.
    assert made.find("n").statistics is made.route("n").statistics is counts
    assert made.index() == [IndexEntry("m", "", "LOADING"), IndexEntry("n", "1", "READY")]
    with pytest.raises(NotFound):
        made.find("n", "2")
    made.put("m", [], [])
    with pytest.raises(NotFound):
        made.find("m")


def test_a_version_that_failed_has_the_reason_and_the_others_are_served() -> None:
    made = Catalog()
    made.put("m", [served("m", "1")], [unavailable("m", "2")])
    assert made.find("m").version == "1"
    with pytest.raises(Unavailable, match=r"^model 'm' is unavailable: broken$"):
        made.find("m", "2")
    with pytest.raises(NotFound, match="'m' version 3 is not found"):
        made.find("m", "3")


def test_put_replaces_all_versions_of_a_model() -> None:
    made = catalog(served("m", "1"), served("m", "2"))
    made.put("m", [served("m", "3")], [])
    assert made.versions("m") == ["3"]
    with pytest.raises(NotFound):
        made.find("m", "1")
    made.put("m", [], [unavailable("m", reason="unloaded")])
    assert made.versions("m") == []
    assert made.index() == [unavailable("m", reason="unloaded")]


def test_a_reloaded_version_keeps_its_statistics_and_a_new_one_starts_at_zero() -> None:
    made = catalog(served("m", "1"))
    made.find("m").statistics.failed(1, "OTHER")
    made.put("m", [served("m", "1", load=2), served("m", "2", load=2)], [])
    assert made.find("m", "1").key == "m/1#2"
    assert made.find("m", "1").statistics.failures == {"OTHER": 1}
    assert made.find("m", "2").statistics.failures == {}


def test_a_model_never_loaded_is_in_the_index_as_not_loaded_and_not_found() -> None:
    made = catalog(served("m", "1"))
    assert made.index(["k", "m", "z"]) == [
        unavailable("k", reason="not loaded"),
        IndexEntry("m", "1", "READY"),
        unavailable("z", reason="not loaded"),
    ]
    with pytest.raises(NotFound):
        made.find("k")


def test_a_removed_model_leaves_the_index_unless_served_loading_or_configured() -> None:
    made = catalog(served("m", "1"))
    made.put("half", [served("half", "1")], [unavailable("half", "2")])
    made.put("broken", [], [unavailable("broken")])
    made.put("expected", [], [unavailable("expected", reason="not in the repository")])
    made.announce("loading")
    assert [(entry.name, entry.version, entry.state) for entry in made.index([], ["expected", "*"])] == [
        ("expected", "", "UNAVAILABLE"),
        ("half", "1", "READY"),
        ("half", "2", "UNAVAILABLE"),
        ("loading", "", "LOADING"),
        ("m", "1", "READY"),
    ]
    assert "broken" in {entry.name for entry in made.index()}, "without a listing of the repository it may still be there"


def test_a_model_that_is_put_with_nothing_is_not_known_any_more() -> None:
    """Else a process that replaces this one would show it as loading."""
    made = catalog(served("m", "1"), served("k", "1"))
    made.put("m", [], [])
    assert [name for name, _, _ in made.listing()] == ["k"]
    with pytest.raises(NotFound):
        made.find("m")


def test_served_lists_every_ready_model() -> None:
    models = [served("m", "2"), served("m", "1"), served("k", "1")]
    assert catalog(*models).served() == models


def routed(made: Catalog, count: int) -> str:
    """The versions of m that so many requests without one get."""
    return "".join(made.route("m").version for _ in range(count))


def test_requests_without_a_version_get_the_highest_or_one_by_the_weights() -> None:
    made = catalog(served("m", "1"), served("m", "2"), served("m", "3"))
    assert routed(made, 3) == "333"
    made.weigh({"m": {"1": 3, "2": 1}, "another": {"1": 1}})
    assert routed(made, 8) == "11211121"
    assert made.find("m").version == "3", "what is said of the model does not change in turn"
    assert [made.route("m", version).version for version in "333"] == ["3"] * 3
    assert routed(made, 4) == "1121", "who names a version takes no turn"
    made.weigh({"m": {"1": 0, "3": 1}})
    assert routed(made, 3) == "333"
    made.weigh({})
    assert routed(made, 2) == "33"


def test_weights_of_versions_that_are_not_served_count_once_these_are() -> None:
    made = catalog(served("m", "1"))
    made.weigh({"m": {"1": 1, "2": 1}})
    assert routed(made, 3) == "111"
    made.put("m", [served("m", "1", load=2), served("m", "2")], [])
    assert routed(made, 4) == "1212"
    made.put("m", [served("m", "3")], [])
    assert routed(made, 2) == "33"
    made.put("m", [], [unavailable("m")])
    with pytest.raises(Unavailable):
        made.route("m")
    with pytest.raises(NotFound):
        made.route("another")


def test_the_turns_go_on_when_something_else_changes() -> None:
    made = catalog(served("m", "1"), served("m", "2"))
    made.weigh({"m": {"1": 2, "2": 1}})
    assert routed(made, 2) == "12"
    made.weigh({"m": {"1": 2, "2": 1}, "n": {"1": 1}})
    made.put("m", [served("m", "1", load=3), served("m", "2", load=3)], [])
    assert routed(made, 4) == "1121"


def test_a_request_keeps_its_version_while_that_is_served() -> None:
    made = catalog(served("m", "1"), served("m", "2"))
    assert made.route("m", None, made.find("m", "1")).version == "2", "without weights it is always the highest"
    made.weigh({"m": {"1": 1, "2": 1}})
    had = made.route("m")
    assert [made.route("m", None, had) for _ in range(3)] == [had] * 3
    made.put("m", [served("m", "1", load=2), served("m", "2")], [])
    assert made.route("m", None, had).key == "m/1#2"
    made.put("m", [served("m", "2")], [])
    assert made.route("m", None, had).version == "2"


def test_why_a_version_was_not_replaced_is_said_where_it_is_ready() -> None:
    made = Catalog()
    made.put("m", [served("m", "1")], [unavailable("m", "1", "cannot be read"), unavailable("m", "2")])
    expected = [IndexEntry("m", "1", "READY", "cannot be read"), unavailable("m", "2")]
    assert made.index() == expected
    again = Catalog()
    for arguments in made.listing():
        again.put(*arguments)
    assert again.index() == expected
    made.put("m", [served("m", "1", load=2)], [])
    assert made.index() == [IndexEntry("m", "1", "READY")]
