"""KV pages to host memory and back: two programs of fixed size, and the host's pages.

A step's pages are read into fresh device arrays before anything else of the step runs, so later writes to the same
pages cannot reach them: the pool is donated to what comes after, and waits for its readers. They go on to the host
while steps run, and lie in host pages when their step is collected, or earlier where a step brings one back. Host
memory is what the operating system gives: on an accelerator, copies through page-locked memory (JAX's memory kind
pinned_host) may be faster, which no device has confirmed.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from headrace.pallas_kernels.types import KVPool
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.errors import ConfigError, InvariantError
from headrace.serving.core.plan import PageCopy, StepPlan
from headrace.serving.runner.backend import Backend
from headrace.serving.runner.warmup import Program

Array = jax.Array
Staged = tuple[Array, ...]
"""Pages on their way, for each array of the pool: [lanes * pages of a call, L, ...]."""

GROUP_BYTES = 8 << 20
"""About what one call copies in each lane. A page of SmolLM2-135M takes 720 KiB, of Llama-3.1-8B in bfloat16 8 MiB."""
MAX_GROUP_PAGES = 8
STAGED_BYTES = 256 << 20
"""Of each lane, most that is on its way in each direction: a long sequence would otherwise lie on the device twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapShape:
    """What one call copies in each lane. num_pages: at most. page_bytes: of all layers, on all devices of the lane."""

    num_pages: int
    page_bytes: int

    @property
    def max_staged(self) -> int:
        """Calls in each direction whose pages may be on their way."""
        return max(1, STAGED_BYTES // (self.num_pages * self.page_bytes))

    def staged_pages(self, config: SchedulerConfig) -> int:
        """Most pages of a lane that are on their way, both directions together."""
        calls = min(self.max_staged, -(-config.num_swap_pages // self.num_pages))
        return 2 * calls * self.num_pages


def swap_shape(pool: KVPool, config: SchedulerConfig) -> SwapShape:
    """pool: shapes."""
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(pool))
    page_bytes = size // (config.num_lanes * config.num_pages)
    fitting = max(1, min(GROUP_BYTES // page_bytes, MAX_GROUP_PAGES))
    return SwapShape(num_pages=min(fitting, config.num_pages - 1, config.num_swap_pages), page_bytes=page_bytes)


def swap_programs(pool: KVPool, config: SchedulerConfig, backend: Backend) -> tuple[Program, Program]:
    """(out, in). pool: shapes, types and places.

    out: (pool, pages_GS) -> an array [G * S, L, ...] for each of the pool's. in: (pool, pages_GS, the same arrays) ->
    (pool, 0); the pool is donated. G lanes, S pages of each call; pages_GS i32, of the lane, its real ones first and 0
    behind them.
    """
    size = swap_shape(pool, config).num_pages
    pages_GS = jax.ShapeDtypeStruct((config.num_lanes, size), jnp.int32, sharding=backend.sharding())
    staged = tuple(_staged_shape(x, config, size, backend) for x in jax.tree.leaves(pool))
    lane, num_pages = backend.shards.data, config.num_pages

    def swap_out(pool: KVPool, pages_GS: Array) -> Staged:
        return _read(pool, pages_GS[lane.index], num_pages)

    def swap_in(pool: KVPool, pages_GS: Array, staged: Staged) -> tuple[KVPool, Array]:
        # The number is there to be waited for: the pool itself is donated to what comes next.
        return _write(pool, pages_GS[lane.index], staged, num_pages), jnp.int32(0)

    out: Any = swap_out
    back: Any = swap_in
    if backend.mesh is not None:
        whole = PartitionSpec()
        cut, cut_staged = (jax.tree.map(lambda x: x.sharding.spec, of) for of in (pool, staged))
        out = jax.shard_map(out, mesh=backend.mesh, in_specs=(cut, whole), out_specs=cut_staged, check_vma=False)
        back = jax.shard_map(
            back, mesh=backend.mesh, in_specs=(cut, whole, cut_staged), out_specs=(cut, whole), check_vma=False
        )
    return (
        Program(function=out, donated=(), arguments=(pool, pages_GS)),
        Program(function=back, donated=(0,), arguments=(pool, pages_GS, staged)),
    )


def _staged_shape(rows: Any, config: SchedulerConfig, size: int, backend: Backend) -> jax.ShapeDtypeStruct:
    """Of a pool's array [lanes * layers * pages, heads, ...]."""
    layers = rows.shape[0] // (config.num_lanes * config.num_pages)
    shape = (config.num_lanes * size, layers, *rows.shape[1:])
    sizes = backend.mesh_shape.sizes
    cut = PartitionSpec(*(axis if sizes[axis] > 1 else None for axis in ("data", "stage", "tensor")))
    return jax.ShapeDtypeStruct(shape, rows.dtype, sharding=backend.sharding(cut))


def _read(pool: KVPool, page_S: Array, num_pages: int) -> Staged:
    """[S, L, ...] of what this device has; zeros where page_S has no page.

    A slice for each layer of a page: XLA:CPU copies a slice whole, and a gather element by element.
    """
    layers = pool.pages_RKWC.shape[0] // num_pages
    start = jax.tree.map(lambda x: jnp.zeros((page_S.shape[0] * layers, *x.shape[1:]), x.dtype), pool)

    def copy(i: Array, to: KVPool) -> KVPool:
        row = (i % layers) * num_pages + page_S[i // layers]
        return _moved(to, i, pool, row)

    rows = lax.fori_loop(0, (page_S > 0).sum() * layers, copy, start)
    return tuple(x.reshape(page_S.shape[0], layers, *x.shape[1:]) for x in jax.tree.leaves(rows))


def _write(pool: KVPool, page_S: Array, staged: Staged, num_pages: int) -> KVPool:
    layers = pool.pages_RKWC.shape[0] // num_pages
    rows = jax.tree.unflatten(jax.tree.structure(pool), [x.reshape(-1, *x.shape[2:]) for x in staged])

    def copy(i: Array, to: KVPool) -> KVPool:
        return _moved(to, (i % layers) * num_pages + page_S[i // layers], rows, i)

    return lax.fori_loop(0, (page_S > 0).sum() * layers, copy, pool)


def _moved(to: KVPool, at: Array, source: KVPool, row: Array) -> KVPool:
    """to, with one row of source."""
    moved: KVPool = jax.tree.map(
        lambda x, y: lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(y, row, 1), at, axis=0), to, source
    )
    return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaving:
    """Pages on their way to the host. rows: (row of the staged arrays, host page)."""

    step_id: int
    staged: Staged
    rows: tuple[tuple[int, int], ...]


class HostPages:
    """Host memory of preempted sequences, and what is on its way there. Its memory is taken when it is first written.

    Args:
      pool: shapes, types and places of the pages. config: num_swap_pages of each lane.
    Raises: ConfigError where the pages of a mesh lie in several processes.
    """

    def __init__(self, pool: KVPool, config: SchedulerConfig, backend: Backend) -> None:
        if backend.mesh is not None and backend.mesh.is_multi_process:
            raise ConfigError("swap of KV pages works within one process; on several hosts give --swap-memory 0")
        self._config = config
        self.shape = swap_shape(pool, config)
        self._staged = [_staged_shape(x, config, self.shape.num_pages, backend) for x in jax.tree.leaves(pool)]
        self._pages = [np.zeros((self.num_pages, *x.shape[1:]), x.dtype) for x in self._staged]
        self._filled: set[int] = set()
        self._leaving: deque[_Leaving] = deque()
        self._returning: deque[Array] = deque()

    @property
    def num_pages(self) -> int:
        """Of all lanes."""
        return self._config.num_lanes * self._config.num_swap_pages

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.shape.page_bytes

    def check(self, plan: StepPlan) -> None:
        """Raises: InvariantError naming the copy; XLA would clamp an index out of range and copy another page."""
        for copy in (*plan.swap_out, *plan.swap_in):
            if not (
                0 <= copy.page < self._config.num_lanes * self._config.num_pages
                and copy.page % self._config.num_pages > 0
                and 0 <= copy.host_page < self.num_pages
            ):
                raise InvariantError(
                    f"step {plan.step_id}: {copy} is out of range: {self._config.num_lanes} x {self._config.num_pages} "
                    f"pages, the first of each lane is the null page, and {self.num_pages} host pages"
                )
        leaving = {copy.host_page for copy in plan.swap_out}
        if len(leaving) != len(plan.swap_out) or len({copy.page for copy in plan.swap_in}) != len(plan.swap_in):
            raise InvariantError(f"step {plan.step_id}: two copies go to one page")
        for copy in plan.swap_in:
            if copy.host_page in leaving:
                raise InvariantError(f"step {plan.step_id}: host page {copy.host_page} is written and read at once")
            if copy.host_page not in self._filled:
                raise InvariantError(f"step {plan.step_id}: host page {copy.host_page} was never written")

    def start_out(self, program: jax.stages.Compiled, pool: KVPool, step_id: int, copies: Sequence[PageCopy]) -> None:
        """Read pages; ``finish`` brings them into host pages. Waits only where STAGED_BYTES are on their way."""
        for pages_GS, rows in self._groups(copies):
            if len(self._leaving) >= self.shape.max_staged:
                self._finish_oldest()
            staged = program(pool, pages_GS)
            for leaf in staged:
                leaf.copy_to_host_async()
            self._leaving.append(_Leaving(step_id=step_id, staged=staged, rows=rows))
            self._filled.update(host_page for _, host_page in rows)

    def finish(self, step_id: int) -> None:
        """Bring what steps up to this one read into host pages; waits for it."""
        while self._leaving and self._leaving[0].step_id <= step_id:
            self._finish_oldest()

    def bring_back(self, program: jax.stages.Compiled, pool: KVPool, copies: Sequence[PageCopy]) -> KVPool:
        """The pool with pages written. Waits for those of them that are still on their way to the host, and where
        STAGED_BYTES are on their way back."""
        wanted = {copy.host_page for copy in copies}
        while any(host_page in wanted for of in self._leaving for _, host_page in of.rows):
            self._finish_oldest()
        for pages_GS, rows in self._groups(copies):
            if len(self._returning) >= self.shape.max_staged:
                self._returning.popleft().block_until_ready()
            # New arrays each time: the device may read them after this returned.
            staged = [np.zeros(x.shape, x.dtype) for x in self._staged]
            for to, source in zip(staged, self._pages, strict=True):
                for row, host_page in rows:
                    to[row] = source[host_page]
            pool, done = program(pool, pages_GS, tuple(staged))
            self._returning.append(done)
        return pool

    def measure(self, out: jax.stages.Compiled, back: jax.stages.Compiled, pool: KVPool) -> tuple[KVPool, float]:
        """(pool, seconds that a page takes to the host and back), from one full call in the first lane, the better of
        two. For warm-up: pages hold zeros, and keep them."""
        copies = [PageCopy(page=1 + i, host_page=i) for i in range(self.shape.num_pages)]
        seconds = math.inf
        for _ in range(2):
            jax.block_until_ready(pool)
            started_s = time.perf_counter()
            self.start_out(out, pool, 0, copies)
            self.finish(0)
            pool = self.bring_back(back, pool, copies)
            jax.block_until_ready(pool)
            seconds = min(seconds, time.perf_counter() - started_s)
        self._filled.clear()
        return pool, seconds / len(copies)

    def _finish_oldest(self) -> None:
        of = self._leaving.popleft()
        for to, leaf in zip(self._pages, of.staged, strict=True):
            staged = np.asarray(leaf)
            for row, host_page in of.rows:
                to[host_page] = staged[row]

    def _groups(self, copies: Sequence[PageCopy]) -> Iterator[tuple[np.ndarray, tuple[tuple[int, int], ...]]]:
        """For each call its pages_GS and (row of the staged arrays, host page)."""
        config, size = self._config, self.shape.num_pages
        lanes = [
            [copy for copy in copies if config.lane_of_page(copy.page) == lane] for lane in range(config.num_lanes)
        ]
        for first in range(0, max((len(of) for of in lanes), default=0), size):
            pages_GS, rows = np.zeros((config.num_lanes, size), np.int32), []
            for lane, of in enumerate(lanes):
                for place, copy in enumerate(of[first : first + size]):
                    pages_GS[lane, place] = copy.page % config.num_pages
                    rows.append((lane * size + place, copy.host_page))
            yield pages_GS, tuple(rows)
