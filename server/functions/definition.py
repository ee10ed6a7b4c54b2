"""What is known of a model's functions without running them."""

from dataclasses import dataclass

from engines import Signature


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of one version of a model.

    `source` is the text of `model.py` as it was when the model was loaded, `path` where that is, and `where` the same below the
    repository, for clients. `inner` is the engine's own
    signature; clients see the one of `ServedModel`. `preprocess` and `postprocess` say which of the two there are.
    """

    path: str
    where: str
    source: str
    inner: Signature
    preprocess: bool
    postprocess: bool


class FunctionsFailed(Exception):
    """`model.py` could not be run; the text says why."""
