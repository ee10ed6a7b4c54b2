"""The demo's classifier against images made here, on ONNX Runtime itself."""

import os
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from engines.datatypes import DATATYPES
from engines.signature import Signature, TensorSpec
from server import demo
from server.app import log_configuration
from server.config.tables import ConfigError
from server.repository.model_config import apply
from server.repository.model_repository import Repository

SIZES = [(8, 8), (12, 20), (33, 47), (64, 64)]
KINDS = ["horizontal", "vertical", "diagonal", "other diagonal", "checkerboard"]


def image(kind, size, width, noise=0.0):
    """Bands or squares of 0 and 1, `width` pixels wide, with Gaussian noise of this deviation."""
    y, x = np.indices(size)
    bands = {"horizontal": y // width, "vertical": x // width, "diagonal": (x + y) // width}
    bands |= {"other diagonal": (x - y) // width, "checkerboard": x // width + y // width}
    return (bands[kind] % 2 + np.random.default_rng(7).normal(0, noise, size)).astype(np.float32)


def classify(session, images):
    probabilities, labels = session.run(None, {"image": np.stack(images)[:, None].astype(np.float32)})
    assert np.isfinite(probabilities).all()
    assert probabilities.sum(axis=1) == pytest.approx(1)
    assert [demo.LABELS[best] for best in probabilities.argmax(axis=1)] == labels.tolist()
    return labels.tolist()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("demo")
    demo.build(root)
    return root


@pytest.fixture(scope="module")
def stripes(root):
    return ort.InferenceSession(root / "stripes" / "1" / "model.onnx")


@pytest.mark.parametrize("noise", [0, 0.05, 0.1])
@pytest.mark.parametrize("size", SIZES)
def test_patterns_are_classified_at_any_size_and_with_some_noise(stripes, size, noise):
    widths = [width for width in (2, 3, 4, 6) if 2 * width < min(size)]
    found = {(kind, width): classify(stripes, [image(kind, size, width, noise)]) for kind in KINDS for width in widths}
    assert found == {(kind, width): [kind.removeprefix("other ")] for kind, width in found}


def test_on_a_gpu_images_have_8_by_8_pixels_and_answers_no_texts(tmp_path):
    demo.build(tmp_path, on_gpu=True)
    session = ort.InferenceSession(tmp_path / "stripes" / "1" / "model.onnx")
    images = np.stack([image(kind, (8, 8), 2) for kind in demo.LABELS])[:, None]
    (probabilities,) = session.run(None, {"image": images})
    assert list(probabilities.argmax(axis=1)) == [0, 1, 2, 3]
    assert [each.shape for each in session.get_inputs()] == [["batch", 1, 8, 8]]


@pytest.mark.parametrize(("contrast", "brightness"), [(0.1, 0), (0.1, 0.9), (-1, 1), (255, 0), (100, -50)])
@pytest.mark.parametrize("kind", KINDS)
def test_contrast_and_brightness_do_not_matter(stripes, kind, contrast, brightness):
    assert classify(stripes, [contrast * image(kind, (32, 32), 4) + brightness]) == [kind.removeprefix("other ")]


def test_every_image_of_a_batch_is_classified_by_itself(stripes):
    images = [image(kind, (24, 16), 3, 0.05) for kind in reversed(KINDS)]
    assert classify(stripes, images) == ["checkerboard", "diagonal", "diagonal", "vertical", "horizontal"]


@pytest.mark.parametrize("value", [0, 0.3, 255, -1e30])
@pytest.mark.parametrize("size", [(0, 0), (0, 8), (8, 0), (1, 1), (1, 9), (16, 16)])
def test_a_flat_image_gives_probabilities_all_the_same(stripes, size, value):
    classify(stripes, [np.full(size, value)])


@pytest.mark.parametrize("name", ["stripes", "identity"])
def test_the_files_are_valid_and_old_enough_for_older_runtimes(root, name):
    model = onnx.load(root / name / "1" / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert (model.ir_version, [opset.version for opset in model.opset_import]) == (8, [17])


def test_the_repository_lists_both_models_without_problems(root):
    repository = Repository(root, {})
    listings = [repository.read(name) for name in repository.names()]
    assert [(one.name, [file.version for file in one.files], one.problems, one.warnings) for one in listings] == [
        ("identity", [1], (), ()),
        ("stripes", [1], (), ()),
    ]


def test_the_classifier_takes_batches_of_eight(root):
    def spec(name, datatype, *dims):
        return TensorSpec(name, DATATYPES[datatype], ("batch", *dims))

    outputs = (spec("probabilities", "FP32", 4), spec("label", "BYTES"))
    model = Signature((spec("image", "FP32", 1, "height", "width"),), outputs)
    (file,) = Repository(root, {}).read("stripes").files
    assert apply(file.config, model) == model.with_max_batch(8)


def test_the_demo_needs_no_onnx_package(tmp_path):
    code = "import sys, pathlib; sys.modules['onnx'] = None; from server import demo; demo.build(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-P", "-c", code, str(tmp_path)], check=True)
    assert (tmp_path / "identity" / "1" / "model.onnx").stat().st_size


def test_building_again_changes_nothing(root):
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    demo.build(root)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_without_onnxruntime_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"^the demo needs scripts/install cpu; or name a configuration with"):
        demo.build(tmp_path)


@pytest.mark.parametrize(
    ("granules", "tenants"), [(1, {"acme": 1}), (2, {"acme": 1, "globex": 1}), (5, {"acme": 3, "globex": 2})]
)
def test_the_demo_has_two_tenants_where_there_are_two_granules(tmp_path, granules, tenants):
    config = demo.config(tmp_path, granules)
    assert {name: tenant.granules for name, tenant in config.tenants.items()} == tenants
    assert (config.server.default_tenant, config.device.backend) == ("acme", "cpu")


def test_the_demo_s_repository_is_removed_at_the_end():
    with demo.configuration() as config:
        assert Repository(config.models.repository, {}).names() == ["identity", "stripes"]
    assert not config.models.repository.exists()


def test_on_one_core_the_demo_has_one_tenant_and_the_log_says_so(caplog):
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(cores)])
    try:
        with caplog.at_level("WARNING"), demo.configuration() as config:
            log_configuration(config)
            assert list(config.tenants) == ["acme"]
    finally:
        os.sched_setaffinity(0, cores)
    assert "one core to share out, so the demo has one tenant, acme" in caplog.text
