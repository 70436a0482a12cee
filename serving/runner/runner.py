"""Device arrays, compiled programs and steps in flight: the runner of the step loop."""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from headrace.model.load import LoadedModel
from headrace.model.on_mesh import config_on_mesh
from headrace.serving.core.config import SchedulerConfig
from headrace.serving.core.errors import InvariantError
from headrace.serving.core.plan import Bucket, SlotLoad, SlotRef, StepPlan, StepResult
from headrace.serving.engine.ports import CompiledProgram, ExpertTokens, Progress, Ticket
from headrace.serving.runner.arrays import make_counts, make_pool, make_state, pool_shapes, state_shapes
from headrace.serving.runner.backend import Backend
from headrace.serving.runner.compile_cache import CompileLog
from headrace.serving.runner.expert_counts import ExpertCounts, count_shapes
from headrace.serving.runner.inputs import InputLayout
from headrace.serving.runner.load import PlacedModel, placed
from headrace.serving.runner.programs import load_program, program_name, read_sampled, step_program
from headrace.serving.runner.sampling_state import (
    load_scalars,
    load_with_rows,
    neutral_load,
    pack_load,
)
from headrace.serving.runner.swap import HostPages, swap_programs
from headrace.serving.runner.warmup import Program, compile_programs
from headrace.serving.runner.weights import weight_shapes

_LOAD, _LOAD_ROWS = "load-slot", "load-slot-rows"
_SWAP_OUT, _SWAP_IN = "swap-out", "swap-in"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tenant:
    slot: SlotRef
    min_tokens: int
    num_logprobs: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTicket:
    """A step in flight. rows: of packed, of decode rows and then segments as the plan has them. decode, prefill: wanted
    logprobs."""

    step_id: int
    packed: jax.Array
    rows: tuple[int, ...]
    decode: tuple[int | None, ...]
    prefill: tuple[int | None, ...]
    samples: tuple[bool, ...]


class JaxRunner:
    """Implements ``engine.ports.Runner``. Not thread safe: one thread dispatches and collects.

    Args:
      model: its weights are in the backend's places.
      config: its buckets are the programs; num_pages the pool.
      backend: device, kernels and types.
      before_first_run: called between compiling and running: on several hosts no program may run, since it waits for
        the others and not for long, before all have compiled it.
    """

    def __init__(
        self,
        model: PlacedModel,
        config: SchedulerConfig,
        *,
        backend: Backend = Backend(),
        before_first_run: Callable[[], None] | None = None,
    ) -> None:
        self._model_config = config_on_mesh(model.config, backend.mesh_shape)
        self._config = config
        self._backend = backend
        self._before_first_run = before_first_run
        self._vocab_size = model.config.vocab_size
        self._weights = model.weights
        self._pool = make_pool(self._model_config, config, backend)
        self._state = make_state(self._model_config, config, backend)
        self._counts = make_counts(self._model_config, backend)
        self._host_pages: HostPages | None = None
        self._swap_page_seconds: float | None = None
        if config.num_swap_pages:
            self._host_pages = HostPages(pool_shapes(self._model_config, config, backend), config, backend)
        self._expert_counts = ExpertCounts(count_shapes(self._model_config, backend))
        self._layouts = {bucket: InputLayout(bucket, config, self._vocab_size) for bucket in config.buckets}
        self._programs: dict[str, jax.stages.Compiled] = {}
        self._tenants: dict[int, _Tenant] = {}
        self._in_flight: deque[StepTicket] = deque()
        self._compile_log = CompileLog()
        # JAX keeps its listeners: the log of a runner that is gone would report the compiles of the next one.
        self._stop_log = weakref.finalize(self, self._compile_log.close)

    @classmethod
    def of_host(cls, model: LoadedModel, config: SchedulerConfig, *, backend: Backend = Backend()) -> "JaxRunner":
        """With weights that are on the host, in the backend's type: for tests and measurements."""
        return cls(placed(model, backend), config, backend=backend)

    def warm_up(self, progress: Progress) -> tuple[CompiledProgram, ...]:
        """Compile every program and run each once, on padding. See ``ports.Runner``.

        Raises: ConfigError where the chosen kernels cannot run a program.
        """
        self._programs, ledger = compile_programs(
            self._program_list(),
            self._backend.device,
            self._compile_log,
            progress,
            self._backend.deterministic_options if self._config.deterministic else None,
        )
        if self._before_first_run is not None:
            self._before_first_run()
        neutral = neutral_load(self._config.num_slots, self._vocab_size)
        self._state = self._programs[_LOAD](self._state, neutral.scalars)
        self._state = self._programs[_LOAD_ROWS](self._state, neutral.scalars, *neutral.rows)
        for bucket, layout in self._layouts.items():
            jax.block_until_ready(self._run(bucket, layout.empty()))
        if self._host_pages is not None:
            self._pool, self._swap_page_seconds = self._host_pages.measure(
                self._programs[_SWAP_OUT], self._programs[_SWAP_IN], self._pool
            )
        self._compile_log.mark_ready()
        return ledger

    def dispatch(self, plan: StepPlan) -> StepTicket:
        """See ``ports.Runner``. Raises: InvariantError before anything ran, if the plan does not fit."""
        if len(self._in_flight) >= self._config.max_steps_in_flight:
            raise InvariantError(f"step {plan.step_id}: {len(self._in_flight)} steps are in flight already")
        layout = self._layouts.get(plan.bucket)
        if layout is None or not self._programs:
            raise InvariantError(f"step {plan.step_id}: no program {program_name(plan.bucket)}; warm_up compiles them")
        tenants = self._tenants | {load.slot.slot: _tenant(load) for load in plan.loads}
        for row in (*plan.decode, *plan.prefill):
            tenant = tenants.get(row.slot.slot)
            if tenant is None or tenant.slot != row.slot:
                raise InvariantError(f"step {plan.step_id}: {row.slot} was not loaded")
        self._check_swap(plan)
        packed = layout.pack(plan, {slot: tenant.min_tokens for slot, tenant in tenants.items()})
        config = self._config
        loads = [pack_load(load, config.num_slots, self._vocab_size, config.num_lanes) for load in plan.loads]
        self._tenants = tenants
        self._swap(plan)
        for load in loads:
            if load.rows is None:
                self._state = self._programs[_LOAD](self._state, load.scalars)
            else:
                self._state = self._programs[_LOAD_ROWS](self._state, load.scalars, *load.rows)
        result = self._run(plan.bucket, packed.array)
        result.copy_to_host_async()
        ticket = StepTicket(
            step_id=plan.step_id,
            packed=result,
            rows=packed.rows,
            decode=tuple(tenants[row.slot.slot].num_logprobs for row in plan.decode),
            prefill=tuple(tenants[segment.slot.slot].num_logprobs for segment in plan.prefill),
            samples=tuple(segment.samples for segment in plan.prefill),
        )
        self._in_flight.append(ticket)
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        """See ``ports.Runner``. Raises: InvariantError if it is not the oldest ticket."""
        if not self._in_flight or self._in_flight[0] is not ticket:
            raise InvariantError(f"step {ticket.step_id} is not the oldest in flight")
        oldest = self._in_flight.popleft()
        if self._host_pages is not None:
            self._host_pages.finish(oldest.step_id)
        rows = np.asarray(oldest.packed)[list(oldest.rows)]
        num_decode = len(oldest.decode)
        decode = tuple(
            read_sampled(row, wanted, self._vocab_size)
            for row, wanted in zip(rows[:num_decode], oldest.decode, strict=True)
        )
        prefill = tuple(
            read_sampled(row, wanted, self._vocab_size) if samples else None
            for row, wanted, samples in zip(rows[num_decode:], oldest.prefill, oldest.samples, strict=True)
        )
        return StepResult(step_id=oldest.step_id, decode=decode, prefill=prefill)

    @property
    def swap_page_seconds(self) -> float | None:
        """What a page takes to host memory and back, as warm-up measured it; None without swap space."""
        return self._swap_page_seconds

    def expert_tokens(self) -> ExpertTokens | None:
        """See ``ports.Runner``."""
        return self._expert_counts.read(self._counts)

    def compiles_after_ready(self) -> int:
        """See ``ports.Runner``."""
        return len(self._compile_log.after_ready)

    def close(self) -> None:
        """Stop counting compilations; device memory goes with the object."""
        self._stop_log()

    def poison_pages(self, page_ids: Sequence[int]) -> None:
        """Tests only: overwrite pages of all layers with NaN, so that a read of one shows in every result.

        Integer pages get their largest value, and NaN factors as all 8-bit pages do.
        """
        config, layers = self._config, self._model_config.num_layers

        def poisoned(array: jax.Array) -> jax.Array:
            host = np.array(array)
            # All bits set is NaN in every narrow float.
            poison = np.iinfo(host.dtype).max if np.issubdtype(host.dtype, np.integer) else np.nan
            # Lanes, then layers of all stages, then pages; a page's number counts through the lanes.
            rows = host.reshape(config.num_lanes, layers, config.num_pages, -1)
            for page in page_ids:
                rows[config.lane_of_page(page), :, page % config.num_pages] = poison
            return jax.device_put(host, array.sharding)

        self._pool = jax.tree.map(poisoned, self._pool)

    def _check_swap(self, plan: StepPlan) -> None:
        if self._host_pages is not None:
            self._host_pages.check(plan)
        elif plan.swap_out or plan.swap_in:
            raise InvariantError(f"step {plan.step_id}: pages are to be swapped, and num_swap_pages is 0")

    def _swap(self, plan: StepPlan) -> None:
        """First out, then in: a page that leaves may be taken by one that comes back."""
        if self._host_pages is not None:
            out, back = self._programs[_SWAP_OUT], self._programs[_SWAP_IN]
            self._host_pages.start_out(out, self._pool, plan.step_id, plan.swap_out)
            self._pool = self._host_pages.bring_back(back, self._pool, plan.swap_in)

    def _run(self, bucket: Bucket, packed: np.ndarray) -> jax.Array:
        program = self._programs[program_name(bucket)]
        self._pool, self._state, self._counts, result = program(
            self._weights, self._pool, self._state, self._counts, packed
        )
        return result

    def _program_list(self) -> dict[str, Program]:
        cfg, config, backend = self._model_config, self._config, self._backend
        weights, pool = weight_shapes(cfg, backend), pool_shapes(cfg, config, backend)
        state = state_shapes(cfg, config, backend)
        programs = {
            program_name(bucket): step_program(cfg, layout, backend, weights, pool, state)
            for bucket, layout in self._layouts.items()
        }
        loads = neutral_load(config.num_slots, self._vocab_size)
        whole = backend.sharding()
        scalars, *rows = (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in (loads.scalars, *(loads.rows or ()))
        )
        programs[_LOAD] = load_program(load_scalars, backend, (state, scalars))
        programs[_LOAD_ROWS] = load_program(load_with_rows, backend, (state, scalars, *rows))
        if config.num_swap_pages:
            programs[_SWAP_OUT], programs[_SWAP_IN] = swap_programs(pool, config, backend)
        return programs


def _tenant(load: SlotLoad) -> _Tenant:
    return _Tenant(
        slot=load.slot,
        min_tokens=load.request.stop.min_tokens,
        num_logprobs=load.request.sampling.num_logprobs,
    )
