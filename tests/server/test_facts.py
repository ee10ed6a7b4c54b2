"""The JSON of facts, which is that of answers: names, order, and units."""

import pytest

from server.api.framework import json_response
from server.control.descriptions import Paused
from server.control.moves import Move
from server.facts import Fact
from server.observing.baseline import Isolation
from server.observing.problems import Problem

ROWS = {
    "a move": (
        Move(7, 1.5, "operator", "moved", "", {"a": 2}, {"a": 1}, "", 12.5, 20.125, {"a": Paused(0.25, True)}),
        '{"number":7,"at":1.5,"by":"operator","outcome":"moved","reason":"","before":{"a":2},"after":{"a":1},"error":"",'
        '"prepared_ms":12.5,"took_ms":20.125,"paused":{"a":{"ms":0.25,"ladder":true}}}',
    ),
    "an isolation": (
        Isolation(1.25, True, 3.5, 800, ""),
        '{"ratio":1.25,"slower":true,"quiet_p99_ms":3.5,"quiet_requests":800,"why":""}',
    ),
    "a problem": (Problem("a", "refused", 1.5, 2.0, 3), '{"tenant":"a","text":"refused","first":1.5,"last":2.0,"count":3}'),
}


@pytest.mark.parametrize(("fact", "json"), ROWS.values(), ids=ROWS)
def test_a_facts_json(fact: Fact, json: str) -> None:
    assert bytes(json_response(fact).body).decode() == json
