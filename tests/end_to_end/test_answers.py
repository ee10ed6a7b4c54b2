"""Over HTTP: what a library answers wrongly, on a simulated GPU, is right or an error; joined requests are as those alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines import load_engine
from engines.model_files.artifact import Artifact
from engines.model_files.onnx_file import source_digest
from engines.model_files.profiles import Profile, Range
from server.config.schema import Config, DeviceConfig, ModelOptions, ModelsConfig
from server.config.server import ServerConfig
from server.config.tenant import TenantConfig
from tests.engines.simulated import AFFINE, ROWS
from tests.engines.small import model
from tests.engines.verification.test_rows import CENTRED
from tests.models import save
from tests.simulation import Gpu, installed
from tests.simulation.plans import make_plan
from tests.simulation.tensorrt import library

from .harness import ARENA, Served, serving


def configuration(root: Path, backend: str, **options: ModelOptions) -> Config:
    return Config(
        server=ServerConfig(default_tenant="acme", drain_grace=0.0),
        device=DeviceConfig(backend=backend),
        models=ModelsConfig(repository=root, options=options),
        tenants={"acme": TenantConfig(name="acme", granules=1, models=("*",), memory=ARENA)},
        source="test",
    )


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """`padded` may be run with other rows, `whole` not; the library answers 3 and 5 rows wrongly."""
    gpu = Gpu()
    gpu.wrong_for = lambda shapes: shapes[0][0] in (3, 5)
    with installed(gpu, library(gpu)) as cuda:
        from engines.tensorrt.api import find_tensorrt

        api = find_tensorrt()
        for name in ("padded", "whole"):
            folder = tmp_path / name / "1"
            folder.mkdir(parents=True)
            (folder / "model.onnx").write_bytes(model(AFFINE))
            described = Artifact(
                library=api.library,
                version=api.version,
                targets=(),
                source=source_digest(model(AFFINE), []),
                signature=load_engine(folder / "model.onnx").signature,
                profiles=(Profile({name: Range(*map(tuple, shapes)) for name, shapes in ROWS.items()}),),
            )
            (folder / "model.plan").write_bytes(described.pack(make_plan(model(AFFINE), ROWS)))
            (tmp_path / name / "config.pbtxt").write_text('platform: "tensorrt_plan"')
        options = {"padded": ModelOptions(max_batch=8, warm_up=(1, 3)), "whole": ModelOptions(warm_up=(1, 3))}
        with serving(configuration(tmp_path, "cuda", **options), cuda.open_cuda(gpu.index)) as found:
            yield found


def ask(served: Served, name: str, rows: list[list[float]]) -> httpx.Response:
    data = [number for row in rows for number in row]
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(rows), 3], "data": data}
    return httpx.post(f"{served.url}/v2/models/{name}/infer", json={"inputs": [tensor]}, timeout=60)


def test_a_shape_that_the_library_answers_wrongly_is_answered_rightly_or_with_an_error(served: Served) -> None:
    for rows in (5, 3, 4, 1, 5, 3):
        given = [[float(row), 1.0, 2.0] for row in range(rows)]
        expected = [2 * number - 3 for row in given for number in row]
        answer = ask(served, "padded", given)
        assert answer.status_code == 200, answer.text
        assert answer.json()["outputs"][0]["data"] == expected
        answer = ask(served, "whole", given)
        if rows in (3, 5):
            assert answer.status_code == 500
            assert f"model.plan does not answer shape {rows}x3: output 'y' is off by " in answer.json()["error"]
        else:
            assert answer.json()["outputs"][0]["data"] == expected
    metrics = httpx.get(f"{served.url}/metrics").text
    assert 'greenlane_model_shapes{model="whole",tenant="acme",verdict="wrong",version="1"} 2.0' in metrics
    models: Any = {each["name"]: each for each in httpx.get(f"{served.url}/admin/status").json()["models"]}
    verified = models["padded"]["execution"]["verified"]["others"]
    assert {each["shapes"][0][0]: each["runs_as"] for each in verified if "runs_as" in each}[3] == [[4, 3]]
    assert any("shape 3x3 is refused" in note for note in models["whole"]["execution"]["notes"])


def test_requests_of_a_model_whose_rows_depend_on_each_other_get_the_answers_they_get_alone(tmp_path: Path) -> None:
    (tmp_path / "centred" / "1").mkdir(parents=True)
    save(tmp_path / "centred" / "1" / "model.onnx", CENTRED.replace("[n, 4]", "[n, 3]"))
    config = configuration(tmp_path, "cpu", centred=ModelOptions(max_batch=8, batch_delay=0.2))
    with serving(config) as served, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: ask(served, "centred", [[100.0 * number, 1.0, -number]]), range(8)))
        assert [answer.json()["outputs"][0]["data"] for answer in answers] == [[0.0, 0.0, 0.0]] * 8
        configured = httpx.get(f"{served.url}/v2/models/centred/config").json()
    assert "depend on each other" in configured["parameters"]["greenlane.execution"]["string_value"]
