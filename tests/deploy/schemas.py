"""The schemas that manifests are checked with: Kubernetes' own, and KServe's as its Python package describes them."""

import ast
import json
import re
import zipfile
from collections.abc import Iterator
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from .tools import KSERVE, KUBERNETES, wheel


class Kubernetes:
    """What one version of Kubernetes takes; keys that it does not know are mistakes."""

    def __init__(self, version: str) -> None:
        self._files = zipfile.ZipFile(wheel(KUBERNETES))
        self._folder = f"kubernetes_validate/kubernetes-json-schema/v{version}.0-local-strict/"
        definitions = Resource.from_contents(self._read("_definitions.json"), default_specification=DRAFT202012)
        self._registry: Registry[Any] = Registry().with_resource("_definitions.json", definitions).crawl()

    def mistakes(self, manifest: dict[str, Any]) -> list[str]:
        """What is wrong with this object. Raises KeyError for a kind that Kubernetes does not have."""
        group, _, version = manifest["apiVersion"].rpartition("/")
        words = [manifest["kind"], *([group.split(".")[0]] if group else []), version]
        return self._mistakes(self._read("-".join(words).lower() + ".json"), manifest)

    def mistakes_of(self, definition: str, value: Any) -> list[str]:
        """What is wrong with a part, such as a V1Container."""
        name = "io.k8s.api.core.v1." + definition.removeprefix("V1")
        return self._mistakes({"$ref": f"_definitions.json#/$defs/{name}"}, value)

    def _mistakes(self, schema: dict[str, Any], value: Any) -> list[str]:
        found = Draft202012Validator(schema, registry=self._registry).iter_errors(value)
        return [f"{error.json_path}: {error.message}" for error in found]

    def _read(self, name: str) -> Any:
        return json.loads(self._files.read(self._folder + name))


@cache
def kubernetes(version: str) -> Kubernetes:
    """The schemas of a version, read once: they are large."""
    return Kubernetes(version)


class KServe:
    """What KServe takes, by the classes of its package; for parts that are Kubernetes' this version of it."""

    def __init__(self, kubernetes: Kubernetes) -> None:
        self._kubernetes = kubernetes

    def mistakes(self, manifest: dict[str, Any]) -> list[str]:
        version = manifest["apiVersion"].removeprefix("serving.kserve.io/")
        return list(self._mistakes(version.capitalize() + manifest["kind"], manifest, "$"))

    def _mistakes(self, kind: str, value: Any, path: str) -> Iterator[str]:
        if many := re.fullmatch(r"list\[(\w+)\]", kind):
            for place, each in enumerate(value):
                yield from self._mistakes(many[1], each, f"{path}[{place}]")
        elif re.match(r"V1(alpha|beta)\d", kind):
            fields = _fields(kind)
            for key, each in value.items():
                if key not in fields:
                    yield f"{path}.{key}: {kind} has no such key"
                else:
                    yield from self._mistakes(fields[key], each, f"{path}.{key}")
        elif kind.startswith("V1") and kind != "V1ObjectMeta":
            yield from (f"{path} {mistake}" for mistake in self._kubernetes.mistakes_of(kind, value))
        elif kind in (plain := {"str": str, "int": int, "bool": bool}) and type(value) is not plain[kind]:
            yield f"{path}: {value!r} is no {kind}"


@cache
def _fields(kind: str) -> dict[str, str]:
    """The keys of a class of KServe's package, and their types."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
    with zipfile.ZipFile(wheel(KSERVE)) as files:
        tree = ast.parse(files.read(f"kserve/models/{name}.py"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    tables = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in found.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    return {key: tables["openapi_types"][attribute] for attribute, key in tables["attribute_map"].items()}
