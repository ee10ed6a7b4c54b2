"""What the status page shows of a GPU."""

from partitions.health import Health
from server.admin.status import shown_health


def test_a_gpus_reading() -> None:
    health = Health(
        utilization=0.5,
        memory_total=80 << 30,
        memory_used=20 << 30,
        power=350.5,
        power_limit=700.0,
        temperature=54,
        throttled={"thermal": False, "power": True},
        xids={"31": 2},
        memory_bandwidth=3352,
    )
    found = shown_health(health, {"memory": 1000.4, "pcie_in": 0.0})
    assert (found.utilization, found.memory_used_bytes, found.power_limit_watts) == (0.5, 20 << 30, 700.0)
    assert (found.throttled, found.errors, found.lost) == (["power"], {"31": 2}, False)
    assert (found.memory_bandwidth, found.bytes_per_second) == (3352, {"memory": 1000, "pcie_in": 0})
    assert shown_health(Health(lost=True)).utilization is None
