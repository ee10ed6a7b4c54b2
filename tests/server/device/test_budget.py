"""A tenant's budget: the arithmetic and its words."""

from server.config.tenant import TenantConfig
from server.device.budget import Claim, missing, refusal, sized

GIB = 1 << 30
MIB = 1 << 20


def tenant(limit: int, paging: bool = False) -> TenantConfig:
    return TenantConfig(name="acme", granules=1, models=("*",), device_memory=limit, paging=paging)


def test_a_refusal_has_the_arithmetic_and_what_can_be_done() -> None:
    held = [Claim("small 1", {"weights": GIB}), Claim("bert 1", {"weights": 10 * GIB, "contexts": 8 * GIB})]
    needed = Claim("resnet50", {"weights": 98 * MIB, "contexts": 1200 * MIB})
    assert missing(20 * GIB, held, needed) == 19 * GIB + 1298 * MIB - 20 * GIB
    assert refusal(tenant(20 * GIB), held, needed) == (
        "it needs 1.27 GiB of device memory (weights 98 MiB, contexts 1.17 GiB), but acme has 19 GiB of 20 GiB in use by "
        "bert 1 18 GiB, small 1 1 GiB: 274 MiB too many; unload something, raise tenants.acme.device_memory, or set "
        "tenants.acme.paging"
    )
    assert refusal(tenant(20 * GIB, paging=True), held, needed).endswith(
        "; unload something or raise tenants.acme.device_memory"
    )


def test_a_model_that_is_larger_than_the_budget_is_refused_without_the_others() -> None:
    text = refusal(tenant(GIB), [Claim("small 1", {"weights": 1})], Claim("big", {"weights": 2 * GIB}))
    need = "it needs 2 GiB of device memory (weights 2 GiB)"
    assert text == f"{need}, but acme may have 1 GiB: 1 GiB too many; raise tenants.acme.device_memory"


def test_a_refusal_names_the_largest_five() -> None:
    held = [Claim(f"m{index} 1", {"session": index * MIB}) for index in range(9)]
    text = refusal(tenant(40 * MIB), held, Claim("more", {"session": 5 * MIB}))
    assert "m8 1 8 MiB, m7 1 7 MiB, m6 1 6 MiB, m5 1 5 MiB, m4 1 4 MiB, 3 more: 1 MiB too many" in text


def test_sizes_are_shown_with_three_digits() -> None:
    assert [sized(n) for n in (0, 999, 1024, 1500, 10 * MIB, 1023 * MIB, 20 * GIB)] == [
        "0 bytes", "999 bytes", "1 KiB", "1.46 KiB", "10 MiB", "1023 MiB", "20 GiB",
    ]  # fmt: skip
