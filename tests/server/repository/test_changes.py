"""Changes of a repository are acted on once they stand still."""

import os
from pathlib import Path

from server.repository.changes import Settling, stamps


def test_a_growing_file_is_acted_on_once_it_stands_still(tmp_path: Path) -> None:
    def poll() -> list[str]:
        return settling.settled(stamps(tmp_path, sorted(path.name for path in tmp_path.iterdir())))

    settling = Settling({})
    file = tmp_path / "double" / "1" / "model.onnx"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"a")
    assert poll() == []
    file.write_bytes(b"ab")
    assert poll() == []
    assert poll() == ["double"]
    assert poll() == []
    file.unlink()
    file.parent.rmdir()
    file.parent.parent.rmdir()
    assert poll() == []
    assert poll() == ["double"]
    assert poll() == []


def test_what_cannot_be_read_is_a_change_as_any_other(tmp_path: Path) -> None:
    version = tmp_path / "double" / "1"
    version.mkdir(parents=True)
    link = version / "model.onnx"
    link.symlink_to("nowhere")
    before = stamps(tmp_path, ["double", "gone"])
    settling = Settling(before)
    (version / "nowhere").write_bytes(b"a")
    now = stamps(tmp_path, ["double", "gone"])
    assert before["double"] != now["double"]
    assert before["gone"] == now["gone"]
    assert [settling.settled(now) for _ in range(3)] == [[], ["double"], []]


def test_a_change_that_is_undone_is_not_acted_on() -> None:
    one, two = frozenset({("1/", 0, 0, 0)}), frozenset({("2/", 0, 0, 0)})
    settling = Settling({"double": one})
    assert [settling.settled({"double": each}) for each in (two, one, one)] == [[], [], []]


def test_links_to_the_directories_above_are_not_followed(tmp_path: Path) -> None:
    """With two of them there are 2^40 paths, of which the kernel refuses only longer ones."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").touch()
    for name in ("latest", "current"):
        (tmp_path / "m" / name).symlink_to(".")
    (tmp_path / "m" / "1" / "root").symlink_to(tmp_path)
    assert len(stamps(tmp_path, ["m"])["m"]) < 50


def test_directories_that_links_show_in_very_many_places_are_looked_into_only_so_far(tmp_path: Path) -> None:
    above = tmp_path / "m"
    above.mkdir()
    for number in range(24):  # Each has two links to the next: 16 million places in all.
        under = tmp_path / f".{number}"
        under.mkdir()
        (under / "file").touch()
        for name in "ab":
            (above / name).symlink_to(under)
        above = under
    (found,) = stamps(tmp_path, ["m"]).values()
    assert len(found) < 200_000
    deep = str(tmp_path / "n")
    for _ in range(100):
        os.mkdir(deep)
        deep += "/d"
    (found,) = stamps(tmp_path, ["n"]).values()
    assert len(found) < 20
