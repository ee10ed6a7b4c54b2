import hashlib

import pytest
from hypothesis import example, given
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
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER ", "Bearer "])
@pytest.mark.parametrize("default", [None, "open", "acme"])
def test_a_key_identifies_the_tenant_whatever_the_default(scheme: str, key: str, name: str, default: str | None) -> None:
    for stated in (None, name):
        assert tenancy(default).identify(f"{scheme} {key}", stated).name == name


@pytest.mark.parametrize("authorization", [None, ""])
def test_without_a_key_x_tenant_or_else_the_default_names_the_tenant(authorization: str | None) -> None:
    assert tenancy("open").identify(authorization, "").name == "open"
    two = Tenancy([tenant("one"), tenant("two")], "one")
    assert [two.identify(authorization, name).name for name in (None, "two")] == ["one", "two"]


NO_KEY = "Authorization: no tenant has this key"
NO_BEARER = "Authorization: expected 'Bearer KEY'"
KEY_NEEDED = "tenant 'acme' needs its key: send Authorization: Bearer KEY"


@pytest.mark.parametrize(
    ("authorization", "name", "default", "text"),
    [
        *((f"Bearer {KEY}", name, None, f"X-Tenant: {name!r}, but the key is another tenant's") for name in ("globex", "open")),
        *((f"Bearer {KEY}", name, None, f"X-Tenant: {name!r}, but the key is another tenant's") for name in ("nobody", "ACME")),
        *(
            (f"Bearer {key}", None, "open", NO_KEY)
            for key in ("wrong", KEY.upper(), KEY[:-1], digest(KEY), "é", " ", "hunter2")
        ),
        *(("Bearer wrong", name, "open", NO_KEY) for name in ("open", "acme")),
        *((wrong, "open", None, NO_BEARER) for wrong in ("Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer:{KEY}")),
        (f" Bearer {KEY}", "open", None, NO_BEARER),
        (None, "acme", None, KEY_NEEDED),
        (None, None, "acme", KEY_NEEDED),
        *((None, name, "open", f"X-Tenant: there is no tenant {name!r}") for name in ("nobody", "OPEN", "open ", "acme-key")),
        (None, None, None, "no tenant: send Authorization: Bearer KEY or X-Tenant: NAME"),
    ],
)
def test_what_identifies_no_tenant_is_refused_with_what_to_send(
    authorization: str | None, name: str | None, default: str | None, text: str
) -> None:
    assert refusal(authorization, name, default) == text


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


@given(st.text(alphabet=st.characters(max_codepoint=255, exclude_characters="\t "), min_size=1))
@example("voilà".encode().decode("latin-1"))  # Whose last byte is a space to Python.
def test_a_digest_is_the_sha256_of_the_bytes_on_the_wire(key: str) -> None:
    assert digest(f" {key} ") == hashlib.sha256(key.encode("latin-1")).hexdigest()
