"""Sends cases to a server, one thread a connection, and records every wrong answer, 5xx, hang and disconnect."""

import gzip
import json
from collections import Counter
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPException
from threading import Lock, Thread
from time import monotonic
from typing import Protocol

import numpy as np

from tests.end_to_end.wire import Answer, Connection

from .cases import Case, Maker
from .models import Oracle
from .wire import Unreadable, body_of, tensors

PATIENCE = 20.0
"""Seconds without an answer that count as a hang."""
REFUSALS = frozenset({400, 404, 405, 408, 411, 413, 414, 415, 417, 431})
HONEST = frozenset({501, 505})
"""Statuses for requests that use parts of HTTP that the server does not support."""
MOST = 20
"""Findings that are kept."""


class Sent(Protocol):
    """What was sent, and what was done to it before."""

    @property
    def damage(self) -> str: ...

    def data(self) -> bytes: ...


@dataclass(slots=True)
class Found:
    """What came of a run: answers by damage and status (0: the connection was closed), and what must not happen."""

    answers: Counter[tuple[str, int | str]] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def note(self, case: "Sent", status: int | str, finding: str = "") -> None:
        """Count one case. Any thread."""
        with self.lock:
            self.answers[case.damage, status] += 1
            if finding and len(self.findings) < MOST:
                self.findings.append(f"{finding}; {case.damage or 'whole'}: {case.data()[:3000]!r}")


class Attack(Thread):
    """Cases of one seed, one after another until a time of `time.monotonic`, or so many."""

    def __init__(self, port: int, maker: Maker, oracle: Oracle, found: Found, until: float, most: int | None = None) -> None:
        super().__init__(name="fuzz", daemon=True)
        self.port = port
        self._maker = maker
        self._oracle = oracle
        self._found = found
        self._until = until
        self._most = most
        self._connection: Connection | None = None

    def run(self) -> None:
        done = 0
        while monotonic() < self._until and (self._most is None or done < self._most):
            self._try(self._maker.case())
            done += 1
        self._hang_up()

    def _try(self, case: Case) -> None:
        try:
            answer = self._ask(case)
        except TimeoutError:
            self._hang_up()
            self._found.note(case, 0, f"no answer in {PATIENCE:g} s")
        except (OSError, HTTPException, ValueError) as error:
            self._hang_up()
            self._found.note(case, 0, "" if case.damage else f"no answer: {error!r}")
        else:
            self._found.note(case, answer.status, self._judge(case, *answer))

    def _ask(self, case: Case) -> Answer:
        if self._connection is None:
            self._connection = Connection(self)
            self._connection.patience(PATIENCE)
        odd = case.raw is not None or case.claimed is not None
        self._connection.send(case.data())
        if odd:  # Where the request ends is not certain any more.
            self._connection.shut()
        answer = self._connection.answer()
        if odd or answer.headers.get("connection", "").lower() == "close":
            self._hang_up()
        return answer

    def _hang_up(self) -> None:
        if self._connection:
            self._connection.close()
        self._connection = None

    def _judge(self, case: Case, status: int, headers: Message, body: bytes) -> str:
        """What is wrong with an answer; empty where it is right."""
        if status == 200:
            return "" if case.raw is not None else self._compare(case, headers, body)
        if status not in REFUSALS and not (case.raw is not None and status in HONEST):
            return f"status {status}: {body[:300]!r}"
        if not case.damage:
            return f"a whole request was refused with {status}: {body[:300]!r}"
        return self._check_error(case, body)

    def _check_error(self, case: Case, body: bytes) -> str:
        try:
            fine = list(json.loads(body)) == ["error"]
        except ValueError:
            fine = case.raw is not None and not body  # Perhaps the answer to a HEAD.
        return "" if fine else f"an error that is no {{'error': text}}: {body[:300]!r}"

    def _compare(self, case: Case, headers: Message, body: bytes) -> str:
        try:
            document, rest = body_of(case.head + case.rest, case.size)
            given = tensors(document.get("inputs"), rest)
        except Unreadable as error:
            return f"answered with 200 what cannot be read: {error}"
        body = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
        size = headers.get("inference-header-content-length")
        try:
            response, rest = body_of(body, None if size is None else int(size))
            got = tensors(response["outputs"], rest)
        except (Unreadable, KeyError) as error:
            return f"an answer that cannot be read ({error!r}): {body[:300]!r}"
        try:
            wanted = self._oracle.outputs(case.model, given)
        except Exception as error:  # Whatever ONNX Runtime raises.
            return f"answered with 200 what ONNX Runtime refuses: {error}"
        names = [asked["name"] for asked in document.get("outputs") or ()] or list(wanted)
        if list(got) != names:
            return f"outputs {list(got)} for {names}"
        if response.get("id") != (document.get("id") or None):  # As in Triton, an empty one is none.
            return f"id {response.get('id')!r} for {document.get('id')!r}"
        for name, values in got.items():
            if values.shape != wanted[name].shape or not np.array_equal(values, wanted[name], _has_nan(values)):
                return f"output {name} is {values!r}, of ONNX Runtime {wanted[name]!r}"
        return ""


def _has_nan(values: np.ndarray) -> bool:  # type: ignore[type-arg]
    return values.dtype.kind == "f"
