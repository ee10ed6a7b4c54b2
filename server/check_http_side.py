"""What `greenlane check` tries of a model besides its engine: its functions and its tokenizer, which HTTP processes run."""

import asyncio
from typing import NamedTuple

from .config.text import TextOptions
from .functions.definition import FunctionsFailed
from .tenants.catalog import ModelVersion
from .tenants.running_functions import open_functions
from .tenants.running_text import open_text
from .text.folder import NoEncoder, TokenizerFailed

_LIMIT = 0.0, ""
"""None for single calls; loading has its own."""


class Tried(NamedTuple):
    """What was found of a version: a `line` to print, why it cannot be served, and why it takes no texts; each may be ""."""

    line: str = ""
    unserved: str = ""
    without_texts: str = ""


def try_http_side(served: ModelVersion, options: TextOptions) -> Tried:
    """Run a version's model.py and load its tokenizer, as an HTTP process does before it serves it.

    Blocks, for 60 s each at most.
    """
    return asyncio.run(_try(served, options))


async def _try(served: ModelVersion, options: TextOptions) -> Tried:
    try:
        if served.functions:
            (await open_functions(served.functions, served.name, 1, "", _LIMIT)).close()
    except FunctionsFailed as error:
        return Tried(unserved=f"model {served.name} {served.version} is unavailable: {error}")
    if not served.folder:
        return Tried()
    try:
        text = await open_text(served.folder, served.name, served.signature, 1, "", _LIMIT)
        try:
            encoder = text.encoder(options)
        finally:
            text.close()
    except (TokenizerFailed, NoEncoder) as error:
        return Tried(without_texts=f"model {served.name} {served.version} does not take texts: {error}")
    return Tried(
        f"takes texts of up to {encoder.most} tokens at /v1/{'embeddings' if options.task == 'embed' else options.task}"
    )
