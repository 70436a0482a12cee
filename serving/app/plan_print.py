"""A plan for people: a table for each slice, the choices and their Pareto front, what was assumed; and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from headrace.serving.app.plan_front import Choice, choices
from headrace.serving.app.plan_types import GIB, Exchange, ExchangeKind, Plan, PlanRow, StepCost

SCHEMA = "headrace-plan/1"
ASSUMPTIONS = (
    "Memory is what the chip's compiler reports for the programs that would be served, of the data sheet's HBM.",
    "Times are bounds: HBM and products at the data sheet's rates, every needed byte read once, nothing waits. Weights "
    "of int8 are widened before products, which run at the rate of bfloat16 whatever the chip does with int8.",
    "Tokens/s and the time between tokens have the other streams' prompts in them, a chunk at a time, and all streams "
    "half through their output. Experts are chosen evenly.",
    "Links (one way): v5e 45, v5p and v6e 90, TPU7x 100 GB/s to each neighbour (600 between its two devices), H100 and "
    "H200 450 GB/s to their switches. Sums of float32 go round all dimensions of a group at once; they are not hidden, "
    "and a hop takes 1 us. A line comes back over its own links; 16r is a ring.",
    "Copies of the model (data) exchange nothing but results of some kB: one is compiled, and its figures are those of "
    "each. Stages read their weights once for each micro-batch, and stand on padding while the pipe fills.",
    "Not known: the host's share of a step, fragments of memory, what a hot chip or a busy network loses.",
)
SHOWN_ROWS = (
    "weights",
    "temporaries",
    "code",
    "KV pages that fit",
    "tokens in them",
    "streams at once",
    "decode: FLOPs",
    "decode: bytes of HBM",
    "decode: exchanged",
    "decode: on each link",
    "decode: HBM",
    "decode: products",
    "decode: links",
    "decode step, its bound",
    "with a chunk of a prompt",
    "between tokens",
    "tokens/s of all streams",
    "first token, nobody waiting",
    "first token beside the others",
)
"""Of one device, with as many streams as fit; a copy of the model where there are several."""


def print_plan(plan: Plan, console: Console) -> None:
    for topology in dict.fromkeys(row.topology for row in plan.rows):
        rows = [row for row in plan.rows if row.topology == topology]
        console.print(
            f"{plan.model} on {topology}, weights {plan.weights}, KV {plan.kv_dtype}, requests of "
            f"{plan.workload.prompt} + {plan.workload.output} tokens; per device and step",
            highlight=False,
        )
        _print_slice(rows, console)
    found = choices(plan)
    if len(found) > 1:
        _print_choices(found, console)
    for line in plan.left_out:
        console.print(f"left out: {line}", highlight=False, style="yellow")
    for line in ASSUMPTIONS:
        console.print(f"* {line}", highlight=False, style="dim")


def _print_slice(rows: Sequence[PlanRow], console: Console) -> None:
    columns = [(row.mesh, *_cells(row)) for row in rows if row.misfit is None]
    names = ("mesh", *SHOWN_ROWS)
    while columns:
        taken, width = 0, max(map(len, names))
        for column in columns:
            width += 2 + max(len(line) for cell in column for line in cell.split("\n"))
            if taken and width > console.width:
                break
            taken += 1
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        for _ in columns[:taken]:
            table.add_column(justify="right", no_wrap=True)
        for name, *cells in zip(names, *columns[:taken], strict=True):
            table.add_row(name, *cells)
        console.print(table, highlight=False)
        columns = columns[taken:]
    for row in rows:
        if row.misfit is not None:
            console.print(f"{row.mesh}: {row.misfit}", highlight=False, style="yellow")


def _cells(row: PlanRow) -> tuple[str, ...]:
    compiled, point = row.compiled, row.points[-1]
    assert compiled is not None and row.first_token_s is not None
    cost = point.decode
    known = [size for size in compiled.code_bytes.values() if size is not None]
    copies = f"{row.data} x " if row.data > 1 else ""
    return (
        f"{compiled.memory.weights_bytes / GIB:.2f} GiB",
        f"{compiled.memory.temporary_bytes / 1e6:.0f} MB",
        f"{sum(known) / 1e6:.0f} MB" if known else "not told",
        f"{copies}{compiled.pages:,}",
        f"{copies}{compiled.tokens:,}",
        f"{copies}{point.streams}",
        f"{cost.flops / 1e9:,.0f} G",
        f"{cost.weight_bytes / 1e9:.2f} + {cost.kv_bytes / 1e9:.2f} GB",
        "\n".join(_sums(exchange) for exchange in _large(cost)) or "none",
        "\n".join(f"{x.count * x.link_bytes / 1e6:.1f} MB" for x in _large(cost)) or "none",
        _ms(cost.hbm_s),
        _ms(cost.products_s),
        _ms(cost.links_s),
        f"{_ms(cost.seconds)}, {cost.bound}",
        f"{_ms(point.mixed.seconds)}, {point.mixed.bound}",
        _ms(point.token_s),
        f"{row.tokens_per_s(point):,.0f}",
        _ms(row.first_token_s),
        _ms(point.first_token_s),
    )


def _large(cost: StepCost) -> list[Exchange]:
    """Without those of a draw, whose bytes nobody would notice; their time is counted."""
    return [exchange for exchange in cost.exchanges if exchange.what is not ExchangeKind.DRAW]


def _sums(exchange: Exchange) -> str:
    what = "to next " if exchange.what is ExchangeKind.SEND else ""
    axes = "+".join(exchange.axes)
    return f"{what}{axes} {exchange.group}: {exchange.count} x {exchange.size_bytes / 1e3:.0f} kB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _print_choices(found: Sequence[Choice], console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, title_justify="left")
    table.title = "Which to take (*: none is both faster for a stream and cheaper)"
    table.add_column("slice, mesh", no_wrap=True)
    for name in ("streams", "ms a token", "tokens/s", "per chip", "first token"):
        table.add_column(name, justify="right", no_wrap=True)
    for choice in found:
        table.add_row(
            f"{'*' if choice.is_best else ' '} {choice.row.topology} {choice.row.mesh}",
            f"{choice.streams}",
            f"{1e3 * choice.token_s:.2f}",
            f"{choice.row.tokens_per_s(choice.point):,.0f}",
            f"{choice.tokens_per_s_per_chip:,.1f}",
            _ms(choice.point.first_token_s),
            style=None if choice.is_best else "dim",
        )
    console.print(table, highlight=False)


def plan_json(plan: Plan) -> str:
    """Everything that is known, with the assumptions. Seconds, bytes and operations, of one device and one step."""
    document = asdict(plan) | {"schema": SCHEMA, "assumptions": ASSUMPTIONS, "rows": [_row(row) for row in plan.rows]}
    document["choices"] = [
        {
            "topology": choice.row.topology,
            "mesh": choice.row.mesh,
            "streams": choice.streams,
            "token_s": choice.token_s,
            "tokens_per_s_per_chip": choice.tokens_per_s_per_chip,
            "first_token_s": choice.point.first_token_s,
            "is_best": choice.is_best,
        }
        for choice in choices(plan)
    ]
    return json.dumps(document, indent=1)


def _row(row: PlanRow) -> dict[str, object]:
    points = [
        asdict(point)
        | {
            "decode": _cost(point.decode),
            "mixed": _cost(point.mixed),
            "tokens_per_s": row.tokens_per_s(point),
            "tokens_per_s_per_chip": row.tokens_per_s_per_chip(point),
        }
        for point in row.points
    ]
    compiled = None if row.compiled is None else asdict(row.compiled) | {"pages": row.compiled.pages}
    alone = None if row.alone is None else _cost(row.alone)
    return asdict(row) | {"points": points, "alone": alone, "compiled": compiled}


def _cost(cost: StepCost) -> dict[str, object]:
    return asdict(cost) | {"links_s": cost.links_s, "seconds": cost.seconds, "bound": cost.bound}
