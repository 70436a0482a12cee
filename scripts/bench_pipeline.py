"""How well micro-batches fill the stages of a pipeline: measured utilization against M / (M + S - 1).

Every device computes with one thread, so stages need as many free cores. The work of a micro-batch is the step time of
its rows on one device, all layers; utilization is M times that, over S devices times the step time of all rows on S
stages.
Both are measured in turns in one process; the ratio is the median of pairs. Random weights, no prompt: a decode step.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from headrace.model.config import ModelConfig
from scripts import evidence

MODEL = ModelConfig(
    family="llama", vocab_size=1024, num_layers=8, width=1024, ffn_width=4096, num_heads=16, num_kv_heads=4,
    head_dim=64, max_context=1024, rope_theta=10000.0, rms_norm_eps=1e-5, tied_embeddings=True, bos_id=None,
    eos_ids=(2,),
)  # fmt: skip
ROWS, CONTEXT, PAGE = 8, 256, 16
"""ROWS: of a micro-batch."""


def step_of(stages: int, rows: int) -> Callable[[], Any]:
    """Compile a decode step of rows and return what runs it once."""
    import jax

    from headrace.model.on_mesh import config_on_mesh
    from headrace.serving.core.config import SchedulerConfig
    from headrace.serving.runner.arrays import make_pool, make_state, pool_shapes, state_shapes
    from headrace.serving.runner.backend import Backend, find_mesh
    from headrace.serving.runner.inputs import InputLayout
    from headrace.serving.runner.programs import step_program
    from headrace.serving.runner.weights import weight_shapes
    from headrace.sharding.mesh_shape import MeshShape

    pages = -(-CONTEXT // PAGE)
    config = SchedulerConfig(
        num_slots=rows, page_size=PAGE, num_pages=1 + rows * pages, max_context=CONTEXT, chunk_tokens=PAGE,
        block_tokens=PAGE, decode_rows=(rows,), prefill_tokens=(PAGE,),
    )  # fmt: skip
    device, shape = jax.devices()[0], MeshShape(stage=stages)
    backend = Backend(device=device, mesh=find_mesh(device, shape))
    cfg = config_on_mesh(MODEL, shape)
    layout = InputLayout(config.buckets[0], config, cfg.vocab_size)
    shapes = weight_shapes(cfg, backend)
    arrays = pool_shapes(cfg, config, backend), state_shapes(cfg, config, backend)
    program = step_program(cfg, layout, backend, shapes, *arrays).compile(device)
    rng = np.random.default_rng(0)
    weights = jax.tree.map(
        lambda x: jax.device_put(0.02 * rng.standard_normal(x.shape, np.float32), x.sharding), shapes
    )
    kept = [make_pool(cfg, config, backend), make_state(cfg, config, backend)]
    packed = layout.empty()
    fields = layout.unpack(packed[0])
    fields.kv_len_Z[:] = CONTEXT
    fields.slot_Z[:] = np.arange(rows)
    fields.page_table_ZM[:] = 1 + np.arange(rows * pages).reshape(rows, pages)

    def run() -> None:
        *kept[:], _, result = program(weights, *kept, None, packed)
        result.block_until_ready()

    run()
    return run


def seconds(run: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def measure(stages: int, micro_batches: int, repeats: int) -> dict[str, float]:
    # An odd number of rows cannot be shared out, so it is one micro-batch.
    rows = ROWS * micro_batches if micro_batches > 1 else ROWS + 1
    alone, piped = step_of(1, rows // micro_batches), step_of(stages, rows)
    pairs = [(seconds(alone), seconds(piped)) for _ in range(repeats)]
    shares = [micro_batches * one / (stages * whole) for one, whole in pairs]
    low, middle, high = statistics.quantiles(shares, n=4)
    return {
        "stages": stages,
        "micro_batches": micro_batches,
        "step_ms": 1e3 * statistics.median(whole for _, whole in pairs),
        "alone_ms": 1e3 * statistics.median(one for one, _ in pairs),
        "utilization": middle,
        "quartiles": [low, high],
        "ideal": micro_batches / (micro_batches + stages - 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    # Before JAX starts: one thread for each device, so that stages do not share out a core's work.
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.stages)
    rows = [measure(args.stages, count, args.repeats) for count in sorted({1, args.stages})]
    return evidence.write(args.out, True, model=repr(MODEL), rows_each=ROWS, context=CONTEXT, rows=rows)


if __name__ == "__main__":
    raise SystemExit(main())
