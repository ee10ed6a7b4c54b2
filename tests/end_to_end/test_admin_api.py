"""Administration over HTTP: authorization, answers, errors, and draining."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import Request

from server.api import dependencies
from server.app import Application
from server.app import configuration as demo
from server.config.tenant import TenantConfig
from server.errors import Unauthorized
from server.tenants.auth import digest

from .harness import Served, configuration, cores, serving
from .virtual import VirtualDevice
from .wire import SMALL, Connection, busy, client, infer, lane, posted, until

GRANULES = 8
MISSING = "send Authorization: Bearer KEY with the admin key"
WRONG = "Authorization: this is not the admin key, whose SHA-256 is server.admin_key_sha256"
PATHS = [
    ("GET", "/admin/device"),
    ("GET", "/admin/partitions"),
    ("POST", "/admin/partitions/probe"),
    ("PUT", "/admin/partitions"),
    ("POST", "/admin/tenants/acme/strain"),
    ("GET", "/admin/tenants"),
    ("GET", "/admin/advice?seconds=0.1"),
    ("GET", "/admin/memory"),
    ("GET", "/admin/moves"),
    ("GET", "/admin/autopilot"),
    ("PUT", "/admin/autopilot"),
    ("GET", "/admin/status"),
    ("POST", "/admin/tenants/acme/models/identity/unload"),
    ("POST", "/admin/tenants/acme/models/identity/load"),
    ("POST", "/admin/drain"),
    ("GET", "/metrics"),
    ("GET", "/admin/openapi.json"),
    ("GET", "/admin/docs"),
]


@pytest.fixture(scope="module")
def pair(standard: Path) -> Iterator[Served]:
    """Two tenants on a device with granules to spare."""
    acme = TenantConfig(name="acme", granules=2, models=("identity", "spin"), queue=7, in_flight=3)
    globex = TenantConfig(name="globex", granules=3, models=("rows", "absent"))
    with serving(configuration(standard, acme, globex), VirtualDevice(GRANULES)) as served:
        yield served


@pytest.fixture(scope="module")
def admin(pair: Served) -> Iterator[httpx.Client]:
    with client(pair) as http:
        yield http


@pytest.fixture(scope="module")
def locked(standard: Path) -> Iterator[httpx.Client]:
    """A server with an admin key, and with a tenant that has one."""
    acme = TenantConfig(name="acme", granules=1, models=("identity",), keys_sha256=(digest("acme's"),))
    with (
        serving(configuration(standard, acme, admin_key_sha256=digest("the admin's"))) as served,
        client(served) as http,
    ):
        yield http


@pytest.fixture(params=[False, True], ids=["asgi", "direct"])
def draining(standard: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server for a test to drain; it runs one request at a time."""
    one_by_one = TenantConfig(name="acme", granules=1, models=("identity", "spin"), in_flight=1)
    with serving(configuration(standard, one_by_one), direct=request.param) as served:
        yield served


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/admin/reload?dry=1", '"dry": there is no such parameter; expected none'),
        ("GET", "/admin/advice?secondz=60", '"secondz": there is no such parameter; expected seconds, or none'),
        ("GET", "/admin/advice?seconds=0.1&seconds=60", '"seconds": given twice; expected it once'),
        ("PUT", "/admin/partitions?force", '"force": there is no such parameter; expected none'),
    ],
)
def test_a_parameter_of_the_query_that_would_be_ignored_is_refused(
    admin: httpx.Client, method: str, path: str, said: str
) -> None:
    answer = admin.request(method, path, content="{}" if method == "PUT" else None)
    assert (answer.status_code, answer.json()) == (400, {"error": said})


def test_the_device_lists_its_granules(http: httpx.Client) -> None:
    device = http.get("/admin/device").json()
    assert (device["kind"], device["unit"]) == ("cpu", "core")
    assert device["granules"] == [{"index": index, "size": 1} for index in range(len(cores()))]
    assert device["description"].startswith(f"CPU, {len(cores())} core")
    (named,) = device.pop("devices")
    assert named == {"name": "0", "tenants": ["acme"], "state": "serving", **device}


def test_partitions_list_holders_and_free_granules(admin: httpx.Client) -> None:
    assert admin.get("/admin/partitions").json() == {
        "unit": "core",
        "granules": GRANULES,
        "free": 3,
        "devices": [{"name": "0", "unit": "core", "granules": GRANULES, "free": 3}],
        "partitions": {
            "acme": {"granules": [0, 1], "size": 2, "device": "0"},
            "globex": {"granules": [2, 3, 4], "size": 3, "device": "0"},
        },
    }


def test_probe_reports_units(admin: httpx.Client) -> None:
    plain, probed = admin.get("/admin/partitions?probe=0").json(), admin.post("/admin/partitions/probe").json()
    assert {name: partition.pop("located") for name, partition in probed["partitions"].items()} == {
        "acme": [0, 1],
        "globex": [2, 3, 4],
    }
    assert probed.pop("overlaps") == []
    assert probed == plain


def test_probe_reports_overlaps(standard: Path) -> None:
    tenants = [TenantConfig(name=name, granules=1, models=("identity",)) for name in ("one", "two")]
    device = VirtualDevice(2)
    with serving(configuration(standard, *tenants), device) as served, client(served) as http:
        for partition in device.carved:
            partition.locate = lambda: frozenset({1})  # type: ignore[method-assign]
        answer = http.post("/admin/partitions/probe").json()
    assert answer["overlaps"] == [{"tenants": ["one", "two"], "units": [1]}]


def test_a_strain_moves_bytes_on_a_tenant_s_cores_while_it_is_served(admin: httpx.Client) -> None:
    for kind in ("memory read", "L2"):
        asked = {"kind": kind, "seconds": 0.05}
        done = admin.post("/admin/tenants/acme/strain", json=asked).json()
        assert (done.pop("tenant"), done.pop("kind")) == ("acme", kind)
        assert done["bytes"] > 0
        assert done["gigabytes_per_second"] == pytest.approx(done["bytes"] / done["seconds"] / 1e9, rel=0.01, abs=0.001)
    assert admin.get("/admin/partitions").json()["partitions"]["acme"]["granules"] == [0, 1]
    (acme,) = [each for each in admin.get("/admin/usage").json()["tenants"] if each["tenant"] == "acme"]
    used = {(each["name"], each["version"]): each["used"] for each in acme["models"]}
    assert min(used["strain", "memory read"], used["strain", "L2"]) >= 2 * 0.05, "of two cores"


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({}, 400, "the request body has []; expected 'kind' and 'seconds'"),
        ({"kind": "L2", "seconds": 1, "tenant": "acme"}, 400, "expected 'kind' and 'seconds'"),
        ({"kind": "arithmetic", "seconds": 1}, 400, 'kind: "arithmetic"; expected one of "memory copy", "memory read", '),
        ({"kind": ["L2"], "seconds": 1}, 400, 'kind: ["L2"]; expected one of'),
        ({"kind": "L2", "seconds": "1"}, 400, 'seconds: "1"; expected a number'),
        ({"kind": "L2", "seconds": True}, 400, "seconds: true; expected a number"),
        ({"kind": "L2", "seconds": 0}, 400, "seconds: a strain of 0 s: expected more than 0 and at most 2"),
        ({"kind": "L2", "seconds": 2.5}, 400, "seconds: a strain of 2.5 s: expected more than 0 and at most 2"),
        ({"kind": "PCIe in", "seconds": 1}, 409, "strain 'PCIe in': there is none on cores; there are memory copy, "),
    ],
    ids=str,
)
def test_a_strain_that_cannot_be_is_refused_with_what_can(
    admin: httpx.Client, body: dict[str, object], status: int, text: str
) -> None:
    answer = admin.post("/admin/tenants/acme/strain", json=body)
    assert (answer.status_code, text in answer.json()["error"]) == (status, True), answer.text


def test_a_strain_ends_in_its_time_and_keeps_the_granules_meanwhile_where_its_client_has_gone(admin: httpx.Client) -> None:
    began = perf_counter()
    with pytest.raises(httpx.ReadTimeout):
        admin.post("/admin/tenants/acme/strain", json={"kind": "L2", "seconds": 0.6}, timeout=0.2)
    assert admin.post("/admin/partitions/probe").status_code == 200
    assert perf_counter() - began > 0.5


def test_a_strain_of_an_unknown_tenant_names_those_that_there_are(admin: httpx.Client) -> None:
    answer = admin.post("/admin/tenants/initech/strain", json={"kind": "L2", "seconds": 0.1})
    assert (answer.status_code, answer.json()["error"]) == (404, "initech: there is no such tenant; there are acme, globex")


def test_tenants_list_models_limits_and_counts(admin: httpx.Client) -> None:
    counts = dict.fromkeys(("waiting", "in_flight", "abandoned", "rejected", "expired", "invalid", "unread"), 0)
    idle = counts | {"age_seconds": 0.0}
    ready = {"version": "1", "state": "READY"}
    absent = {"name": "absent", "state": "UNAVAILABLE", "reason": "not in the repository"}
    acme = {"name": "acme", "queue": 7, "credits": 3, "models": [{"name": "identity", **ready}, {"name": "spin", **ready}]}
    globex = {"name": "globex", "queue": 64, "credits": 2, "models": [absent, {"name": "rows", **ready}]}
    assert admin.get("/admin/tenants").json() == {"tenants": [acme | idle, globex | idle]}


BAD_PLANS: list[tuple[str | bytes, int, str]] = [
    ("", 400, 'the request body names no tenant; expected granules by tenant, such as {"acme": 2}'),
    (" {} ", 400, 'the request body names no tenant; expected granules by tenant, such as {"acme": 2}'),
    ('{"acme": 6}', 409, "acme 6 + globex 3 = 9 granules, but the device has 8: 1 too many"),
    ('{"acme": 5, "globex": 4}', 409, "acme 5 + globex 4 = 9 granules, but the device has 8: 1 too many"),
    ('{"initech": 1}', 400, "initech: there is no such tenant; there are acme, globex"),
    ('{"acme": 3, "initech": 1}', 400, "initech: there is no such tenant; there are acme, globex"),
    ('{"acme": 0}', 400, "acme: 0 granules; expected an integer of at least 1"),
    ('{"acme": -1}', 400, "acme: -1 granules; expected an integer of at least 1"),
    ('{"acme": true}', 400, "acme: true granules; expected an integer of at least 1"),
    ('{"acme": "2"}', 400, 'acme: "2" granules; expected an integer of at least 1'),
    (f'{{"acme": {10**23}}}', 400, f"acme: {10**23} granules; expected an integer of at least 1"),
    ('{"acme": 2.0}', 400, "acme: 2.0 granules; expected an integer of at least 1"),
    ('{"acme": null}', 400, "acme: null granules; expected an integer of at least 1"),
    ('{"acme": [1]}', 400, "acme: [1] granules; expected an integer of at least 1"),
    ('{"acme": 3, "acme": 4}', 400, 'the request body has the key "acme" twice in one object'),
    ('["acme"]', 400, "the request body is an array; expected an object"),
    ("3", 400, "the request body is an integer; expected an object"),
    ('{"acme": 3', 400, "the request body is not JSON: unexpected end of data at byte 10, where it ends"),
    ('{"acme": NaN}', 400, "the request body is not JSON: "),
    ('{"acme":' + "[" * 250_000, 400, "the request body is not JSON: "),
    (b"\xff", 400, "the request body is not JSON: "),
    (b" " * 2_000_000, 413, "a body of more than 1048576 bytes"),
]


@pytest.mark.parametrize(("body", "status", "text"), BAD_PLANS, ids=count())
def test_invalid_repartitions_are_refused(admin: httpx.Client, body: str | bytes, status: int, text: str) -> None:
    before = admin.get("/admin/partitions").json()
    answer = admin.put("/admin/partitions", content=body)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert answer.json()["error"].startswith(text)
    assert admin.get("/admin/partitions").json() == before


@pytest.mark.parametrize("body", ['{"acme": 2}', '{"globex": 3, "acme": 2}'])
def test_repartition_to_current_partitions_moves_no_tenant(pair: Served, admin: httpx.Client, body: str) -> None:
    before, moves = (admin.get(path).json() for path in ("/admin/partitions", "/admin/moves"))
    workers = dict(pair.runtime.workers)
    answer = admin.put("/admin/partitions", content=body)
    assert (answer.status_code, answer.json()) == (200, before | {"moved": []})
    assert pair.runtime.workers == workers
    assert admin.get("/admin/moves").json() == moves


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/admin/device", "GET"),
        ("DELETE", "/admin/partitions", "GET, PUT"),
        ("POST", "/admin/partitions", "GET, PUT"),
        ("PUT", "/admin/tenants", "GET"),
        ("GET", "/admin/drain", "POST"),
        ("POST", "/metrics", "GET"),
    ],
)
def test_wrong_method_is_405_with_all_allowed_ones(admin: httpx.Client, method: str, path: str, allowed: str) -> None:
    answer = admin.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.json() == {"error": f"{method} is not possible here; use {allowed}"}


@pytest.mark.parametrize("path", ["/admin", "/admin/"])
def test_the_admin_api_s_root_says_where_it_is_described(admin: httpx.Client, path: str) -> None:
    error = f"there is nothing at {path}; the status page is at /, and what there is to call at /admin/docs"
    answer = admin.get(path)
    assert (answer.status_code, answer.json()) == (404, {"error": error})
    assert admin.get("/admin/docs").status_code == 200


@pytest.mark.parametrize("path", ["/admin/nope", "/admin/device/", "/admin/partitions/acme", "/metrics/"])
def test_a_path_to_nothing_is_404(admin: httpx.Client, path: str) -> None:
    answer = admin.get(path)
    assert (answer.status_code, answer.json()) == (404, {"error": f"there is nothing at {path}"})


def test_invalid_query_parameter_is_400(admin: httpx.Client) -> None:
    answer = admin.get("/admin/partitions?probe=banana")
    assert (answer.status_code, list(answer.json())) == (400, ["error"])
    assert answer.json()["error"].startswith("query.probe: ")


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize(
    ("authorization", "why"),
    [
        ("", MISSING),
        ("Bearer", MISSING),
        ("Basic the admin's", MISSING),
        ("Bearer wrong", WRONG),
        ("Bearer acme's", WRONG),
    ],
)
def test_admin_key_is_required_where_configured(
    locked: httpx.Client, method: str, path: str, authorization: str, why: str
) -> None:
    answer = locked.request(method, path, headers={"Authorization": authorization})
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert answer.json() == {"error": why}
    assert locked.get("/v2/health/ready").status_code == 200


@pytest.mark.parametrize(("method", "path"), [pair for pair in PATHS if pair[1] != "/admin/drain"])
@pytest.mark.parametrize("authorization", ["Bearer the admin's", "bearer the admin's"])
def test_admin_key_opens_all_admin_routes(locked: httpx.Client, method: str, path: str, authorization: str) -> None:
    bodies = {"/admin/partitions": '{"acme": 1}', "/admin/autopilot": '{"mode": "off"}'} if method == "PUT" else {}
    body = {**bodies, "/admin/tenants/acme/strain": '{"kind": "L2", "seconds": 0.01}'}.get(path, "")
    assert locked.request(method, path, content=body, headers={"Authorization": authorization}).status_code == 200


def test_admin_key_is_not_a_tenant_key(locked: httpx.Client) -> None:
    answer = infer(locked, "identity", SMALL, headers={"Authorization": "Bearer the admin's"})
    assert (answer.status_code, answer.json()["error"]) == (401, "Authorization: no tenant has this key")
    assert infer(locked, "identity", SMALL, headers={"Authorization": "Bearer acme's"}).status_code == 200


def from_client(client: tuple[str, int] | None, key: str | None = None, **headers: str) -> Request:
    """A request from this address to a server with this admin key."""
    service = SimpleNamespace(config=configuration(Path(), admin_key_sha256=digest(key) if key else None))
    app: Any = SimpleNamespace(state=SimpleNamespace(service=lambda: service))
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "client": client, "headers": raw, "app": app})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "::ffff:127.0.0.1"])
async def test_loopback_may_administer_without_admin_key(host: str) -> None:
    await dependencies.admin(from_client((host, 5)))


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "192.168.0.1", "0.0.0.0", "::", "::ffff:10.0.0.1", "fe80::1", "2001:db8::1", "testclient", "", None]
)
async def test_other_addresses_may_not_administer_without_admin_key(host: str | None) -> None:
    with pytest.raises(Unauthorized, match=r"without server\.admin_key_sha256 .* loopback"):
        await dependencies.admin(from_client(host if host is None else (host, 5)))


async def test_address_is_ignored_with_admin_key() -> None:
    await dependencies.admin(from_client(("10.0.0.1", 5), "key", authorization="Bearer key"))
    with pytest.raises(Unauthorized, match="admin key"):
        await dependencies.admin(from_client(("127.0.0.1", 5), "key"))


def is_draining(http: httpx.Client) -> bool:
    return http.get("/v2/health/ready").status_code == 503


def test_drain_answers_accepted_requests_and_refuses_new_ones(draining: Served) -> None:
    with client(draining) as http, Connection(draining) as asking:
        with busy(draining, http):
            asking.send(posted("identity", SMALL))
            until(lambda: lane(http)["waiting"] + lane(http)["in_flight"] == 2)
            for _ in range(2):  # Asking twice changes nothing.
                answer = http.post("/admin/drain")
                assert (answer.status_code, answer.json()) == (202, {"state": "draining"})
            until(lambda: infer(http, "identity", SMALL).status_code == 503)
            for refused in (infer(http, "identity", SMALL), http.get("/v2/health/ready")):
                assert (refused.status_code, refused.json()) == (503, {"error": "the server is draining"})
                assert refused.headers["retry-after"]
            assert http.get("/v2/health/live").status_code == 200
            assert lane(http)["waiting"] + lane(http)["in_flight"] == 2
        assert asking.answer().status == 200


def test_drain_accepts_requests_during_drain_grace(standard: Path) -> None:
    with (
        serving(configuration(standard, drain_grace=1.0)) as served,
        client(served) as http,
    ):
        assert http.post("/admin/drain").status_code == 202
        assert is_draining(http)
        answers: list[int] = []
        until(lambda: answers.append(infer(http, "identity", SMALL).status_code) or answers[-1] != 200)  # type: ignore[func-returns-value]
    assert len(answers) > 1
    assert answers == [200] * (len(answers) - 1) + [503]


@pytest.mark.parametrize(
    ("method", "path"), [*PATHS, ("GET", "/v2/health/ready"), ("GET", "/v2/models/x"), ("POST", "/v2/models/x/infer")]
)
async def test_routes_are_503_before_the_runtime_exists(method: str, path: str) -> None:
    transport = httpx.ASGITransport(Application(lambda: demo(None)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.request(method, path)
        assert (answer.status_code, answer.json()) == (503, {"error": "the server is starting"})
        assert answer.headers["retry-after"]
        assert (await http.get("/v2/health/live")).json() == {"live": True}


@pytest.mark.parametrize("change", ["load", "unload"])
def test_administrators_learn_why_a_model_cannot_be_loaded(admin: httpx.Client, change: str) -> None:
    answer = admin.post(f"/admin/tenants/globex/models/identity/{change}")
    assert (answer.status_code, answer.json()) == (404, {"error": "tenants.globex.models does not name 'identity'"})


def test_a_load_of_a_misspelled_model_names_the_nearest(standard: Path) -> None:
    every = TenantConfig(name="acme", granules=1, models=("*",))
    with serving(configuration(standard, every)) as served, client(served) as http:
        answer = http.post("/admin/tenants/acme/models/identty/load")
    said = "failed to load 'identty': not in the repository; did you mean 'identity'?"
    assert (answer.status_code, answer.json()) == (400, {"error": said})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"parameters": {"config": "{}"}}, "parameters.config: expected none: administrators load what the repository has"),
        ({"parameters": {"confg": "{}"}}, "parameters.confg: there is no such parameter; did you mean 'config'?"),
    ],
)
def test_administrators_may_not_load_by_a_configuration(admin: httpx.Client, body: dict[str, Any], text: str) -> None:
    answer = admin.post("/admin/tenants/acme/models/identity/load", json=body)
    assert (answer.status_code, answer.json()["error"].startswith(text)) == (400, True), answer.text
    assert admin.post("/admin/tenants/acme/models/identity/load").status_code == 200


LOAD = "/v2/repository/models/identity/load"
UNLOAD = LOAD.replace("load", "unload")
ELSEWHERE = {
    "a page": {"Origin": "https://elsewhere.example"},
    "a page without an origin": {"Origin": "null"},
    "a page on another port": {"Origin": "http://localhost:1"},
    "a page behind a proxy's login": {"Origin": "https://elsewhere.example", "Authorization": "Basic dTpw"},
    "a picture on a page": {"Sec-Fetch-Site": "cross-site"},
    "a page of a neighbour": {"Sec-Fetch-Site": "same-site"},
    "a page that was rebound": {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"},
    "a page that was rebound, in a newer browser": {"Host": "evil.example:8000", "Sec-Fetch-Site": "same-origin"},
}
PROXIES = {
    name: {name: "1.1 proxy"}
    for name in ("Via", "Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Real-IP", "CF-Connecting-IP")
}
REBOUND = {"a name that was rebound": {"Host": "evil.example:8000"}}


OTHERS = ELSEWHERE | PROXIES | REBOUND


@pytest.mark.parametrize(
    ("method", "path", "who"),
    [*((*path, "a page") for path in PATHS), *(("PUT", "/admin/partitions", who) for who in OTHERS if who != "a page")],
)
def test_pages_and_proxies_may_not_administer_without_admin_key(http: httpx.Client, method: str, path: str, who: str) -> None:
    answer = http.request(method, path, headers=OTHERS[who])
    assert answer.status_code == 401, answer.text
    assert answer.json()["error"].startswith("without server.admin_key_sha256 the admin API ")
    assert http.get("/v2/health/ready").status_code == 200


@pytest.mark.parametrize("headers", [pytest.param(value, id=key) for key, value in (ELSEWHERE | PROXIES).items()])
@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_pages_and_proxies_may_not_load_models_of_tenants_without_key(
    http: httpx.Client, path: str, headers: dict[str, str]
) -> None:
    answer = http.post(path, headers={"Content-Type": "text/plain", **headers})
    assert answer.status_code == 401, answer.text
    assert answer.json()["error"].startswith("without a key of its tenant's a model is not loaded or unloaded")
    assert http.get("/v2/models/identity/ready").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "same-origin"},
        {"Origin": "http://localhost:8000", "Host": "localhost:8000"},
    ],
)
def test_programs_and_same_origin_pages_may_administer(http: httpx.Client, headers: dict[str, str]) -> None:
    assert http.get("/admin/tenants", headers=headers).status_code == 200
    assert http.post(LOAD, headers=headers).status_code == 200


def test_load_accepts_any_host_from_programs(http: httpx.Client) -> None:
    assert http.post(LOAD, headers={"Host": "greenlane.default.svc:8000"}).status_code == 200


def test_pages_and_proxies_are_allowed_with_keys(locked: httpx.Client) -> None:
    for headers in OTHERS.values():
        admin = {**headers, "Authorization": "Bearer the admin's"}
        assert locked.get("/admin/tenants", headers=admin).status_code == 200
        assert locked.post(LOAD, headers={**headers, "Authorization": "Bearer acme's"}).status_code == 200


def test_allowed_hosts_are_names_of_the_server(standard: Path) -> None:
    with (
        serving(configuration(standard, allowed_hosts=("gpu1.example.com",))) as served,
        client(served) as http,
    ):
        assert http.get("/metrics", headers={"Host": "gpu1.example.com:8000"}).status_code == 200
        assert http.get("/metrics", headers={"Host": "gpu2.example.com:8000"}).status_code == 401


def test_moves_are_kept_with_what_they_cost(standard: Path) -> None:
    tenants = [TenantConfig(name=name, granules=2, models=("identity",)) for name in ("acme", "globex")]
    with (
        serving(configuration(standard, *tenants), VirtualDevice(6)) as served,
        client(served) as http,
    ):
        assert http.get("/admin/moves").json() == {"moves": []}
        assert http.put("/admin/partitions", json={"acme": 4}).status_code == 200
        assert http.put("/admin/partitions", json={"acme": 5}).status_code == 409
        refused, moved = http.get("/admin/moves").json()["moves"]
    assert (moved["number"], moved["by"], moved["outcome"]) == (1, "operator", "moved")
    assert (moved["before"], moved["after"], list(moved["paused"])) == ({"acme": 2}, {"acme": 4}, ["acme"])
    assert 0 < moved["paused"]["acme"]["ms"] < moved["took_ms"]
    assert 0 < moved["prepared_ms"] < moved["took_ms"]
    assert (refused["outcome"], refused["error"]) == (
        "refused",
        "acme 5 + globex 2 = 7 granules, but the device has 6: 1 too many",
    )


def test_advice_compares_what_a_tenant_needed_with_its_share(standard: Path) -> None:
    acme = TenantConfig(name="acme", granules=2, models=("identity",), target_p99=0.005, target_rate=800)
    globex = TenantConfig(name="globex", granules=1, models=("identity",))
    with (
        serving(configuration(standard, acme, globex), VirtualDevice(4)) as served,
        client(served) as http,
    ):
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(httpx.get, f"{served.url}/admin/advice?seconds=0.5", timeout=30)
            while not asked.done():
                infer(http, "identity", SMALL)
        found = asked.result().json()["tenants"]
        for wrong in ("61", "0", "nan", "soon"):
            answer = http.get("/admin/advice", params={"seconds": wrong})
            assert answer.status_code == 400
            assert answer.json() == {"error": f'seconds: "{wrong}"; expected a number from 0.1 to 60'}
    assert (found["acme"]["granules"], found["acme"]["target_ms"]) == (2, 5.0)
    assert found["acme"]["measured"]["requests"] > 0
    assert found["acme"]["advice"].startswith("acme uses ")
    assert (found["globex"]["verdict"], found["globex"]["target_ms"]) == ("unknown", None)
    assert "no requests in 0.5" in found["globex"]["advice"]
