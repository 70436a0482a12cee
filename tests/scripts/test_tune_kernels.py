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
from scripts.tune_kernels import Product, Task
from tests.aot.bundles import UNITS, Loop

V6E = CHIPS["v6e"]
TASKS = {task.name: task for task in tune_kernels.tasks_of(V6E)}
QUANT = TASKS["llama-3.1-8b up, int4 in 32, 16 rows"]
GROUPED = TASKS["mixtral-8x7b up, 1 token"]
DECODE = TASKS["v6e decode int8 D128 K8 W128"]
SILENT = Console(quiet=True)


def kernel(outer: int, inner: int) -> Loop:
    return Loop(0, 20, loops=[Loop(1, outer, loops=[Loop(2, inner)])])


def product_of(task: Task) -> Product:
    product = getattr(task.static_s, "__self__", None)
    assert isinstance(product, Product)
    return product


def test_trips_of_a_quantized_matmul() -> None:
    assert product_of(QUANT).trips(QuantBlocks(rows=16, columns=1024, loop_rows=512)) == (14, 8)


def test_a_step_for_each_busy_expert() -> None:
    """Two experts have a row each, and 14 rows of padding follow."""
    steps, iterations = product_of(GROUPED).trips(GroupedBlocks(rows=16, columns=256, loop_rows=512))
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
    seconds = QUANT.static_s(kernel(90, 900), blocks)
    assert seconds == pytest.approx((20 + 14 * 90 + 14 * 8 * 900) / 1.75e9 + first_tile_s)


def test_static_time_is_that_of_the_bytes_where_bundles_are_few() -> None:
    blocks = QuantBlocks(rows=16, columns=1024, loop_rows=512)
    first_tile_s = 4096 * 1024 / 2 / 1.64e12
    seconds = QUANT.static_s(kernel(9, 9), blocks)
    assert seconds == pytest.approx(product_of(QUANT).cost.bytes / 1.64e12 + first_tile_s)


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
    for task in (*tune_kernels.quant_tasks(V6E), *tune_kernels.grouped_tasks(V6E)):
        product = product_of(task)
        for blocks in (task.heuristic, *task.candidates):
            steps, iterations = product.trips(blocks)
            assert steps > 0
            assert iterations * blocks.loop_rows == product.shapes[0].shape[1]


def test_decode_has_the_time_of_its_bundles_or_of_its_bytes() -> None:
    """Twice the bundles of a key block: 64 sequences, 16 to 2,032 tokens long, have 160 blocks of 512."""
    block_pages = DECODE.heuristic.block_pages
    assert block_pages * 128 == 512
    few, many, more = (
        DECODE.static_s(Loop(0, 20, loops=[Loop(1, 100, loops=[Loop(2, bundles)])]), DECODE.heuristic)
        for bundles in (150, 20_000, 40_000)
    )
    assert many - few > 0
    assert more - many == pytest.approx(160 * 20_000 / 1.75e9, rel=1e-3)
    assert few == pytest.approx(96e-6, rel=0.01)


def test_some_blocks_of_every_decode_task_are_taken() -> None:
    tasks = list(tune_kernels.decode_tasks(V6E))
    assert {task.key for task in tasks} >= {DECODE.key}
    for task in tasks:
        built = task.built(tune_kernels.kernels_with(task.heuristic, V6E))
        assert built.donated_bytes > 0
        assert all(blocks.block_pages >= 1 for blocks in task.candidates)
        assert len(set(task.candidates)) == len(task.candidates) > 1


def test_what_spills_is_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernel(9, 9)
    monkeypatch.setattr(tune_kernels.aot, "compile_for", lambda chip, built: None)
    monkeypatch.setattr(tune_kernels, "read_dump", lambda dump, names: dict.fromkeys(names, found))
    assert tune_kernels.rank_static(QUANT, QUANT.heuristic, V6E, tmp_path) > 0
    found.uses[UNITS.index("SPILL")] = 2
    with pytest.raises(UnsupportedCase, match="2 spills"):
        tune_kernels.rank_static(QUANT, QUANT.heuristic, V6E, tmp_path)


def test_a_chip_without_a_known_clock_is_timed_or_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tune_kernels", "--chip", "tpu7x"])
    assert tune_kernels.main() == 2
    assert "--time" in capsys.readouterr().err
