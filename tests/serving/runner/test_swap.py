"""Pages to host memory and back, without a model: every type of page, and lanes, stages and heads on a mesh."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headrace.model.on_mesh import config_on_mesh
from headrace.pallas_kernels.types import KVPool
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.errors import InvariantError
from headrace.serving.core.plan import PageCopy, StepPlan
from headrace.serving.runner import swap
from headrace.serving.runner.arrays import pool_shapes
from headrace.serving.runner.backend import Backend, find_mesh
from headrace.serving.runner.swap import HostPages, swap_programs
from headrace.sharding.mesh_shape import parse_mesh
from tests.model.tiny import TINY
from tests.serving.runner.plans import CONFIG, DECODE, plan

CPU = jax.devices("cpu")[0]
PAGES, HOST_PAGES = 30, 21
MODEL = replace(TINY, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8)


@dataclass(frozen=True, slots=True)
class Case:
    kv_dtype: str
    mesh: str = "tensor=1"
    as_bits: bool = False


CASES = (
    Case("float32"),
    Case("int8"),
    Case("bfloat16", as_bits=True),
    Case("float8_e4m3fn", "tensor=2", as_bits=True),
    Case("int8", "data=2,stage=2,tensor=2"),
)


class World:
    """A pool of random bits, its programs and its host pages."""

    def __init__(self, case: Case, num_pages: int = PAGES) -> None:
        shape = parse_mesh(case.mesh)
        self.backend = Backend(
            device=CPU,
            mesh=find_mesh(CPU, shape),
            kv_dtype=np.dtype(jnp.dtype(case.kv_dtype)),
            kv_as_bits=case.as_bits,
        )
        self.config = replace(CONFIG, num_pages=num_pages, num_swap_pages=HOST_PAGES, num_lanes=shape.data)
        cfg = config_on_mesh(MODEL, shape)
        shapes = pool_shapes(cfg, self.config, self.backend)
        self.layers = cfg.num_layers
        programs = swap_programs(shapes, self.config, self.backend)
        self.out, self.back = (program.compile(CPU) for program in programs)
        self.host = HostPages(shapes, self.config, self.backend)
        rng = np.random.default_rng(7)

        def random(x: Any) -> jax.Array:
            bits = rng.integers(0, 256, (*x.shape, x.dtype.itemsize), np.uint8)
            return jax.device_put(bits.view(x.dtype)[..., 0], x.sharding)

        self.pool: KVPool = jax.tree.map(random, shapes)

    def rows(self) -> list[np.ndarray]:
        """[lanes, layers, pages, bytes] of each array."""
        shape = (self.config.num_lanes, self.layers, PAGES, -1)
        return [np.array(x).view(np.uint8).reshape(shape) for x in jax.tree.leaves(self.pool)]

    def poison(self) -> None:
        """All bits of all pages, by a program like a step: the pool is donated to it."""
        spoil = jax.jit(lambda pool: jax.tree.map(lambda x: jnp.full_like(x, 77), pool), donate_argnums=0)
        self.pool = spoil(self.pool)

    def swap_out(self, step_id: int, copies: list[PageCopy]) -> None:
        self.host.start_out(self.out, self.pool, step_id, copies)

    def swap_in(self, copies: list[PageCopy]) -> None:
        self.pool = self.host.bring_back(self.back, self.pool, copies)

    def page(self, index: int, lane: int) -> int:
        return lane * PAGES + index


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pages_come_back_bit_for_bit_at_other_places(case: Case) -> None:
    world = World(case)
    before, lanes = world.rows(), range(world.config.num_lanes)
    # More than a call takes, and not as many in each lane.
    moved = [
        (lane, 2 + 2 * i, lane * HOST_PAGES + (5 * i) % HOST_PAGES) for lane in lanes for i in range(13 - 4 * lane)
    ]
    world.swap_out(1, [PageCopy(world.page(page, lane), host) for lane, page, host in moved])
    world.poison()
    poisoned = world.rows()
    world.swap_in([PageCopy(world.page(page - 1, lane), host) for lane, page, host in moved])
    after = world.rows()
    changed = {(lane, page - 1): page for lane, page, _ in moved}
    for old, spoiled, new in zip(before, poisoned, after, strict=True):
        for lane in lanes:
            for page in range(PAGES):
                source = changed.get((lane, page))
                expected = spoiled[lane, :, page] if source is None else old[lane, :, source]
                np.testing.assert_array_equal(new[lane, :, page], expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_program_copies_the_pool(case: Case) -> None:
    world = World(case, num_pages=500)
    devices = 1 if world.backend.mesh is None else world.backend.mesh.size
    pool_bytes = sum(x.nbytes for x in jax.tree.leaves(world.pool)) // devices
    assert world.back.memory_analysis().alias_size_in_bytes == pool_bytes
    assert world.back.memory_analysis().temp_size_in_bytes < pool_bytes / 10
    staged = world.host.shape.num_pages * world.host.shape.page_bytes * world.config.num_lanes // devices
    assert world.out.memory_analysis().temp_size_in_bytes <= 2 * staged


def test_steps_that_are_not_collected_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "STAGED_BYTES", 1)  # one call on its way, in each direction
    world = World(Case("float32"))
    before = world.rows()[0]
    copies = [PageCopy(1 + i, i) for i in range(HOST_PAGES)]
    world.swap_out(1, copies)
    world.poison()
    world.swap_in(copies)
    np.testing.assert_array_equal(world.rows()[0][:, :, 1 : 1 + HOST_PAGES], before[:, :, 1 : 1 + HOST_PAGES])


def test_a_host_page_may_go_to_another_lane() -> None:
    world = World(Case("float32", "data=2"))
    before = world.rows()[0]
    world.swap_out(1, [PageCopy(world.page(3, 0), 5)])
    world.host.finish(1)
    world.swap_in([PageCopy(world.page(4, 1), 5)])
    np.testing.assert_array_equal(world.rows()[0][1, :, 4], before[0, :, 3])


def test_what_a_page_takes_is_measured_and_leaves_nothing_behind() -> None:
    world = World(Case("int8"))
    before = world.rows()
    world.pool, seconds = world.host.measure(world.out, world.back, world.pool)
    assert 0 < seconds < 1
    for old, new in zip(before, world.rows(), strict=True):
        np.testing.assert_array_equal(old, new)
    with pytest.raises(InvariantError, match="host page 0 was never written"):
        world.host.check(step(swap_in=(PageCopy(1, 0),)))


def step(**parts: tuple[PageCopy, ...]) -> StepPlan:
    return replace(plan(1, DECODE), **parts)


@pytest.mark.parametrize(
    ("why", "parts"),
    [
        ("out of range", {"swap_out": (PageCopy(0, 1),)}),
        ("out of range", {"swap_out": (PageCopy(PAGES, 1),)}),
        ("out of range", {"swap_out": (PageCopy(2 * PAGES, 1),)}),
        ("out of range", {"swap_out": (PageCopy(-1, 1),)}),
        ("out of range", {"swap_out": (PageCopy(1, 2 * HOST_PAGES),)}),
        ("out of range", {"swap_in": (PageCopy(1, -1),)}),
        ("two copies go to one page", {"swap_out": (PageCopy(1, 1), PageCopy(2, 1))}),
        ("two copies go to one page", {"swap_in": (PageCopy(1, 1), PageCopy(1, 2))}),
        ("written and read at once", {"swap_out": (PageCopy(1, 1),), "swap_in": (PageCopy(2, 1),)}),
        ("never written", {"swap_in": (PageCopy(2, 1),)}),
    ],
)
def test_copies_that_do_not_fit_are_refused(why: str, parts: dict[str, tuple[PageCopy, ...]]) -> None:
    config: SchedulerConfig = replace(CONFIG, num_pages=PAGES, num_swap_pages=HOST_PAGES, num_lanes=2)
    backend = Backend(device=CPU, mesh=find_mesh(CPU, parse_mesh("data=2")))
    host = HostPages(pool_shapes(MODEL, config, backend), config, backend)
    with pytest.raises(InvariantError, match=why):
        host.check(step(**parts))
