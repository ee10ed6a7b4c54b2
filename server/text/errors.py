"""Why texts are not taken."""


class NoEncoder(Exception):
    """A model that texts cannot be given to; the text says why."""


class TokenizerFailed(Exception):
    """A tokenizer that cannot be used; the text says why."""
