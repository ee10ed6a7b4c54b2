"""The last things that went wrong: joined by minute, the newest first, and no more than so many."""

import logging

from server.observing.overview import MOST, Problems


def test_the_same_within_a_minute_is_one() -> None:
    now = [100.0]
    problems = Problems(lambda: now[0])
    problems.add("full", "acme", 3)
    now[0] = 150.0
    problems.add("full", "acme", 2)
    problems.add("full", "globex")
    (globex, acme) = problems.newest()
    assert (globex.tenant, globex.count) == ("globex", 1)
    assert (acme.first, acme.last, acme.count) == (100.0, 150.0, 5)
    now[0] = 211.0
    problems.add("full", "acme")
    assert [(each.tenant, each.first, each.count) for each in problems.newest()] == [("acme", 211.0, 1), ("globex", 150.0, 1)]


def test_the_oldest_go() -> None:
    problems = Problems()
    for number in range(MOST + 2):
        problems.add(f"{number}")
    assert [each.text for each in problems.newest()] == [f"{number}" for number in reversed(range(2, MOST + 2))]


def test_a_tenant_with_many_takes_the_place_of_its_own() -> None:
    problems = Problems()
    problems.add("the device is hot")
    problems.add("full", "globex")
    for number in range(2 * MOST):
        problems.add(f"{number}", "acme")
    found = problems.newest()
    assert [(each.tenant, each.text) for each in found[-2:]] == [("globex", "full"), ("", "the device is hot")]
    assert [each.text for each in found[:-2]] == [f"{number}" for number in reversed(range(MOST + 2, 2 * MOST))]


def test_warnings_of_a_logger_are_kept_with_their_tenant() -> None:
    problems, logger = Problems(), logging.getLogger("test.problems")
    logger.addHandler(problems)
    try:
        logger.info("not this")
        logger.warning("it is %s", "late", extra={"tenant": "acme"})
        logger.warning("POST /admin/reload: nothing has changed:\n  tenants.acme.memory needs a restart\n  so does server.port")
        logger.error("it failed")
    finally:
        logger.removeHandler(problems)
    refused = "POST /admin/reload: nothing has changed: tenants.acme.memory needs a restart; so does server.port"
    assert [(each.tenant, each.text) for each in problems.newest()] == [
        ("", "it failed"),
        ("", refused),
        ("acme", "it is late"),
    ]
