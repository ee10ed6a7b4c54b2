"""`python -m tests.browser.screenshots FOLDER`: the pictures of the status page in the documentation.

Three tenants on a device of 16 virtual granules, under load: one alone at first, so that its quiet latency is known, then all.
The pictures are PNG of few colors, so that they are small.
"""

import asyncio
import io
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import PIL.Image

from server.config.tenant import TenantConfig
from server.demo import build

from ..end_to_end import repository
from ..end_to_end.harness import configuration, serving
from ..end_to_end.virtual import VirtualDevice
from ..end_to_end.wire import SMALL, infer, spin
from .chromium import browsing

TENANTS = (
    TenantConfig(name="acme", granules=5, models=("stripes", "spin"), burst=8, target_p99=0.02),
    TenantConfig(name="globex", granules=6, models=("identity", "spin", "absent"), lend=0.005),
    TenantConfig(name="initech", granules=3, models=("identity",), queue=8),
)
QUIET = 1000
"""Requests of acme that are answered before the others have any."""
LOADED = 30.0
"""Seconds for which all have load."""
PICTURES = (
    ("status-page-light", 1280, 1440, "light"),
    ("status-page-dark", 1280, 1440, "dark"),
    ("status-page-narrow", 400, 1440, "dark"),
)
MOST_BYTES = 150_000


def main() -> None:
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        models = Path(scratch) / "models"
        build(models)
        repository.write(models, "spin", repository.SPIN)
        config = configuration(models, *TENANTS, autopilot="dry-run")
        with serving(config, VirtualDevice(16), direct=True) as served, load(served.url, "acme", "spin", 60, 100):
            while quiet_requests(served.url) < QUIET:
                time.sleep(1)
            with load(served.url, "globex", "spin", 20, 200), load(served.url, "initech", "identity", 30, 0):
                httpx.put(f"{served.url}/admin/partitions", json={"initech": 4})
                asyncio.run(take(served.url, folder, Path(scratch)))


def quiet_requests(url: str) -> int:
    """What the server knows of acme alone."""
    acme = httpx.get(f"{url}/admin/status").json()["tenants"][0]
    return int(acme["isolation"]["quiet_requests"])


@contextmanager
def load(url: str, tenant: str, model: str, rate: float, turns: int) -> Iterator[None]:
    """Ask so many times a second, in a thread, while this block runs."""
    stop = threading.Event()

    def ask() -> None:
        with httpx.Client(timeout=60, base_url=url, headers={"X-Tenant": tenant}) as http:
            while not stop.wait(1 / rate):
                infer(http, model, spin(turns) if model == "spin" else SMALL)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def take(url: str, folder: Path, scratch: Path) -> None:
    async with browsing(scratch / "browser") as browser:
        page = await browser.open(f"{url}/")
        await page.until("!document.getElementById('status').hidden")
        await asyncio.sleep(LOADED)
        for name, width, height, scheme in PICTURES:
            await page.look(width, height, scheme)
            await asyncio.sleep(1.5)
            data = small(await page.picture())
            assert len(data) < MOST_BYTES, f"{name}: {len(data)} bytes"
            (folder / f"{name}.png").write_bytes(data)


def small(picture: bytes) -> bytes:
    """The same picture with at most 256 colors."""
    out = io.BytesIO()
    PIL.Image.open(io.BytesIO(picture)).convert("RGB").quantize(256, dither=PIL.Image.Dither.NONE).save(
        out, "PNG", optimize=True
    )
    return out.getvalue()


if __name__ == "__main__":
    main()
