"""The accountant over fake device sides: plans, processes that answer, hang, fail and are replaced; and its files."""

import asyncio
import csv
import errno
import os
import threading
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from partitions.base import Bandwidth
from server.accounts.account import Account
from server.accounts.usage import NS, DeviceTotals, ModelTotals, Moved, Report, TenantTotals, TenantUsages, Totals, Usage
from server.control.controlled_device import ControlledDevice
from server.control.descriptions import Beside, DeviceInfo, ModelMemory, TenantMemory
from server.control.fence import Fence, FencedModel, FencedTenant, Narrowing
from server.errors import Unavailable
from server.observing.accountant import Accountant
from server.observing.usage_files import COLUMNS, UsageFiles, rows

MIDNIGHT = 1_795_305_600 * NS  # 2026-11-22T00:00:00Z
DAY = 86_400 * NS
MS = 10**6


class FakeSide:
    """A device side that answers with `report`, or raises it."""

    def __init__(self) -> None:
        self.report: Any = Report(1, [])

    def used(self, ns: int, epoch: int = 1, energy: int | None = None, works: int = 1) -> None:
        self.report = Report(epoch, [TenantUsages("acme", [Usage("mob/1", works, ns, {})])], energy)

    async def usage(self) -> Any:
        if isinstance(self.report, Exception):
            raise self.report
        return self.report


class Site:
    """A device of four cores, two of them acme's, and a clock that stands still."""

    def __init__(self, files: UsageFiles | None = None, count: Any = None) -> None:
        self.now = 0
        self.side: Any = FakeSide()
        self.device = ControlledDevice("0", {"acme": self.side}, info=DeviceInfo("cpu", "", "core", (1,) * 4))
        self.accountant = Accountant([self.device], files, lambda: self.now, lambda: MIDNIGHT + self.now, count=count)
        self.hold(2)

    def hold(self, count: int) -> None:
        self.device.hold({"acme": tuple(range(count))})
        self.accountant.follow(self.device)

    async def acme(self) -> Any:
        return (await self.accountant.collect()).devices["0"].tenants["acme"]


async def test_it_follows_plans_and_asks_for_what_was_used() -> None:
    site = Site()
    site.now += 10
    site.hold(3)
    site.now += 10
    site.side.used(7)
    acme = await site.acme()
    assert (acme.granted, acme.used, acme.idle, acme.share) == (50, 7, 43, 3)


@pytest.mark.parametrize("answer", [None, RuntimeError("it broke")])
async def test_one_that_does_not_answer_counts_as_before(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    site = Site()
    site.side.used(7)
    await site.acme()
    site.now += 5 * NS
    site.side.report = answer
    for _ in range(3):
        assert (await site.acme()).used == 7
    assert site.accountant.age(site.side) == 5
    assert len(caplog.records) == (answer is not None)
    site.side.used(3, epoch=2)
    assert (await site.acme()).used == 10
    assert site.accountant.age(site.side) == 0


async def test_a_meter_that_several_processes_see_is_counted_once() -> None:
    site, other = Site(), FakeSide()
    site.device.runtimes["globex"] = other  # type: ignore[assignment]
    for joules in (1, 3):
        site.now += NS
        for side in (site.side, other):
            side.used(joules, energy=joules * 10**6)
        totals = await site.accountant.collect()
    assert totals.devices["0"].energy == 2 * 10**6


class Cores(Site):
    """The same, where the kernel counts what acme's cores move: each work a thousand bytes."""

    def __init__(self, files: UsageFiles | None = None) -> None:
        super().__init__(files, self._count)
        self.works = 0
        self.side.models = NoModels()

    def work(self) -> None:
        self.now += NS
        self.works += 1
        self.side.used(500 * self.works, works=self.works)

    async def _count(self) -> dict[str, int]:
        return {"acme": 1000 * self.works}

    @property
    def moved(self) -> Any:
        return self.accountant.totals().devices["0"].tenants["acme"].moved


async def counted(site: Cores) -> None:
    """Begin, and wait for the first count."""
    site.accountant.start()
    async with asyncio.timeout(20):
        while site.moved is None:
            await asyncio.sleep(0)


async def test_what_cores_moved_since_they_were_counted_last_is_counted_at_the_end(tmp_path: Path) -> None:
    site = Cores(UsageFiles(tmp_path))
    await counted(site)
    site.work()
    await site.accountant.close()
    assert site.moved == Moved(1000)
    (found,) = parsed(tmp_path).values()
    assert sum(int(row["memory_bytes"] or 0) for row in found) == 1000


async def test_what_cores_moved_since_they_were_counted_last_is_counted_when_their_tenant_leaves() -> None:
    site = Cores()
    await counted(site)
    site.work()
    site.device.remove("acme")
    site.accountant.follow(site.device)
    site.work()
    await site.accountant.collect()
    assert site.moved == Moved(), "not yet"
    await site.accountant.settle(site.device, site.side)
    assert site.moved == Moved(2000)
    assert site.accountant.rates("0") == {}, "it has gone"
    site.device.runtimes["acme"] = site.side
    site.works += 5  # Elsewhere.
    site.hold(2)
    await site.accountant.write()
    site.work()
    await site.accountant.close()
    assert site.moved == Moved(3000)


async def test_a_tenant_can_leave_a_device_side_that_cannot_say_what_was_used(caplog: pytest.LogCaptureFixture) -> None:
    site = Site()
    site.side.report = RuntimeError("it broke")
    await site.accountant.settle(site.device, site.side)
    assert "it broke" in caplog.text


class FakeModels:
    """What acme's model takes of the device's memory; or raises."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.asked = 0

    async def memory(self) -> Any:
        self.asked += 1
        if isinstance(self._memory, Exception):
            raise self._memory
        return [TenantMemory("acme", None, 0, 0, 0, 0.0, 0.0, [ModelMemory("mob", "1", False, self._memory)])]


class NoModels:
    """Acme has none any more."""

    async def memory(self) -> Any:
        return []


@pytest.mark.parametrize("memory", [{"weights": 800, "buffers": 100}, RuntimeError("it broke")])
async def test_when_a_device_says_what_it_moved_works_are_asked_for_at_once(
    memory: Any, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site()
    site.side.models = FakeModels(memory)
    site.accountant.start()
    for reading in range(1, 4):
        site.now += 2 * NS
        site.side.used(reading * 1000, works=10 * reading)
        site.accountant.moved("0", Moved(9000 * reading, 1000 * reading, 0))
        async with asyncio.timeout(20):
            while site.accountant.totals().devices["0"].moved != Moved(9000 * (reading - 1), 1000 * (reading - 1), 0):
                await asyncio.sleep(0)
    await site.accountant.close()
    device = site.accountant.totals().devices["0"]
    acme = device.tenants["acme"].models["mob/1"]
    assert device.moved == acme.moved.plus(device.background)
    assert acme.moved.memory > 0.9 * 18000
    traffic = site.accountant.traffic("0")
    assert traffic
    assert traffic.rates["acme", "mob/1"][0].memory == pytest.approx(4500, rel=0.1)
    assert len(caplog.records) == isinstance(memory, Exception)
    assert site.side.models.asked == 1, "not each time"


class FakePlacements:
    """Keeps the last figures, by which it holds one model; or raises that its process has ended."""

    RATE = 10**9

    def __init__(self) -> None:
        self.figures: Any = None
        self.home_ms = self.narrow_ms = 0.0
        self.others: list[FencedModel] = []
        self.granules: tuple[int, ...] = (0,)
        self.calls = 0
        self.away = False

    async def moved(self, figures: Any) -> None:
        self.calls += 1
        if self.away:
            raise Unavailable("it is being started again")
        self.figures = figures

    async def states(self) -> dict[str, Beside]:
        """As the device side says it."""
        if self.away:
            raise Unavailable("it is being started again")
        moved = (self.figures or {}).get("acme", {}).get("mob/1", 0)
        models = [FencedModel("mob/1", abs(moved), self.home_ms, self.narrow_ms, moved < 0), *self.others]
        fence = FencedTenant(self.RATE, self.granules, 0, 0, 0, [], [], models)
        return {"acme": Beside(None, fence, [])}

    @property
    def held(self) -> bool:
        """Whether works of that model run narrow beside others."""
        moved = self.figures["acme"]["mob/1"]
        return bool(moved < 0 or moved * 1e3 > self.RATE * self.home_ms)


async def said(site: Site, placements: FakePlacements) -> Any:
    """What is said next of what works move, more than SAYING later."""
    calls = placements.calls
    site.now += 2 * NS
    site.accountant.moved("0", Moved())
    async with asyncio.timeout(20):
        while placements.calls == calls:
            await asyncio.sleep(0)
    return placements.figures


@pytest.mark.parametrize("memory", [{"weights": 700, "buffers": 100}, {"file": 800, "session": 900}])
async def test_fenced_tenants_device_sides_are_said_what_works_move(memory: dict[str, int]) -> None:
    """Guesses at first, then what the device's meter shows; models that have gone are not named."""
    site, placements = Site(), FakePlacements()
    site.side.models, site.side.placements = FakeModels(memory), placements
    site.device.fences = {"acme": object()}
    site.accountant.start()
    assert await said(site, placements) == {"acme": {"mob/1": 800}}
    for reading in range(1, 6):
        site.now += 2 * NS
        site.side.used(reading * 1000, works=10 * reading)
        site.accountant.moved("0", Moved(90_000_000 * reading))
        async with asyncio.timeout(20):
            while site.accountant.totals().devices["0"].moved != Moved(90_000_000 * reading):
                await asyncio.sleep(0)
    assert (await said(site, placements))["acme"]["mob/1"] == pytest.approx(9_000_000, rel=0.5)
    placements.away = True
    await said(site, placements)
    placements.away, site.side.models = False, FakeModels(memory)
    assert "mob/1" in (await said(site, placements))["acme"], "a process that replaces another is said it too"
    site.side.models = NoModels()
    await said(site, placements)
    assert (await said(site, placements)) == {"acme": {}}
    await site.accountant.close()


@pytest.mark.parametrize("read", [True, False])
async def test_what_works_move_is_said_when_a_meter_was_read_and_where_none_is_after_a_while(
    read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.observing.accountant.INTERVAL", 60 if read else 0.001)
    site, placements = Site(), FakePlacements()
    site.side.models, site.side.placements = FakeModels({"weights": 700}), placements
    site.device.fences = {"acme": object()}
    site.accountant.start()
    for calls in range(3):
        if read:
            site.accountant.moved("0", Moved())
        else:
            site.now += 2 * NS
        async with asyncio.timeout(20):
            while placements.calls == calls:
                await asyncio.sleep(0)
    await site.accountant.close()


class Neighbours(FakeSide):
    """Acme's model, and another tenant's, whose works take three times as long while it is not held."""

    def __init__(self, placements: FakePlacements) -> None:
        super().__init__()
        self._placements = placements
        self._works = self._ms = 0

    async def usage(self) -> Report:
        """A second has passed."""
        self._works += 50
        self._ms += 50 * (3 if self._placements.figures is None or not self._placements.held else 1)
        acme = Usage("mob/1", self._works, self._works * 2 * 16 * MS, {})
        globex = Usage("net/1", self._works, self._ms * 2 * MS, {})
        return Report(1, [TenantUsages("acme", [acme]), TenantUsages("globex", [globex])])


def beside_a_neighbour(guess: int) -> tuple[Site, FakePlacements]:
    """Acme's model, of whose works it is guessed that they move so much, is fenced beside globex's."""
    site, placements = Site(), FakePlacements()
    placements.home_ms = 16.0
    site.side = side = Neighbours(placements)
    side.models, side.placements = FakeModels({"weights": guess}), placements
    site.device.runtimes = {"acme": side, "globex": side}
    site.device.info = DeviceInfo("cuda", "", "SM", (1,) * 4, bandwidth=Bandwidth(4 * 10**9, 10**9, 10**9))
    site.device.hold({"acme": (0, 1), "globex": (2, 3)})
    site.accountant.follow(site.device)
    site.device.fences = {"acme": Fence(("globex",), placements.RATE, (0,))}
    return site, placements


async def test_a_model_that_is_held_for_what_it_moves_is_not_tried() -> None:
    site, placements = beside_a_neighbour(2 * 16 * 10**6)  # Twice what its tenant may in its time.
    site.accountant.start()
    for _ in range(150):
        assert await said(site, placements) == {"acme": {"mob/1": 32 * 10**6}}
        assert not any(each.single for each in site.device.narrowing.values())
    await site.accountant.close()


@pytest.mark.parametrize("guess", [0, 800])
async def test_a_model_beside_which_neighbours_are_slow_is_held_though_it_moves_little(
    caplog: pytest.LogCaptureFixture, guess: int
) -> None:
    """By the guess, where there is one, and by the meter."""
    caplog.set_level("INFO", "greenlane.fence")
    site, placements = beside_a_neighbour(guess)
    site.accountant.start()
    for _ in range(150):
        await said(site, placements)
    assert site.device.slows == {("acme", "mob/1"): 3.0}
    assert placements.figures["acme"]["mob/1"] < 0, "whatever it moves"
    (text,) = [each.getMessage() for each in caplog.records if each.name == "greenlane.fence"]
    assert text == (
        "tenant acme: mob/1 runs narrow while others work, whose inferences take at least 3 times as long beside it"
    )
    placements.RATE = 4 * 10**9  # All there is.
    await said(site, placements)
    await said(site, placements)
    assert site.device.slows == {}
    assert placements.figures == {"acme": {"mob/1": guess}}, "the meter stands still"
    await site.accountant.close()


@pytest.mark.parametrize(
    ("others", "metered"),
    [([], True), ([FencedModel("net/1", 9 * 10**9, 2.0, 0.0)], True), ([], False)],
    ids=["alone", "beside one that ran while all others rested only", "not where it is guessed what they move"],
)
async def test_models_that_draw_less_than_they_could_where_they_are_held_get_more_granules_there(
    others: list[FencedModel], metered: bool
) -> None:
    """By what the meter shows that their works move there."""
    site, placements = Site(), FakePlacements()
    placements.others = others
    placements.home_ms, placements.narrow_ms, placements.granules = 2.0, 9.0, (0, 1)
    site.side.models, site.side.placements = FakeModels({"weights": 800 if metered else 10**8}), placements
    site.device.info = DeviceInfo("cuda", "", "SM", (8,) * 5, bandwidth=Bandwidth(4 * 10**9, 10**9, 10**9))
    site.device.runtimes["globex"] = site.side
    site.device.hold({"acme": (0, 1, 2, 3), "globex": (4,)})
    site.accountant.follow(site.device)
    site.device.fences = {"acme": Fence(("globex",), placements.RATE, placements.granules)}
    narrowed: list[Mapping[str, Narrowing]] = []
    accountant = Accountant(
        [site.device], None, lambda: site.now, narrowed=lambda: narrowed.append(dict(site.device.narrowing))
    )
    site.accountant = accountant
    accountant.follow(site.device)
    accountant.start()
    works = moved = 0
    for second in range(120):
        works, moved = works + 100 + second % 7 * 20, moved + (100 + second % 7 * 20) * 9_000_000 * metered
        site.side.used(works * 4 * MS, works=works)
        calls = placements.calls
        site.now += 2 * NS
        accountant.moved("0", Moved(moved))
        async with asyncio.timeout(20):
            while placements.calls == calls:
                await asyncio.sleep(0)
    assert [each.keys() for each in narrowed] == [{"acme"}] * metered, "once, not with each look"
    if metered:
        assert 1.05 * 1e9 <= narrowed[0]["acme"].unit * 16 < 1.2 * 1e9  # 9 MB in 9 ms on 16 units, and what is not certain.
        assert not narrowed[0]["acme"].single
        fences, site.device.fences = site.device.fences, {}
        accountant.moved("0", Moved(moved))
        async with asyncio.timeout(20):
            while site.device.narrowing:
                await asyncio.sleep(0)
        site.device.fences = fences
        await said(site, placements)
        assert site.device.narrowing == {}, "what was seen before is forgotten"
    await accountant.close()


async def test_a_model_that_is_loaded_again_with_other_weights_is_measured_afresh() -> None:
    """Also if it was away meanwhile. As one that had changed it would be taken for what it was, or less, for ten windows."""
    site, placements = Site(), FakePlacements()
    site.side.models, site.side.placements = FakeModels({"weights": 800}), placements
    site.device.fences = {"acme": object()}
    site.accountant.start()
    works = moved = 0
    for window in range(107):
        site.side.models = {101: NoModels(), 102: FakeModels({"weights": 8000})}.get(window, site.side.models)
        more = 0 if 100 < window < 103 else 100 + window % 7 * 20
        works, moved = works + more, moved + more * (10**6 if window < 103 else 10**7)
        site.now += 2 * NS
        site.side.used(works * MS, works=works)
        calls = placements.calls
        site.accountant.moved("0", Moved(moved))
        async with asyncio.timeout(20):
            while placements.calls == calls:
                await asyncio.sleep(0)
    traffic = site.accountant.traffic("0")
    assert traffic
    assert traffic.memory_of(("acme", "mob/1"), 8000) == pytest.approx(10**7, rel=0.05)
    await site.accountant.close()


async def test_the_account_goes_on_where_what_a_device_side_says_of_held_models_makes_no_sense(
    caplog: pytest.LogCaptureFixture,
) -> None:
    site, placements = Site(), FakePlacements()
    placements.home_ms, placements.narrow_ms = 1.0, 1e-320
    placements.others = [FencedModel("mob/1", 10**18, 1.0, 1e-320)]
    site.side.models, site.side.placements = FakeModels({"weights": 10**15}), placements
    site.device.info = DeviceInfo("cuda", "", "SM", (1,) * 4, bandwidth=Bandwidth(4 * 10**9, 10**9, 10**9))
    site.device.fences = {"acme": Fence(("globex",), placements.RATE, (0,))}
    site.accountant.start()
    for reading in range(1, 20):
        site.now += 2 * NS
        site.side.used(reading * 1000, works=10 * reading)
        site.accountant.moved("0", Moved(90_000_000 * reading))
        async with asyncio.timeout(20):
            while (found := site.accountant.before(MIDNIGHT + site.now)) is None or found.at < site.now:
                await asyncio.sleep(0)
    assert [each for each in caplog.records if each.levelname == "ERROR"]
    await site.accountant.close()


async def test_where_no_tenant_is_fenced_nothing_is_said() -> None:
    site, placements = Site(), FakePlacements()
    site.side.models, site.side.placements = FakeModels({"weights": 700}), placements
    site.accountant.start()
    for _ in range(3):
        site.now += 10 * NS
        site.accountant.moved("0", Moved())
        for _ in range(20):
            await asyncio.sleep(0)
    await site.accountant.close()
    assert placements.calls == 0


def parsed(folder: Path) -> dict[str, list[dict[str, str]]]:
    found = {path.name: list(csv.DictReader(path.read_text().splitlines())) for path in sorted(folder.iterdir())}
    assert all(path.read_text().startswith(COLUMNS + "\n") for path in folder.iterdir())
    return found


async def test_files_are_a_day_each_and_a_column_can_be_summed(tmp_path: Path) -> None:
    files = UsageFiles(tmp_path / "usage")
    site = Site(files)
    files.begin(site.accountant.totals())
    for now in (30 * NS, 60 * NS, DAY + 1, DAY + 5):
        site.now = now
        site.side.used(now)
        await site.accountant.write()
    found = parsed(tmp_path / "usage")
    assert [(name, len(rows)) for name, rows in found.items()] == [("usage-2026-11-22.csv", 9), ("usage-2026-11-23.csv", 3)]
    every = [row for rows in found.values() for row in rows]
    nanoseconds = {column: sum(_ns(row[column]) for row in every) for column in ("granted", "idle", "used", "borrowed", "lent")}
    assert nanoseconds == {"granted": 4 * site.now, "idle": site.now, "used": site.now, "borrowed": 0, "lent": 0}
    assert every[0]["from"] == "2026-11-22T00:00:00.000000Z"


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def _ns(seconds: str) -> int:
    whole, _, part = (seconds or "0.0").partition(".")
    return int(whole) * NS + int(part.ljust(9, "0"))


@pytest.mark.parametrize("left", ["2026-11-22T00:00", "\0" * 200_000], ids=["row", "zeros"])
async def test_a_file_goes_on_after_a_restart_and_loses_a_line_that_was_cut_off(tmp_path: Path, left: str) -> None:
    """A file system may leave zeros where a machine stopped."""
    for _ in range(2):
        files = UsageFiles(tmp_path)
        site = Site(files)
        files.begin(site.accountant.totals())
        site.now = NS
        await site.accountant.write()
        only(tmp_path).write_text(only(tmp_path).read_text() + left)
    found = only(tmp_path).read_text().removesuffix(left)
    assert "\0" not in found
    assert [row["tenant"] for row in csv.DictReader(found.splitlines())] == ["", "acme", "", "acme"]


async def test_a_folder_that_cannot_be_made_is_said_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    files = UsageFiles(tmp_path / "file" / "usage")
    await files.begin(Site(files).accountant.totals())
    (record,) = caplog.records
    assert "what was used is not written, but kept for the next attempt" in record.getMessage()


@pytest.mark.parametrize("short", [True, False])
async def test_a_full_disk_leaves_whole_lines_and_the_next_rows_are_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: bool, caplog: pytest.LogCaptureFixture
) -> None:
    files, write = UsageFiles(tmp_path), os.write
    site = Site(files)
    files.begin(site.accountant.totals())

    def full(file: int, data: bytes) -> int:
        if short:
            return write(file, data[:40])
        raise OSError(errno.ENOSPC, "No space left on device")

    site.now = NS
    await site.accountant.write()
    kept = only(tmp_path).read_text()
    monkeypatch.setattr(os, "write", full)
    for site.now in (2 * NS, 3 * NS):
        await site.accountant.write()
        assert only(tmp_path).read_text() == kept
    assert len(caplog.records) == 1
    monkeypatch.undo()
    site.now = 4 * NS
    await site.accountant.write()
    (rows,) = parsed(tmp_path).values()
    assert [(row["from"][17:19], row["to"][17:19]) for row in rows[2:]] == [("01", "04")] * 2
    assert sum(_ns(row["granted"]) for row in rows) == 16 * NS


async def test_a_file_with_other_columns_is_left_and_another_one_begun(tmp_path: Path) -> None:
    old = tmp_path / "usage-2026-11-22.csv"
    old.write_text("from,to,device\n1,2,0\n")
    for _ in range(2):
        files = UsageFiles(tmp_path)
        site = Site(files)
        files.begin(site.accountant.totals())
        site.now = NS
        await site.accountant.write()
    assert old.read_text() == "from,to,device\n1,2,0\n"
    lines = (tmp_path / "usage-2026-11-22-18.csv").read_text().splitlines()
    assert [row["tenant"] for row in csv.DictReader(lines)] == ["", "acme"] * 2


async def test_two_files_with_other_columns_are_left_and_rows_kept_until_one_is_moved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = [tmp_path / f"usage-2026-11-22{each}.csv" for each in ("", "-18")]
    for each in old:
        each.write_text("from,to,device\n1,2,0\n")
    files = UsageFiles(tmp_path)
    site = Site(files)
    await files.begin(site.accountant.totals())
    site.now = NS
    await site.accountant.write()
    assert [each.read_text() for each in old] == ["from,to,device\n1,2,0\n"] * 2
    assert f"{old[1]} has other columns as well; move it elsewhere" in caplog.text
    old[1].rename(tmp_path / "elsewhere")
    site.now = 2 * NS
    await site.accountant.write()
    rows = list(csv.DictReader(old[1].read_text().splitlines()))
    assert sum(_ns(row["granted"]) for row in rows) == 8 * NS


@pytest.mark.parametrize(("estimated", "by"), [(0, "measured"), (2, "estimated")])
def test_what_was_moved_is_in_the_files_with_whether_it_was_measured(estimated: int, by: str) -> None:
    models = {"mob/1": ModelTotals(1, 2, moved=Moved(7, 8, 9)), "enc/1": ModelTotals(1, 2, moved=Moved(20), estimated=Moved(9))}
    tenants = {"acme": TenantTotals(5, 0, 1, models, Moved(27, 8, 9))}
    moved, background = Moved(30, 8, 9), Moved(3)
    device = DeviceTotals("SM", 1, 5, tenants, moved=moved, background=background, estimated=Moved(estimated))
    found = list(csv.DictReader([COLUMNS, *rows(Totals(0, 0, {}), Totals(5, 5, {"0": device}))]))
    columns = "memory_bytes", "pcie_in_bytes", "pcie_out_bytes", "moved_by"
    assert [tuple(row[column] for column in columns) for row in found] == [
        ("3", "0", "0", by),
        ("", "", "", ""),
        ("7", "8", "9", "measured"),
        ("20", "0", "0", "estimated"),
    ]


def test_what_a_tenants_cores_moved_besides_its_works_is_in_the_row_of_its_share() -> None:
    models = {"mob/1": ModelTotals(1, 2, moved=Moved(7))}
    tenants = {"acme": TenantTotals(5, 0, 1, models, Moved(11)), "globex": TenantTotals(5, 0, 1, models)}
    device = DeviceTotals("core", 2, 5, tenants, moved=Moved(11))
    found = list(csv.DictReader([COLUMNS, *rows(Totals(0, 0, {}), Totals(5, 5, {"0": device}))]))
    assert [(row["tenant"], row["model"], row["memory_bytes"], row["moved_by"]) for row in found] == [
        ("", "", "0", "measured"),
        ("acme", "", "4", "measured"),
        ("acme", "mob", "7", "measured"),
        ("globex", "", "", ""),
        ("globex", "mob", "", ""),
    ]


def test_a_tenant_that_has_gone_has_no_rows_of_later_periods() -> None:
    account = Account()
    account.hold("0", "core", 2, {"acme": 1, "globex": 1}, 0)
    totals = [account.totals(0, 0)]
    account.hold("0", "core", 2, {"globex": 1}, NS)
    totals += [account.totals(at * NS, at * NS) for at in (2, 3)]
    found = [[row.split(",")[4] for row in rows(before, now)] for before, now in pairwise(totals)]
    assert found == [["", "acme", "globex"], ["", "globex"]]


def test_names_of_models_are_quoted(tmp_path: Path) -> None:
    models = {'a,"b"/1': ModelTotals(1, 2)}
    device = DeviceTotals("core", 1, 5, {"acme": TenantTotals(5, 0, 1, models)})
    found = list(csv.reader([COLUMNS, *rows(Totals(0, 0, {}), Totals(5, 5, {"0": device}))]))
    assert {len(row) for row in found} == {len(COLUMNS.split(","))}
    assert found[-1][5] == 'a,"b"'


async def test_minutes_are_due_when_the_clock_shows_them(tmp_path: Path) -> None:
    files = UsageFiles(tmp_path)
    await files.begin(Totals(0, MIDNIGHT + 59 * NS, {}))
    assert not files.due(Totals(0, MIDNIGHT + 60 * NS - 1, {}))
    assert files.due(Totals(0, MIDNIGHT + 60 * NS, {}))


async def test_the_end_does_not_wait_for_a_disk_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files, hanging = UsageFiles(tmp_path), asyncio.Event()
    site = Site(files)

    async def hang(_: Totals) -> None:
        await hanging.wait()

    monkeypatch.setattr(files, "write", hang)
    monkeypatch.setattr("server.observing.accountant.LIMIT", 0.01)
    await site.accountant.write()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that takes nothing before this is set."""
    gate, write = threading.Event(), os.write

    def wait(file: int, data: bytes) -> int:
        gate.wait()
        return write(file, data)

    monkeypatch.setattr(os, "write", wait)
    yield gate
    gate.set()


async def test_rows_whose_end_was_not_waited_for_are_not_written_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stuck: threading.Event
) -> None:
    """The end of the server waits for two seconds, and asks again: what was written meanwhile was in two rows."""
    files = UsageFiles(tmp_path)
    site = Site(files)
    files.begin(site.accountant.totals())
    monkeypatch.setattr("server.observing.accountant.LIMIT", 0.01)
    site.now = NS
    await site.accountant.write()
    monkeypatch.setattr("server.observing.accountant.LIMIT", 60)
    stuck.set()
    site.now = 2 * NS
    await site.accountant.write()
    (found,) = parsed(tmp_path).values()
    assert [(row["from"][17:19], row["to"][17:19]) for row in found] == [("00", "01")] * 2 + [("01", "02")] * 2
    assert sum(_ns(row["granted"]) for row in found) == 8 * NS


async def test_the_account_goes_on_while_the_disk_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stuck: threading.Event
) -> None:
    site = Site(UsageFiles(tmp_path))
    monkeypatch.setattr("server.observing.accountant.INTERVAL", 0.001)
    site.accountant.start()
    for minute in (1, 2, 3):
        site.now = minute * 60 * NS
        while (last := site.accountant.before(MIDNIGHT + site.now)) is None or last.at != site.now:
            await asyncio.sleep(0.001)
    stuck.set()
    await site.accountant.close()
    (found,) = parsed(tmp_path).values()
    assert sum(_ns(row["granted"]) for row in found) == 4 * 180 * NS


async def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(tmp_path / "usage-2026-11-22.csv")
    files = UsageFiles(tmp_path)
    site = Site(files)
    files.begin(site.accountant.totals())
    site.now = NS
    await files.write(site.accountant.totals())
    (record,) = caplog.records
    assert "is a named pipe; expected a file" in record.getMessage()
