"""``headrace plan``: what a model would take and do on accelerators that are not there, a row for each mesh and slice.

JAX-free: each mesh is compiled in a process of its own, once for all slices of a kind of chip.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from headrace.model.config import ModelConfig
from headrace.serving.app.build import EngineOptions
from headrace.serving.app.plan_types import Place, Plan, PlanAnswer, PlanJob, PlanRow, Workload
from headrace.serving.core.errors import ConfigError
from headrace.serving.engine.ports import Progress
from headrace.sharding.errors import MeshError
from headrace.sharding.mesh_shape import MeshShape, parse_mesh
from headrace.sharding.slices import Slice, parse_slice

COMPILER_VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
"""What compilers read when they are loaded: compile here, ask no metadata server for a machine, look for no driver."""
COMPILERS = {"tpu": ("libtpu", "tpu"), "gpu": ("jax_plugins.xla_cuda12", "cuda")}
"""By platform: the module that has its compiler, and the extra of this package that brings it."""
MAX_PROCESSES = 4
"""Of some 1.5 GB each."""
LIMIT_S = 3600.0
"""For one mesh; a person can stop earlier."""
AUTO = "auto"
Compile = Callable[[PlanJob], PlanAnswer]
"""Tests give another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the flags said. meshes: as given; empty or AUTO = all that a slice and the model allow. keep_hlo: folder."""

    model: str
    topologies: tuple[str, ...]
    meshes: tuple[str, ...]
    work: Workload
    keep_hlo: Path | None = None


def make_plan(
    wanted: PlanRequest, config: ModelConfig, options: EngineOptions, progress: Progress, compile_job: Compile
) -> Plan:
    """Rows in the order of the topologies, and for each in that of the meshes. Raises: ConfigError naming the flag."""
    try:
        slices = [parse_slice(text) for text in dict.fromkeys(wanted.topologies)]
        chosen, left_out = choose_meshes(slices, wanted.meshes, config)
    except MeshError as error:
        raise ConfigError(str(error)) from error
    if not chosen:
        raise ConfigError("nothing to plan: " + "; ".join(left_out))
    jobs = make_jobs(wanted, options, chosen)
    answers: list[PlanAnswer] = []
    what = f"compiling {len(jobs)} meshes"
    progress(what, 0, len(jobs))
    with ThreadPoolExecutor(min(MAX_PROCESSES, max(1, (os.cpu_count() or 1) // 2))) as pool:
        futures = [pool.submit(compile_job, job) for job in jobs]
        for done, future in enumerate(as_completed(futures), 1):
            answers.append(future.result())
            progress(what, done, len(jobs))
    for answer in answers:
        if answer.refusal is not None:
            raise ConfigError(answer.refusal)
    order = {(str(of), str(mesh)): place for place, (of, mesh) in enumerate(chosen)}
    rows = sorted((row for answer in answers for row in answer.rows), key=lambda row: order[row.topology, row.mesh])
    stored = next((answer for answer in answers if answer.weights is not None), PlanAnswer())
    return Plan(
        model=wanted.model,
        weights=stored.weights or options.weights,
        kv_dtype=stored.kv_dtype or options.kv_dtype,
        workload=wanted.work,
        rows=tuple(rows),
        left_out=tuple(left_out),
    )


def choose_meshes(
    slices: Sequence[Slice], meshes: Sequence[str], config: ModelConfig
) -> tuple[list[tuple[Slice, MeshShape]], list[str]]:
    """(what is planned, why others are not). A mesh is planned on slices of just as many devices.

    Raises: MeshError for a mesh that is none.
    """
    chosen: list[tuple[Slice, MeshShape]] = []
    left_out: list[str] = []
    given = [parse_mesh(mesh) for mesh in dict.fromkeys(meshes) if mesh != AUTO]
    for of in slices:
        candidates = list(given)
        if not meshes or AUTO in meshes:
            candidates += [mesh for mesh in sensible_meshes(of.num_devices, config) if mesh not in given]
        for mesh in candidates:
            if mesh.num_devices == of.num_devices:
                chosen.append((of, mesh))
            else:
                left_out.append(f"{of}, {mesh}: the mesh has {mesh.num_devices} devices and the slice {of.num_devices}")
    return chosen, left_out


def sensible_meshes(devices: int, config: ModelConfig) -> list[MeshShape]:
    """All of so many devices that heads, feed-forward, vocabulary and experts divide into; most tensor parts first.

    data takes what tensor and expert leave. Stages are planned where they are asked for by name.
    """
    found = []
    for tensor in _divisors(devices):
        if not _cuts(config, tensor):
            continue
        for expert in _divisors(devices // tensor):
            if expert == 1 or (config.num_experts and config.num_experts % expert == 0):
                found.append(MeshShape(tensor=tensor, expert=expert, data=devices // tensor // expert))
    return sorted(found, key=lambda mesh: (mesh.data, -mesh.tensor))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _cuts(config: ModelConfig, tensor: int) -> bool:
    widths = [config.num_heads, config.vocab_size, config.expert_ffn_width or config.ffn_width]
    keys = config.num_kv_heads
    return all(width % tensor == 0 for width in widths) and (keys % tensor == 0 or tensor % keys == 0)


def make_jobs(wanted: PlanRequest, options: EngineOptions, chosen: Sequence[tuple[Slice, MeshShape]]) -> list[PlanJob]:
    """One for each kind of chip and mesh without its data axis: copies of the model exchange nothing, and a slice of
    another size gives the same program."""
    places: dict[tuple[str, str], list[Place]] = {}
    for of, mesh in chosen:
        key = of.chip, str(replace(mesh, data=1))
        places.setdefault(key, []).append(Place(topology=str(of), data=mesh.data))
    return [
        PlanJob(
            model=wanted.model,
            options=options,
            mesh=mesh,
            places=tuple(at),
            work=wanted.work,
            keep_hlo=None if wanted.keep_hlo is None else str(wanted.keep_hlo),
        )
        for (_, mesh), at in places.items()
    ]


def check_compilers(topologies: Sequence[str]) -> None:
    """Raises: ConfigError naming the extra that brings a compiler which is not installed."""
    for text in topologies:
        try:
            of = parse_slice(text)
        except MeshError as error:
            raise ConfigError(f"--topology: {error}") from error
        module, extra = COMPILERS[of.kind.platform]
        if not _is_installed(module):
            raise ConfigError(
                f"--topology {of}: its compiler, {module}, is not installed; the {extra} extra of this package "
                f"brings it"
            )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        return False


class Compilers:
    """Starts processes that compile, and ends them when the plan ends. Use as a context; may be used by threads."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s, self._lock = limit_s, threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Compilers":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for process in self._running:
                process.kill()

    def compile(self, job: PlanJob) -> PlanAnswer:
        """A compiler that dies or takes too long ends its own rows and no others."""
        command = [sys.executable, "-P", "-m", "headrace.serving.app.plan_worker"]
        with tempfile.TemporaryDirectory(prefix="headrace-plan-") as folder:
            file = Path(folder) / "answer"
            with (Path(folder) / "log").open("w+b") as log:
                process = subprocess.Popen(
                    [*command, str(file)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=os.environ | COMPILER_VARIABLES,
                )
                with self._lock:
                    self._running.append(process)
                try:
                    process.communicate(msgspec.msgpack.encode(job), timeout=self._limit_s)
                    why = None if process.returncode == 0 else how_it_ended(process.returncode)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    why = f"was stopped after {self._limit_s:.0f} s"
                finally:
                    with self._lock:
                        self._running.remove(process)
                if why is None:
                    return msgspec.msgpack.decode(file.read_bytes(), type=PlanAnswer)
                log.seek(0)
                return _lost(job, f"was not compiled: the compiler {why}{_last_line(log.read())}")


def how_it_ended(code: int) -> str:
    """Of a process, from its return code."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _last_line(log: bytes) -> str:
    lines = [line.strip() for line in log.decode(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("F") or "rror" in line or "heck fail" in line]
    return f": {(telling or lines)[-1][:300]}" if lines else ""


def _lost(job: PlanJob, why: str) -> PlanAnswer:
    shape = parse_mesh(job.mesh)
    return PlanAnswer(
        rows=tuple(
            PlanRow(
                topology=place.topology,
                mesh=str(replace(shape, data=place.data)),
                chips=parse_slice(place.topology).num_chips,
                devices=parse_slice(place.topology).num_devices,
                data=place.data,
                misfit=why,
            )
            for place in job.places
        )
    )
