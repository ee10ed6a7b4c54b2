import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.config.tenant import TenantConfig
from server.errors import Unauthorized
from server.tenants.auth import Tenancy, digest

KEY, SPARE, OTHERS = "acme-key", "acme-spare", "globex-key"


def tenant(name: str, *keys: str) -> TenantConfig:
    return TenantConfig(name=name, granules=1, models=("*",), keys_sha256=tuple(map(digest, keys)))


def tenancy(default: str | None = None) -> Tenancy:
    """Two tenants with keys and one without."""
    return Tenancy([tenant("acme", KEY, SPARE), tenant("globex", OTHERS), tenant("open")], default)


def refusal(authorization: str | None, name: str | None, default: str | None = None) -> str:
    with pytest.raises(Unauthorized) as caught:
        tenancy(default).identify(authorization, name)
    return str(caught.value)


@pytest.mark.parametrize(("key", "name"), [(KEY, "acme"), (SPARE, "acme"), (OTHERS, "globex")])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
@pytest.mark.parametrize("default", [None, "open", "acme"])
def test_a_key_identifies_the_tenant_whatever_the_default(scheme: str, key: str, name: str, default: str | None) -> None:
    assert tenancy(default).identify(f"{scheme} {key}", None).name == name


def test_a_key_and_the_name_of_its_tenant_are_accepted() -> None:
    assert tenancy().identify(f"Bearer {KEY}", "acme").name == "acme"


def test_spaces_around_a_key_are_not_part_of_it() -> None:
    assert tenancy().identify(f"Bearer  {KEY} ", None).name == "acme"


@pytest.mark.parametrize("name", ["globex", "open", "nobody", "ACME"])
def test_a_key_and_a_name_that_disagree_are_refused(name: str) -> None:
    assert refusal(f"Bearer {KEY}", name) == f"X-Tenant: {name!r}, but the key is another tenant's"


@pytest.mark.parametrize("name", [None, "open", "acme"])
@pytest.mark.parametrize("key", ["wrong", KEY.upper(), KEY[:-1], digest(KEY), "é", " "])
def test_an_unknown_key_is_refused_even_for_a_tenant_without_keys(key: str, name: str | None) -> None:
    assert refusal(f"Bearer {key}", name, default="open") == "Authorization: no tenant has this key"


@pytest.mark.parametrize("authorization", ["Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer:{KEY}", f" Bearer {KEY}"])
def test_an_authorization_other_than_bearer_is_refused(authorization: str) -> None:
    assert refusal(authorization, "open") == "Authorization: expected 'Bearer KEY'"


@pytest.mark.parametrize("authorization", [None, ""])
def test_a_tenant_without_keys_is_found_by_its_name_or_as_the_default(authorization: str | None) -> None:
    assert tenancy().identify(authorization, "open").name == "open"
    assert tenancy("open").identify(authorization, None).name == "open"
    assert tenancy("open").identify(authorization, "").name == "open"


def test_x_tenant_overrules_the_default_tenant() -> None:
    two = Tenancy([tenant("one"), tenant("two")], "one")
    assert two.identify(None, "two").name == "two"


def test_a_tenant_with_keys_needs_one_by_name_and_as_the_default() -> None:
    expected = "tenant 'acme' needs its key: send Authorization: Bearer KEY"
    assert refusal(None, "acme") == expected
    assert refusal(None, None, default="acme") == expected


@pytest.mark.parametrize("name", ["nobody", "OPEN", "open ", "acme-key"])
def test_an_unknown_tenant_is_refused_even_with_a_default_tenant(name: str) -> None:
    assert refusal(None, name, default="open") == f"X-Tenant: there is no tenant {name!r}"


def test_a_request_without_a_tenant_is_refused_with_the_headers_to_send() -> None:
    assert refusal(None, None) == "no tenant: send Authorization: Bearer KEY or X-Tenant: NAME"


@given(
    st.none() | st.sampled_from(["Bearer", "Basic"]).flatmap(lambda s: st.text(max_size=9).map(lambda key: f"{s} {key}")),
    st.none() | st.text(max_size=6) | st.sampled_from(["acme", "globex", "open"]),
)
def test_no_refusal_reveals_keys_digests_or_names_of_other_tenants(authorization: str | None, name: str | None) -> None:
    everyone = tenancy()
    try:
        found = everyone.identify(authorization, name)
    except Unauthorized as error:
        text = str(error)
    else:
        assert found.name == "open"
        return
    secrets = {KEY, SPARE, OTHERS} | {key for tenant in everyone.tenants.values() for key in tenant.keys_sha256}
    others = everyone.tenants.keys() - {name}
    shown = text.replace(repr(name), "") if name else text
    assert not [word for word in secrets | others if f"'{word}'" in shown or (word in secrets and word in shown)]


def test_a_wrong_key_is_not_repeated_in_the_error() -> None:
    assert "hunter2" not in refusal("Bearer hunter2", "open") + refusal("hunter2", "open")


@given(st.text(alphabet=st.characters(max_codepoint=255, exclude_categories=["Cc", "Z"]), min_size=1))
def test_a_digest_is_the_sha256_of_the_bytes_on_the_wire(key: str) -> None:
    assert digest(f" {key} ") == hashlib.sha256(key.encode("latin-1")).hexdigest()


def test_tenants_are_listed_in_their_order() -> None:
    assert list(tenancy().tenants) == ["acme", "globex", "open"]
    assert repr(tenancy("open")) == "<Tenancy of acme, globex, open, default open>"
