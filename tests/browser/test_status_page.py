"""The status page in a real browser: what it shows, what its forms do, and what it may not do."""

import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from greenlane.prove.page import render as report
from greenlane.prove.plan import Pair
from partitions.base import Bandwidth
from partitions.health import Health
from partitions.strain import STRAINS
from server.config.tenant import TenantConfig

from ..end_to_end import repository
from ..end_to_end.harness import Served, configuration, cores, serving
from ..end_to_end.processes import client, configure, running, running_devices
from ..end_to_end.virtual import VirtualDevice
from ..end_to_end.wire import SMALL, infer, spin
from ..greenlane.prove.test_report import findings, result, strained
from .chromium import Browser, Page, browsing

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE = "<img src=x onerror=document.title='taken'>"
"""The name of a model, which is a folder's."""
SHOWN = "!document.getElementById('status').hidden"
LOW_CONTRAST = Path(__file__).with_name("contrast.js").read_text()
OVERLAPS = """
    [...document.querySelectorAll("svg")].flatMap((svg) => {
        const texts = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
        const meet = (a, b) => a.left < b.right + 4 && b.left < a.right + 4 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
        return texts.flatMap(([a, box], at) => texts.slice(at + 1).filter(([, one]) => meet(box, one)).map(([b]) => [a, b]));
    })
"""
"""Texts of a picture with less than 4 pixels between them."""
KEY = "the admin's"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    repository.write(root, "identity", repository.IDENTITY)
    repository.write(root, HOSTILE, repository.IDENTITY)
    return root


@pytest.fixture(scope="module")
def served(models: Path) -> Iterator[Served]:
    """Two tenants on eight granules, one of them free."""
    acme = TenantConfig(name="acme", granules=2, models=("*",), queue=1, target_p99=0.005)
    globex = TenantConfig(name="globex", granules=5, models=("identity", "absent"))
    with serving(configuration(models, acme, globex, autopilot="dry-run"), VirtualDevice(8)) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    async with browsing(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, served: Served) -> AsyncIterator[Page]:
    """The page, with what it shows first. Nothing may be wrong with it at the end of a test."""
    page = await browser.open(f"{served.url}/")
    await page.until(SHOWN)
    yield page
    assert page.complaints == []
    assert {httpx.URL(each).netloc.decode() for each in page.requests} == {served.address}
    assert await page.evaluate("document.title") == "Greenlane"


async def text(page: Page, selector: str) -> str:
    found: str = await page.evaluate(f"document.querySelector({selector!r}).innerText")
    return found


async def focus_on(page: Page, what: str) -> None:
    """Press Tab until an element that this expression says of `e` has the focus."""
    for _ in range(40):
        await page.press("Tab")
        if await page.evaluate(f"(() => {{ const e = document.activeElement; return {what}; }})()"):
            return
    raise AssertionError(f"40 tabs do not lead to {what}")


async def test_numbers_appear_under_load(page: Page, served: Served) -> None:
    number = ".tenant[data-key='acme'] [data-number='{}']"
    with httpx.Client(timeout=60, base_url=served.url) as http:
        for _ in range(50):
            assert infer(http, "identity", SMALL).status_code == 200
    await page.until(f'document.querySelector("{number.format("p99")}").innerText.match(/\\d (ms|µs)/)')
    assert float(await text(page, number.format("Requests/s"))) > 0
    assert await page.evaluate("document.querySelectorAll('.granule.free').length") == 1
    assert "acme has 0\u20131" in await page.evaluate("document.querySelector('.granules').getAttribute('aria-label')")
    assert "absent" in await text(page, "#models")
    assert "not in the repository" in await text(page, "#models")


async def test_the_page_links_to_what_else_there_is(page: Page, served: Served) -> None:
    links = await page.evaluate("[...document.querySelectorAll('nav a')].map((each) => each.getAttribute('href'))")
    local = [each for each in links if each.startswith("/")]
    assert local == ["/docs", "/admin/docs", "/metrics"]
    async with httpx.AsyncClient(timeout=60, base_url=served.url) as http:
        assert [(await http.get(each)).status_code for each in local] == [200] * 3
    assert any("/docs/operations.md" in each for each in links)


class Moving(VirtualDevice):
    def bandwidth(self) -> Bandwidth:
        return Bandwidth(memory=10 * 10**9, unit=10**9, pcie=10**9)


async def test_what_does_not_hold_a_tenant_stands_beside_what_does(browser: Browser, models: Path) -> None:
    keys = {"models": ("identity",), "memory_bandwidth": 0.05, "pcie": 0.5}
    acme, globex = (TenantConfig(name=name, granules=count, **keys) for name, count in (("acme", 1), ("globex", 2)))
    with serving(configuration(models, acme, globex), Moving(8)) as served:
        page = await browser.open(f"{served.url}/")
        await page.until("document.querySelectorAll('#devices .notes li').length === 4")
        notes = (await text(page, "#devices .notes")).splitlines()
    assert notes[0] == "acme has, while others work, 500 MB/s of PCIe: 0 inferences waited so far"
    assert notes[1].startswith("acme: it has one granule, which cannot be narrowed")
    assert notes[2].startswith("globex has, while others work, 500 MB/s of memory: 0 inferences on 1 so far; 500 MB/s of PCIe")
    assert notes[3].startswith("globex: its memory_bandwidth is 500 MB/s, but one granule (1 cores) draws 1 GB/s at most")


async def test_on_cores_the_page_speaks_of_cores_and_threads(page: Page) -> None:
    await page.evaluate("document.querySelectorAll('#models details').forEach((each) => { each.open = true; })")
    shown = await text(page, "#devices") + await text(page, "#models")
    assert "cores" in shown
    assert "thread" in shown
    assert "warmed for" in shown
    assert [word for word in ("granules,", "graph", "[[", "0.00 in use") if word in shown] == []
    assert "of the 100 requests that this needs" in await text(page, ".tenant[data-key='globex'] .why")


async def test_what_models_move_is_shown_where_it_is_known(page: Page, served: Served) -> None:
    heading = "getComputedStyle(document.querySelector('th.moved')).display"
    assert await page.evaluate(heading) == "none"
    observers = served.application.observers()

    async def says(memory: int) -> None:
        observers.health.take("0000:4e:00.0", "0", Health(moved={"memory": memory, "pcie_in": 0, "pcie_out": 0}))
        await observers.accountant.collect()

    served.call(says(1))
    async with httpx.AsyncClient(timeout=60, base_url=served.url) as http:
        answer = await http.post("/v2/models/identity/infer", json=SMALL, headers={"x-tenant": "acme"})
        assert answer.status_code == 200
    served.call(says(10**12))
    await page.until(f"{heading} !== 'none'")
    cells = "[...document.querySelectorAll('td[data-column=Moves]')].map((each) => [each.innerText, each.title])"
    shown = await page.evaluate(cells)
    assert "" in [title for _, title in shown], "of a model that has not run"
    assert any(text.startswith("~") and text.endswith("B/s") and "estimated" in title for text, title in shown), shown


async def test_hostile_names_are_text(page: Page) -> None:
    assert HOSTILE in await text(page, "#models")
    assert await page.evaluate("document.images.length") == 1


async def test_shares_are_changed_with_the_keyboard_alone(page: Page, served: Served) -> None:
    await focus_on(page, "e.id === 'share-0-acme'")
    await page.press("4")
    assert "9 of 8 cores, 1 too many" in await text(page, ".sum")
    await page.press("Enter")  # Nothing is sent: the button says that it cannot be.
    await page.press("ArrowDown", "Enter")
    await page.until("document.getElementById('result').innerText.includes('Given: acme 3 cores.')")
    partition = served.controller.partition("acme")
    assert partition
    assert len(partition.granules) == 3
    await page.until("document.querySelector('.row .had').innerText === 'has 3'")
    await page.until("document.getElementById('moves').innerText.includes('operator: acme 2 → 3')")
    assert (
        await page.evaluate("document.activeElement.id") == "share-0-acme"
    )  # What is drawn again leaves the focus where it is.


async def test_models_are_unloaded_and_loaded_after_a_question(page: Page) -> None:
    await page.evaluate("document.querySelector(\"[aria-label='Unload identity of globex']\").focus()")
    await page.press("Enter")
    await page.until("document.getElementById('confirm').open")
    assert await page.evaluate("document.activeElement.id") == "confirm-no"  # Enter alone changes nothing.
    await page.press("Tab", "Enter")
    await page.until("document.getElementById('result').innerText.includes('identity of globex is unloaded')")
    await page.evaluate("document.getElementById('load-tenant').value = 'globex'")
    await page.evaluate("document.getElementById('load-model').focus()")
    await page.press(*"identity", "Enter")
    await page.until("document.getElementById('result').innerText.includes('identity of globex is loaded')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_text_has_contrast(page: Page, scheme: str) -> None:
    await page.look(scheme=scheme)
    await page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert await page.evaluate(LOW_CONTRAST) == []
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(14, 18, 21)") == (scheme == "dark")


async def test_a_narrow_window_needs_no_horizontal_scroll(page: Page) -> None:
    await page.look(width=400)
    await page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert await page.evaluate("document.documentElement.scrollWidth") == 400
    numbers = "[...document.querySelectorAll('td.number')].map((cell) => getComputedStyle(cell).textAlign)"
    assert {*await page.evaluate(numbers)} == {"left"}, "each is below its own label there"
    wide = "[...document.querySelectorAll('main *')].filter((e) => e.getBoundingClientRect().right > 400.5)"
    assert await page.evaluate(f"{wide}.map((e) => e.outerHTML)") == []


@pytest.mark.parametrize("path", ["/docs", "/admin/docs"])
async def test_the_description_fits_a_narrow_window(browser: Browser, served: Served, path: str) -> None:
    page = await browser.open(f"{served.url}{path}")
    await page.look(width=400)
    assert await page.evaluate("document.documentElement.scrollWidth") == 400


async def test_a_report_of_prove_has_contrast_in_the_dark(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(report(findings(result(), result(beside=2000), untried={Pair("b", "a"): "no time"})))
    page = await browser.open(file.as_uri())
    for scheme in ("light", "dark"):
        await page.look(scheme=scheme)
        assert await page.evaluate(LOW_CONTRAST) == []
    assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 25, 29)"


async def test_words_in_a_picture_of_prove_do_not_overlap(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    for kind in STRAINS:
        file.write_text(report(strained(kind=kind)))
        page = await browser.open(file.as_uri())
        assert await page.evaluate(OVERLAPS) == []


async def test_a_wrong_key_says_so(browser: Browser, models: Path) -> None:
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    with serving(configuration(models, admin_key_sha256=digest), VirtualDevice(2)) as served:
        page = await browser.open(f"{served.url}/")
        await page.until("document.activeElement.id === 'key'")
        assert "send Authorization: Bearer KEY with the admin key" in await text(page, "#refusal")
        assert await text(page, "#wrong") == ""
        await page.press(*"guessed", "Enter")
        await page.until("document.getElementById('wrong').innerText === 'That is not the admin key.'")
        await page.press(*KEY, "Enter")  # The wrong one is selected, so typing replaces it.
        await page.until(SHOWN)
        assert await page.evaluate("sessionStorage.length") == 0
        assert all("401" in each for each in page.complaints), page.complaints


@pytest.mark.skipif(len(cores()) < 2, reason="two devices of cores need two cores")
async def test_a_move_to_another_device_and_reading_the_configuration(browser: Browser, models: Path, tmp_path: Path) -> None:
    first, second = cores()[:2]
    devices = [f'[devices.{name}]\nbackend = "cpu"\ncores = "{core}"' for name, core in ((0, first), (1, second))]
    tenant = '[tenants.acme]\ndevice = "0"\ngranules = 1\nmodels = ["identity"]'
    with running_devices(configure(tmp_path / "greenlane.toml", models, "\n".join([*devices, tenant]))) as server:
        page = await browser.open(f"{server.url}/")
        await page.until(SHOWN)
        await page.evaluate("document.getElementById('transfer-device').value = '1'")
        await page.evaluate("document.getElementById('transfer-count').focus()")
        await page.press("2", "Enter")
        await page.until("document.getElementById('result').innerText.includes('acme is on device 1.')")
        await page.evaluate("document.querySelector('#reload-form button').focus()")
        await page.press("Enter")
        await page.until("document.getElementById('result').innerText.includes('read; nothing has changed.')")
        await page.until("document.querySelector('.device[data-key=\"1\"] .had')?.innerText === 'has 2'")
        assert await page.evaluate("document.querySelectorAll('.device[data-key=\"0\"] .row').length") == 0
        assert page.complaints == []


@pytest.mark.skipif(len(cores()) < 2, reason="two tenants need two cores")
async def test_a_borrower_and_what_takes_too_long_to_lend_for_are_shown(browser: Browser, models: Path, tmp_path: Path) -> None:
    repository.write(models, "spin", repository.SPIN)
    tenants = """
        [tenants.acme]
        granules = 1
        burst = 2
        models = ["spin"]
        [tenants.globex]
        granules = 1
        lend = "20us"
        models = ["identity"]
        """
    with running(configure(tmp_path / "greenlane.toml", models, tenants)) as server:
        page = await browser.open(f"{server.url}/")
        chip = "document.querySelector('.tenant[data-key={}] .state').innerText"
        await page.until(f"!document.getElementById('status').hidden && {chip.format('acme')} === 'may borrow'")
        assert await page.evaluate(chip.format("globex")) == "lends"
        with client(server, **{"X-Tenant": "acme"}) as http:
            for _ in range(20):
                assert infer(http, "spin", spin(20_000)).status_code == 200
        await page.until("document.querySelector('.device .notes').innerText.startsWith('acme: spin/1 does not run on')")
        assert page.complaints == []
