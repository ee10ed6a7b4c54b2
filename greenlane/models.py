"""The model that a command is about: a file, or one of a configuration's repository."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from engines import ModelRefused
from partitions import Device
from server.app import configuration, open_alone
from server.config.schema import Config, ModelsConfig
from server.config.tables import nearest
from server.device.model_loader import ModelLoader


@contextmanager
def configured(model: str, config: str | None) -> Iterator[tuple[Path | None, Config, Device]]:
    """The file that MODEL is, or None for a name; the configuration; and the device it names.

    A file without a configuration runs on the default device. Raises ConfigError, PartitionError, ModelRefused.
    """
    path = Path(model)
    if path.suffix in (".onnx", ".plan") and not path.is_file():
        raise ModelRefused(f"{path}: there is no such file; expected a file, or a model's name in the repository")
    if path.suffix == ".toml":
        raise ModelRefused(f"{path} is no model; did you mean --config {path}, and a model's name in its repository?")
    with ExitStack() as stack:
        if path.is_file() and not config:
            found = Config(models=ModelsConfig(repository=path.absolute().parent), tenants={}, source="the command line")
        else:
            found = stack.enter_context(configuration(config))
        device = stack.enter_context(closing(open_alone(found.device)))
        yield path if path.is_file() else None, found, device


def check_name(name: str, loader: ModelLoader, source: str) -> None:
    """Raise ModelRefused, with names near to this one, unless the repository has such a model."""
    known = loader.names()
    if name not in known:
        hint = nearest(name, known) if known else "it is empty"
        raise ModelRefused(f"there is no model {name!r} in the repository of {source}; {hint}")
