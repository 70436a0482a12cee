"""Time from start to ready: with an empty compile cache, then again with what the first start left.

The model file is pulled beforehand, since its download depends on the network. The default options of
``headrace serve`` are used.
"""

import tempfile
import time
from pathlib import Path

from headrace.model.pull import DEFAULT_MODEL, resolve_model
from scripts import evidence
from tests.live import start_server

COLD_LIMIT_S = 90.0
WARM_LIMIT_S = 15.0


def seconds_to_ready(folder: Path, model: Path) -> float:
    start = time.monotonic()
    server = start_server(folder / "log", str(model), "--compile-cache", str(folder / "compiled"))
    took = time.monotonic() - start
    assert server.stop() == 0
    return round(took, 1)


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="starts with a warm cache")
    args = parser.parse_args()
    model = resolve_model(DEFAULT_MODEL).path
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cold = seconds_to_ready(folder, model)
        warm = [seconds_to_ready(folder, model) for _ in range(args.repeats)]
    passed = cold <= COLD_LIMIT_S and max(warm) <= WARM_LIMIT_S
    limits = {"first_s": COLD_LIMIT_S, "second_s": WARM_LIMIT_S}
    return evidence.write(args.out, passed, limits=limits, first_start_s=cold, later_starts_s=warm)


if __name__ == "__main__":
    raise SystemExit(main())
