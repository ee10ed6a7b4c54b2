"""Which models tenants are served with, as a table that nothing else is needed for."""

from server.device.loaded_models import UNLOADED, LoadedModels
from server.device.model_loader import LoadedModel
from server.tenants.catalog import IndexEntry


def table(strict: bool) -> LoadedModels:
    return LoadedModels(("acme", "globex"), strict)


def failed(name: str, reason: str = "no such file") -> LoadedModel:
    return LoadedModel(name, [], [IndexEntry(name, "1", "UNAVAILABLE", reason)], {})


def test_a_model_of_one_tenant_that_failed_makes_a_strict_server_incomplete_and_no_other() -> None:
    for strict, expected in ((True, "incomplete"), (False, "serving")):
        models = table(strict)
        models.put("globex", failed("a"))
        assert models.state() == expected


def test_a_model_that_was_unloaded_is_not_missed() -> None:
    models = table(strict=True)
    models.put("acme", failed("a"))
    models.put("acme", failed("a", UNLOADED))
    assert models.state() == "serving"
    assert not models.serves("acme", "a")


def test_what_a_model_was_before_is_given_back_when_another_takes_its_place() -> None:
    models, first, second = table(strict=False), failed("a"), failed("a", "another reason")
    assert models.put("acme", first) is None
    assert models.put("acme", second) == first
    assert models.put("globex", first) is None, "it is another tenant's"


def test_ensembles_of_a_model_are_found_also_while_they_cannot_be_served() -> None:
    models, reason = table(strict=False), [IndexEntry("both", "1", "UNAVAILABLE", "its step is unavailable")]
    models.put("acme", LoadedModel("both", [], reason, {}, steps=("a", "b")))
    models.put("acme", failed("a"))
    assert [each.name for each in models.ensembles("acme", ["b", "c"])] == ["both"]
    assert models.ensembles("acme", ["c"]) == []
    assert models.ensembles("globex", ["a"]) == []


def test_a_tenant_whose_models_all_failed_is_shown_as_served_nothing() -> None:
    models = table(strict=False)
    models.put("acme", failed("a"))
    assert models.shown("acme") == "nothing"
    assert repr(models) == "<LoadedModels acme: nothing; globex: nothing>"
