"""What clients see of models that each device of a tenant has loaded for itself."""

import pytest

from engines import DATATYPES, Signature, TensorSpec
from server.tenants.catalog import IndexEntry, ServedModel
from server.tenants.merged_models import Merged, MergedModels

FP32 = DATATYPES["FP32"]
SIGNATURE = Signature((TensorSpec("x", FP32, ("n",)),), (TensorSpec("y", FP32, ("n",)),))
OTHER = Signature((TensorSpec("x", FP32, (3,)),), (TensorSpec("y", FP32, (3,)),))


@pytest.fixture
def models() -> MergedModels:
    return MergedModels(["a", "b"])


def version(key: str, signature: Signature = SIGNATURE) -> ServedModel:
    name, _, rest = key.partition("/")
    return ServedModel(name, rest.partition("#")[0], key, signature, "onnxruntime_onnx", {})


def put(models: MergedModels, device: str, *keys: str, problems: tuple[IndexEntry, ...] = ()) -> Merged:
    return models.put({device: ([version(key) for key in keys], problems)}, "m")


def test_a_version_is_served_if_one_device_serves_it(models: MergedModels) -> None:
    assert put(models, "a", "m/1#5").keys == {"m/1#1": {"a": "m/1#5"}}
    merged = put(models, "b", "m/1#8", "m/2#8")
    assert merged.keys == {"m/1#2": {"a": "m/1#5", "b": "m/1#8"}, "m/2#3": {"b": "m/2#8"}}
    assert [each.key for each in merged.served] == ["m/1#2", "m/2#3"]


def test_the_key_changes_whenever_a_device_changes_what_it_serves(models: MergedModels) -> None:
    put(models, "a", "m/1#5")
    put(models, "b", "m/1#8")
    assert put(models, "b", "m/1#8").keys == {"m/1#2": {"a": "m/1#5", "b": "m/1#8"}}, "nothing has changed"
    assert put(models, "a", "m/1#6").keys == {"m/1#3": {"a": "m/1#6", "b": "m/1#8"}}
    assert put(models, "a").keys == {"m/1#4": {"b": "m/1#8"}}
    assert put(models, "b") == Merged([], [], {})


def test_a_device_that_is_lost_leaves_the_key_to_the_other(models: MergedModels) -> None:
    put(models, "a", "m/1#5")
    put(models, "b", "m/1#8", "m/2#8")
    assert models.drop("b") == ["m"], "version 2 was there only"
    assert models.merged("m").keys == {"m/1#2": {"a": "m/1#5"}}
    assert models.of("b") == []
    assert put(models, "b", "m/1#1").keys == {"m/1#4": {"a": "m/1#5", "b": "m/1#1"}}


def test_a_device_with_other_tensors_is_left_out(models: MergedModels, caplog: pytest.LogCaptureFixture) -> None:
    put(models, "b", "m/1#8")
    merged = models.put({"a": ([version("m/1#5", OTHER)], [])}, "m")
    assert merged.keys == {"m/1#2": {"b": "m/1#8"}}
    assert merged.served[0].signature == SIGNATURE, "clients of the model see no change"
    assert "model m 1 has other tensors on device a" in caplog.text
    both = {"a": ([version("m/1#6", OTHER)], []), "b": ([version("m/1#9", OTHER)], [])}
    assert models.put(both, "m").keys == {"m/1#3": {"a": "m/1#6", "b": "m/1#9"}}, "loaded again on both"


def test_problems_are_shown_of_versions_that_no_device_serves(models: MergedModels) -> None:
    broken, other = (IndexEntry("m", "2", "UNAVAILABLE", why) for why in ("no memory", "another reason"))
    assert put(models, "a", "m/1#5", problems=(broken,)).problems == [broken]
    assert put(models, "b", "m/1#8", problems=(other,)).problems == [broken], "once"
    assert put(models, "b", "m/1#9", "m/2#9").problems == []
    whole = IndexEntry("m", "", "UNAVAILABLE", "unloaded")
    assert put(models, "a", problems=(whole,)).problems == []
    assert put(models, "b", problems=(whole,)).problems == [whole]


def test_why_devices_go_on_with_what_they_served_is_shown_beside_it(models: MergedModels) -> None:
    put(models, "a", "m/1#5")
    other, whole, same = (IndexEntry("m", version, "UNAVAILABLE", "broken") for version in ("2", "", "1"))
    assert put(models, "b", problems=(whole, same)).problems == [], "b serves nothing of it, and a does"
    merged = put(models, "a", "m/1#5", problems=(other, whole, same))
    assert (merged.keys, merged.problems) == ({"m/1#1": {"a": "m/1#5"}}, [other, whole, same])
