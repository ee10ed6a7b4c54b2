"""Which protocol `uvicorn server.app:app` uses, with which options of uvicorn.

In a process of its own: a class that once had a `__new__` of its own does not take arguments again without it.
"""

import json
import subprocess
import sys
from pathlib import Path

CHOOSES = """
import asyncio, json, os, sys
import uvicorn
from uvicorn.server import ServerState
from server.app import app
from server.single_process import install
from server.http.uvicorn_protocol import JsonHttpToolsProtocol

async def other(scope, receive, send): ...

async def around(scope, receive, send):
    await app(scope, receive, send)

def kind(application, **options):
    config = uvicorn.Config(application, http="auto", log_config=None, **options)
    config.load()
    return type(config.http_protocol_class(config=config, server_state=ServerState(), app_state={})).__name__

async def main():
    install()
    quiet = {"access_log": False}
    print(json.dumps({
        "plain": kind(app, **quiet),
        "no proxy headers": kind(app, proxy_headers=False, **quiet),
        "access log": kind(app),
        "limit": kind(app, limit_concurrency=9, **quiet),
        "most requests": kind(app, limit_max_requests=9, **quiet),
        "root path": kind(app, root_path="/models", **quiet),
        "unix socket": kind(app, uds="socket", **quiet),
        "wrapped": kind(around, **quiet),
        "other": kind(other, **quiet),
    }))

asyncio.run(main())
"""


def test_requests_pass_asgi_by_only_where_no_option_of_uvicorn_and_no_application_around_it_needs_that() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHOOSES], cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    asgi, direct = "JsonHttpToolsProtocol", "HttpConnection"
    chosen = json.loads(done.stdout)
    assert chosen == dict.fromkeys(chosen, asgi) | {"plain": direct, "no proxy headers": direct}
    assert len(chosen) == 9
