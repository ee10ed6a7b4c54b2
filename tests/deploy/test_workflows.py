"""GitHub's workflows: valid by their schema and to zizmor, with actions of one version each."""

import json
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft7Validator

from .tools import WORKFLOWS, wheel, zizmor

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github" / "workflows").iterdir())

every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


@every_file
def test_github_takes_it(file: Path) -> None:
    with zipfile.ZipFile(wheel(WORKFLOWS)) as files:
        name = next(name for name in files.namelist() if name.endswith("vendor/github-workflows.json"))
        schema = json.loads(files.read(name))
    workflow = yaml.safe_load(file.read_text())
    workflow["on"] = workflow.pop(True)  # So YAML 1.1 reads "on".
    assert [f"{error.json_path}: {error.message}" for error in Draft7Validator(schema).iter_errors(workflow)] == []


@every_file
def test_each_action_is_of_one_version(file: Path) -> None:
    uses = re.findall(r"uses: (\S+)", file.read_text())
    assert uses
    assert [action for action in uses if not re.fullmatch(r"[\w/-]+@v\d+\.\d+\.\d+", action)] == []


def test_zizmor_has_nothing_to_say() -> None:
    done = subprocess.run([zizmor(), "--offline", "--quiet", ROOT / ".github"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
