"""How many of some new values may lie above the largest of earlier ones, if all are alike. Pure.

If m earlier and n new values come from one continuous distribution, every order of them is equally likely, whatever that
distribution is. So the number of new ones above the r-th largest earlier one has a known distribution, also for few values:
E. J. Gumbel and H. von Schelling, "The Distribution of the Number of Exceedances", Annals of Mathematical Statistics 21 (1950).
"""

from functools import lru_cache


@lru_cache(maxsize=1024)
def critical(earlier: int, rank: int, new: int, chance: float) -> int:
    """The fewest of `new` values above the `rank`-th largest of `earlier` ones that are less likely than `chance`, if all are
    alike; more than `new` if no number of them is.
    """
    likely = 1.0
    for index in range(rank):
        likely *= (earlier - index) / (new + earlier - index)
    at_most = 0.0
    for count in range(new + 1):
        at_most += likely
        if 1 - at_most < chance:
            return count + 1
        likely *= (count + rank) * (new - count) / ((count + 1) * (new - count - 1 + earlier - rank + 1))
    return new + 1
