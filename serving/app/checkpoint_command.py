"""The command ``headrace checkpoint``: a model's weights in parts, beside all else that serving it needs."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from headrace.serving.app.build import EngineOptions, mesh_shape
from headrace.serving.app.console import ProgressDisplay
from headrace.serving.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRequest:
    """model: a .gguf file or a model directory. target: a directory to be made, or an empty one."""

    model: Path
    target: Path


def run_checkpoint(request: CheckpointRequest, options: EngineOptions, console: Console) -> int:
    """Write it, and print where it is; exit code 0. The directory appears when it is complete.

    Raises: ConfigError naming the flag or directory; ModelFileError.
    """
    shape = mesh_shape(options)
    for axis in ("data", "stage"):
        if shape.sizes[axis] > 1:
            raise ConfigError(
                f"--mesh {shape}: a checkpoint is cut over tensor and expert; it restores onto every mesh, also one "
                f"with a {axis} axis"
            )
    target = request.target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty directory; give another name or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            with ProgressDisplay(console) as display:
                _write(request.model, work, options, display)
            work.chmod(0o755)
            work.rename(target)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from error
    print(target)
    return 0


def _write(model: Path, folder: Path, options: EngineOptions, display: ProgressDisplay) -> None:
    from headrace.model.checkpoint_files import Manifest, copy_companions, write_manifest
    from headrace.model.load import open_weights
    from headrace.serving.runner.backend import Wishes, choose_backend, find_device, find_mesh
    from headrace.serving.runner.checkpoint import save_weights
    from headrace.sharding.errors import MeshError

    shape = mesh_shape(options)
    device = find_device(options.device, min_cpus=shape.num_devices)
    backend = choose_backend(device, Wishes(attention="reference", dtype=options.dtype), find_mesh(device, shape))
    files = open_weights(model, dtype=backend.dtype)
    copy_companions(model, folder)

    def progress(done: int, total: int) -> None:
        display.update("reading weights" if done < total else "writing weights", done, total)

    try:
        stored = save_weights(files, folder, backend, progress)
    except MeshError as error:
        raise ConfigError(f"--mesh {shape}: {error}") from error
    manifest = Manifest(dtype=backend.dtype.name, mesh=str(shape), source_hash=files.model_hash, weights=stored)
    write_manifest(folder, manifest)
