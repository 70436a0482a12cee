"""The command ``headrace plan``: what the flags say, checked before a compiler is started; then the plan. JAX-free."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from headrace.model.config_files import read_config
from headrace.model.published.configurations import PUBLISHED, published_config
from headrace.serving.app.build import EngineOptions
from headrace.serving.app.console import ProgressDisplay
from headrace.serving.app.plan import AUTO, Compile, Compilers, PlanRequest, check_compilers, make_plan
from headrace.serving.app.plan_front import choices
from headrace.serving.app.plan_plot import check_plot, save_plot
from headrace.serving.app.plan_print import plan_json, print_plan
from headrace.serving.app.plan_types import Workload
from headrace.serving.core.errors import ConfigError
from headrace.sharding.errors import MeshError
from headrace.sharding.mesh_shape import parse_mesh


def parse_workload(text: str) -> Workload:
    """Of ``IN:OUT``. Raises: ConfigError naming --workload."""
    prompt, colon, output = text.partition(":")
    if not (colon and prompt.isascii() and prompt.isdigit() and output.isascii() and output.isdigit()):
        raise ConfigError(f"--workload {text!r} is not IN:OUT, such as 1024:256")
    if not (int(prompt) and int(output)):
        raise ConfigError(f"--workload {text}: both numbers must be at least 1")
    return Workload(prompt=int(prompt), output=int(output))


def run_plan(
    wanted: PlanRequest,
    options: EngineOptions,
    console: Console,
    *,
    as_json: bool = False,
    plot: Path | None = None,
    compile_job: Compile | None = None,
) -> int:
    """Exit code 0. The table or the JSON object goes to standard output. compile_job: tests only; None compiles.

    Raises: ConfigError, ModelFileError.
    """
    try:
        for mesh in wanted.meshes:
            if mesh != AUTO:
                parse_mesh(mesh)
    except MeshError as error:
        raise ConfigError(f"--mesh: {error}") from error
    if wanted.model not in PUBLISHED and not Path(wanted.model).exists():
        known = ", ".join(PUBLISHED)
        raise ConfigError(f"{wanted.model!r} is neither a file or directory nor a published name; known: {known}")
    if plot is not None:
        check_plot(plot)
    config = published_config(wanted.model) if wanted.model in PUBLISHED else read_config(wanted.model)
    most = wanted.work.prompt + wanted.work.output
    context = min(options.context or config.max_context, config.max_context)
    if most > context:
        raise ConfigError(f"--workload: a request of {most} tokens is longer than the context of {context}")
    options = replace(options, context=context)
    if compile_job is None:
        check_compilers(wanted.topologies)
    with Compilers() as compilers, ProgressDisplay(console) as display:
        plan = make_plan(wanted, config, options, display.update, compile_job or compilers.compile)
    if as_json:
        print(plan_json(plan))
    else:
        print_plan(plan, Console())
    if plot is not None:
        save_plot(f"{plan.model}, {plan.workload.prompt} + {plan.workload.output} tokens", choices(plan), plot)
    return 0
