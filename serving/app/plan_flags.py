"""The flags of ``headrace plan``. JAX-free, and light to import."""

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from headrace.serving.app.build import DEFAULT_MEMORY_FRACTION, DTYPES, KV_DTYPES, WEIGHTS, EngineOptions
from headrace.serving.app.help_sections import SectionCommand, section

compute = section("Compute")
memory = section("Memory and steps")
output = section("Output")


@click.command(cls=SectionCommand)
@click.argument("model_source", metavar="MODEL")
@compute(
    "--topology",
    "topologies",
    required=True,
    multiple=True,
    help="Slice to compile for, such as v5e:4x4, v5p:2x2x1, v6e:2x4, tpu7x:2x2x1, h100:4; may be given several times.",
)
@compute(
    "--mesh",
    "meshes",
    multiple=True,
    help="As for serve, such as tensor=4; may be given several times.  [default: auto, all that fit the slice]",
)
@compute("--dtype", type=click.Choice(DTYPES), default="auto", help="Type of weights and products; auto: bfloat16.")
@compute("--weights", type=click.Choice(WEIGHTS), default="native", help="As for serve; native: as a file has them.")
@compute("--kv-dtype", "--kv", type=click.Choice(KV_DTYPES), default="auto", help="Type of stored keys and values.")
@memory("--context", type=int, default=8192, help="Most tokens of a request.")
@memory("--max-streams", type=int, default=64, help="Requests that generate at the same time, on each copy.")
@memory("--chunk-tokens", type=int, default=512, help="Most prompt tokens of one step.")
@memory(
    "--memory-fraction",
    type=click.FloatRange(0, 1, min_open=True),
    default=DEFAULT_MEMORY_FRACTION,
    help="Share of HBM.",
)
@memory("--workload", default="1024:256", metavar="IN:OUT", help="Tokens of a prompt and of its answer.")
@output("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Picture to write: .svg, .png or .pdf.")
@output("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@output("--keep-hlo", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder for the programs.")
def plan(model_source: str, as_json: bool, plot: Path | None, **flags: Any) -> int:
    """Say whether MODEL fits on a slice of accelerators and what bounds it, without them.

    MODEL is a published name (llama-3.1-8b, llama-3.1-70b, qwen3-8b, qwen3-32b, qwen3-30b-a3b, mixtral-8x7b,
    gpt-oss-20b, gpt-oss-120b), a .gguf file or a directory with a config.json, of which weights are not needed. The
    programs that would be served are compiled by the accelerator's own compiler, which comes with the tpu or the cuda
    extra of this package.
    """
    from headrace.serving.app.plan import PlanRequest
    from headrace.serving.app.plan_command import parse_workload, run_plan

    wanted = PlanRequest(
        model=model_source,
        topologies=flags["topologies"],
        meshes=flags["meshes"],
        work=parse_workload(flags["workload"]),
        keep_hlo=flags["keep_hlo"],
    )
    options = EngineOptions(
        model=model_source,
        dtype=flags["dtype"],
        weights=flags["weights"],
        kv_dtype=flags["kv_dtype"],
        context=flags["context"],
        num_slots=flags["max_streams"],
        chunk_tokens=flags["chunk_tokens"],
        memory_fraction=flags["memory_fraction"],
    )
    return run_plan(wanted, options, Console(stderr=True), as_json=as_json, plot=plot)
