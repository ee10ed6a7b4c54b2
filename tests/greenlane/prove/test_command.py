"""`greenlane prove` on this machine's cores, in a short form: what it says, and that what shares a core is never isolated.

How isolated two tenants are here depends on what else this machine does. So no test expects a verdict of `isolated`.
"""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest

from greenlane.load.jobs import Ask
from greenlane.load.server_process import family_of
from greenlane.load.wire import Caller, post
from greenlane.prove import server, text
from greenlane.prove.access import Access, CannotProve, ServerEnded
from greenlane.prove.command import main
from greenlane.prove.command_line import parse
from greenlane.prove.findings import Findings
from greenlane.prove.plan import LEAST
from greenlane.prove.proving import Run, prove
from greenlane.prove.survey import Surveyed, survey
from partitions.strain import STRAINS
from server.demo import build
from server.tenants.auth import digest
from tests import models

PROGRAM = "greenlane prove"
KEY = "a key that only its digest is in the file of"
CORES = sorted(os.sched_getaffinity(0))[:2]

pytestmark = [
    pytest.mark.skipif(len(CORES) < 2, reason="two tenants need two cores"),
    pytest.mark.usefixtures("forked_programs"),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tenants on a core each, one of which has a key; a port that is taken would be refused if it were used."""
    folder = tmp_path_factory.mktemp("prove")
    build(folder / "models")
    return written(folder / "two.toml", 'models = ["*"]', f'models = ["stripes"]\nkeys_sha256 = ["{digest(KEY)}"]\nport = 1')


def written(path: Path, acme: str, globex: str) -> Path:
    device = f'[device]\nbackend = "cpu"\ncores = "{CORES[0]},{CORES[1]}"\n'
    models = '[models]\nrepository = "models"\n'
    path.write_text(f"{device}{models}[tenants.acme]\ncores = 1\n{acme}\n[tenants.globex]\ncores = 1\n{globex}\n")
    return path


@contextmanager
def running(config: Path) -> Iterator[tuple[Access, Callable[[], str], int]]:
    with server.started(str(config), lambda _: None) as started:
        yield started.access, started.alive, started.pid


def proven(access: Access, alive: Callable[[], str], report: Callable[[str], None] = lambda _: None) -> Findings:
    return prove(Run(access, alive, False, "test", 4.0, None, PROGRAM, report))


def test_a_run_writes_text_page_and_document_and_says_what_there_was_no_time_for(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, file = tmp_path / "page.html", tmp_path / "found.json"

    status = main(["--config", str(config), "--seconds", "8", "--html", str(page), "--json", str(file)], PROGRAM)

    said = capsys.readouterr()
    found: dict[str, Any] = json.loads(file.read_text())
    assert status == found["exit_status"]
    assert status in (1, 3)  # The second pair was not tried, so that not all is isolated.
    (pair,) = found["pairs"]
    assert (pair["victim"], pair["aggressor"]) == ("acme", "globex")
    assert [attack["attack"] for attack in pair["attacks"]] == ["batches"]
    assert pair["attacks"][0]["microseconds"]["beside"]["count"] > 10  # Few where other programs have most of the cores.
    assert pair["attacks"][0]["aggressor_statuses"]["200"] > 0
    (left,) = found["untried"]
    assert (left["victim"], left["aggressor"]) == ("globex", "acme")
    assert "--seconds" in left["why"]
    assert [(each["units"], each["verdict"]) for each in found["partitions"]] == [([core], "isolated") for core in CORES]
    for core, each in zip(CORES, found["partitions"], strict=True):  # A machine that is busy otherwise may show nothing.
        assert (each["models"]["cores"], each["models"]["verdict"]) in (([core], "isolated"), ([], "not exercised"))
    acme = found["tenants"][0]
    assert {*(model["name"] for model in acme["models"]), *acme["not_asked"]} == {"identity", "stripes"}
    assert set(acme["not_asked"].values()) <= {
        "there was no time left; more --seconds has time for more models"
    }  # On a busy machine.
    assert "<svg" in page.read_text()
    assert f"acme beside globex: {pair['model']}" in said.out
    assert "round 1 of" in said.err
    assert "no time is left for strains of memory, which would not count; --seconds 17 has it" in said.err
    assert KEY not in file.read_text() + page.read_text()


def test_limits_of_the_configuration_are_lifted_as_they_are_not_what_is_proven(config: Path) -> None:
    """A victim is asked 300 times a second, whatever its rate is limited to."""
    limits = "requests_per_second = 1\nbytes_per_second = 100\nmax_connections = 1\nmax_large_bodies = 1"
    limited = written(config.parent / "limited.toml", f'models = ["identity"]\n{limits}', 'models = ["stripes"]')
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}).encode()
    ask = Ask(post("/v2/models/identity/infer", {"X-Tenant": "acme"}, body))
    with running(limited) as (access, _, _), closing(Caller(access.port)) as first, closing(Caller(access.port)) as second:
        assert [each.ask(ask).status for _ in range(5) for each in (first, second)] == [200] * 10


def test_a_tenant_whose_key_was_not_given_is_not_asked_and_the_file_for_it_is_shown(config: Path) -> None:
    with running(config) as (access, _, _):
        keyless, _ = server.running(f"http://127.0.0.1:{access.port}", {}, access.admin_key)
        found = {each.name: each for each in survey(keyless, 5.0, lambda _: None)}
    assert not found["globex"].drivable
    (why,) = set(found["globex"].undriven.values())
    assert why == 'tenant globex has keys: give --keys FILE, TOML with [tenants] and globex = "KEY"'


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """As `config`, but globex has a model that reads 64 MiB: no event loop takes it, which would go to globex's core then."""
    model = onnx.parser.parse_model(models.HEADER + "slow (float[n, 4096] x) => (float[n, 4096] y) { y = MatMul(x, w) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4096, 4096), np.float32), "w"))
    build(tmp_path / "models")
    file = tmp_path / "models" / "slow" / "1" / "model.onnx"
    file.parent.mkdir(parents=True)
    file.write_bytes(model.SerializeToString())
    return written(tmp_path / "slow.toml", 'models = ["identity"]', f'models = ["slow"]\nkeys_sha256 = ["{digest(KEY)}"]')


def test_tenants_that_share_a_core_are_found_and_never_called_isolated(slow: Path) -> None:
    """Every thread of the server on one core, as a wrong cpuset would put them; asked by its URL and with its keys."""

    def crowd(what: str) -> None:
        for one in family_of(pid):
            for tid in os.listdir(f"/proc/{one.pid}/task"):
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(tid), CORES[:1])

    with running(slow) as (access, _, pid):
        other, gone = server.running(f"http://127.0.0.1:{access.port}", dict(access.keys), access.admin_key)
        found = proven(other, gone, crowd)
        with pytest.raises(CannotProve, match="the admin key"):
            server.running(f"http://127.0.0.1:{access.port}", {}, "another key")

    acme, globex = found.located
    assert (acme.own_word, globex.own_word) == ("isolated", "leaks")
    assert globex.own == tuple(CORES[:1])
    assert f"ran on core {CORES[0]} (of acme)" in globex.own_why
    assert "isolated" not in found.words.values()
    assert (found.word, found.status) == ("leaks", 1)


def test_strains_of_memory_are_tried_and_reported_with_what_they_moved(config: Path) -> None:
    said: list[str] = []
    with running(config) as (access, alive, _):
        wanted = ("memory read", "PCIe out")
        found = prove(Run(access, alive, False, "test", 4.0, None, PROGRAM, said.append, memory=True, strains=wanted))
    (measured,) = found.unfenced
    (result,) = measured.results
    assert (str(measured.pair), result.attack.other.kind) == ("acme beside globex", "memory read")
    assert {200} <= {*result.statuses} <= {0, 200}, "a strain that a phase ends has no answer"
    assert result.attack.other.rate > 0.1
    assert all(rate > 0.1 for rate in result.moved.values())
    assert measured.fenced == (
        "not fenced: what globex does to memory and the last cache (L2)",
        "globex: it has no memory_bandwidth",
        "cores cannot strain PCIe out",
    )
    assert said[0] == "cores cannot strain PCIe out"
    assert "acme beside globex: straining memory" in said
    (why,) = [why for pair, why in found.untried.items() if str(pair) == "globex beside acme"]
    assert why.startswith("there was no time left for it; --seconds "), "not only for strains, which take less"


def test_strains_that_count_and_say_nothing_yet_are_measured_again(slow: Path) -> None:
    """Of a victim whose model is slow there are too few requests in the rounds that `seconds` have time for."""
    said: list[str] = []
    with running(slow) as (access, alive, _):
        run = Run(access, alive, False, "test", 6.0, "globex", PROGRAM, said.append, memory=True, strains=("memory read",))
        (measured,) = prove(run).unfenced
    assert "globex beside acme: too noisy for a verdict on memory read: again" in said
    assert len(measured.results[0].rounds["alone"]) > LEAST


@pytest.mark.parametrize("words", [[], ["--memory"]])
def test_strains_that_no_tenant_s_share_has_are_refused_before_anything_is_measured(
    config: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(config), "--seconds", "8", "--strains", "pcie-out,pcie-in", *words], PROGRAM) == 2
    said = capsys.readouterr().err
    assert said.endswith(
        f"{PROGRAM}: --strains: cores cannot strain PCIe out and PCIe in; choose from memory-copy, memory-read, memory-write, "
        "random-sectors, l2, or leave it out\n"
    )
    assert "probing" not in said


@pytest.mark.parametrize("words", [["--memory"], ["--strains", "memory-read"]])
def test_strains_that_no_neighbour_feels_are_refused_before_anything_is_measured(
    config: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each tenant has a device of its own."""
    apart = config.parent / "apart.toml"
    tables = [
        f'[devices.{name}]\nbackend = "cpu"\ncores = "{core}"\n[tenants.{name}]\ndevice = "{name}"\ncores = 1\nmodels = ["*"]\n'
        for name, core in zip(("acme", "globex"), CORES, strict=True)
    ]
    apart.write_text("".join(('[models]\nrepository = "models"\n', *tables)))
    assert main(["--config", str(apart), "--seconds", "8", *words], PROGRAM) == 2
    said = capsys.readouterr().err
    assert said.endswith(
        f"{PROGRAM}: {words[0]}: no two tenants share a device, so none feels another's strains; leave it out\n"
    )
    assert "probing" not in said


class BesideGpu(Access):
    """A server that has two more tenants, on a GPU."""

    def administer(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        found = super().administer(method, path, body)
        if (method, path) == ("GET", "/admin/partitions"):
            found["devices"].append({"name": "gpu", "unit": "SM"})
            found["partitions"] |= {"initech": {"device": "gpu"}, "hooli": {"device": "gpu"}}
        return found


@pytest.mark.parametrize("memory", [True, False])
def test_tenants_on_cores_are_not_tried_with_strains_that_only_a_gpu_beside_them_has(
    config: Path, memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("greenlane.prove.proving.UNFENCED", 2.0)
    said: list[str] = []
    with running(config) as (access, alive, _):
        beside = BesideGpu(access.port, access.keys, access.admin_key)
        found = prove(Run(beside, alive, False, "test", 4.0, None, PROGRAM, said.append, memory=memory, strains=("PCIe in",)))
    assert not found.unfenced
    assert said[0] == "cores cannot strain PCIe in"
    untried = {str(pair): why for pair, why in found.untried.items()}
    assert untried.get("acme beside globex") == (said[0] if memory else None)


class Refusing(Access):
    """A server that strains nothing, such as one of an earlier version."""

    def administer(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        if path.endswith("/strain"):
            raise ServerEnded(f"{method} {path} is answered with 404: no such path")
        return super().administer(method, path, body)


@pytest.mark.parametrize("memory", [True, False])
def test_strains_that_are_refused_are_a_pair_that_was_not_tried_if_they_count(
    config: Path, memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("greenlane.prove.proving.UNFENCED", 2.0)  # Else a third of 4 s is too short for them.
    said: list[str] = []
    with running(config) as (access, alive, _):
        refusing = Refusing(access.port, access.keys, access.admin_key)
        found = prove(Run(refusing, alive, False, "test", 4.0, "acme", PROGRAM, said.append, memory=memory))
    assert not found.unfenced
    why = "strains of memory are refused: POST /admin/tenants/globex/strain is answered with 404: no such path"
    assert list(found.untried.values()) == [why] * memory
    assert (f"acme beside globex: {why}; they would not count" in said) == (not memory)


def test_a_tenant_without_models_is_no_victim_and_can_only_send_invalid_requests(config: Path) -> None:
    with running(written(config.with_name("none.toml"), 'models = ["stripes"]', 'models = ["absent"]')) as (access, alive, _):
        found = proven(access, alive)
    (measured,) = found.measured
    assert (str(measured.pair), [each.attack.other.kind for each in measured.results]) == ("acme beside globex", ["invalid"])
    assert set(measured.results[0].statuses) == {404}
    assert [(str(pair), why) for pair, why in found.untried.items()] == [
        ("globex beside acme", "globex has no model that can be asked")
    ]
    assert found.tenants[1].undriven == {"absent": "it is not ready"}
    assert found.status in (1, 3)


def test_a_server_that_dies_meanwhile_ends_the_run_with_what_was_found_so_far(config: Path) -> None:
    with running(config) as (access, alive, pid):

        def kill(what: str) -> None:
            if "round 1" in what:
                os.kill(pid, signal.SIGKILL)

        found = proven(access, alive, kill)
    assert found.ended.startswith("the server ended with status -9")
    assert not found.measured
    assert set(found.untried.values()) == {found.ended}
    assert len(found.untried) == 2
    assert found.status == 3


@pytest.mark.parametrize("memory", [True, False])
def test_a_server_that_dies_while_it_is_strained_is_said_and_leaves_the_pair_untried_if_strains_count(
    config: Path, memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("greenlane.prove.proving.UNFENCED", 2.0)
    said: list[str] = []
    with running(config) as (access, alive, pid):

        def kill(what: str) -> None:
            said.append(what)
            if "round 1" in what and "acme beside globex: straining memory" in said:
                os.kill(pid, signal.SIGKILL)

        strains = ("memory read",)
        found = prove(Run(access, alive, False, "test", 4.0, "acme", PROGRAM, kill, memory=memory, strains=strains))
    assert found.ended.startswith("the server ended with status -9")
    assert len(found.measured) == 1
    assert not found.unfenced
    assert list(found.untried.values()) == [found.ended] * memory
    assert found.ended in text.render(found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9 does not answer GET /v2/health/ready with 200"),
        (["--url", "http://example.org"], "the clients have to run on the server's machine"),
        (["--url", "http://127.0.0.1:99999"], "expected the address of a server, such as http://127.0.0.1:8000"),
        (["--url", ""], "--url: ''; expected the address of a server"),
        (["--url", "localhost:0"], "--url: 'localhost:0'; expected the address of a server"),
        (["--url", "http://admin:hidden@127.0.0.1:9"], "--url: an address with a name or a password; "),
        (["--url", "http://127.0.0.1:9", "--keys", "absent.toml"], "--keys absent.toml: "),
        (["--config", "absent.toml"], "absent.toml"),
        (["--json", "/absent/file"], "/absent/file cannot be written"),
        (["--html", "/"], "/ cannot be written: Is a directory"),
    ],
)
def test_what_cannot_be_tried_is_status_2_and_a_sentence(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words, PROGRAM) == 2
    found = capsys.readouterr().err
    assert said in found
    assert "hidden" not in found


class Page(BaseHTTPRequestHandler):
    """Answers whatever is asked with a page, as many web servers do."""

    page = b"<html>"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.page)))
        self.end_headers()
        self.wfile.write(self.page)

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Nested(Page):
    page = b"[" * 100_000


@pytest.mark.parametrize("kind", [Page, Nested])
def test_another_server_is_status_2(kind: type[Page], capsys: pytest.CaptureFixture[str]) -> None:
    with HTTPServer(("127.0.0.1", 0), kind) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            status = main(["--url", f"127.0.0.1:{other.server_port}"], PROGRAM)
        finally:
            other.shutdown()
            thread.join()
    assert status == 2
    assert "answered something else at /admin/tenants" in capsys.readouterr().err


class HalfDead(Page):
    """A server of one tenant that answers one inference on each connection, and then closes it."""

    protocol_version = "HTTP/1.1"
    models: ClassVar = ("m",)

    def do_GET(self) -> None:
        x = {"name": "x", "datatype": "FP32", "shape": [2]}
        models = [{"name": name, "state": "READY"} for name in self.models]
        answer = {"tenants": [{"name": "acme", "models": models}], "partitions": {}, "inputs": [x]}
        self.page = json.dumps(answer).encode()
        super().do_GET()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        super().do_GET()
        self.close_connection = True


def surveyed(kind: type[HalfDead], seconds: float) -> Surveyed:
    """What a survey of such a server finds in so many seconds."""
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            (found,) = survey(Access(listening.server_port), seconds, lambda _: None)
        finally:
            listening.shutdown()
            thread.join()
    return found


def test_a_model_that_stops_answering_is_not_driven() -> None:
    found = surveyed(HalfDead, 5.0)
    assert not found.drivable
    assert found.undriven["m"].startswith("it does not answer: ")


class Silent(HalfDead):
    """A server of models that are never answered."""

    models = tuple(f"m{number}" for number in range(9))

    def do_POST(self) -> None:
        while self.rfile.read(1):
            pass


def test_a_server_that_answers_no_model_is_given_up_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenlane.prove.survey.PATIENCE", 0.2)
    found = surveyed(Silent, 0.1)
    assert found.undriven["m0"] == "it does not answer: no answer within 0.2 s"
    assert found.undriven["m8"].startswith("there was no time left")


def test_a_file_of_keys_that_is_not_there_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    assert main(["--url", "http://127.0.0.1:9", "--keys", str(path)], PROGRAM) == 2
    assert f"--keys {path}: cannot be read: No such file or directory\n" in capsys.readouterr().err


@pytest.mark.parametrize("text", ['admin = "a\\nb"', '[tenants]\nacme = "a\\u0000"'])
def test_a_key_that_no_header_has_is_status_2(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    assert main(["--url", "http://127.0.0.1:9", "--keys", str(path)], PROGRAM) == 2
    assert f"--keys {path}: a key in one line" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nobody", ""])
def test_a_victim_that_is_no_tenant_is_status_2(config: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(config), "--seconds", "8", "--only", name], PROGRAM) == 2
    assert f"--only {name!r}: there is no such tenant; there are acme, globex" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "words"), [("wrong.toml", ["--config", "wrong.toml"]), ("greenlane.toml", [])])
def test_a_wrong_configuration_is_status_2_with_its_name_and_mistakes(
    name: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GREENLANE_CONFIG", raising=False)
    Path(name).write_text('[tenants.acme]\ncroes = 1\nmodels = ["*"]\n')
    assert main(words, PROGRAM) == 2
    said = capsys.readouterr().err
    assert f"starting a server of {name}\n" in said
    assert "did you mean 'cores'" in said


@pytest.mark.parametrize(
    "words",
    [
        ["--config", "a", "--url", "b"],
        ["--keys", "a"],
        ["--seconds", "7"],
        ["--seconds", "x"],
        ["--lending", "--memory"],
        ["--lending", "--strains", "l2"],
        ["--strains", "memory"],
    ],
)
def test_wrong_words_are_status_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words, PROGRAM)
    assert ended.value.code == 2


def test_strains_are_chosen_by_their_names_without_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([], PROGRAM).strains == STRAINS
    assert parse(["--strains", "memory-read,l2,PCIe-out,l2"], PROGRAM).strains == ("memory read", "L2", "PCIe out")
    with pytest.raises(SystemExit):
        parse(["--strains", "memory"], PROGRAM)
    assert "'memory'; expected some of memory-copy, memory-read, " in capsys.readouterr().err
