"""Engine files: a TensorRT plan with its description.

A bare plan is opaque and fits one version of one library; that version, and the signature, cannot be read without a GPU. So
`engines.build` writes it as the last of thirteen fields, in the fixed order of `FIELDS`. How it is to be run is not among
them: see `engines.settings`.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from partitions.regular_file import open_regular

from ..datatypes import DATATYPES
from ..errors import ModelRefused
from ..signature import Signature, TensorSpec
from .frame import Frame, FrameError
from .profiles import Profile, Range

FILE = Frame(b"\x89GLPLAN\n", 3)
FORMAT = FILE.version

# All UTF-8 text but the plan. `has_facts` is "1" if `facts` was written and "0" if the defaults hold.
FIELDS = (
    "library", "version", "platform", "targets", "source", "structure", "signature",
    "profiles", "options", "layers", "has_facts", "facts", "plan",
)  # fmt: skip

PORTABLE = frozenset({"tensorrt_rtx"})
"""Libraries whose plans run on another operating system than the one they were built on."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """The description in an engine file.

    `library` is `tensorrt_rtx` or `tensorrt`. `targets` are compute capabilities, none for the library's default set. `source`
    is the SHA-256 of the ONNX, and `structure` that of the ONNX without its weights, or "". `layers` is the network's count
    before the library merged layers. `options` are the other build options. `facts` are what the engine itself reported, if
    there was a GPU.
    """

    library: str
    version: str
    targets: tuple[str, ...]
    source: str
    signature: Signature
    profiles: tuple[Profile, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 0
    facts: Mapping[str, int] | None = None
    platform: str = field(default_factory=lambda: this_platform())
    structure: str = ""

    def pack(self, plan: bytes | memoryview) -> bytes:
        """The bytes of the file with this plan."""
        texts = (
            self.library,
            self.version,
            self.platform,
            ",".join(self.targets),
            self.source,
            self.structure,
            _signature_text(self.signature),
            json.dumps([_profile_json(profile) for profile in self.profiles]),
            json.dumps(dict(self.options)),
            str(self.layers),
            "0" if self.facts is None else "1",
            "" if self.facts is None else json.dumps(dict(self.facts)),
        )
        return FILE.pack([*(text.encode() for text in texts), plan])

    def kernels_digest(self) -> str:
        """SHA-256 in hexadecimal of what the kernels of this plan depend on, its weights not among it. "" where unknown."""
        built = [self.structure, [_profile_json(profile) for profile in self.profiles], dict(self.options)]
        return hashlib.sha256(json.dumps(built, sort_keys=True).encode()).hexdigest() if self.structure else ""

    def check(self, where: str, library: str, version: str, capability: str | None = None) -> None:
        """Raise ModelRefused with both sides of a difference, before the library gets the plan.

        `library` and `version` are of the one that is to run it, `capability` is the GPU's, such as "9.0".
        """
        again = "; build it again with `greenlane build`"
        if library != self.library:
            raise ModelRefused(
                f"{where}: the plan is for {self.library} {self.version}, but this is {library} {version}{again}"
            )
        if version != self.version:
            raise ModelRefused(f"{where}: built with {library} {self.version}, but this is {library} {version}{again}")
        if library not in PORTABLE and self.platform != this_platform():
            raise ModelRefused(f"{where}: built on {self.platform}, but this is {this_platform()}{again} here")
        if capability and self.targets and capability not in self.targets:
            raise ModelRefused(
                f"{where}: built for compute capabilities {', '.join(self.targets)}, but the GPU has {capability}{again}"
            )


class PlanFile(NamedTuple):
    """A plan and its description; None for a bare plan."""

    plan: memoryview
    artifact: Artifact | None


def read_plan(path: Path) -> PlanFile:
    """Read an engine file, either an artifact or a bare plan. Blocks. Raises ModelRefused."""
    try:
        with open_regular(path) as file:
            return unpack(file.read(), str(path))
    except OSError as error:
        raise ModelRefused(f"{path}: {error.strerror}") from error


def read_artifact(path: Path) -> Artifact | None:
    """The description in an engine file, which is read no further than that; None for a bare plan, and for what is no whole
    description. Blocks.
    """
    try:
        with open_regular(path) as file:
            texts = [field.decode() for field in FILE.first(file, len(FIELDS) - 1)]
        return _artifact(dict(zip(FIELDS, texts, strict=False)))
    except (OSError, FrameError, ValueError, TypeError, KeyError, AttributeError):
        return None


def unpack(data: bytes, where: str) -> PlanFile:
    """Parse an engine file without copying the plan. Raises ModelRefused; `where` is what its text calls the file."""
    if not data:
        raise ModelRefused(f"{where}: empty; expected an engine file of `greenlane build`, or a plan")
    if not FILE.owns(data):
        return PlanFile(memoryview(data), None)
    try:
        fields = dict(zip(FIELDS, FILE.unpack(data, len(FIELDS)), strict=True))
        plan = fields.pop("plan")
        return PlanFile(plan, _artifact({name: bytes(value).decode() for name, value in fields.items()}))
    except FrameError as error:
        raise ModelRefused(f"{where}: the engine file is {error}; build it again with `greenlane build`") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelRefused(f"{where}: the engine file's fields cannot be read: {error}") from error


def this_platform() -> str:
    """The operating system and processor, such as `linux x86_64`."""
    return f"{platform.system()} {platform.machine()}".lower()


def _artifact(texts: Mapping[str, str]) -> Artifact:
    if (flag := texts["has_facts"]) not in ("0", "1"):
        raise ValueError(f"has_facts is {flag!r}; expected '0' or '1'")
    return Artifact(
        library=texts["library"],
        version=texts["version"],
        platform=texts["platform"],
        targets=tuple(texts["targets"].split(",")) if texts["targets"] else (),
        source=texts["source"],
        structure=texts["structure"],
        signature=_signature(json.loads(texts["signature"])),
        profiles=tuple(_profile(value) for value in json.loads(texts["profiles"])),
        options=dict(json.loads(texts["options"])),
        layers=int(texts["layers"]),
        facts=dict(json.loads(texts["facts"])) if flag == "1" else None,
    )


def _signature_text(signature: Signature) -> str:
    rows = [[[spec.name, spec.datatype.name, spec.dims] for spec in specs] for specs in (signature.inputs, signature.outputs)]
    return json.dumps(rows)


def _signature(rows: Any) -> Signature:
    inputs, outputs = (tuple(TensorSpec(name, DATATYPES[code], tuple(dims)) for name, code, dims in specs) for specs in rows)
    return Signature(inputs, outputs)


def _profile_json(profile: Profile) -> dict[str, Any]:
    return {
        "ranges": {name: list(range_) for name, range_ in profile.ranges.items()},
        "sms": profile.sms,
        "tuned": profile.tuned,
    }


def _profile(value: Any) -> Profile:
    ranges = {name: Range(*(tuple(shape) for shape in shapes)) for name, shapes in value["ranges"].items()}
    return Profile(ranges, value["sms"], value["tuned"])
