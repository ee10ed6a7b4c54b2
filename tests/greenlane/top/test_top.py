"""`greenlane top` against a server that answers as the test says: figures, errors, pipes, and a terminal of its own."""

import fcntl
import json
import os
import pty
import select
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import permutations
from typing import Any

import pytest

from greenlane.top import command
from greenlane.top.command import KEY, lines, parse
from greenlane.top.rates import ModelRates, Moving, between, quantile
from greenlane.top.source import Look, Unreachable, look, read_metrics

PATIENCE = 30


BEGAN = "2026-11-28T12:00:00.000Z"


def usage(seconds: float, used: float, works: int, joules: float | None = None, since: str = BEGAN) -> dict[str, Any]:
    model = {"name": "mob", "version": "1", "works": works, "used": used, "borrowed": 0.0, "energy_joules": joules}
    counts = {"granted": 2 * seconds, "used": used, "idle": 2 * seconds - used, "lent": 0.0, "borrowed": 0.0}
    tenant = {"tenant": "acme", "device": "0", "unit": "SM", "share": 2, **counts, "energy_joules": joules}
    idle = None if joules is None else joules / 2
    device = {"name": "0", "unit": "SM", "units": 4, "energy_joules": joules, "idle_energy_joules": idle, **counts}
    tenant |= {"device_memory_bytes": 3 << 20, "age_seconds": 0.1, "models": [model]}
    return {"since": since, "until": "b", "seconds": seconds, "devices": [device], "tenants": [tenant]}


def metrics(answered: int) -> str:
    name, labels = "greenlane_request_duration_seconds", 'model="mob",tenant="acme",version="1"'
    return "\n".join(
        [
            f"# TYPE {name} histogram",
            f'{name}_bucket{{le="0.001",{labels}}} {answered // 2}',
            f'{name}_bucket{{le="0.01",{labels}}} {answered}',
            f'{name}_bucket{{le="+Inf",{labels}}} {answered}',
            f"{name}_count{{{labels}}} {answered}",
            "# TYPE greenlane_limited_requests counter",
            f'greenlane_limited_requests_total{{limit="max_connections",tenant="acme"}} {answered // 10}',
            f'greenlane_limited_requests_total{{limit="requests_per_second",tenant="acme"}} {answered // 10}',
            "# TYPE greenlane_ready gauge\ngreenlane_ready 1.0\n",
        ]
    )


def looked(seconds: float, used: float, works: int, joules: float | None = None) -> Look:
    return Look(usage(seconds, used, works, joules), *read_metrics(metrics(works)))


class Answering(HTTPServer):
    """Each look sees two seconds more, of which the tenant used half of its two SMs."""

    seen = 0
    status = 200
    target = ""
    unsent = 0
    keys: list[str | None]

    def answer(self, path: str) -> tuple[int, bytes]:
        if self.status != 200:
            return self.status, b'{"error": "not so"}'
        if path.startswith("/metrics"):
            return 200, metrics(100 * self.seen).encode()
        self.seen += 1
        return 200, json.dumps(usage(2.0 * self.seen, 2.0 * self.seen, 100 * self.seen)).encode()


class Handler(BaseHTTPRequestHandler):
    server: Answering

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        status, body = self.server.answer(self.path)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) + self.server.unsent))
        if self.server.target:
            self.send_header("Location", self.server.target)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Answering]:
    with Answering(("127.0.0.1", 0), Handler) as found:
        found.keys = []
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def url(server: Answering) -> str:
    return f"http://127.0.0.1:{server.server_port}"


def moved(look: Look, seconds: float, memory: int, by: str) -> Look:
    found = {"memory": memory, "pcie_in": 10**9, "pcie_out": memory // 1000, "by": by}
    for each in (*look.usage["devices"], *look.usage["tenants"], *look.usage["tenants"][0]["models"]):
        each["moved"] = found
    look.usage["devices"][0]["moved_seconds"] = seconds
    return look


def test_bytes_a_second_are_of_the_time_for_which_they_were_counted() -> None:
    """Which are readings of each two seconds: there may be none in an interval, or as many as in a longer one."""
    first = moved(looked(10, 5, 100), 8.0, 10**12, "measured")
    rates = between(first, moved(looked(12, 7, 300), 12.0, 5 * 10**12, "estimated"))
    assert rates
    assert rates.tenants[0].moving == rates.tenants[0].models[0].moving == Moving(1e12, 1e9, True)
    text = "\n".join(lines(rates))
    assert "moves ~1.0 TB/s (PCIe ~1.0 GB/s)" in text
    assert text.count("~1.0 TB/s  ~1.0 GB/s") == 2
    rates = between(first, moved(looked(12, 7, 300), 8.0, 10**12, "measured"))
    assert rates
    assert rates.tenants[0].moving is None
    assert "MOVES" not in "\n".join(lines(rates))


def test_cores_move_memory_and_nothing_over_pcie() -> None:
    looks = [moved(looked(at, 5, 100), float(at), at * 10**12, "measured") for at in (10, 12)]
    for each in (
        *looks[0].usage["devices"],
        *looks[1].usage["devices"],
        *looks[0].usage["tenants"],
        *looks[1].usage["tenants"],
    ):
        each["unit"] = "core"
    rates = between(*looks)
    assert rates
    text = "\n".join(lines(rates))
    assert text.count("1.0 TB/s") == 3
    assert "PCIE" not in text.upper()


def test_rates_are_of_the_interval() -> None:
    rates = between(looked(10, 5, 100, 50.0), looked(12, 7, 300, 90.0))
    assert rates
    (tenant,) = rates.tenants
    assert (tenant.used, tenant.granted, tenant.works, tenant.answered, tenant.watts) == (1, 2, 100, 100, 20)
    assert (rates.devices[0].watts, rates.devices[0].idle_watts) == (20, 10)
    assert tenant.p99 == pytest.approx(0.00982, abs=1e-5)
    assert tenant.refused == 20
    text = "\n".join(lines(rates))
    assert "50.0   50.0" in text
    assert "20 W (10 of them idle)" in text
    assert "3.0 MiB" in text
    assert "mob 1" not in "\n".join(lines(rates, models=False))


def test_rows_are_in_order_of_use_and_then_of_names_and_versions_whatever_the_order_they_come_in() -> None:
    def model(name: str, version: str, used: float, borrowed: float = 0.0) -> ModelRates:
        return ModelRates(name, version, used, borrowed, 1.0, None)

    rates = between(looked(10, 5, 100), looked(12, 7, 300))
    assert rates
    acme = rates.tenants[0]
    models = [
        model("b", "10", 0.5),
        model("b", "9", 0.5004),
        model("a", "1", 0.5),
        model("idle", "1", 0),
        model("c", "1", 0, 1),
    ]
    for given in permutations(models):
        tenants = (replace(acme, tenant="zeta", models=()), replace(acme, models=given), replace(acme, tenant="busy", used=1.5))
        shown = [line.split()[:2] for line in lines(replace(rates, tenants=tenants))[4:]]
        assert [first for first, _ in shown if len(first) > 2 and first != "idle"] == ["busy", "mob", "acme", "zeta"]
        rows = [" ".join(row) for row in shown]
        assert rows[rows.index("acme 0") + 1 : rows.index("zeta 0")] == ["c 1", "a 1", "b 9", "b 10", "idle 1"]


def test_a_server_that_was_started_again_has_no_rates_yet() -> None:
    before = looked(10, 5, 100)
    assert between(before, looked(1, 0, 0)) is None
    for seconds, since, same in ((40, "12:00:20.000Z", False), (70, "12:00:00.021Z", True)):
        after = looked(seconds, 6, 100)
        after.usage["since"] = f"2026-11-28T{since}"  # Computed from the clock of the day, which is adjusted now and then.
        assert (between(before, after) is not None) == same


def test_quantiles_are_between_the_bounds_of_buckets() -> None:
    assert quantile({}, 0.99) is None
    assert quantile({1.0: 0.0}, 0.99) is None
    assert quantile({1.0: 0.0, 2.0: 10.0}, 0.5) == 1.5
    assert quantile({1.0: 0.0, float("inf"): 4.0}, 0.99) == 1.0


def test_a_model_that_began_to_count_again_takes_nothing_from_the_others() -> None:
    """Loading a model that was unloaded once hid, for an interval, the requests of all models of its tenant."""
    first, second = looked(10, 5, 100), looked(12, 7, 300)
    for each, old, kept in ((first, 5000, 100), (second, 4, 140)):
        more = metrics(old).replace('model="mob"', 'model="old"')
        requests, _ = read_metrics(metrics(kept) + "\n".join(line for line in more.splitlines() if "_bucket" in line) + "\n")
        each.requests["acme"] = requests["acme"]
    rates = between(first, second)
    assert rates
    assert (rates.tenants[0].answered, rates.tenants[0].refused) == (22, 4)
    assert rates.tenants[0].p99 == pytest.approx(0.01, rel=0.1)


def test_a_replaced_process_counts_from_nothing() -> None:
    first, second = looked(10, 5, 100), looked(12, 7, 300)
    first.requests["acme"], second.requests["acme"] = (read_metrics(metrics(each))[0]["acme"] for each in (100, 40))
    rates = between(first, second)
    assert rates
    assert (rates.tenants[0].answered, rates.tenants[0].refused) == (20, 4)


def test_a_device_without_a_meter_has_no_watts() -> None:
    rates = between(looked(10, 5, 100), looked(12, 7, 300))
    assert rates
    assert not any("WATTS" in line for line in lines(rates))


def test_a_device_of_one_unit_has_no_plural() -> None:
    rates = between(looked(10, 5, 100), looked(12, 7, 300))
    assert rates
    shown = lines(replace(rates, devices=[*rates.devices, replace(rates.devices[0], name="1", unit="core", units=1)]))
    assert [line.split(",")[0] for line in shown if line.startswith("device")] == ["device 0: 4 SMs", "device 1: 1 core"]


def test_once_prints_one_table_and_json_one_object(server: Answering, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([url(server), "--once", "--interval", "0.01"], "greenlane top") == 0
    assert "acme" in capsys.readouterr().out
    assert command.main([url(server), "--once", "--json", "--interval", "0.01"], "greenlane top") == 0
    assert json.loads(capsys.readouterr().out)["tenants"][0]["used"] == 1


def test_the_key_comes_from_the_environment(server: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    look(url(server), parse([url(server)], "top").key)
    assert set(server.keys) == {"Bearer secret"}


@pytest.mark.parametrize(
    ("status", "key", "says"),
    [
        (401, None, f"set {KEY} to its admin key"),
        (401, "x", f"the key in {KEY} is not this server's"),
        (404, None, "is it a Greenlane of this version?"),
        (503, None, "answers 503: not so"),
    ],
)
def test_refusals_say_what_to_do(server: Answering, status: int, key: str | None, says: str) -> None:
    server.status = status
    with pytest.raises(Unreachable, match=r".*") as raised:
        look(url(server), key)
    assert says in str(raised.value)


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_the_key_is_not_sent_to_where_a_server_points(server: Answering, status: int) -> None:
    server.status, server.target = status, f"{url(server)}/elsewhere"
    with pytest.raises(Unreachable) as raised:
        look(url(server), "secret")
    assert len(server.keys) == 1
    assert f"points to {url(server)}/elsewhere; give the server's own address" in str(raised.value)


@pytest.mark.parametrize("status", [200, 401, 500])
def test_an_answer_that_breaks_off_is_said(server: Answering, status: int) -> None:
    server.status, server.unsent = status, 1
    with pytest.raises(Unreachable, match=url(server)):
        look(url(server), None)


def test_a_server_that_goes_on_answering_for_ever_is_given_up() -> None:
    ended = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            while not ended.wait(0.01):
                connection.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        dripping = threading.Thread(target=drip, args=(listener,))
        dripping.start()
        try:
            with pytest.raises(Unreachable, match=r"has not answered within 0\.5 s"):
                look(f"http://127.0.0.1:{listener.getsockname()[1]}", None, 0.5)
        finally:
            ended.set()
            dripping.join()


def test_a_name_that_no_host_has_is_said() -> None:
    with pytest.raises(Unreachable, match="does not answer: "):
        look(f"http://{'a' * 64}.example", None)


def test_a_proxy_is_not_sent_the_key(server: Answering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert look(url(server), "secret").ready


def test_a_password_in_the_address_is_refused_and_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["http://admin:hidden@127.0.0.1:8000"], "greenlane top")
    said = capsys.readouterr().err
    assert KEY in said
    assert "hidden" not in said


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("gpu7", "http://gpu7:8000"),
        ("gpu7/", "http://gpu7:8000"),
        ("[::1]", "http://[::1]:8000"),
        ("gpu7:80", "http://gpu7:80"),
        (":8001", "http://:8001"),
        ("http://gpu7", "http://gpu7"),
        ("https://gpu7/models/", "https://gpu7/models"),
    ],
)
def test_a_host_alone_is_asked_on_the_port_of_a_server(given: str, asked: str) -> None:
    assert parse([given], "top").url == asked


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["127.0.0.1:1", "--once"], "greenlane top") == 1
    assert capsys.readouterr().err.startswith("greenlane top: http://127.0.0.1:1 does not answer: ")


@pytest.mark.parametrize("wrong", [b"<html>", b"[" * 100_000, b"{}", b"3", b'{"devices": [], "tenants": [], "x": "\xff"}'])
@pytest.mark.parametrize("path", ["/admin/usage", "/metrics"])
def test_another_server_is_not_understood(server: Answering, path: str, wrong: bytes) -> None:
    right = server.answer
    server.answer = lambda asked: (200, wrong) if asked == path else right(asked)  # type: ignore[method-assign]
    with pytest.raises(Unreachable, match=f"{path} answered something else"):
        look(url(server), None)


@pytest.mark.parametrize(("key", "sent"), [("clé", b"Bearer cl\xc3\xa9"), ("5€", b"Bearer 5\xe2\x82\xac")])
def test_a_key_is_sent_as_utf_8(server: Answering, key: str, sent: bytes) -> None:
    look(url(server), key)
    assert {each.encode("latin-1") for each in server.keys if each} == {sent}


def test_a_key_that_no_header_has_is_named(server: Answering) -> None:
    with pytest.raises(Unreachable, match=f"{KEY}: a key in one line"):
        look(url(server), "two\nlines")


@pytest.mark.parametrize(
    "words",
    [
        ["ftp://x"],
        ["--interval", "0"],
        ["--interval", "1e18"],
        ["http://"],
        ["http://[::1"],
        ["http://127.0.0.1:99999"],
        ["http:///a"],
    ],
)
def test_a_wrong_command_line_has_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(words, "greenlane top")
    assert raised.value.code == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "gpu7"], "unexpected --url; the server is a word by itself: greenlane top URL\n"),
        (["--once", "--url=http://admin:hidden@gpu7"], "unexpected --url; the server is a word by itself: greenlane top URL\n"),
        (["--url", "http://admin:hidden@gpu7"], "an address with a name or a password; give the address alone, and the"),
        (["gpu7", "gpu8", "--ones"], "unrecognized arguments: gpu8 --ones\n"),
    ],
)
def test_words_that_it_does_not_know_are_said_and_how_a_server_is_given(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(words, "greenlane top")
    found = capsys.readouterr().err
    assert said in found
    assert "hidden" not in found


class Terminal:
    """A terminal of 80 columns in which the command runs."""

    def __init__(self, address: str) -> None:
        self.shown = b""
        self._main, other = pty.openpty()
        self.resize(20, 80)
        words = [sys.executable, "-m", "greenlane", "top", address, "--interval", "0.2"]
        environment = {**os.environ, "TERM": "xterm"}
        self.process = subprocess.Popen(words, stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True)
        os.close(other)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, text: bytes) -> None:
        self.shown = b""
        while text not in self.shown:
            assert select.select([self._main], [], [], PATIENCE)[0], self.shown
            self.shown += os.read(self._main, 65536)

    def press(self, key: bytes) -> None:
        os.write(self._main, key)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        os.close(self._main)


def test_in_a_terminal_the_table_is_live_and_keys_work(server: Answering) -> None:
    terminal = Terminal(url(server))
    try:
        terminal.read_until(b"mob 1")
        terminal.press(b"m")
        terminal.press(b" ")
        terminal.read_until(b"stopped; ")
        server.status = 503
        terminal.press(b" ")
        terminal.read_until(b"503: not so")
        terminal.resize(3, 20)
        terminal.press(b"q")
        terminal.read_until(b"\x1b[?1049l")  # The screen as it was before.
        assert terminal.process.wait(PATIENCE) == 0
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("width", "gone"), [(None, set()), (80, {"DEVICE", "IDLE%"}), (60, {"DEVICE", "IDLE%", "LENT%", "BORROWED"})]
)
def test_a_narrow_terminal_has_fewer_columns_and_says_how_many_more_there_are(width: int | None, gone: set[str]) -> None:
    rates = between(looked(2, 1, 100), looked(4, 3, 300))
    assert rates
    full, shown = lines(rates), lines(rates, width=width)
    head, narrow = (next(line for line in each if line.startswith("TENANT")) for each in (full, shown))
    missing = set(head.split()) - set(narrow.split())
    assert missing >= gone
    assert {"TENANT", "USED%", "REQ/S"} <= set(narrow.split())
    if width:
        table = shown[shown.index(narrow) :]
        assert max(map(len, table)) < width
        longest = max(map(len, full[full.index(head) :]))
        assert f"{len(missing)} more columns in a terminal of {longest + 1}" in shown


def test_the_column_of_devices_stays_where_there_are_several() -> None:
    rates = between(looked(2, 1, 100), looked(4, 3, 300))
    assert rates
    shown = lines(replace(rates, devices=[*rates.devices, replace(rates.devices[0], name="1")]), width=85)
    assert next(line for line in shown if line.startswith("TENANT")).split()[1] == "DEVICE"


def test_a_fenced_tenant_s_narrow_inferences_have_a_column() -> None:
    def with_narrow(seconds: float, count: int) -> Look:
        text = f'# TYPE greenlane_narrow_launches counter\ngreenlane_narrow_launches_total{{tenant="acme"}} {count}\n'
        return Look(usage(seconds, 1.0, 10), *read_metrics(metrics(10) + text))

    rates = between(with_narrow(2.0, 100), with_narrow(4.0, 150))
    assert rates
    head, row = [line.split() for line in lines(rates, models=False) if "TENANT" in line or line.startswith("acme")]
    assert (head[-1], row[-1]) == ("NARROW/S", "25.0")
    rates = between(looked(2.0, 1.0, 10), looked(4.0, 2.0, 20))
    assert rates
    assert "NARROW" not in "\n".join(lines(rates))


def test_the_help_explains_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    def full(seconds: float, count: int) -> Look:
        narrow = f'# TYPE greenlane_narrow_launches counter\ngreenlane_narrow_launches_total{{tenant="acme"}} {count}\n'
        seen = Look(usage(seconds, 1.0, count, seconds), *read_metrics(metrics(count) + narrow))
        return moved(seen, seconds, count * 10**9, "measured")

    rates = between(full(2.0, 100), full(4.0, 200))
    assert rates
    head = next(line.split() for line in lines(rates) if line.startswith("TENANT"))
    assert len(head) == 17
    with pytest.raises(SystemExit):
        parse(["--help"], "greenlane top")
    said = capsys.readouterr().out.partition("columns:")[2]
    assert not [word for word in head[2:] if word.strip("%") not in said]
