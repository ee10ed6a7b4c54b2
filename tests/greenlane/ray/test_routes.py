"""Which server gets a request."""

from greenlane.ray.coordinator import Listed, Listing
from greenlane.ray.ingress import Routes, Tenants
from server.tenants.auth import digest

ONE, TWO = (Listed(id, number, f"http://{id}", "key") for number, id in enumerate(["one", "two"]))
BOTH = Listing((ONE, TWO), complete=True)


def routes(**places: tuple[int, ...]) -> Routes:
    found = Routes(places)
    found.update(BOTH)
    return found


def test_the_server_with_the_fewest_requests_gets_it_and_equal_ones_in_turn() -> None:
    found = routes()
    assert {found.choose("acme"), found.choose("acme")} == {ONE, TWO}
    found.begin(ONE)
    assert [found.choose("acme") for _ in range(3)] == [TWO] * 3
    found.end(ONE)
    found.begin(TWO)
    assert found.choose("acme") == ONE


def test_a_tenant_is_served_where_the_application_says() -> None:
    found = routes(acme=(1,))
    assert [found.choose("acme") for _ in range(3)] == [TWO] * 3
    assert found.choose("acme", tried={"two"}) is None
    assert {found.choose("globex") for _ in range(2)} == {ONE, TWO}
    assert {found.choose(None) for _ in range(2)} == {ONE, TWO}, "the server says why it refuses"


def test_one_that_was_not_reached_comes_last_until_the_next_listing() -> None:
    found = routes()
    assert found.could_not_reach(ONE), "the first time, to be logged"
    assert not found.could_not_reach(ONE)
    assert [found.choose(None) for _ in range(3)] == [TWO] * 3
    assert found.choose(None, tried={"two"}) == ONE
    found.update(BOTH)
    assert {found.choose(None) for _ in range(2)} == {ONE, TWO}


def test_a_coordinator_that_does_not_know_all_servers_yet_takes_none_away() -> None:
    found = routes()
    found.update(Listing((TWO,), complete=False))
    assert found.servers_of(None) == [ONE, TWO]
    found.update(Listing((), complete=False, gone=frozenset({"two"})))
    assert found.servers_of(None) == [ONE], "two stops"
    found.update(Listing((ONE, TWO), complete=False))
    assert found.servers_of(None) == [ONE, TWO]
    found.update(Listing((TWO,), complete=True))
    assert found.servers_of(None) == [TWO]


def test_tenants_are_found_as_the_servers_find_them() -> None:
    keyed = f'[tenants.acme]\nkeys_sha256 = ["{digest("k")}"]\n[tenants.open]\n'
    tenants = Tenants('[server]\ndefault_tenant = "open"\n' + keyed)
    assert tenants.identify("Bearer k", None) == "acme"
    assert tenants.identify("bearer k ", "acme") == "acme"
    assert tenants.identify("Bearer wrong", "acme") is None
    assert tenants.identify("Basic k", None) is None
    assert tenants.identify(None, "acme") == "acme"
    assert tenants.identify(None, None) == "open"
    assert Tenants("[tenants.open]").identify("Bearer of a proxy", "open") == "open"
