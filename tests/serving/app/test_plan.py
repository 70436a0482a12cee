"""What ``headrace plan`` compiles, in what process, and what becomes of the answers; nothing is compiled here."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from rich.console import Console

from headrace.model.init import init_weights
from headrace.model.published.configurations import published_config
from headrace.model.specs import WeightScheme
from headrace.pallas_kernels.chips import CHIPS
from headrace.pallas_kernels.types import Implementation, Kernels
from headrace.serving.app import plan as plan_module
from headrace.serving.app.build import EngineOptions
from headrace.serving.app.plan import (
    Compilers,
    PlanRequest,
    check_compilers,
    choose_meshes,
    how_it_ended,
    make_jobs,
    sensible_meshes,
)
from headrace.serving.app.plan_command import run_plan
from headrace.serving.app.plan_front import choices, front
from headrace.serving.app.plan_print import SHOWN_ROWS, plan_json, print_plan
from headrace.serving.app.plan_types import (
    Compiled,
    Exchange,
    ExchangeKind,
    Place,
    Plan,
    PlanAnswer,
    PlanJob,
    PlanRow,
    Point,
    StepCost,
    Workload,
)
from headrace.serving.app.plan_worker import as_served, compiler_says, device_bytes, misfit, weights_text
from headrace.serving.core.errors import ConfigError
from headrace.serving.core.kv_memory import DeviceMemory
from headrace.serving.runner.backend import Backend
from headrace.serving.runner.forms import with_forms
from headrace.serving.runner.weights import weight_shapes
from headrace.sharding.slices import parse_slice
from tests.model.tiny import TINY, write_gguf

LLAMA, QWEN_MOE = published_config("llama-3.1-8b"), published_config("qwen3-30b-a3b")
WORK = Workload(prompt=1024, output=256)
OPTIONS = EngineOptions(model="llama-3.1-8b", context=8192)
MEMORY = DeviceMemory(
    limit_bytes=32 << 30,
    fraction=0.9,
    weights_bytes=4 << 30,
    state_bytes=1 << 20,
    temporary_bytes=20_000_000,
    steps_bytes=1 << 16,
    page_bytes=1 << 21,
)


def cost(seconds: float) -> StepCost:
    exchange = Exchange(
        what=ExchangeKind.SUM,
        axes=("tensor",),
        group="2x2",
        count=65,
        size_bytes=262_144,
        link_bytes=196_608,
        seconds=0.25 * seconds,
    )
    return StepCost(
        weight_bytes=3.75e9,
        kv_bytes=0.6e9,
        flops=62e9,
        exchanges=(exchange,),
        hbm_s=0.75 * seconds,
        products_s=0.1 * seconds,
    )


def row(topology: str, mesh: str, *points: tuple[int, float], data: int = 1, known: int | None = 16_000_000) -> PlanRow:
    of = parse_slice(topology)
    compiled = Compiled(
        memory=MEMORY,
        code_bytes={"decode-16": known, "mixed-16+512": known},
        tokens=820_160,
        layer_kv_bytes=1 << 28,
        seconds=60.0,
        cpu_seconds=50.0,
    )
    made = tuple(
        Point(streams=n, decode=cost(s), mixed=cost(2 * s), token_s=1.2 * s, first_token_s=4 * s) for n, s in points
    )
    return PlanRow(
        topology=topology,
        mesh=mesh,
        chips=of.num_chips,
        devices=of.num_devices,
        data=data,
        compiled=compiled,
        alone=cost(0.003),
        first_token_s=0.006,
        points=made,
    )


def request(*topologies: str, meshes: tuple[str, ...] = (), model: str = "llama-3.1-8b") -> PlanRequest:
    return PlanRequest(model=model, topologies=topologies, meshes=meshes, work=WORK)


def test_all_meshes_of_a_slice_that_the_model_divides_into() -> None:
    assert [str(mesh) for mesh in sensible_meshes(8, LLAMA)] == [
        "tensor=8", "data=2,tensor=4", "data=4,tensor=2", "data=8",
    ]  # fmt: skip
    assert [str(mesh) for mesh in sensible_meshes(4, QWEN_MOE)] == [
        "tensor=4", "expert=2,tensor=2", "expert=4", "data=2,tensor=2", "data=2,expert=2", "data=4",
    ]  # fmt: skip
    assert [str(mesh) for mesh in sensible_meshes(3, LLAMA)] == ["data=3"]
    # 32 heads do not divide by 64, and 8 key heads lie on 16 devices twice.
    assert [mesh.tensor for mesh in sensible_meshes(64, LLAMA)] == [32, 16, 8, 4, 2, 1]


def test_a_mesh_is_planned_where_it_is_the_whole_slice() -> None:
    slices = [parse_slice("v6e:2x2"), parse_slice("v6e:2x4")]
    chosen, left_out = choose_meshes(slices, ["tensor=4", "tensor=4,data=2"], LLAMA)
    assert [(str(of), str(mesh)) for of, mesh in chosen] == [("v6e:2x2", "tensor=4"), ("v6e:2x4", "data=2,tensor=4")]
    assert left_out == [
        "v6e:2x2, data=2,tensor=4: the mesh has 8 devices and the slice 4",
        "v6e:2x4, tensor=4: the mesh has 4 devices and the slice 8",
    ]
    chosen, _ = choose_meshes(slices[:1], ["tensor=4", "auto"], LLAMA)
    assert [str(mesh) for _, mesh in chosen] == ["tensor=4", "data=2,tensor=2", "data=4"]
    chosen, _ = choose_meshes(slices[:1], ["stage=2,tensor=2"], LLAMA)
    assert [str(mesh) for _, mesh in chosen] == ["stage=2,tensor=2"]


def test_a_mesh_is_compiled_once_for_all_slices_of_a_chip() -> None:
    chosen, _ = choose_meshes([parse_slice(name) for name in ("v6e:2x2", "v6e:2x4", "v5e:2x2")], [], LLAMA)
    jobs = make_jobs(request(), OPTIONS, chosen)
    assert [(job.mesh, [(at.topology, at.data) for at in job.places]) for job in jobs] == [
        ("tensor=4", [("v6e:2x2", 1), ("v6e:2x4", 2)]),
        ("tensor=2", [("v6e:2x2", 2), ("v6e:2x4", 4)]),
        ("tensor=1", [("v6e:2x2", 4), ("v6e:2x4", 8)]),
        ("tensor=8", [("v6e:2x4", 1)]),
        ("tensor=4", [("v5e:2x2", 1)]),
        ("tensor=2", [("v5e:2x2", 2)]),
        ("tensor=1", [("v5e:2x2", 4)]),
    ]


def fake_compile(job: PlanJob) -> PlanAnswer:
    """Through the frames of the process that it stands for; a place of two copies does not fit."""
    job = msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=PlanJob)
    rows = []
    for place in job.places:
        mesh = job.mesh if place.data == 1 else f"data={place.data},{job.mesh}"
        made = row(place.topology, mesh, (1, 0.003), (16, 0.004), data=place.data)
        rows.append(made if place.data != 2 else replace(made, points=(), misfit="does not fit: short by 1 GiB"))
    answer = PlanAnswer(rows=tuple(rows), weights="bfloat16", kv_dtype="int8")
    return msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=PlanAnswer)


def run(wanted: PlanRequest, capsys: pytest.CaptureFixture[str], *, as_json: bool) -> str:
    console = Console(stderr=True, width=200)
    assert run_plan(wanted, OPTIONS, console, as_json=as_json, compile_job=fake_compile) == 0
    return capsys.readouterr().out


def test_the_command_prints_rows_in_the_order_of_slices_and_meshes(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(request("v6e:2x4", "v6e:2x2", meshes=("tensor=4", "tensor=4,data=2")), capsys, as_json=False)
    assert out.index("llama-3.1-8b on v6e:2x4, weights bfloat16, KV int8") < out.index("on v6e:2x2")
    assert "data=2,tensor=4: does not fit: short by 1 GiB" in out
    assert "* v6e:2x2 tensor=4" in out
    assert "left out: v6e:2x2, data=2,tensor=4: the mesh has 8 devices and the slice 4" in " ".join(out.split())


def test_the_json_object_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(
        run(request("v6e:2x2", "v6e:2x4", meshes=("tensor=4", "tensor=4,data=2")), capsys, as_json=True)
    )
    assert document["schema"] == "headrace-plan/1"
    assert document.keys() == {
        "schema", "model", "weights", "kv_dtype", "workload", "rows", "left_out", "assumptions", "choices",
    }  # fmt: skip
    fits, misfits = document["rows"]
    assert (fits["topology"], fits["mesh"], fits["misfit"]) == ("v6e:2x2", "tensor=4", None)
    assert misfits["misfit"].startswith("does not fit") and misfits["points"] == []
    point = fits["points"][-1]
    assert point["streams"] == 16 and point["tokens_per_s"] == pytest.approx(16 / 0.0048)
    assert point["tokens_per_s_per_chip"] == pytest.approx(4 / 0.0048)
    assert point["decode"]["seconds"] == pytest.approx(0.004) and point["decode"]["bound"] == "memory"
    assert point["decode"]["exchanges"][0]["axes"] == ["tensor"]
    assert fits["compiled"]["memory"]["weights_bytes"] == 4 << 30
    assert fits["compiled"]["pages"] == MEMORY.num_pages - 1
    assert [choice["is_best"] for choice in document["choices"]] == [True, True]


def test_what_was_refused_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(job: PlanJob) -> PlanAnswer:
        return PlanAnswer(refusal=f"topology {job.places[0].topology!r}: no such slice")

    with pytest.raises(ConfigError, match="no such slice"):
        run_plan(request("v6e:2x2"), OPTIONS, Console(stderr=True), compile_job=refuse)
    with pytest.raises(ConfigError, match=r"nothing to plan: v6e:2x2, tensor=8: the mesh has 8 devices"):
        run_plan(request("v6e:2x2", meshes=("tensor=8",)), OPTIONS, Console(stderr=True), compile_job=refuse)
    with pytest.raises(ConfigError, match="a request of 1280 tokens is longer than the context of 1024"):
        run_plan(request("v6e:2x2"), replace(OPTIONS, context=1024), Console(stderr=True), compile_job=refuse)


JOB = PlanJob(
    model="llama-3.1-8b", options=OPTIONS, mesh="tensor=4", places=(Place(topology="v6e:2x4", data=2),), work=WORK
)


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ("import os, sys; sys.stderr.write('F1130 check failed: tiles\\n'); sys.stderr.flush(); os.abort()",
         "was not compiled: the compiler was ended by SIGABRT: F1130 check failed: tiles"),
        ("raise SystemExit(3)", "was not compiled: the compiler ended with exit code 3"),
        ("import time; time.sleep(60)", "was not compiled: the compiler was stopped after 1 s"),
    ],
)  # fmt: skip
def test_a_compiler_that_dies_ends_its_own_rows(
    ends: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = tmp_path / "python"
    dying.write_text(f"#!{sys.executable}\n{ends}\n")
    dying.chmod(0o755)
    monkeypatch.setattr(plan_module.sys, "executable", str(dying))
    with Compilers(limit_s=1.0 if "sleep" in ends else 60.0) as compilers:
        (lost,) = compilers.compile(JOB).rows
    assert (lost.topology, lost.mesh, lost.misfit) == ("v6e:2x4", "data=2,tensor=4", says)
    assert how_it_ended(-250) == "was ended by signal 250"


def test_weights_of_a_gguf_file_are_planned_as_they_are_served(tmp_path: Path) -> None:
    cfg = replace(TINY, ffn_width=128)
    path = write_gguf(tmp_path / "m.gguf", cfg, init_weights(cfg, 3), GGMLQuantizationType.Q8_0)
    kernels = Kernels(implementation=Implementation.TPU, chip="v6e")
    floats = Backend(device=jax.devices("cpu")[0], kernels=kernels, dtype=np.dtype(jnp.bfloat16))
    served = as_served(floats, str(path))
    assert served == with_forms(floats, path) and "layers.0.down_FD" in served.forms
    assert device_bytes(weight_shapes(cfg, served)) < device_bytes(weight_shapes(cfg, floats))
    assert weights_text(served) == "as the file has them, else bfloat16"
    assert as_served(floats, "llama-3.1-8b") == floats and weights_text(floats) == "bfloat16"
    assert weights_text(replace(floats, weights=WeightScheme.INT4)) == "int4"


def test_a_compiler_that_is_not_installed_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "COMPILERS", {"tpu": ("no_libtpu", "tpu"), "gpu": ("no.cuda", "cuda")})
    with pytest.raises(
        ConfigError, match="--topology v6e:2x2: its compiler, no_libtpu, is not installed; the tpu extra"
    ):
        check_compilers(["v6e:2x2"])
    with pytest.raises(ConfigError, match="the cuda extra of this package brings it"):
        check_compilers(["h100:4"])


def test_what_does_not_fit_says_by_how_much() -> None:
    assert misfit(MEMORY) is None
    says = misfit(replace(MEMORY, weights_bytes=30 << 30))
    assert (
        says == "does not fit: short by 1.22 GiB in weights, which take 30.00 of the 28.80 GiB to be used of a device"
    )
    says = misfit(replace(MEMORY, temporary_bytes=40 << 30))
    assert says is not None and "in temporaries, which take 40.00" in says


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (35.81G) exceeds "
         "available HBM (31.25G).",
         "does not fit: short by 4.56 GiB in temporaries, which take 35.81 of 31.25 GiB"),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 33.25G of 31.25G hbm. Exceeded hbm capacity "
         "by 2.00G.\n\nTotal hbm usage",
         "does not fit: short by 2.00 GiB in a program with its arguments: RESOURCE_EXHAUSTED"),
        ("INTERNAL: Mosaic failed\nmore", "was not compiled: INTERNAL: Mosaic failed"),
    ],
)  # fmt: skip
def test_what_the_compiler_says_of_memory(message: str, says: str) -> None:
    assert compiler_says(message).startswith(says)


def test_the_front() -> None:
    values = [(1.0, 10.0), (2.0, 20.0), (2.0, 15.0), (3.0, 20.0), (4.0, 30.0), (4.0, 30.0), (0.5, 1.0)]
    assert list(front(values)) == [True, True, False, False, True, True, True]
    assert list(front([])) == []


def plan_of(*rows: PlanRow) -> Plan:
    return Plan(model="llama-3.1-8b", weights="int8", kv_dtype="int8", workload=WORK, rows=rows)


def test_choices_are_compared_by_chip_over_all_copies() -> None:
    one = row("v6e:2x2", "tensor=4", (1, 0.002), (16, 0.004))
    two = row("v6e:2x4", "data=2,tensor=4", (1, 0.002), (16, 0.005), data=2)
    half = row("tpu7x:2x2x1", "tensor=8", (4, 0.001))
    found = choices(plan_of(one, two, half))
    assert [(choice.row.topology, choice.streams, choice.is_best) for choice in found] == [
        ("tpu7x:2x2x1", 4, True),
        ("v6e:2x2", 1, False),
        ("v6e:2x4", 2, False),
        ("v6e:2x2", 16, False),
        ("v6e:2x4", 32, False),
    ]
    # Four chips, eight devices.
    assert found[0].tokens_per_s_per_chip == pytest.approx(4 / 0.0012 / 4)
    assert found[2].tokens_per_s_per_chip == pytest.approx(2 / 0.0024 / 8)


def test_a_table_of_a_slice_has_a_column_for_each_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    made = row("h100:4", "data=2,tensor=2", (8, 0.004), data=2, known=None)
    print_plan(plan_of(made), Console(width=120))
    lines = {line[:30].strip(): line[30:].strip() for line in capsys.readouterr().out.splitlines()}
    assert set(SHOWN_ROWS) <= lines.keys()
    assert lines["code"] == "not told"
    assert lines["tokens in them"] == "2 x 820,160" and lines["streams at once"] == "2 x 8"
    assert lines["decode: exchanged"] == "tensor 2x2: 65 x 262 kB"
    assert lines["decode: on each link"] == "12.8 MB"
    assert lines["tokens/s of all streams"] == f"{2 * 8 / 0.0048:,.0f}"
    assert json.loads(plan_json(plan_of(made)))["rows"][0]["compiled"]["code_bytes"]["decode-16"] is None


def test_columns_that_do_not_fit_go_below(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("v6e:2x4", mesh, (8, 0.004)) for mesh in ("tensor=8", "expert=2,tensor=4", "expert=4,tensor=2")]
    print_plan(plan_of(*rows), Console(width=80))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("mesh")]
    assert lines == [["mesh", "tensor=8", "expert=2,tensor=4"], ["mesh", "expert=4,tensor=2"]]


@pytest.mark.parametrize("chip", CHIPS)
def test_a_slice_of_every_chip_has_a_name(chip: str) -> None:
    of = CHIPS[chip]
    assert parse_slice(of.topology or f"{chip}:1").chip == chip
