"""How the host's cores are shared: arithmetic, to be read as examples."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.processes.supervision.affinity import MAX_CORES, Affinity, conflicts, describe, share_cores


def tenants(count: int) -> dict[str, Sequence[int] | None]:
    return {f"t{number}": None for number in range(count)}


def told(cores: int, chosen: dict[str, Sequence[int] | None]) -> str | None:
    shares = share_cores(range(cores), chosen)
    return None if shares is None else str(shares)


@pytest.mark.parametrize(
    ("cores", "count", "expected"),
    [
        (16, 2, "HTTP process of t0 on cores 8-9, of t1 on cores 10-11; "
                "device process on cores 0-7, all others on cores 12-15"),
        (16, 4, "HTTP process of t0 on core 8, of t1 on core 9, of t2 on core 10, of t3 on core 11; "
                "device process on cores 0-7, all others on cores 12-15"),
        (16, 8, "HTTP process of t0 on core 8, of t1 on core 9, of t2 on core 10, of t3 on core 11, of t4 on core 12, "
                "of t5 on core 13, of t6 on core 14, of t7 on core 15; device process on cores 0-7, all others on cores 0-7"),
        (16, 6, "HTTP process of t0 on core 8, of t1 on core 9, of t2 on core 10, "
                "of t3 on core 11, of t4 on core 12, of t5 on core 13; "
                "device process on cores 0-7, all others on cores 14-15"),
        (64, 1, "HTTP process of t0 on cores 32-33; device process on cores 0-31, all others on cores 34-63"),
        (3, 2, "HTTP process of t0 on core 1, of t1 on core 2; device process on core 0, all others on core 0"),
        (2, 1, "HTTP process of t0 on core 1; device process on core 0, all others on core 0"),
    ],
)  # fmt: skip
def test_the_device_has_half_and_every_tenant_as_many_as_every_other(cores: int, count: int, expected: str) -> None:
    assert told(cores, tenants(count)) == expected


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (2, 2), (16, 9), (0, 1)])
def test_too_few_are_not_shared_at_all(cores: int, count: int) -> None:
    assert share_cores(range(cores), tenants(count)) is None


def test_configured_front_cores_go_to_no_one_else() -> None:
    shares = share_cores(range(8), {"acme": (0, 5), "globex": None})
    assert shares == Affinity(
        {"0": frozenset({1, 2, 3})}, {"acme": frozenset({0, 5}), "globex": frozenset({4, 6})}, frozenset({7})
    )
    assert (
        str(shares)
        == "HTTP process of acme on cores 0,5, of globex on cores 4,6; device process on cores 1-3, all others on core 7"
    )


def test_where_every_tenant_chose_the_device_has_all_that_is_left() -> None:
    assert told(8, {"acme": (6,), "globex": (7,)}) == (
        "HTTP process of acme on core 6, of globex on core 7; device process on cores 0-5, all others on cores 0-5"
    )
    assert share_cores(range(2), {"acme": (0, 1)}) is None


def test_cores_that_two_tenants_chose_are_theirs_together() -> None:
    assert told(4, {"acme": (3,), "globex": (3,)}) == (
        "HTTP process of acme on core 3, of globex on core 3; device process on cores 0-2, all others on cores 0-2"
    )


def test_front_cores_on_another_tenants_partition_are_reported() -> None:
    partitions = {"acme": {0}, "globex": {1, 2}, "initech": {3}}
    assert list(conflicts({"acme": (0, 1, 2), "globex": (1,), "initech": (4,), "umbrella": None}, partitions)) == [
        "tenants.acme.front_cores: 1-2 is of globex's partition, whose work this tenant's HTTP would delay; "
        "leave it out, or name cores of no partition"
    ]


def test_the_placement_of_http_is_shown_as_core_ranges() -> None:
    assert describe({"acme": [2, 0, 1], "globex": {5}}) == "HTTP process of acme on cores 0-2, of globex on core 5"


def test_the_processes_of_several_devices_have_equal_parts_of_the_half_and_the_last_has_the_rest() -> None:
    shares = share_cores(range(16), tenants(2), ["0", "1", "b"])
    assert str(shares) == (
        "HTTP process of t0 on cores 8-9, of t1 on cores 10-11; "
        "device processes of 0 on cores 0-1, of 1 on cores 2-3, of b on cores 4-7, all others on cores 12-15"
    )
    assert share_cores(range(4), tenants(1), ["0", "1", "2"]) is None


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (16, "HTTP process of a on cores 8-9, of b on cores 10-11, of c on cores 12-13; "
             "device processes of a on cores 0-1, of b on cores 2-3, of c on cores 4-7, all others on cores 14-15"),
        (11, "HTTP process of a on core 6, of b on core 7, of c on core 8; "
             "device processes of a on cores 0-1, of b on cores 2-3, of c on cores 4-5, all others on cores 9-10"),
        (8, "HTTP process of a on core 4, of b on core 5, of c on core 6; "
            "device processes of a on core 0, of b on core 1, of c on cores 2-3, all others on core 7"),
    ],
)  # fmt: skip
def test_a_device_process_for_each_tenant_has_two_cores_before_http_has_a_second(cores: int, expected: str) -> None:
    assert str(share_cores(range(cores), dict.fromkeys("abc"), "abc")) == expected


def test_a_second_core_for_device_processes_takes_none_from_a_tenant_s_several_http_processes() -> None:
    shares = share_cores(range(11), dict.fromkeys("abc"), "abc", dict.fromkeys("abc", 2))
    assert shares
    assert [len(cores) for cores in shares.tenants.values()] == [2, 2, 2]


@given(
    st.sets(st.integers(0, 40)),
    st.lists(st.sets(st.integers(0, 40), max_size=3), min_size=1, max_size=6),
    st.integers(1, 4),
)
def test_shares_of_cores_are_disjoint(allowed: set[int], wishes: list[set[int]], devices: int) -> None:
    chosen = {f"t{place}": sorted(wish) or None for place, wish in enumerate(wishes)}
    if shares := share_cores(allowed, chosen, [str(number) for number in range(devices)]):
        given_away = [shares.tenants[name] for name, wish in chosen.items() if not wish]
        of_devices = set().union(*shares.devices.values())
        assert len(shares.devices) == devices
        assert all(shares.devices.values())
        sets = [*shares.devices.values(), *given_away, set().union(*wishes)]
        assert sum(map(len, sets)) == len(set().union(*sets))
        assert of_devices.union(*given_away) <= allowed
        assert all(0 < len(cores) <= MAX_CORES for cores in given_away)
        assert len(set(map(len, given_away))) <= 1
        assert shares.others
        assert shares.others == of_devices or shares.others.isdisjoint(set().union(*sets))
        for name, own in shares.devices.items():
            beside = of_devices.difference(own)
            assert shares.builds(name)
            assert shares.builds(name).isdisjoint(beside.union(*given_away)), "a build keeps others' cores busy for seconds"
