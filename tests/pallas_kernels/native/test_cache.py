"""What is loaded is this user's, unchanged, and compiled once."""

import ctypes
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headrace.pallas_kernels.native import build, cache
from headrace.pallas_kernels.native.compiler import BuildError
from tests.pallas_kernels.native.small_library import SOURCE, counting_compiler, make_root


@pytest.fixture
def place(tmp_path: Path) -> "Place":
    return Place(tmp_path)


class Place:
    """A small root, a cache that is not there yet, and a compiler that counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = make_root(folder)
        self.cache = folder / "cache" / "native"
        self.search_path, self._count = counting_compiler(folder)

    def built(self) -> cache.Version:
        return build.built(
            self.cache, search_path=self.search_path + os.pathsep + os.environ["PATH"], root=self.root,
            prebuilt=self.folder / "none",
        )  # fmt: skip

    @property
    def num_compiled(self) -> int:
        return len(self._count.read_text().splitlines()) if self._count.exists() else 0


def test_a_second_start_compiles_nothing(place: Place) -> None:
    first = place.built()
    compiled = place.num_compiled
    assert compiled == 1 + len(first.record["isas"])
    assert ctypes.CDLL(str(first.path)).Answer() == 42
    assert place.built() == first
    assert place.num_compiled == compiled


def test_only_this_user_can_read_or_write_the_cache(place: Place) -> None:
    old = os.umask(0)
    try:
        version = place.built()
    finally:
        os.umask(old)
    assert place.cache.stat().st_mode & 0o777 == 0o700
    assert version.path.parent.stat().st_mode & 0o777 == 0o700
    for path in version.path.parent.iterdir():
        assert not path.stat().st_mode & 0o022, path
    assert sorted(path.name for path in version.path.parent.iterdir()) == [cache.RECORD, cache.LIBRARY]


@pytest.mark.parametrize("which", ["cache", "version", "library", "record"])
def test_what_others_may_write_is_refused(place: Place, which: str) -> None:
    library = place.built().path
    path = {
        "cache": place.cache, "version": library.parent, "library": library, "record": library.parent / cache.RECORD,
    }[which]  # fmt: skip
    for bit in (0o020, 0o002):
        mode = path.stat().st_mode & 0o777
        path.chmod(mode | bit)
        with pytest.raises(BuildError, match="may be written by other users .*remove it, or give another cache .*XDG"):
            place.built()
        path.chmod(mode)
    place.built()


def test_a_cache_that_others_may_write_is_refused_before_anything_is_compiled(place: Place) -> None:
    place.cache.mkdir(parents=True)
    place.cache.chmod(0o777)
    with pytest.raises(BuildError, match=r"mode 0777"):
        place.built()
    assert place.num_compiled == 0


def test_a_folder_that_every_user_may_rename_things_in_is_refused(place: Place) -> None:
    place.built()
    place.cache.parent.chmod(0o777)
    with pytest.raises(BuildError, match="may be written by every user"):
        place.built()
    place.cache.parent.chmod(0o1777)  # as /tmp is: only the owner renames
    place.built()


def test_what_another_user_owns_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    library = place.built().path
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(BuildError, match=f"belongs to user {own}, not to {own + 1}"):
        place.built()
    monkeypatch.undo()
    if own == 0:
        os.chown(library, 12345, 12345)
        with pytest.raises(BuildError, match="belongs to user 12345, not to 0"):
            place.built()


def test_a_library_behind_a_symbolic_link_is_refused(place: Place) -> None:
    library = place.built().path
    elsewhere = place.folder / "elsewhere.so"
    library.rename(elsewhere)
    library.symlink_to(elsewhere)
    with pytest.raises(BuildError, match="is a symbolic link"):
        place.built()


@pytest.mark.parametrize("damage", ["flipped", "cut", "replaced with its hash gone", "record is no JSON", "missing"])
def test_a_damaged_library_is_said_and_compiled_again(
    place: Place, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = place.built()
    content = first.path.read_bytes()
    record = first.path.parent / cache.RECORD
    if damage == "flipped":
        middle = len(content) // 2
        first.path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif damage == "cut":
        first.path.write_bytes(content[: len(content) // 2])
    elif damage == "replaced with its hash gone":
        first.path.write_bytes(b"evil")
        record.write_text("{}")
    elif damage == "record is no JSON":
        record.write_text('{"sha256": ')
    else:
        first.path.unlink()
    compiled = place.num_compiled
    with caplog.at_level(logging.WARNING, "headrace.native"):
        again = place.built()
    assert place.num_compiled > compiled
    assert any("are not used" in line.message for line in caplog.records)
    assert ctypes.CDLL(str(again.path)).Answer() == 42
    assert json.loads(record.read_text())["sha256"] == again.record["sha256"]


def test_old_versions_go_and_the_used_ones_stay(place: Place) -> None:
    first = place.built().path.parent
    for number in range(cache.KEPT_VERSIONS + 2):
        make_root(place.folder, SOURCE.replace("42", str(number)))
        os.utime(first, ns=(2**62, 2**62))  # used all the time
        latest = place.built().path.parent
    kept = {path.name for path in place.cache.iterdir() if path.is_dir()}
    assert len(kept) == cache.KEPT_VERSIONS
    assert {first.name, latest.name} <= kept


def test_what_is_not_a_version_stays(place: Place) -> None:
    place.cache.mkdir(parents=True, mode=0o750)
    others = [place.cache / name for name in ("photos", "thesis", "src", "mail", "0" * 20, "f" * 19)]
    for folder in others:
        folder.mkdir()
        (folder / "work").write_text("of years")
        os.utime(folder, ns=(0, 0))
    (place.cache / ("1" * 20)).write_text("a file")
    for number in range(cache.KEPT_VERSIONS + 1):
        make_root(place.folder, SOURCE.replace("42", str(number)))
        place.built()
    assert [(folder / "work").read_text() for folder in others] == ["of years"] * len(others)
    assert sum((path / cache.LIBRARY).exists() for path in place.cache.iterdir()) == cache.KEPT_VERSIONS
    assert place.cache.stat().st_mode & 0o777 == 0o750


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no entry of the user either
    with pytest.raises(BuildError, match="no home directory .*set HOME or XDG_CACHE_HOME"):
        build.default_cache()


def test_two_processes_at_once_compile_once(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    search_path, count = counting_compiler(tmp_path, delay_s=0.5)
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from headrace.pallas_kernels.native.build import built\n"
        "sys.stdin.readline()\n"
        f"version = built(Path({str(tmp_path / 'cache')!r}), search_path={search_path!r} + os.pathsep + "
        f"os.environ['PATH'], root=Path({str(root)!r}), prebuilt=Path('none'),\n"
        "    progress=lambda done, total, name: print(name, file=sys.stderr))\n"
        "print(version.path)\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    outcomes: list[tuple[str, str]] = [("", "")] * 2

    def finish(place: int) -> None:
        outcomes[place] = processes[place].communicate("go\n", timeout=120)

    threads = [threading.Thread(target=finish, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [process.returncode for process in processes] == [0, 0], outcomes
    assert outcomes[0][0] == outcomes[1][0] != ""
    record = json.loads((Path(outcomes[0][0].strip()).parent / cache.RECORD).read_text())
    assert len(count.read_text().splitlines()) == 1 + len(record["isas"])


def test_leftovers_of_killed_processes_go(place: Place) -> None:
    leftover = place.cache / ".build-killed"
    leftover.mkdir(parents=True)
    place.cache.chmod(0o700)
    (leftover / "half.o").write_text("half")
    place.built()
    assert not leftover.exists()
