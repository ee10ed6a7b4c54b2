"""For how many nanoseconds completions of short works may be collected, to wake the HTTP side once for several."""

BUNDLE = 50_000
"""Where the HTTP process has cores of its own."""
BUNDLE_ON_SAME_CORES = 300_000
"""If the HTTP process runs on the partition's cores: each wakes at the other's expense, and evicts its cache lines."""
BUNDLE_ON_SAME_INTERPRETER = 1_000_000
"""If both sides also share one interpreter."""


def longest_delay(shares_interpreter: bool, hosted: bool) -> int:
    """The delay for a link; `hosted`: works run on cores of the host."""
    if shares_interpreter:
        return BUNDLE_ON_SAME_INTERPRETER
    return BUNDLE_ON_SAME_CORES if hosted else BUNDLE
