"""`LoadedModels` alone: which models each tenant is served, and the readiness that follows."""

from engines import Signature
from server.device.loaded_model import LoadedModel, LoadedModels
from server.tenants.catalog import UNLOADED, IndexEntry, ServedModel


def table(strict: bool) -> LoadedModels:
    return LoadedModels(("acme", "globex"), strict)


def failed(name: str, reason: str = "no such file") -> LoadedModel:
    return LoadedModel(name, [], [IndexEntry(name, "1", "UNAVAILABLE", reason)], {})


def test_a_failed_model_makes_only_a_strict_server_incomplete() -> None:
    for strict, expected in ((True, "incomplete"), (False, "serving")):
        models = table(strict)
        models.put("globex", failed("a"))
        models.put("acme", LoadedModel("b", [ServedModel("b", "1", "b/1#1", Signature((), ()), "fake", {})], [], {}))
        assert models.state() == expected


def test_any_server_whose_models_all_failed_is_incomplete() -> None:
    models = table(strict=False)
    assert models.state() == "serving", "nothing was asked for"
    models.put("acme", failed("a"))
    models.put("globex", failed("a", UNLOADED))
    assert models.state() == "incomplete"
    models.put("acme", failed("a", UNLOADED))
    assert models.state() == "serving"


def test_an_unloaded_model_does_not_count_as_failed() -> None:
    models = table(strict=True)
    models.put("acme", failed("a"))
    models.put("acme", failed("a", UNLOADED))
    assert models.state() == "serving"
    assert not models.serves("acme", "a")


def test_put_returns_the_model_it_replaces() -> None:
    models, first, second = table(strict=False), failed("a"), failed("a", "another reason")
    assert models.put("acme", first) is None
    assert models.put("acme", second) == first
    assert models.put("globex", first) is None, "it is another tenant's"


def test_unavailable_ensembles_of_a_step_are_found() -> None:
    models, reason = table(strict=False), [IndexEntry("both", "1", "UNAVAILABLE", "its step is unavailable")]
    models.put("acme", LoadedModel("both", [], reason, {}, steps=("a", "b")))
    models.put("acme", failed("a"))
    assert [each.name for each in models.ensembles("acme", ["b", "c"])] == ["both"]
    assert models.ensembles("acme", ["c"]) == []
    assert models.ensembles("globex", ["a"]) == []


def test_a_tenant_without_working_models_is_shown_with_nothing() -> None:
    models = table(strict=False)
    models.put("acme", failed("a"))
    assert models.shown("acme") == "nothing"
