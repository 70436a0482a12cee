"""Which seeds find which planted bug: a table for the evidence, and the file that the gate's test starts from.

    python -m scripts.simulate_bugs --out evidence/simulate-bugs.json [--seeds 500] [--bug NAME] [--update]

--update writes tests/serving/core/planted_seeds.json: for each bug the first seeds that find it. The exit code is 1
when more than one bug in 24 stays unfound.
"""

import multiprocessing
import sys
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from headrace.serving.core.simulator import SimulationFailure
from headrace.serving.engine.simulated_seed import run_seed
from scripts import evidence
from tests.serving.core.planted_bugs import PLANTED, planted

SEEDS_FILE = Path("tests/serving/core/planted_seeds.json")
NUM_KEPT = 3
"""Seeds of each bug that the gate's test tries first."""
MAX_FOUND = 10
"""A bug that so many seeds found needs no more."""


def finders(job: tuple[str, int]) -> tuple[str, list[int], int, list[str]]:
    """(bug, seeds that find it, seeds that were run, which promise each breaks)."""
    bug, num_seeds = job
    found, promises = [], []
    seed = 0
    with planted(bug):
        for seed in range(num_seeds):
            try:
                run_seed(seed)
            except SimulationFailure as failure:
                found.append(seed)
                promises.append(failure.broken.partition(":")[0])
                if len(found) == MAX_FOUND:
                    break
    return bug, found, seed + 1, promises


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--bug", action="append", choices=tuple(PLANTED), help="only this one; may be given again")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    bugs = options.bug or list(PLANTED)
    jobs = [(bug, options.seeds) for bug in bugs]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        results = {bug: rest for bug, *rest in pool.imap_unordered(finders, jobs)}
    rows = []
    table = Table(box=None)
    for heading in ("planted bug", "first seeds that find it", "of", "as"):
        table.add_column(heading)
    for bug in bugs:
        found, ran, promises = results[bug]
        table.add_row(bug, ", ".join(map(str, found[:5])) or "none", str(ran), ", ".join(sorted(set(promises))))
        rows.append({"bug": bug, "found_by": found, "seeds_run": ran, "breaks": sorted(set(promises))})
    Console(width=160).print(table)
    unfound = [row["bug"] for row in rows if not row["found_by"]]
    if options.update and not options.bug:
        kept = {row["bug"]: row["found_by"][:NUM_KEPT] for row in rows}
        SEEDS_FILE.write_bytes(orjson.dumps(kept, option=orjson.OPT_INDENT_2) + b"\n")
    passed = len(unfound) <= len(rows) // 24
    return evidence.write(
        options.out, passed, bugs=len(rows), found=len(rows) - len(unfound), unfound=unfound, table=rows
    )


if __name__ == "__main__":
    sys.exit(main())
