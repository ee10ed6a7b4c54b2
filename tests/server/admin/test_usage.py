"""The times from which on GET /admin/usage counts."""

import pytest

from server.admin.usage import parse_since
from server.errors import BadRequest

NOW = 1_795_000_000 * 10**9
"""On 2026-11-18."""
MIDNIGHT = 1_793_491_200 * 10**9


@pytest.mark.parametrize("text", ["2026-11-01", "2026-11-01T00:00:00Z", "2026-11-01T01:00:00 01:00", "1793491200"])
def test_a_date_is_its_midnight_in_utc(text: str) -> None:
    assert parse_since(text, NOW) == MIDNIGHT


@pytest.mark.parametrize(
    "text", ["2026-11", "2026-W45-1", "2026-11-31", "2026-11-01Z", " 2026-11-01", "1e300", "-1", "nan", "٢026-11-01"]
)
def test_what_is_neither_aparse_since_nor_a_date_is_refused_with_both_forms(text: str) -> None:
    with pytest.raises(BadRequest, match=r"a time such as 2026-11-22T16:00:00Z .*, a date such as 2026-11-22 .*, or seconds"):
        parse_since(text, NOW)


def test_a_date_in_the_future_is_refused() -> None:
    with pytest.raises(BadRequest, match='since: "2026-11-19" is in the future'):
        parse_since("2026-11-19", NOW)
