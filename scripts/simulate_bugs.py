"""Which seeds find which planted bug: a table for the evidence, and the file that the gate's test starts from.

    python -m scripts.simulate_bugs --out evidence/simulate-bugs.json [--seeds 500] [--bug NAME] [--update]

--update writes tests/serving/core/planted_seeds.json: for each bug the first seeds that find it. The exit code is 1
when more than one bug in 24 stays unfound.
"""

import multiprocessing
import signal
import sys
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from headrace.serving.core.simulated_fairness import fairness
from headrace.serving.core.simulator import SimulationFailure
from headrace.serving.engine.simulated_seed import run_seed
from scripts import evidence
from tests.serving.core.planted_bugs import BY_FAIRNESS, PLANTED, planted

SEEDS_FILE = Path("tests/serving/core/planted_seeds.json")
NUM_KEPT = 3
"""Seeds of each bug that the gate's test tries first."""
MAX_FOUND = 3
"""A bug that so many seeds found needs no more."""
MAX_FAIRNESS_SEEDS = 50
MAX_SEED_S = 60
"""One seed takes 20 to 50 ms, a world of fairness a second."""


class Hangs(BaseException):
    """A seed runs for longer than MAX_SEED_S: a loop without an end."""


def _stop(*_: object) -> None:
    raise Hangs


def find(bug: str, seed: int) -> str | None:
    """Which promise the seed breaks with the bug planted."""
    try:
        if bug in BY_FAIRNESS:
            broken = fairness(seed).broken
            return broken[0].partition(" ")[0] if broken else None
        run_seed(seed)
    except SimulationFailure as failure:
        return failure.broken.partition(":")[0]
    except Hangs:
        return "hangs"
    return None


def finders(job: tuple[str, int]) -> tuple[str, list[int], int, list[str]]:
    """(bug, seeds that find it, seeds that were run, which promise each breaks)."""
    bug, num_seeds = job
    found, promises = [], []
    seed = 0
    signal.signal(signal.SIGALRM, _stop)
    with planted(bug):
        for seed in range(min(num_seeds, MAX_FAIRNESS_SEEDS) if bug in BY_FAIRNESS else num_seeds):
            signal.alarm(MAX_SEED_S)
            broken = find(bug, seed)
            signal.alarm(0)
            if broken is not None:
                found.append(seed)
                promises.append(broken)
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
        results = {}
        for bug, *rest in pool.imap_unordered(finders, jobs):
            results[bug] = rest
            print(f"{len(results)} of {len(bugs)}: {bug}: {rest[0] or 'not found'}", file=sys.stderr, flush=True)
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
