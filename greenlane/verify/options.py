"""The command line of `greenlane verify`, read without importing the server."""

from collections.abc import Sequence
from dataclasses import dataclass

from greenlane.options import CommandParser, checked, count, positive, shape, whole
from server.command_line import DEFAULT_CONFIGURATION, file_name

_EXAMPLES = """\
examples:
  {program} model.onnx
      every number of rows from 1 to 8, as the server would run the file on the device of this machine
  {program} model.onnx --from x:1x16x512 --to x:8x256x512
      100 of the shapes between these two, chosen at random but with both ends, the same each time
  {program} encoder --config greenlane.toml --shape x:2x53x512 --shape x:3x53x512
      a model of the repository with the settings that it is served with, and these shapes only

The engine's answer to random inputs is compared with ONNX Runtime's on the CPU, which reads the ONNX file that the engine was
built from. On CPU cores the session that serves is compared with one without optimisations. An error is |answer - reference| /
|reference|, of the row that is off most; the tolerance is what rounding by the datatype explains (docs/operations/verify.md).
Two rows are also run alone and together, as the server joins them.

exit status: 0 all agree; 1 some shape disagrees, or rows depend on each other; 2 nothing can be compared, or the configuration
or the model cannot be used; 64 the command line is wrong; 130 interrupted
"""

NamedShapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Options:
    """What is to be compared, and where it is written to. `shapes` are sets of shapes, by the names of inputs."""

    model: str
    config: str | None
    least: NamedShapes
    most: NamedShapes
    shapes: tuple[NamedShapes, ...]
    count: int
    seconds: float | None
    seed: int
    json: str | None


def parse(arguments: Sequence[str], program: str = "greenlane verify") -> Options:
    """Read what follows `greenlane verify`. Raises SystemExit."""
    parser = _parser(program)
    words = parser.parse_args(arguments)
    if bool(words.least) != bool(words.most):
        parser.error("give both --from and --to: the smallest and the largest shape of each input whose sizes vary")
    if odd := dict(words.least).keys() ^ dict(words.most).keys():
        parser.error(f"{min(odd)!r} has only one of --from and --to; give both")
    return Options(
        words.model, words.config, dict(words.least), dict(words.most), tuple(words.shape), words.count, words.seconds,
        words.seed, words.json,
    )  # fmt: skip


def _parser(program: str) -> CommandParser:
    what = "Compare an engine's answers with a reference, for many shapes of its inputs."
    parser = CommandParser(program, what, _EXAMPLES)
    parser.add_argument("model", metavar="MODEL", help="name in the repository, or a .onnx or .plan file")
    config = f"TOML configuration; default: {DEFAULT_CONFIGURATION}"
    parser.add_argument("--config", metavar="FILE", type=file_name, help=config)
    for option, dest, what in (("--from", "least", "smallest"), ("--to", "most", "largest")):
        text = f"{what} shape of an input whose sizes vary, repeatable; a file is built for shapes between"
        parser.add_argument(option, dest=dest, type=checked(shape), action="append", default=[], metavar="INPUT:1x9", help=text)
    only = "compare these shapes only, repeatable; inputs separated by commas, as in x:2x9,y:2x3"
    parser.add_argument("--shape", type=checked(_several), action="append", default=[], metavar="INPUT:2x9", help=only)
    parser.add_argument("--count", type=count, default=100, metavar="N", help="shapes to compare at most; default: 100")
    parser.add_argument("--seconds", type=positive, metavar="S", help="stop after this time, and say what was not compared")
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="seed of inputs and of the choice; default: 0")
    json = "write all figures as JSON; - prints them in place of the text"
    parser.add_argument("--json", metavar="FILE", type=file_name, help=json)
    return parser


def _several(text: str) -> NamedShapes:
    return dict(shape(part) for part in text.split(","))
