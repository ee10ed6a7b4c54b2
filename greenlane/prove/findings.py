"""Everything that came of one run, and the verdict on all of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from greenlane.load.rules import WORDS, Word, worst

from .confinement import Located
from .lending import Lent
from .measure import Measured
from .plan import Pair
from .survey import Surveyed

STATUS: dict[Word, int] = {"isolated": 0, "leaks": 1, "not exercised": 3, "too noisy": 3}
"""Exit statuses; 2 is for what could not be tried at all."""


@dataclass(frozen=True, slots=True)
class Findings:
    """One run: of which configuration (`source`), in how many seconds, on which machine, and what came of it.

    `untried` are pairs that were not measured, and why. `ended` is why the server did before the end; empty if it did not.
    `lending` is what `--lending` found; nothing else is measured then. `unfenced` is what strains of memory, caches and PCIe
    did, which no partition fences: with `memory` that counts as all else does, without it is only said. `planned` are the
    seconds of `--seconds`; strains and repeated measurements take longer.
    """

    source: str
    seconds: float
    machine: Mapping[str, str]
    located: Sequence[Located]
    tenants: Sequence[Surveyed]
    measured: Sequence[Measured]
    untried: Mapping[Pair, str]
    ended: str = ""
    lending: Sequence[Lent] = ()
    unfenced: Sequence[Measured] = ()
    memory: bool = False
    planned: float = math.inf

    @property
    def words(self) -> dict[Pair, Word]:
        """A verdict for every pair: the worst of its kinds of aggressor."""
        found: dict[Pair, list[Word]] = {}
        for each in (*self.measured, *(self.unfenced if self.memory else ())):
            found.setdefault(each.pair, []).extend(result.ruling.word for result in each.results)
        for lent in self.lending:
            found.setdefault(lent.pair, []).extend(ruling.word for ruling in lent.rulings)
        for pair in self.untried:
            found.setdefault(pair, []).append("not exercised")
        return {pair: worst(words) for pair, words in found.items()}

    @property
    def counts(self) -> dict[str, int]:
        """How many pairs there are of each verdict, and how many were not tried; without those of which there are none."""
        words = self.words
        untried = [pair for pair in self.untried if words[pair] != "leaks"]  # As strains of a pair may be all that was not.
        judged = [word for pair, word in words.items() if pair not in untried]
        found: dict[str, int] = {word: judged.count(word) for word in reversed(WORDS) if word in judged}
        return found | ({"not tried": len(untried)} if untried else {})

    @property
    def word(self) -> Word:
        """The verdict on all: of every pair, of every partition's probe, and of the models' own work where that leaks.

        Own work that cannot be seen spoils nothing, or no GPU could ever pass.
        """
        probed = [each.word for each in self.located]
        own: list[Word] = ["leaks" for each in self.located if each.own_word == "leaks"]
        ended: list[Word] = ["not exercised"] if self.ended or not self.words else []
        return worst([*self.words.values(), *probed, *own, *ended])

    @property
    def status(self) -> int:
        """The exit status."""
        return STATUS[self.word]
