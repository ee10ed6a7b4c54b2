"""A headless Chromium, driven over the DevTools protocol: what a person would do with a page, and what it says of itself."""

import asyncio
import base64
import itertools
import json
import os
import shutil
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PATIENCE = 30.0
"""Seconds for which a page may take to show what is waited for."""
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--disable-background-networking",
    "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
_KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), " ": (32, " "), "Escape": (27, ""), "ArrowUp": (38, ""), "ArrowDown": (40, "")}
"""The code of a key and what it types."""
_MOST = 64 * 1024 * 1024


def program() -> str:
    """The browser's program. Skips the test where there is none, except in CI, where it fails."""
    for name in _NAMES:
        if found := shutil.which(name):
            return found
    why = f"the status page is NOT TESTED IN A BROWSER: there is none of {', '.join(_NAMES)}; apt-get install chromium"
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


class Page:
    """One tab. `requests` are the addresses that it asked for, `complaints` what its console says of errors."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser = browser
        self._session = session
        self._loaded = asyncio.Event()
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol."""
        return await self._browser.call(method, self._session, **parameters)

    def on_event(self, method: str, about: Any) -> None:
        """Something happened in the tab."""
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(about["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(about["args"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")

    async def go(self, url: str) -> None:
        """Open an address; returns when the page and all its files are there."""
        self._loaded.clear()
        answer = await self.call("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        async with asyncio.timeout(PATIENCE):
            await self._loaded.wait()

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, awaited if it is a promise."""
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true. It is tried at once, and then whenever the page may have changed."""
        looks = f"{{ const look = () => {{ if ({expression}) ok(true); else setTimeout(look, 50); }}; look(); }}"
        try:
            async with asyncio.timeout(PATIENCE):
                await self.evaluate(f"new Promise((ok) => {looks})")
        except TimeoutError:
            text = await self.evaluate("document.body.innerText")
            raise AssertionError(f"not so after {PATIENCE:g} s: {expression}\n{text}") from None

    async def press(self, *keys: str) -> None:
        """Press and release keys, one after another: those with names, and single characters."""
        for key in keys:
            code, text = _KEYS[key] if key in _KEYS else (ord(key.upper()) if key.isalnum() else 0, key)
            about = {"key": key, "windowsVirtualKeyCode": code}
            await self.call("Input.dispatchKeyEvent", type="keyDown", **about, **({"text": text} if text else {}))
            await self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    async def look(self, width: int = 1280, height: int = 900, scheme: str = "light", scale: float = 1) -> None:
        """The size of the window, and `light` or `dark`."""
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False)
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def picture(self) -> bytes:
        """The window as PNG."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


class Browser:
    """A running browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._pages: dict[str, Page] = {}
        self._reading = asyncio.create_task(self._read())

    async def call(self, method: str, session: str = "", **parameters: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        await self._socket.send_json(message)
        return await answer

    async def open(self, url: str) -> Page:
        """A new tab with this address, whose storage no other one shares."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = (await self.call("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            await page.call(f"{domain}.enable")
        await page.look()
        await page.go(url)
        return page

    async def close(self) -> None:
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading

    async def _read(self) -> None:
        async for message in self._socket:
            about = json.loads(message.data)
            if waiting := self._answers.pop(about.get("id"), None):
                if "error" in about:
                    waiting.set_exception(AssertionError(about["error"]))
                else:
                    waiting.set_result(about["result"])
            elif page := self._pages.get(about.get("sessionId")):
                page.on_event(about["method"], about["params"])


@asynccontextmanager
async def browsing(folder: Path) -> AsyncIterator[Browser]:
    """Start a browser that keeps its files in this folder, and end it."""
    words = [program(), *_OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    process = await asyncio.create_subprocess_exec(*words, stderr=PIPE)
    assert process.stderr
    try:
        async with asyncio.timeout(PATIENCE):
            while b"DevTools listening on " not in (line := await process.stderr.readline()):
                assert line, "the browser ended"
        reading = asyncio.create_task(process.stderr.read())  # It never waits for the reader.
        address = line.decode().split()[-1]
        async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=_MOST) as socket:
            browser = Browser(socket)
            try:
                yield browser
            finally:
                with suppress(AssertionError, ConnectionError):
                    async with asyncio.timeout(PATIENCE):
                        await browser.call("Browser.close")
                await browser.close()
        await reading
    finally:
        if process.returncode is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()
