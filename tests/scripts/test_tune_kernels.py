import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from headrace.pallas_kernels import block_sizes
from headrace.pallas_kernels.chips import CHIPS
from headrace.pallas_kernels.grouped_matmul.cases import GroupedCase
from headrace.pallas_kernels.grouped_matmul.tpu import GroupedBlocks
from headrace.pallas_kernels.grouped_matmul.visits import make_visits
from headrace.pallas_kernels.quant_matmul.tpu import QuantBlocks
from headrace.pallas_kernels.types import Kernels, UnsupportedCase
from scripts import tune_kernels
from scripts.tune_kernels import Task
from tests.aot.bundles import Loop

QUANT = next(t for t in tune_kernels.quant_tasks("v6e") if t.name == "llama-3.1-8b up, int4 in 32, 16 rows")
GROUPED = next(t for t in tune_kernels.grouped_tasks() if t.name == "mixtral-8x7b up, 1 token")
V6E = CHIPS["v6e"]
SILENT = Console(quiet=True)


def kernel(outer: int, inner: int) -> Loop:
    return Loop(0, 20, loops=[Loop(1, outer, loops=[Loop(2, inner)])])


def test_trips_of_a_quantized_matmul() -> None:
    assert QUANT.trips(QuantBlocks(rows=16, columns=1024, loop_rows=512)) == (14, 8)


def test_a_step_for_each_busy_expert() -> None:
    """Two experts have a row each, and 14 rows of padding follow."""
    steps, iterations = GROUPED.trips(GroupedBlocks(rows=16, columns=256, loop_rows=512))
    assert (steps, iterations) == (56 * 3, 8)


def test_visits_are_those_that_the_kernel_makes() -> None:
    case = GroupedCase(
        name="",
        num_experts=5,
        contraction=64,
        columns=128,
        group_sizes=(9, 3, 0, 20, 5),
        padding_rows=13,
        group_offset=1,
        local_experts=3,
    )
    sizes = np.array(case.group_sizes, np.int32)
    visits = make_visits(jnp.asarray(sizes), case.group_offset, case.experts_here, case.rows, 8)
    assert tune_kernels.count_visits(case, sizes, 8) == int(visits.count[0])


def test_static_time_is_that_of_the_bundles() -> None:
    blocks = QuantBlocks(rows=16, columns=1024, loop_rows=512)
    first_tile_s = 4096 * 1024 / 2 / 1.64e12
    seconds = tune_kernels.static_seconds(kernel(90, 900), QUANT, blocks, V6E)
    assert seconds == pytest.approx((20 + 14 * 90 + 14 * 8 * 900) / 1.75e9 + first_tile_s)


def test_static_time_is_that_of_the_bytes_where_bundles_are_few() -> None:
    blocks = QuantBlocks(rows=16, columns=1024, loop_rows=512)
    first_tile_s = 4096 * 1024 / 2 / 1.64e12
    seconds = tune_kernels.static_seconds(kernel(9, 9), QUANT, blocks, V6E)
    assert seconds == pytest.approx(QUANT.cost.bytes / 1.64e12 + first_tile_s)


def test_only_what_beats_the_heuristic_is_kept_and_picked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    better = QUANT.candidates[1]

    def rank(task: Task, blocks: object) -> float:
        if blocks == QUANT.candidates[0]:
            raise UnsupportedCase("too large")
        return 0.9 if blocks == better else 1.0

    best = tune_kernels.search([QUANT, GROUPED], rank, SILENT)
    assert list(best) == ["quant_matmul"]
    path = tmp_path / "v6e.json"
    path.write_text('{"quant_matmul": {"other": {}}}')
    tune_kernels.write(path, best)
    tuned = json.loads(path.read_text())
    assert set(tuned["quant_matmul"]) == {"other", QUANT.key}

    monkeypatch.setattr(block_sizes, "tuned", lambda chip: tuned)
    picked = block_sizes.pick(Kernels(chip="v6e"), QuantBlocks, "quant_matmul", QUANT.key, lambda: QUANT.heuristic)
    assert picked == better


def test_every_candidate_is_one_that_the_kernels_take() -> None:
    for task in (*tune_kernels.quant_tasks("v6e"), *tune_kernels.grouped_tasks()):
        for blocks in (task.heuristic, *task.candidates):
            steps, iterations = task.trips(blocks)
            assert steps > 0
            assert iterations * blocks.loop_rows == task.shapes[0].shape[1]


def test_a_chip_without_a_known_clock_is_timed_or_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tune_kernels", "--chip", "tpu7x"])
    assert tune_kernels.main() == 2
    assert "--time" in capsys.readouterr().err
