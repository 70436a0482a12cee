"""The commands ``headrace simulate`` and ``headrace cost-model``."""

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from headrace.serving.app.help_sections import SectionCommand, section
from headrace.serving.core.errors import ConfigError

MAX_REPLICAS = 256
MAX_JSON_BYTES = 256 << 20
MAX_PAGES = 10_000_000
COUNT = click.IntRange(1, 1_000_000_000)

A_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)

traffic = section("Traffic")
server = section("Server")
output = section("Output")


@click.command("cost-model")
@click.argument("journal", type=A_FILE)
@click.option("-o", "--output", "target", type=NEW_FILE, required=True, help="File to write.")
@click.option(
    "--bench",
    type=A_FILE,
    help="JSON of headrace bench against the same server: what clients waited beyond the engine's own times.",
)
def cost_model(journal: Path, target: Path, bench: Path | None) -> int:
    """Fit how long steps take to JOURNAL, which headrace serve --journal wrote under load.

    The file that -o names is for headrace simulate. Each program gets a constant and a factor for rows, prompt tokens
    and context; what is left over is kept as a spread.
    """
    from headrace.serving.app.cost_model_fit import fit_cost_model
    from headrace.serving.app.simulate_report import check_files, write_text

    check_files(output=target)
    cost = fit_cost_model(journal, None if bench is None else outside_ms(bench))
    write_text("output", target, json.dumps(cost.as_json(), indent=1) + "\n")
    console = Console()
    for name, program in cost.programs.items():
        low, high = program.spread[len(program.spread) // 20], program.spread[-1 - len(program.spread) // 20]
        console.print(
            f"{name}: {1e3 * program.base_s:.3f} ms + {1e6 * program.row_s:.1f} us a row + {1e6 * program.token_s:.1f} "
            f"us a prompt token + {1e9 * program.context_s:.1f} ns a position; {program.num_steps:,} steps, 90% of "
            f"them at {low:.2f} to {high:.2f} of that",
            highlight=False,
        )
    return 0


@click.command(cls=SectionCommand)
@traffic("--workload", type=A_FILE, required=True, help="JSON lines, as headrace make-workload writes them.")
@traffic("--slo", help="Such as ttft=1s,itl=250ms: what a good answer is, as for headrace bench.")
@traffic("--tokens-per-word", type=click.FloatRange(0.1, 100), default=1.0, help="Of prompts that are text.")
@server("--cost-model", "cost_file", type=A_FILE, required=True, help="Measured step times, by headrace cost-model.")
@server("--replicas", type=click.IntRange(1, MAX_REPLICAS), default=1, help="Servers behind a router.")
@server("--tenants", type=A_FILE, help="As for serve: weights, priorities, budgets and rates.")
@server(
    "--max-streams",
    "num_slots",
    type=click.IntRange(1, 65_536),
    help="As for serve.  [default: as measured, also below]",
)
@server("--pages", "num_pages", type=click.IntRange(2, MAX_PAGES), help="Pages of KV memory of each copy of the model.")
@server("--chunk-tokens", type=click.IntRange(1, 1 << 20), help="Most prompt tokens of one step.")
@server("--context", "max_context", type=click.IntRange(2, 1 << 24), help="Most tokens of a request.")
@server("--max-queued", "max_queued_requests", type=COUNT, help="Requests that may wait.")
@server("--max-queued-tokens", "max_queued_prompt_tokens", type=COUNT, help="Prompt tokens that may wait.")
@server("--prefix-cache/--no-prefix-cache", default=None, help="Reuse the KV of prompts seen before.")
@server("--inter-token-ms", type=click.FloatRange(0, min_open=True), help="Objective for the gap between tokens.")
@server("--swap-pages", "num_swap_pages", type=click.IntRange(0, MAX_PAGES), help="Host pages for preempted requests.")
@server("--first-token-ms", type=click.IntRange(1), help="Refuse what would wait longer for its first token.")
@output("--seed", type=int, default=0, help="Of the deviations that step times get.")
@output("--csv", "csv_file", type=NEW_FILE, help="One line for each request.")
@output("--json", "json_file", type=NEW_FILE, help="File for all figures.")
@output("--plot", "plot_file", type=NEW_FILE, help="Report with pictures: .html, .svg, .png or .pdf.")
def simulate(workload: Path, cost_file: Path, **flags: Any) -> int:
    """Say what latencies, goodput and refusals a configuration would give for a workload.

    The real scheduler and the real admission run in simulated time, with steps as long as those of the cost model. A
    router sends each request to the replica with the fewest tokens that are not done. Every answer has max_tokens.
    Standard output gets a table.
    """
    from headrace.serving.app.console import ProgressDisplay
    from headrace.serving.app.cost_model_fit import config_of
    from headrace.serving.app.simulate_gate import make_gates
    from headrace.serving.app.simulate_report import check_files, print_result, result_of, write_csv, write_json
    from headrace.serving.app.simulate_run import Changes, changed_config, simulate_traffic
    from headrace.serving.bench.objective import parse_objective
    from headrace.serving.bench.workload_file import load_workload
    from headrace.serving.core.cost_model import cost_model_from_json

    csv_file, json_file, plot_file = flags["csv_file"], flags["json_file"], flags["plot_file"]
    check_files(csv=csv_file, json=json_file, plot=plot_file)
    objective = None if flags["slo"] is None else parse_objective(flags["slo"])
    cost = cost_model_from_json(_read_json("cost-model", cost_file), str(cost_file))
    given = {name: flags[name] for name in Changes.__slots__ if name in flags}
    gap_ms = flags["inter_token_ms"]
    changes = Changes(**given, inter_token_s=None if gap_ms is None else gap_ms / 1e3)
    config = changed_config(config_of(cost, str(cost_file)), changes)
    planned = load_workload(workload)
    gates, policies = make_gates(flags["replicas"], config, flags["tenants"], flags["first_token_ms"], planned.tenants)
    with ProgressDisplay(Console(stderr=True)) as display:
        found = simulate_traffic(
            planned,
            cost,
            config,
            gates,
            policies=policies,
            objective=objective,
            tokens_per_word=flags["tokens_per_word"],
            seed=flags["seed"],
            watch=lambda done: display.update(f"simulating {workload.name}", done, len(planned.requests)),
        )
    result = result_of(found, cost, flags["replicas"], planned.hash, planned.description)
    print_result(result, Console())
    if csv_file is not None:
        write_csv(csv_file, found.outcomes)
    if json_file is not None:
        write_json(json_file, result)
    if plot_file is not None:
        from headrace.serving.app.simulate_plot import save_plot

        save_plot(plot_file, result, found)
    return 0


def outside_ms(path: Path) -> list[float]:
    """Of each request of a bench, of either loop: client's first token less the engine's. Raises: ConfigError."""
    value = _read_json("bench", path)
    found = []
    for part in (value, *_objects(value, "runs")):
        for request in _objects(part, "requests"):
            server = request.get("server")
            own_ms = server.get("first_token_ms") if isinstance(server, dict) else None
            times = (own_ms, request.get("first_s"), request.get("sent_s"))
            if all(isinstance(time, int | float) for time in times):
                found.append(1e3 * (request["first_s"] - request["sent_s"]) - own_ms)
    if not found:
        raise ConfigError(f"--bench {path} has no request with the server's own times; use the native API")
    return found


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    """Those of a list in a JSON object."""
    listed = value.get(name) if isinstance(value, dict) else None
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def _read_json(option: str, path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ConfigError(f"--{option} {path} has more than {MAX_JSON_BYTES:,} bytes")
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--{option} {path} cannot be read: {error}") from None
