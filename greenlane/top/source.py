"""One look at a running server: its account, and the metrics of its requests."""

import http.client
import json
import math
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from greenlane.load.wire import bearer

KEY = "GREENLANE_ADMIN_KEY"
"""The variable with the administrators' key."""
_TIMEOUT = 10.0
"""Seconds without a byte after which a server is given up."""
PATIENCE = 30.0
"""Seconds after which it is, however many bytes come."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key is for the server that was named."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Unreachable(Exception):
    """The server does not answer, or refuses; the text says what to do."""


_REFUSED = {f"greenlane_{word}_requests_total" for word in ("rejected", "expired", "limited")}


@dataclass(slots=True)
class Requests:
    """Counts of one tenant's requests, each since it began, and how many wait now.

    `buckets` are requests answered, by model and version and by the longest time that they took, in seconds; each includes
    those below it. `refused` is by metric and limit.
    """

    refused: dict[tuple[str, str], float] = field(default_factory=dict)
    waiting: float = 0.0
    narrow: float | None = None
    """Inferences that ran on fewer granules, for a share of bandwidth; None for a tenant without one."""
    buckets: dict[tuple[str, str], dict[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Look:
    """The body of GET /admin/usage, and by tenant what the metrics say of its requests."""

    usage: Mapping[str, Any]
    requests: Mapping[str, Requests]
    ready: bool


def look(url: str, key: str | None, patience: float = PATIENCE) -> Look:
    """Ask a server. Blocks for `patience` at most. Raises Unreachable."""
    answers: Future[tuple[bytes, bytes]] = Future()
    threading.Thread(target=_ask, args=(url, key, answers), daemon=True).start()  # It may read for ever.
    try:
        usage, metrics = answers.result(patience)
    except TimeoutError:
        raise Unreachable(f"{url} has not answered within {patience:g} s, though something came of its answer") from None
    asked = "/admin/usage"
    try:
        found = json.loads(usage)
        found["tenants"], found["devices"], found["since"]
        asked = "/metrics"
        return Look(found, *read_metrics(metrics.decode()))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Unreachable(f"{url}{asked} answered something else; is it a Greenlane of this version?") from None


def read_metrics(text: str) -> tuple[dict[str, Requests], bool]:
    """By tenant what a scrape says of its requests, and whether the server is ready."""
    found: dict[str, Requests] = {}
    ready = False
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            ready = ready or (name == "greenlane_ready" and value == 1)
            if "tenant" not in labels:
                continue
            of = found.setdefault(labels["tenant"], Requests())
            if name == "greenlane_request_duration_seconds_bucket":
                bound = math.inf if labels["le"] == "+Inf" else float(labels["le"])
                of.buckets.setdefault((labels["model"], labels["version"]), {})[bound] = value
            elif name in _REFUSED:
                of.refused[name, labels.get("limit", "")] = value
            elif name == "greenlane_narrow_launches_total":
                of.narrow = value
            elif name == "greenlane_waiting_requests":
                of.waiting += value
    return found, ready


def _ask(url: str, key: str | None, answers: "Future[tuple[bytes, bytes]]") -> None:
    try:
        answers.set_result((_get(url, "/admin/usage", key), _get(url, "/metrics", key)))
    except BaseException as error:
        answers.set_exception(error)


def _get(url: str, path: str, key: str | None) -> bytes:
    try:
        request = urllib.request.Request(url + path, headers=bearer(key) if key else {})
    except ValueError as error:
        raise Unreachable(f"{KEY}: {error}") from error
    proxies = urllib.request.getproxies()
    proxies.pop("http", None)  # It would read the key.
    opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler(proxies))
    try:
        with opener.open(request, timeout=_TIMEOUT) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        raise Unreachable(_refusal(url, path, error, key)) from error
    except (OSError, http.client.HTTPException, ValueError) as error:  # The last is of a name that no host has.
        why = getattr(error, "reason", None) or error
        raise Unreachable(
            f"{url} does not answer: {why}\n"
            "Is a server running there? `greenlane --config FILE` starts one, and `greenlane top URL` asks another one."
        ) from error


def _refusal(url: str, path: str, error: urllib.error.HTTPError, key: str | None) -> str:
    try:
        text = str(json.loads(error.read())["error"])
    except (ValueError, TypeError, KeyError, RecursionError, OSError, http.client.HTTPException):
        text = error.reason
    if error.code // 100 == 3:
        return f"{url} points to {error.headers.get('Location', 'nowhere')}; give the server's own address"
    if error.code == 401:
        hint = f"the key in {KEY} is not this server's admin key" if key else f"set {KEY} to its admin key"
        return f"{url} refuses: {text}\n{hint}."
    if error.code == 404:
        return f"{url} has no {path}; is it a Greenlane of this version?"
    return f"{url}{path} answers {error.code}: {text}"
