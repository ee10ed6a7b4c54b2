"""Arguments of the application: what a command line gives, and everything wrong with it at once."""

from pathlib import Path

import pytest

from greenlane.ray.arguments import Arguments, WrongArguments, read

TOML = '[models]\nrepository = "/models"\n[tenants.acme]\ncores = 1\nmodels = ["*"]\n'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "greenlane.toml"
    path.write_text(TOML)
    return path


def test_texts_of_a_command_line_are_read(file: Path) -> None:
    given = {"config": str(file), "servers": "2", "gpus": "0", "cores": "4", "tenants": {"acme": [1]}}
    assert read(given) == Arguments(TOML, servers=2, gpus=0, cores=4, ingresses=1, tenants={"acme": (1,)})


def test_another_configuration_is_another_version(file: Path) -> None:
    before = read({"config": str(file)}).version
    file.write_text(TOML + "queue = 2\n")
    assert read({"config": str(file)}).version != before


def test_every_mistake_is_named(file: Path) -> None:
    file.write_text(TOML.replace('"/models"', '"models"') + "port = 9000\n")
    given = {
        "config": str(file),
        "servers": "2",
        "gpus": "0",
        "ingresses": 0,
        "tenants": {"globex": [0], "acme": [3]},
        "replicas": 2,
    }
    with pytest.raises(WrongArguments) as refusal:
        read(given)
    assert str(refusal.value).splitlines() == [
        "replicas: unknown; expected config, tenants, servers, gpus, cores, ingresses",
        "ingresses: 0; expected a whole number of 1 or more",
        "models.repository: 'models'; expected an absolute path, as each server reads it on its own machine",
        "tenants.acme.port: leave it out, as requests come through Ray Serve",
        "gpus, cores: a server needs gpus=1, or gpus=0 and the number of its cores, such as cores=4",
        "tenants.globex: the configuration has no such tenant",
        "tenants.acme: [3]; expected a list of numbers from 0 to 1",
    ]


@pytest.mark.parametrize("content", [None, "[models"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(WrongArguments, match=f"^config: {path} cannot be read: "):
        read({"config": str(path)})
    with pytest.raises(WrongArguments, match="config: missing"):
        read({})
