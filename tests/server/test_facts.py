"""The JSON of facts, which is that of answers: names, order, and units."""

import pytest

from server.api.framework import json_response
from server.control.descriptions import ModelMemory, Paused, ReadyShare, TenantMemory
from server.control.moves import Move
from server.control.stretch import LentGranules, WidePartition
from server.facts import Fact
from server.observing.overview import Isolation, Problem

ROWS = {
    "a move": (
        Move(7, 1.5, "operator", "moved", "", {"a": 2}, {"a": 1}, "", 12.5, 20.125, {"a": Paused(0.25, True)}),
        '{"number":7,"at":1.5,"by":"operator","outcome":"moved","reason":"","before":{"a":2},"after":{"a":1},"error":"",'
        '"prepared_ms":12.5,"took_ms":20.125,"paused":{"a":{"ms":0.25,"ladder":true}}}',
    ),
    "a wide partition": (
        WidePartition((0, 1), [LentGranules("b", (1,))], 9, 2, {"in_flight": 3}, ["m: 7 ms"], ["no memory"]),
        '{"granules":[0,1],"borrowed":[{"owner":"b","granules":[1]}],"launches":9,"returns":2,"home_launches":{"in_flight":3},'
        '"too_long":["m: 7 ms"],"problems":["no memory"]}',
    ),
    "a ready share": (ReadyShare((0, 1), 2, 1024), '{"granules":[0,1],"models":2,"bytes":1024}'),
    "a tenant's memory": (
        TenantMemory("a", None, 7, 1, 2, 0.125, 0.25, [ModelMemory("m", "1", False, {"weights": 7})]),
        '{"name":"a","device_memory":null,"used":7,"page_ins":1,"page_outs":2,"page_in_seconds":0.125,'
        '"page_out_seconds":0.25,"models":[{"name":"m","version":"1","paged":false,"bytes":{"weights":7}}]}',
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
