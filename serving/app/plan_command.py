"""The command ``headrace plan``: checks that need no JAX, then the compiler's variables, then the plan."""

import importlib.util
import os
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from headrace.model.config_files import read_config
from headrace.model.published.configurations import PUBLISHED, published_config
from headrace.serving.app.build import EngineOptions
from headrace.serving.app.console import ProgressDisplay
from headrace.serving.core.errors import ConfigError
from headrace.sharding.errors import MeshError
from headrace.sharding.mesh_shape import parse_mesh

COMPILER_VARIABLES = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
"""What libtpu reads when it is loaded: compile here, and ask no metadata server for a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the flags said."""

    model: str
    topology: str
    meshes: tuple[str, ...]
    workload: str
    as_json: bool


def run_plan(wanted: PlanRequest, options: EngineOptions, console: Console) -> int:
    """Exit code 0. The table or the JSON object goes to standard output. Raises: ConfigError, ModelFileError."""
    prompt, colon, output = wanted.workload.partition(":")
    if not (colon and prompt.isascii() and prompt.isdigit() and output.isascii() and output.isdigit()):
        raise ConfigError(f"--workload {wanted.workload!r} is not IN:OUT, such as 1024:256")
    if not (int(prompt) and int(output)):
        raise ConfigError(f"--workload {wanted.workload}: both numbers must be at least 1")
    try:
        for mesh in wanted.meshes:
            parse_mesh(mesh)
    except MeshError as error:
        raise ConfigError(f"--mesh: {error}") from error
    if wanted.model not in PUBLISHED and not Path(wanted.model).exists():
        known = ", ".join(PUBLISHED)
        raise ConfigError(f"{wanted.model!r} is neither a file or directory nor a published name; known: {known}")
    config = published_config(wanted.model) if wanted.model in PUBLISHED else read_config(wanted.model)
    options = replace(options, context=min(options.context or config.max_context, config.max_context))
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("the TPU's compiler, libtpu, is not installed; the tpu extra of this package brings it")
    os.environ |= COMPILER_VARIABLES
    # JAX starts here.
    from headrace.serving.app.plan import Workload, make_plan, plan_json, print_plan

    work = Workload(prompt=int(prompt), output=int(output))
    with ProgressDisplay(console) as display:
        plan = make_plan(wanted.model, config, options, wanted.topology, wanted.meshes, work, display.update)
    if wanted.as_json:
        print(plan_json(plan))
    else:
        print_plan(plan, Console())
    return 0
