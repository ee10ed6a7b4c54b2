"""A model repository on disk, in Triton's layout: `<root>/<model>/<version>/model.onnx`, with an optional `config.pbtxt`.

Broken content is a result, not an exception: a `Listing` has what can be served and the problems with the rest.
"""

import os
import re
from codecs import BOM_UTF8
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from partitions.regular_file import open_regular, read_regular

from ..config.schema import ModelOptions
from ..config.tables import dotted
from ..config.tenant import TenantConfig
from ..config.text import DEFAULTS, TextOptions
from ..protocol.json_document import short
from ..text.folder import TextFolder, read_folder
from .functions_file import FILENAME, FunctionsFile, read_functions
from .model_config import ConfigRefused, ModelConfig, from_json, parse
from .model_settings import StatedSettings, from_options
from .unserved import unserved_backend

_VERSION = re.compile(r"[1-9][0-9]*", re.ASCII)
_TRITONS_OWN = frozenset(("configs", "warmup", "initial_state"))
"""Directories that may stand beside a model's versions in Triton's layout; they are skipped without a warning."""
_DANGLING = "a link to what is not there; mend the link, or take it away"
_KINDS = (".onnx", ".plan")
"""How the names of models' files end."""
_MOST_NAMED = 16
"""How many names a message lists at most; a repository or a request may have thousands."""
_IN_DIRECTORY = "model.onnx"
"""The model's file where a directory stands in place of `model.onnx` or whatever file the configuration names."""
_ENSEMBLE = b"ensemble"
"""What every configuration of an ensemble has somewhere."""
_NO_PYTHON = "code of the repository is not run unless models.python is true: set that, or take the file away"
_MOST_CONFIG = 1 << 20
"""Bytes of a config.pbtxt. To read so many takes more than a second of the interpreter."""
_MOST_LABELS = 1 << 20
"""Bytes of a label file. Every tenant's process holds the labels of every version."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One version of a model that is to be served.

    `path` is the model's file, for an ensemble the version's directory. `labels` are the contents of label files, by output.
    `text` is its tokenizer, with what is said of it, and `text_options` what the configuration says.
    """

    name: str
    version: int
    path: Path
    config: ModelConfig
    labels: Mapping[str, bytes] = field(default_factory=dict)
    functions: FunctionsFile | None = None
    text: TextFolder | None = None
    text_options: TextOptions = DEFAULTS

    @property
    def filename(self) -> str:
        """`path` relative to the version's directory: `model.onnx`, or `model.onnx/model.onnx`; "" for an ensemble."""
        if self.config.steps:
            return ""
        return f"{self.path.parent.name}/{self.path.name}" if self.path.parent.name != str(self.version) else self.path.name


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a version is not served; `version` is its directory's name, "" if the whole model is not served."""

    version: str
    reason: str


@dataclass(frozen=True, slots=True)
class Listing:
    """The content of a model's directory: files to serve, in ascending order of versions, or problems, or both; never neither.

    Only versions that the version policy selects are problems. `warnings` say, one line each, what was skipped or ignored.
    """

    name: str
    files: tuple[ModelFile, ...] = ()
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()


class Repository:
    """The models below a directory. Nothing is cached; every method reads from disk and blocks. Any thread may call.

    `options` are the settings of the server's configuration, by model; they overrule a model's own files. `source` is that
    configuration's name in errors. Functions of models (`model.py`) are served if `python` is set.
    """

    def __init__(self, root: Path, options: Mapping[str, ModelOptions], source: str = "", python: bool = False) -> None:
        self._root = root
        self._options = options
        self._source = source
        self._python = python

    def __repr__(self) -> str:
        return f"<Repository {self._root}>"

    def with_options(self, options: Mapping[str, ModelOptions]) -> "Repository":
        """The same with these options of some models."""
        return Repository(self._root, {**self._options, **options}, self._source, self._python)

    def names(self) -> list[str]:
        """The names of all models, sorted; also of files in place of folders, and of links to nothing, which `read` refuses.
        Raises OSError if the root cannot be read.
        """
        found = [name for name in os.listdir(self._root) if _is_name(name)]
        folders = {name for name in found if os.path.isdir(self._root / name) or _is_dangling(self._root / name)}
        return sorted(folders | {Path(name).stem for name in found if _is_model(self._root / name)})

    def may_be_ensemble(self, name: str) -> bool:
        """Whether a model is an ensemble; if it is, this is True. Its configuration is read, but not parsed."""
        try:
            return _ENSEMBLE in read_regular(self._root / name / "config.pbtxt", _MOST_CONFIG)
        except (OSError, ValueError):
            return False

    def read(self, name: str, override: str | None = None) -> Listing:
        """The versions of a model and its problems. `override` is a configuration as JSON to use in place of `config.pbtxt`.

        Whatever is wrong with the name, the override or the files becomes a problem, never an exception.
        """
        if not _is_name(name):
            return _refused(name, "not in the repository")
        try:
            numbers, skipped = _version_directories(self._root / name)
        except (FileNotFoundError, NotADirectoryError):
            return _refused(name, self._not_there(name))
        except OSError as error:
            return _refused(name, f"{name}: {error.strerror}")
        try:
            config = self._config(name, override)
            labels = self._labels(name, config)
        except ConfigRefused as error:
            return _refused(name, str(error))
        listing = self._list(name, numbers, config, labels)
        read = {folder for file in listing.files if file.text for folder in file.text.folders}
        return replace(listing, warnings=_warnings(name, [each for each in skipped if each not in read], config))

    def _not_there(self, name: str) -> str:
        """Why a name that is no folder is no model."""
        if _is_dangling(self._root / name):
            return f"{name} is {_DANGLING}"
        for kind in _KINDS:
            if _is_model(self._root / f"{name}{kind}"):
                return f"{name}{kind} is not in a folder of its own; move it to {name}/1/model{kind}"
        return "not in the repository"

    def _config(self, name: str, override: str | None) -> ModelConfig:
        config = self._read_config(name) if override is None else self._of_request(name, override)
        if config.name not in ("", name):
            raise ConfigRefused(
                f"{config.source}: name is {short(repr(config.name))}; expected {name!r} as the directory, or none"
            )
        return _overruled(config, self._options[name], name, self._source) if name in self._options else config

    def _of_request(self, name: str, override: str) -> ModelConfig:
        """The configuration in a tenant's request. It cannot change how a model runs, as that costs other tenants too."""
        config = from_json(override)
        if ours := [setting.where for setting in config.settings.values() if not setting.is_tritons]:
            place = f"in {name}/config.pbtxt or as [{dotted(('models', name))}]"
            raise ConfigRefused(f"{ours[0]}: how a model runs is for the server's operator to say, {place}")
        settings: StatedSettings = {}
        labels: Collection[str] = ()
        with suppress(ConfigRefused):  # The request may replace a file that is broken.
            own = self._read_config(name)
            settings, labels = own.settings, own.labels.values()
        if other := sorted(set(config.labels.values()).difference(labels)):  # Otherwise a tenant could read any file.
            said = f"label_filename is {short(repr(other[0]))}"
            raise ConfigRefused(f"{config.source}: {said}; expected one that {name}/config.pbtxt names, or none")
        ignored = tuple(setting.key for setting in config.settings.values())
        return replace(config, settings=settings, unread=(*config.unread, *ignored))

    def _read_config(self, name: str) -> ModelConfig:
        source = f"{name}/config.pbtxt"
        try:
            return parse(read_regular(self._root / source, _MOST_CONFIG).decode("utf-8-sig"), source)
        except FileNotFoundError:
            return ModelConfig()
        except OSError as error:
            raise ConfigRefused(f"{source}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigRefused(f"{source}: not UTF-8 at byte {error.start}") from error

    def _labels(self, name: str, config: ModelConfig) -> dict[str, bytes]:
        """The contents of the model's label files, by output."""
        return {output: self._read_labels(f"{name}/{filename}") for output, filename in config.labels.items()}

    def _read_labels(self, path: str) -> bytes:
        try:
            content = read_regular(self._root / path, _MOST_LABELS).removeprefix(BOM_UTF8)
            content.decode()
        except OSError as error:
            raise ConfigRefused(f"{path}: {error.strerror}; it is a label_filename") from error
        except UnicodeDecodeError as error:
            raise ConfigRefused(f"{path}: not UTF-8 at byte {error.start}, as labels have to be") from error
        return content

    def _list(self, name: str, numbers: list[int], config: ModelConfig, labels: Mapping[str, bytes]) -> Listing:
        """The versions that the policy selects. If some of them have no model, it selects again among the versions with one."""
        found = {number: self._version(name, number, config, labels) for number in numbers}
        files = {number: item for number, item in found.items() if isinstance(item, ModelFile)}
        chosen = [found[number] for number in config.versions.select(numbers)]
        problems = [item for item in chosen if isinstance(item, Problem)]
        if missing := sorted(set(config.versions.specific).difference(numbers)):
            these = f"version {missing[0]}, which is" if len(missing) == 1 else f"versions {some(missing)}, which are"
            problems.append(Problem(str(missing[0]), f"{config.source}: version_policy names {these} not there"))
        if not found:
            file = "".join(config.filenames[:1])  # None for an ensemble, whose version directories may be empty.
            problems.append(Problem("", f"no version in it; expected {name}/1/{file}{_elsewhere(self._root / name, file)}"))
        return Listing(name, tuple(files[number] for number in config.versions.select(list(files))), tuple(problems))

    def _version(self, name: str, number: int, config: ModelConfig, labels: Mapping[str, bytes]) -> ModelFile | Problem:
        version = str(number)
        try:
            functions = read_functions(self._root / name, version)
        except ValueError as error:
            return Problem(version, str(error))
        except OSError as error:
            where = os.path.relpath(error.filename or self._root / name / version / FILENAME, self._root)
            return Problem(version, f"{where}: {error.strerror}")
        if functions and not self._python:
            return Problem(version, f"{functions.where} has functions, and {_NO_PYTHON}")
        if functions and config.steps:
            return Problem(version, f"{functions.where} has functions, which an ensemble cannot have; take the file away")
        if config.steps:
            return ModelFile(name, number, self._root / name / version, config, labels)
        options = self._options.get(name, ModelOptions()).text or DEFAULTS
        try:
            path = _model_file(self._root / name / version, config.filenames)
            if not path:
                folder = self._root / name / version
                other = _misnamed(folder, config.filenames) or unserved_backend(_listed(folder))
                return Problem(version, f"no {' or '.join(config.filenames)} in {name}/{version}{other}")
        except OSError as error:
            where = os.path.relpath(error.filename or self._root / name / version, self._root)
            return Problem(version, f"{where}: {error.strerror}")
        return ModelFile(name, number, path, config, labels, functions, read_folder(self._root / name, version), options)


def some(names: Iterable[object]) -> str:
    """The first few names, and how many more there are, for messages."""
    listed = [str(name) for name in names]
    others = len(listed) - _MOST_NAMED
    return ", ".join(listed[:_MOST_NAMED]) + (f" and {others} more" if others > 0 else "")


def _overruled(config: ModelConfig, options: ModelOptions, name: str, source: str) -> ModelConfig:
    """The configuration with the settings of the server's configuration file `source` in place of its own."""
    config = replace(config, settings={**config.settings, **from_options(options, ("models", name), source)})
    if options.max_batch is not None:
        config = replace(config, max_batch=options.max_batch, max_batch_key=dotted(("models", name, "max_batch")))
    if options.batch_delay is not None:
        config = replace(config, batch_delay=options.batch_delay)
    if options.preferred_batches is not None:
        config = replace(config, preferred_batches=options.preferred_batches)
    return config


def _is_name(name: str) -> bool:
    """Whether a directory of this name is a model: one path component, not hidden, and printable."""
    return name.isprintable() and "/" not in name and name[:1] not in ("", ".") and len(name.encode()) <= 255


def _version_directories(model: Path) -> tuple[list[int], list[str]]:
    """The numbers of versions, ascending, and the other directories, sorted. A dangling link counts as a version."""
    names = [name for name in os.listdir(model) if name.isprintable() and not name.startswith(".")]
    names = [name for name in names if os.path.isdir(model / name) or os.path.islink(model / name)]
    numbers = sorted(int(name) for name in names if _VERSION.fullmatch(name))
    others = (name for name in names if not _VERSION.fullmatch(name) and os.path.isdir(model / name))
    return numbers, sorted(name for name in others if name not in _TRITONS_OWN)


def _model_file(directory: Path, filenames: Sequence[str]) -> Path | None:
    """The first of these files that exists, or None. Raises OSError if it exists but cannot be read.

    An ONNX model of several files may be a directory of that name, as in Triton's layout: `model.onnx/model.onnx`.
    """
    for filename in filenames:
        names = [filename] if filename.endswith(".plan") else [f"{filename}/{_IN_DIRECTORY}", filename]
        for path in [directory / name for name in names]:
            with suppress(FileNotFoundError, NotADirectoryError):
                open_regular(path).close()
                return path
    return None


def _is_dangling(path: Path) -> bool:
    """Whether this is a link to what is not there."""
    return os.path.islink(path) and not os.path.exists(path)


def _is_model(path: Path) -> bool:
    """Whether this is a file that could be a model, by its name."""
    return path.suffix in _KINDS and os.path.isfile(path)


def _misnamed(folder: Path, filenames: Sequence[str]) -> str:
    """What to do with a file of another name than these, or in a folder of this one, as the end of a sentence; "" without one.

    Raises OSError.
    """
    listed = [name for name in sorted(_listed(folder)) if name.isprintable()]
    deeper = [f"{name}/{each}" for name in listed if os.path.isdir(folder / name) for each in sorted(_listed(folder / name))]
    found = next((name for name in (*listed, *filter(str.isprintable, deeper)) if name.lower().endswith(_KINDS)), "")
    if not found:
        return ""
    if found in filenames:
        return f"; {found} is {_DANGLING}"
    name = next((each for each in filenames if each.endswith(Path(found).suffix.lower())), filenames[0])
    if "/" in found:
        return f"; {short(found)} is there: move it to {name}"
    by_name = ", or give its name as default_model_filename" if found.endswith(_KINDS) else ""
    return f"; {short(found)} is there: rename it to {name}{by_name}"


def _elsewhere(model: Path, filename: str) -> str:
    """What to do with a model's file that is in its folder without a version, as the end of a sentence; "" without one."""
    if os.path.isfile(model / "1"):
        return f"; {model.name}/1 is a file, and a version is a folder"
    with suppress(OSError):
        folders = [model, *(model / name for name in sorted(_listed(model)) if os.path.isdir(model / name))]
        paths = [folder / name for folder in folders for name in sorted(_listed(folder)) if name.isprintable()]
        found = next((path.relative_to(model.parent) for path in paths if _is_model(path)), None)
        if found and filename:
            if _VERSION.fullmatch(model.name) and found.parent.name == model.name:
                above = "models.repository has to be the folder above its model's"
                return f"; {found} is there: if {model.name} is a version, {above}"
            return f"; {found} is there: move it to {model.name}/1/model{found.suffix}"
    return ""


def _listed(directory: Path) -> list[str]:
    """The names in a directory; none if it is not a directory, such as a dangling link. Raises OSError."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _warnings(name: str, skipped: list[str], config: ModelConfig) -> tuple[str, ...]:
    lines = []
    if config.unread:
        lines.append(f"{config.source}: ignored, as they mean nothing here: {some(config.unread)}")
    if skipped:
        expected = "a version is a number above 0 without leading zeros"
        lines.append(f"{name}: not looked into: {some(map(short, skipped))}; {expected}")
    return tuple(lines)


def _refused(name: str, reason: str) -> Listing:
    return Listing(name, problems=(Problem("", reason),))


def names_for(tenant: TenantConfig, repository: Path) -> list[str] | None:
    """The models in a repository that a tenant may call; None if it cannot be read. Blocks."""
    with suppress(OSError):
        return [name for name in Repository(repository, {}).names() if tenant.may_call(name)]
    return None
