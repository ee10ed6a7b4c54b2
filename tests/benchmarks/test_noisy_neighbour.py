"""The noisy-neighbour benchmark: its plan, its files, its figures, a whole run against a server that is not ours, and that the
published figures follow from the published data."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from benchmarks.noisy_neighbour import data
from benchmarks.noisy_neighbour.__main__ import main
from benchmarks.noisy_neighbour.measure import Phase
from benchmarks.noisy_neighbour.plan import PHASES, Aggressor, Turn, aggressor, turns
from benchmarks.noisy_neighbour.summary import summary, tables
from greenlane.load.figures import Samples
from greenlane.load.server_process import free_port

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "lab" / "2026-11-23-noisy-neighbour.md").read_text()
PUBLISHED = sorted((ROOT / "docs" / "noisy-neighbour").glob("*"))
ABOUT = {"settings": {"aggressors": {"loud": ""}, "quiet": 0.1, "seconds": 1.7}, "servers": {"a": "A 1"}}


def phase(which: str, turn: int = 0, attempt: int = 0, slow: float = 1.0, others: float = 0.0, failed: int = 0) -> Phase:
    count = 0 if which == "aggressor" else 200
    statuses = [0] * failed + [200] * (count - failed)
    samples = Samples([number / 100 for number in range(count)], [slow * (500 + number) for number in range(count)], statuses)
    answers = {} if which == "alone" else {200: 100, 429: 3}
    return Phase(Turn(turn, "a", "loud"), attempt, which, 1.5, samples, 20.0, others, 0.25, answers)  # type: ignore[arg-type]


def turn(number: int, attempt: int = 0, slow: float = 1.0, others: float = 0.0) -> list[Phase]:
    return [phase(which, number, attempt, slow if which == "beside" else 1.0, others) for which in PHASES]


def test_an_aggressor_is_read() -> None:
    assert aggressor("batches=conv,rows=8,connections=2") == Aggressor("batches", "conv", 8, 2)
    assert aggressor("new=identity,json,churn") == Aggressor("new", "identity", form="json", churn=True)


@pytest.mark.parametrize("text", ["conv", "=conv", "a=", "a=conv,rows=0", "a=conv,rows", "a=conv,fast"])
def test_an_aggressor_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        aggressor(text)


def test_every_round_begins_with_another_server_and_another_aggressor() -> None:
    found = list(turns(["a", "b"], ["x", "y", "z"], 3))
    assert len(found) == len(set(found)) == 3 * 2 * 3
    assert [(one.server, one.aggressor) for one in found[::6]] == [("a", "x"), ("b", "y"), ("a", "z")]


def test_raw_data_is_read_as_it_was_written(tmp_path: Path) -> None:
    phases = [*turn(0, slow=2.0, others=0.2), replace(phase("alone", failed=1), others=float("nan"))]
    data.write(tmp_path, phases, ABOUT)
    first = (tmp_path / data.REQUESTS).read_bytes()
    found, about = data.read(tmp_path)
    data.write(tmp_path, found, about)
    assert (tmp_path / data.REQUESTS).read_bytes() == first
    assert about == ABOUT
    assert found[:3] == phases[:3]
    assert found[3].samples == phases[3].samples
    assert found[3].others != found[3].others


def test_rounds_that_other_programs_disturbed_do_not_count() -> None:
    late = [replace(one, others=0.2 if one.which == "beside" else 0.0) for one in turn(2, slow=70.0)]
    again = [*turn(0, 0, slow=50.0, others=0.5), *turn(0, 1, slow=2.0), *turn(1, slow=2.0), *late]
    [row] = summary(again, ABOUT)["rows"]
    assert (row["rounds"], row["rounds_left_out"]) == (2, 1)
    assert row["growth"]["p99"][0] == row["growth"]["p50"][0] == 2.0
    assert (row["alone"]["count"], row["alone"]["p99"], row["beside"]["worst"]) == (400, 0.697, 1.398)
    assert row["rate"] == {"alone": 50.0, "beside": 50.0}  # 100 answers in the 1.7 s of a phase and the 0.3 before.
    assert row["refused"] == 3 * 4


def test_a_failed_request_is_counted() -> None:
    found = summary([phase("alone"), phase("beside", failed=2), phase("aggressor")], ABOUT)
    assert found["rows"][0]["beside"]["failed"] == 2
    assert "| 0 → 2 | 200 in 1 |" in tables(found)


def test_where_nothing_counts_the_table_says_so() -> None:
    found = summary(turn(0, others=0.5), ABOUT)
    json.dumps(found, allow_nan=False)
    assert "| loud | a | not measured | not measured | not measured |" in tables(found)
    assert "| loud | a | - | - | 0 |" in tables(found)


DOCUMENTS = {
    "/v2": {"name": "other", "version": "7"},
    "/v2/models/m": {"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": ["-1", "16"]}]},
}


class Other(BaseHTTPRequestHandler):
    """A server of the protocol with one model, which answers each inference with as much as came."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(json.dumps(DOCUMENTS.get(self.path, {})).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        head = int(self.headers.get("Inference-Header-Content-Length", len(body)))
        [tensor] = json.loads(body[:head])["inputs"]
        size = len(body) - head or 4 * len(tensor["data"])
        right = self.path == "/v2/models/m/infer" and size == 64 * tensor["shape"][0]
        self._answer(body, 200 if right and self.headers["X-Tenant"] in ("victim", "aggressor") else 400)

    def log_message(self, *_: object) -> None:
        return

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def other() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server, closing(server.socket):
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_any_server_of_the_protocol_can_be_measured(other: str, tmp_path: Path) -> None:
    command = ["run", "--server", f"theirs={other}", "--victim", "m", "--rate", "100", "--rounds", "1", "--seconds", "0.3"]
    kinds = ["--aggressor", "large=m,rows=8,connections=2", "--aggressor", "text=m,json,connections=1"]
    assert main([*command, *kinds, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "summary.json").read_text())
    assert [row["aggressor"] for row in found["rows"]] == ["large", "text"]
    for row in found["rows"]:
        assert row["alone"]["count"] == row["beside"]["count"] > 10
        assert row["alone"]["failed"] == row["beside"]["failed"] == row["refused"] == 0
        assert row["rate"]["alone"] > 0 < row["rate"]["beside"]
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")
    about = json.loads((tmp_path / data.RUN).read_text())
    assert about["servers"] == {"theirs": f"other 7: at {other}"}


def test_a_server_that_does_not_answer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--server", f"gone=http://127.0.0.1:{free_port()}", "--out", str(tmp_path)]) == 2
    assert "gone: GET /v2/health/ready: " in capsys.readouterr().err


def test_a_command_that_ends_is_named_with_what_it_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["ended", f"http://127.0.0.1:{free_port()}", "sh -c 'echo no such model; exit 1'"]
    assert main(["run", "--start", *command, "--out", str(tmp_path)]) == 2
    assert "no such model" in capsys.readouterr().err


def test_greenlane_takes_the_models_as_they_are(tmp_path: Path) -> None:
    assert main(["models", str(tmp_path / "models"), "--threads", "2"]) == 0
    assert main(["models", str(tmp_path / "models")]) == 2
    tenants = '[tenants.victim]\ncores = 1\nmodels = ["*"]\n[tenants.aggressor]\ncores = 1\nmodels = ["*"]\n'
    config = tmp_path / "greenlane.toml"
    config.write_text(f'[device]\nbackend = "cpu"\n[models]\nrepository = "{tmp_path / "models"}"\n{tenants}')
    command = [sys.executable, "-m", "greenlane", "check", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("batches of up to 8") == 8


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_published_figures_follow_from_published_data(folder: Path) -> None:
    phases, about = data.read(folder)
    found = summary(phases, about)
    assert json.loads((folder / "summary.json").read_text()) == found
    assert (folder / "summary.txt").read_text() == f"{tables(found)}\n"
    assert tables(found).split("\n\n")[0] in PAGE


def test_the_page_has_all_tables_of_a_run() -> None:
    assert all(table in PAGE for table in (PUBLISHED[0] / "summary.txt").read_text().strip().split("\n\n"))
