"""headrace beside llama-server and vLLM on a CPU, in turns, and whether it is as much faster as it is meant to be.

Runs scripts/peers/cpu_comparison.toml, writes every figure and a verdict on each bar. A bar against "the better peer"
is held against each of them: the worst of the ratios counts. The peers are not ours and are not installed: README.md in
scripts/peers says how to get them; --set names where they are. --repetitions, --only and --server make it shorter; a
bar with fewer than 5 repetitions is judged, and marked.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from rich.console import Console

from headrace.serving.app.bench_html import check_html, write_page
from headrace.serving.app.compare_command import parse_setting
from headrace.serving.app.compare_page import comparison_page
from headrace.serving.app.compare_report import print_comparison
from headrace.serving.app.compare_run import CompareRequest, measure_comparison
from headrace.serving.bench.compare_file import load_comparison
from headrace.serving.bench.targets import BenchError
from headrace.serving.core.errors import ConfigError
from scripts import evidence

FILE = Path(__file__).parent / "peers" / "cpu_comparison.toml"
ALL_PEERS = ("llama", "llama_long", "vllm", "vllm_bf16")
MIN_REPETITIONS = 5
MAX_EXTRA_MB = 350.0
LLAMA_KV_BYTES = 2
"""Of a number in its cache, float16 by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """near_exact, fast: the ratio that is wanted of the medians, at least for a rate, at most for a time."""

    workload: str
    metric: str
    near_exact: float
    fast: float
    peers: tuple[str, ...] = ALL_PEERS
    is_rate: bool = True


BARS = (
    Bar(workload="mixed-4", metric="output_tokens_per_s", near_exact=1.7, fast=2.3),
    Bar(workload="mixed-16", metric="output_tokens_per_s", near_exact=2.0, fast=3.0),
    Bar(workload="mixed-32", metric="output_tokens_per_s", near_exact=2.0, fast=3.0),
    Bar(workload="decode-16", metric="output_tokens_per_s", near_exact=2.0, fast=2.8),
    Bar(workload="decode-32", metric="output_tokens_per_s", near_exact=1.8, fast=2.4),
    Bar(
        workload="one-stream", metric="inter_token_p50_ms", near_exact=0.8, fast=0.7, peers=("llama", "llama_long"),
        is_rate=False,
    ),
    Bar(workload="prefill-2000", metric="prefill_tokens_per_s", near_exact=2.5, fast=4.0, peers=("llama_long",)),
    Bar(workload="prefill-2000", metric="prefill_tokens_per_s", near_exact=1.1, fast=1.6, peers=("vllm", "vllm_bf16")),
    Bar(workload="poisson", metric="first_token_p95_ms", near_exact=0.5, fast=0.5, is_rate=False),
)  # fmt: skip


def verdicts(workloads: Sequence[Mapping[str, Any]], bars: Sequence[Bar] = BARS) -> list[dict[str, Any]]:
    """Of each bar and mode. passed: None where it was not measured. worst: the peer that it came closest to."""
    by_name = {each["name"]: each for each in workloads}
    return [_verdict(by_name.get(bar.workload), bar, mode) for bar in bars for mode in ("near_exact", "fast")]


def _verdict(workload: Mapping[str, Any] | None, bar: Bar, mode: str) -> dict[str, Any]:
    wanted = getattr(bar, mode)
    ratios = {}
    for peer in bar.peers:
        found = (workload or {}).get("ratios", {}).get(f"{mode}/{peer}", {}).get(bar.metric)
        if found is not None:
            ratios[peer] = found
    sign = "≥" if bar.is_rate else "≤"
    verdict: dict[str, Any] = {
        "bar": f"{bar.workload}, {bar.metric}, {mode} over {' and '.join(bar.peers)}: {sign} {wanted:g}",
        "ratios": ratios,
        "passed": None,
    }
    if ratios:
        choose = min if bar.is_rate else max
        worst = choose(ratios, key=lambda peer: float(ratios[peer]["median"]))
        middle = float(ratios[worst]["median"])
        # A server that takes part once is there to show that it is the slower one.
        repeated = [found["count"] for found in ratios.values() if found["count"] > 1] or [1]
        verdict |= {
            "worst": worst,
            "median": middle,
            "repetitions": min(repeated),
            "passed": middle >= wanted if bar.is_rate else middle <= wanted,
        }
    return verdict


def memory_verdicts(result: Mapping[str, Any], llama_kv_bytes: int) -> list[dict[str, Any]]:
    """Of proportional set sizes with 16 requests of 512 tokens, and of what a token takes in the caches."""
    workload = next((each for each in result["workloads"] if each["name"] == "memory-16x512"), None)
    servers = {} if workload is None else workload["servers"]
    sizes = {name: server["metrics"].get("pss_mb", {}).get("median") for name, server in servers.items()}
    ours, theirs = sizes.get("headrace_16x512"), sizes.get("llama_16x512")
    is_known = ours is not None and theirs is not None
    kv = {
        name: found
        for name, server in result["servers"].items()
        if (found := _kv_bytes_per_token(server["contract"])) is not None
    }
    return [
        {
            "bar": f"PSS with 16 × 512 tokens: at most llama-server's + {MAX_EXTRA_MB:g} MB",
            "pss_mb": sizes,
            "passed": ours <= theirs + MAX_EXTRA_MB if is_known else None,
        },
        {
            "bar": f"KV bytes per token: at most llama-server's {llama_kv_bytes:,}",
            "kv_bytes_per_token": kv,
            "passed": all(each <= llama_kv_bytes for each in kv.values()) if kv else None,
        },
    ]


def _kv_bytes_per_token(value: object) -> int | None:
    """Wherever a contract has it."""
    if not isinstance(value, dict):
        return None
    found = value.get("kv_bytes_per_token")
    if isinstance(found, int):
        return found
    return next((inner for each in value.values() if (inner := _kv_bytes_per_token(each)) is not None), None)


def llama_kv_bytes(path: Path) -> int:
    """Of a token in llama-server's cache, with its default type, from the model's own numbers."""
    fields = GGUFReader(path).fields
    kind = fields["general.architecture"].contents()

    def number(name: str, default: int | None = None) -> int:
        found = fields.get(f"{kind}.{name}")
        return int(found.contents()) if found is not None else int(default or 0)

    width = number("embedding_length") // number("attention.head_count")
    keys, values = number("attention.key_length", width), number("attention.value_length", width)
    return number("block_count") * number("attention.head_count_kv") * (keys + values) * LLAMA_KV_BYTES


def main() -> int:
    parser = evidence.arguments(__doc__)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="gguf, llama_server, vllm, ..."
    )
    parser.add_argument("--repetitions", type=int, help="of each workload; default 5")
    parser.add_argument("--only", action="append", default=[], metavar="WORKLOAD")
    parser.add_argument("--server", action="append", default=[], metavar="NAME", help="take part; default: all")
    parser.add_argument("--minutes", type=float, default=40.0, help="by which it should be done")
    parser.add_argument("--html", type=Path, help="report with pictures")
    parser.add_argument("--logs", type=Path, help="folder for what servers print")
    args = parser.parse_args()
    settings = {"python": sys.executable} | dict(parse_setting(text) for text in args.set)
    try:
        comparison = load_comparison(FILE, settings).only(
            servers=tuple(args.server), workloads=tuple(args.only), repetitions=args.repetitions
        )
        if args.html is not None:
            check_html(args.html)
        wanted = CompareRequest(comparison=comparison, minutes=args.minutes, logs=args.logs)
        kv_bytes = llama_kv_bytes(Path(settings.get("gguf", "SmolLM2-135M-Instruct.Q4_1.gguf")))
        began_s = time.monotonic()
        result = measure_comparison(wanted, Console(stderr=True))
    except (ConfigError, BenchError, OSError) as error:
        print(f"check-peers: {error}\nscripts/peers/README.md says how to get and name the peers", file=sys.stderr)
        return 2
    if result is None:
        return 130
    print_comparison(result, None, Console(width=160))
    if args.html is not None:
        write_page(args.html, comparison_page(result, None))
    bars = verdicts(result["workloads"]) + memory_verdicts(result, kv_bytes)
    is_whole = all(bar.get("repetitions", MIN_REPETITIONS) >= MIN_REPETITIONS for bar in bars)
    checks = [check for each in result["workloads"] for check in each["checks"]]
    is_whole = is_whole and not any(server["lost"] for server in result["servers"].values())
    passed = is_whole and all(bar["passed"] for bar in bars) and all(check["passed"] for check in checks)
    turns = [{name: value for name, value in turn.items() if name != "requests"} for turn in result["turns"]]
    for bar in bars:
        word = {True: "passed", False: "FAILED", None: "not measured"}[bar["passed"]]
        found = bar.get("pss_mb") or bar.get("kv_bytes_per_token") or ""
        if "median" in bar:
            found = f"{bar['median']:.3g} to {bar['worst']}, {bar['repetitions']} repetitions"
        print(f"{word}: {bar['bar']}" + (f" ({found})" if found else ""))
    minutes = round((time.monotonic() - began_s) / 60, 1)
    text = evidence.save(args.out, passed, minutes=minutes, is_whole=is_whole, bars=bars, **{**result, "turns": turns})
    print(f"{args.out}: {len(text):,} bytes, passed: {passed}")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
