"""Key files: digests only, rotation without a restart, and nothing of a key in any message."""

import hashlib
import hmac
import logging
import os
from pathlib import Path

import pytest

from headrace.serving.core.errors import ConfigError
from headrace.serving.edge import keys
from headrace.serving.edge.keys import Identity, KeyRing, digest_line, new_key


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)
    return path


def test_a_new_key_is_accepted_from_its_line_and_is_not_in_it(tmp_path: Path) -> None:
    key = new_key()
    line = digest_line("alice", key)
    assert key not in line and line == f"alice:sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    ring = KeyRing(write(tmp_path / "keys", "# team", "", f"  {line}  # of 2026"))
    assert ring.identify(key) == ring.identify(key.encode()) == Identity("alice", hashlib.sha256(key.encode()).digest())
    assert ring.names == ("alice",)
    assert len({new_key() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    "change",
    [
        lambda key: "",
        lambda key: "x" + key[1:],
        lambda key: key[:-1] + ("x" if key[-1] != "x" else "y"),
        lambda key: key + " ",
        lambda key: key.upper(),
        lambda key: key + "\udc80",
        lambda key: "ключ",
        lambda key: key * 30,
        lambda key: "x" * 1_000_000,
        lambda key: hashlib.sha256(key.encode()).hexdigest(),
    ],
)
def test_wrong_keys(tmp_path: Path, change: object) -> None:
    key = new_key()
    ring = KeyRing(write(tmp_path / "keys", digest_line("a", key)))
    assert callable(change)
    assert ring.identify(change(key)) is None


def test_every_entry_is_compared_whichever_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = [new_key() for _ in range(5)]
    ring = KeyRing(write(tmp_path / "keys", *(digest_line(f"n{i}", key) for i, key in enumerate(secret))))
    compared = []

    def count(left: bytes, right: bytes) -> bool:
        compared.append(right)
        return hmac.compare_digest(left, right)

    class Counted:
        compare_digest = staticmethod(count)

    monkeypatch.setattr(keys, "hmac", Counted)
    for key in (secret[0], secret[4], "wrong"):
        compared.clear()
        ring.identify(key)
        assert len(compared) == 5


def test_keys_change_without_restart(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "keys"
    old, new = new_key(), new_key()
    ring = KeyRing(write(path, digest_line("alice", old)), clock=clock)
    identity = ring.identify(old)
    assert identity is not None
    write(path, digest_line("alice", old), digest_line("alice", new))
    clock.now_s += 2
    assert ring.identify(new) is not None and ring.is_current(identity)
    write(path, digest_line("alice", new))
    clock.now_s += 2
    assert not ring.is_current(identity) and ring.identify(old) is None


@pytest.mark.parametrize("broken", ["", "# nothing\n", "alice:plain-key\n", None])
def test_a_file_that_became_unreadable_keeps_the_keys(
    tmp_path: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    clock, path, key = Clock(), tmp_path / "keys", new_key()
    ring = KeyRing(write(path, digest_line("a", key)), clock=clock)
    if broken is None:
        path.unlink()
    else:
        path.write_text(broken)
    clock.now_s += 2
    assert ring.identify(key) is not None
    assert "stay as they were" in caplog.text and "plain-key" not in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no keys"),
        ("# only a comment\n", "no keys"),
        ("alice:hr_topsecret\n", "line 1"),
        (f"{digest_line('a', 'k')}\nb:sha256:1234\n", "line 2"),
        ("a b:sha256:" + "0" * 64, "line 1"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_bad_files_name_file_and_line_only(tmp_path: Path, content: str | bytes, words: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError) as caught:
        KeyRing(path)
    assert words in str(caught.value) and str(path) in str(caught.value)
    assert "topsecret" not in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        KeyRing(tmp_path / "none")


def test_a_file_that_others_may_write_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    path = write(tmp_path / "keys", digest_line("a", "k"))
    assert KeyRing(path).warning is None
    os.chmod(path, 0o666)
    assert "chmod" in str(KeyRing(path).warning) and "chmod" in caplog.text


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a\nb", "x" * 65, "é"])
def test_names_that_no_line_can_have(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        digest_line(name, "k")
