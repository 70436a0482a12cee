"""Time of each collective that steps use, along each axis of a mesh, at a model's sizes; and memory of each device.

    python -m scripts.bench_collectives --model qwen3-30b-a3b --mesh expert=2,tensor=2 --out collectives.json

Works on the devices that JAX has; ``--cpu-devices 8`` makes as many of a CPU. On several hosts, start it on each with
``--coordinator HOST:PORT --processes N --process I``; process 0 prints and writes.

An array is float32 [rows, width]: rows are decode rows or the tokens of a chunk. A collective is run LOOP times inside
one program, each on the result of the one before, so that starting a program is not what is measured; the row "nothing"
is the same loop without a collective, whose time is in all the others. All groups of an axis exchange at once, as in a
step. Bytes are what a device must receive at least; the share is of the copy bandwidth, measured in the same run with
all devices copying at once (bytes read and written); small arrays, which stay in caches, can be above it.
"""

import argparse
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from headrace.model.config import ModelConfig
from headrace.model.config_files import read_config
from headrace.model.on_mesh import config_on_mesh
from headrace.model.published.configurations import PUBLISHED, published_config
from headrace.serving.runner.backend import Backend
from headrace.serving.runner.topology import topology_of
from headrace.serving.runner.weights import weight_shapes
from headrace.sharding.errors import MeshError
from headrace.sharding.mesh import make_mesh
from headrace.sharding.mesh_shape import MeshShape, parse_mesh
from scripts import evidence

Array = jax.Array
LOOP = 16
ROWS = (1, 4, 16, 64, 256, 512)
PLAIN_COLUMNS = 110
"""Of the table where it goes into a file."""
COPY_BYTES = 64 << 20
"""Of the array that each device copies: more than caches hold of several such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """step: [rows, width] to the same shape and, where all devices have equal values, to the same values; (array, name
    of the axis, devices along it). bytes: that a device must receive, as parts of the array's."""

    step: Callable[[Array, str, int], Array]
    bytes: Callable[[int], float]


def _gathered(x: Array, axis: str, size: int) -> Array:
    """The mean of all, so that every part is used."""
    return lax.all_gather(x, axis, axis=0, tiled=False).sum(axis=0) / size


def _scattered(x: Array, axis: str, size: int) -> Array:
    """Columns are cut, and copied to make the shape whole again."""
    return jnp.tile(lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True) / size, (1, size))


COLLECTIVES = {
    "nothing": Collective(step=lambda x, axis, size: x, bytes=lambda size: 0.0),
    "psum": Collective(step=lambda x, axis, size: lax.psum(x, axis) / size, bytes=lambda size: 2 * (size - 1) / size),
    "pmax": Collective(step=lambda x, axis, size: lax.pmax(x, axis), bytes=lambda size: 2 * (size - 1) / size),
    "all_gather": Collective(step=_gathered, bytes=lambda size: size - 1.0),
    "psum_scatter": Collective(step=_scattered, bytes=lambda size: (size - 1) / size),
    "ppermute": Collective(
        step=lambda x, axis, size: lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)]),
        bytes=lambda size: 1.0,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Microseconds are of one collective: median, and the 10th and 90th percentile over the repetitions. copy_share: of
    the copy bandwidth, None where nothing is received."""

    axis: str
    devices: int
    collective: str
    rows: int
    array_bytes: int
    median_us: float
    p10_us: float
    p90_us: float
    received_gb_per_s: float
    copy_share: float | None


def on_mesh(function: Callable[[Array], Array], mesh: Mesh) -> Any:
    """Jitted; every device has the whole array."""
    whole = PartitionSpec()
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))


def looped(collective: Collective, axis: str, size: int, count: int = LOOP) -> Callable[[Array], Array]:
    """The factor keeps XLA from taking an iteration for the one before; it is 1 in float32."""

    def function(x: Array) -> Array:
        return lax.fori_loop(
            0, count, lambda i, x: collective.step(x * (1 + 1e-9 * i.astype(jnp.float32)), axis, size), x
        )

    return function


def whole_array(shape: tuple[int, int], mesh: Mesh) -> Array:
    """Ones, on every device."""
    return jax.jit(partial(jnp.ones, shape), out_shardings=NamedSharding(mesh, PartitionSpec()))()


def times_s(function: Any, x: Array, warmup: int, repeats: int) -> list[float]:
    for _ in range(warmup):
        jax.block_until_ready(function(x))
    found = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        jax.block_until_ready(function(x))
        found.append(time.perf_counter() - start_s)
    return found


def spread(values: list[float]) -> tuple[float, float, float]:
    """(median, 10th percentile, 90th percentile); at least two values."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return statistics.median(values), tenths[0], tenths[-1]


def copy_bytes_per_s(mesh: Mesh, size_bytes: int, warmup: int, repeats: int) -> float:
    """Of each device, read and written, while all devices copy."""
    x = whole_array((size_bytes // 4096, 1024), mesh)
    median_s, _, _ = spread(times_s(on_mesh(lambda x: x + 1, mesh), x, warmup, repeats))
    return 2 * x.nbytes / median_s


def measure(
    mesh: Mesh, width: int, row_counts: tuple[int, ...], *, copy_per_s: float, warmup: int, repeats: int
) -> list[Row]:
    """Each collective along each axis that has several devices."""
    found = []
    for axis, size in mesh.shape.items():
        if size == 1:
            continue
        for rows in row_counts:
            x = whole_array((rows, math.ceil(width / size) * size), mesh)
            for name, collective in COLLECTIVES.items():
                taken = times_s(on_mesh(looped(collective, axis, size), mesh), x, warmup, repeats)
                median, low, high = (value / LOOP for value in spread(taken))
                received_per_s = collective.bytes(size) * x.nbytes / median
                found.append(
                    Row(
                        axis=axis,
                        devices=size,
                        collective=name,
                        rows=rows,
                        array_bytes=x.nbytes,
                        median_us=round(median * 1e6, 2),
                        p10_us=round(low * 1e6, 2),
                        p90_us=round(high * 1e6, 2),
                        received_gb_per_s=round(received_per_s / 1e9, 3),
                        copy_share=round(received_per_s / copy_per_s, 4) if collective.bytes(size) else None,
                    )
                )
    return found


def memory(mesh: Mesh) -> dict[str, Any]:
    """What devices of this process say; CPU devices say nothing, and share their process's memory."""
    local = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    stats = {str(device.id): device.memory_stats() for device in local}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "process_peak_rss_bytes": peak,
        "devices": {
            name: {key: int(found[key]) for key in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit") if key in found}
            for name, found in stats.items()
            if found
        },
    }


def weight_bytes_per_device(cfg: ModelConfig, mesh: Mesh) -> int:
    """bfloat16, by shape: nothing is loaded."""
    backend = Backend(mesh=mesh, dtype=jnp.dtype(jnp.bfloat16))
    shapes = weight_shapes(config_on_mesh(cfg, backend.mesh_shape), backend)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def print_rows(rows: list[Row], console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in ("axis", "collective", "rows", "array kB", "median us", "p10", "p90", "GB/s", "of copying"):
        table.add_column(heading, justify="left" if heading in ("axis", "collective") else "right")
    for row in rows:
        share = "-" if row.copy_share is None else f"{row.copy_share:.2%}"
        times = (f"{value:,.1f}" for value in (row.median_us, row.p10_us, row.p90_us))
        where = f"{row.axis}={row.devices}"
        kilobytes, rate = f"{row.array_bytes / 1e3:,.1f}", f"{row.received_gb_per_s:.2f}"
        table.add_row(where, row.collective, str(row.rows), kilobytes, *times, rate, share)
    console.print(table, highlight=False)


def model_config(name: str) -> ModelConfig:
    return published_config(name) if name in PUBLISHED else read_config(name)


def _arguments() -> argparse.Namespace:
    parser = evidence.arguments(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="llama-3.1-8b", help=f"{', '.join(PUBLISHED)}, or a model file or directory")
    parser.add_argument("--mesh", required=True, help="such as expert=2,tensor=4")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help=f"rows of arrays (default: {ROWS})")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--cpu-devices", type=int, help="serve so many devices of this process's CPU")
    parser.add_argument("--coordinator", help="HOST:PORT of process 0, where there are several")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    args = parser.parse_args()
    if args.repeats < 2 or args.warmup < 1 or min(args.rows) < 1:
        parser.error("--repeats must be at least 2, --warmup and --rows at least 1")
    if (args.processes > 1) != (args.coordinator is not None):
        parser.error("--coordinator and --processes belong together")
    return args


def _start(args: argparse.Namespace) -> Mesh:
    """Starts JAX."""
    if args.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    if args.coordinator is not None:
        jax.distributed.initialize(args.coordinator, num_processes=args.processes, process_id=args.process)
    return make_mesh(parse_mesh(args.mesh), jax.devices())


def main() -> int:
    args = _arguments()
    cfg, mesh = model_config(args.model), _start(args)
    try:
        weights = weight_bytes_per_device(cfg, mesh)
    except MeshError as error:
        print(f"--mesh {args.mesh}: {error}", file=sys.stderr)
        return 2
    counts = {"warmup": args.warmup, "repeats": args.repeats}
    copy_per_s = copy_bytes_per_s(mesh, COPY_BYTES, **counts)
    rows = measure(mesh, cfg.width, tuple(args.rows), copy_per_s=copy_per_s, **counts)
    found = memory(mesh) | {"weights_bfloat16_bytes": weights}
    if jax.process_index() != 0:
        return 0
    topology = topology_of(list(mesh.devices.flat))
    shape = str(MeshShape(**dict(mesh.shape)))
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_COLUMNS)
    console.print(
        f"{args.model}, width {cfg.width}, {topology.num_devices} × {topology.device} in {topology.num_processes} "
        f"processes, mesh {shape}, link {topology.link}; a device copies {copy_per_s / 1e9:.2f} GB/s",
        highlight=False,
    )
    print_rows(rows, console)
    evidence.save(
        args.out,
        True,
        model=args.model,
        width=cfg.width,
        mesh=shape,
        topology={name: getattr(topology, name) for name in topology.__struct_fields__},
        jaxlib=version("jaxlib"),
        copy_bytes_per_s=copy_per_s,
        loop=LOOP,
        **counts,
        memory=found,
        collectives=[asdict(row) for row in rows],
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
