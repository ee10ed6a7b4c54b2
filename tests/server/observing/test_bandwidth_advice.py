"""What is said of tenants that draw much of a device's memory bandwidth, and of those that are held to a share of it."""

from server.config.tenant import TenantConfig
from server.control.fence import FencedModel, FencedTenant
from server.observing.advice import advise_fenced, advise_hog, advise_paced

WHOLE = 3_350 * 10**9


def test_a_hog_that_nothing_holds_reads_which_key_would() -> None:
    assert advise_hog("acme", 2.3456e12, 0.42, WHOLE, ["globex", "initech"], False) == [
        "acme draws 2.35 TB/s, 70% of the device's memory bandwidth with 42% of its SMs, which globex and initech may feel. "
        '`memory_bandwidth = "auto"` would hold acme to its part while others work; `greenlane prove --memory` says what '
        "they feel"
    ]
    assert "draws about 2" in advise_hog("acme", 2e12, 0.42, WHOLE, ["globex"], True)[0]


def test_a_hog_of_one_granule_is_not_sent_to_a_key_that_cannot_hold_it() -> None:
    assert advise_hog("acme", 1e12, 0.06, WHOLE, ["globex"], False, granules=1) == [
        "acme draws 1 TB/s, 30% of the device's memory bandwidth with 6% of its SMs, which globex may feel. It has one "
        "granule, which no `memory_bandwidth` narrows; `greenlane prove --memory` says what they feel"
    ]


def test_nothing_is_said_of_one_within_its_part_or_alone_or_where_nothing_is_known() -> None:
    assert advise_hog("acme", 1.4e12, 0.42, WHOLE, ["globex"], False) == []
    assert advise_hog("acme", WHOLE / 2, 0.5, WHOLE, ["globex"], False) == []
    assert advise_hog("acme", 3e12, 0.42, WHOLE, [], False) == []
    assert advise_hog("acme", 3e12, 0.42, 0, ["globex"], False) == []


def fenced(*models: FencedModel, problems: tuple[str, ...] = (), paced: bool = False) -> FencedTenant:
    return FencedTenant(10**12, (0,), 5, 0, 0, [], list(problems), list(models), paced=paced)


def test_a_model_that_is_too_slow_where_it_is_held_is_named_with_what_it_takes() -> None:
    slow = FencedModel("mob/1", 4 * 10**9, 1.5, 4.25)
    assert advise_fenced("acme", fenced(slow), 0.002) == [
        "mob/1 takes 4.25 ms where acme's `memory_bandwidth` holds it, and 1.5 ms on all of its share: its target_p99 of 2 ms "
        "while others work takes at least 2 TB/s"
    ]
    said, problem = advise_fenced("acme", fenced(FencedModel("mob/1", 0, 1.5, 4.25), problems=("no memory",)), 0.002)
    assert said.endswith("while others work takes a larger one")
    assert problem == "no memory"


def test_a_model_that_begins_too_seldom_for_its_share_is_named_with_how_often() -> None:
    held = FencedModel("mob/1", 6 * 10**9, 1.5, 1.9)
    assert advise_fenced("acme", fenced(held, paced=True), 0.002) == [
        "mob/1 takes 1.9 ms, and begins every 6 ms, where acme's `memory_bandwidth` holds it, and 1.5 ms on all of its share: "
        "its target_p99 of 2 ms while others work takes at least 3 TB/s"
    ]
    assert advise_fenced("acme", fenced(held), 0.002) == []
    assert advise_fenced("acme", fenced(held, paced=True), 0.006) == [], "it keeps that"
    (said,) = advise_fenced("acme", fenced(FencedModel("mob/1", 10**9, 1.5, 4.25), paced=True), 0.002)
    assert said.startswith("mob/1 takes 4.25 ms where"), "it may begin more often than it ends"
    tried, unseen = FencedModel("mob/1", 6 * 10**9, 1.5, 1.9, anyway=True), FencedModel("mob/1", 6 * 10**9, 1.5, 0.0)
    assert advise_fenced("acme", fenced(tried, unseen, paced=True), 0.002) == []


def test_no_model_is_said_to_take_less_than_its_tenant_has_or_more_than_there_is() -> None:
    narrow = FencedModel("mob/1", 4 * 10**9, 1.5, 12.5)  # On one granule, which draws a third of the share.
    assert advise_fenced("acme", fenced(narrow), 0.005)[0].endswith("while others work takes a larger one")
    tried = FencedModel("mob/1", 9 * 10**9, 1.5, 12.5, anyway=True)
    assert advise_fenced("acme", fenced(tried), 0.005)[0].endswith("while others work takes a larger one")


def test_a_model_beside_which_others_are_slow_is_named_and_only_a_share_that_holds_nothing_helps_it() -> None:
    slowing = FencedModel("mob/1", 4 * 10**9, 1.5, 4.25, slows=2.96)
    assert advise_fenced("acme", fenced(slowing), 0.002) == [
        "mob/1 runs on granules [0] while others work: beside it on all of acme's share their inferences take at least 3 times "
        "as long. Any `memory_bandwidth` below 1 holds it so if acme's granules can draw more",
        "mob/1 takes 4.25 ms where acme's `memory_bandwidth` holds it, and 1.5 ms on all of its share: its target_p99 of 2 ms "
        "while others work takes none, or one that does not hold it so",
    ]


def test_inferences_that_wait_for_pcie_are_said_where_they_may_be_why_a_target_is_missed() -> None:
    acme = TenantConfig(name="acme", granules=1, models=("*",), pcie=20 * 10**9)
    (said,) = advise_paced(acme, 15, 1000, 20 * 10**9)
    assert said == (
        "15 inferences waited for acme's `pcie` of 20 GB/s while others worked: with more of that they would start sooner, "
        "on more granules they would not"
    )
    assert advise_paced(acme, 9, 1000, 20 * 10**9) == [], "a p99 does not show them"
    assert advise_paced(acme, 0, 0, 20 * 10**9) == advise_paced(acme, 1, 1, 0) == []
    assert advise_paced(acme.model_copy(update={"pcie": "auto"}), 15, 1000, 20 * 10**9) == [], "it grows with granules"


def test_nothing_is_said_of_models_that_are_fast_enough_or_too_slow_anyway() -> None:
    quick, slow, unknown = FencedModel("a/1", 1, 1.0, 1.9), FencedModel("b/1", 1, 2.5, 9.0), FencedModel("c/1", 1, 0.0, 0.0)
    assert advise_fenced("acme", fenced(quick, slow, unknown), 0.002) == []
    assert advise_fenced("acme", fenced(slow), None) == []
    assert advise_fenced("acme", fenced(problems=("granules [0]: no memory",)), None) == ["granules [0]: no memory"]
