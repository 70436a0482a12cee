"""Verdicts of check-peers on ratios by hand, and its comparison file."""

from pathlib import Path
from typing import Any

from headrace.serving.bench.compare_file import load_comparison
from scripts.check_peers import BARS, FILE, Bar, memory_verdicts, verdicts

BAR = Bar(workload="w", metric="output_tokens_per_s", near_exact=2.0, fast=3.0, peers=("llama", "vllm"))


def ratio(median: float, count: int = 5) -> dict[str, Any]:
    return {"output_tokens_per_s": {"median": median, "low": median, "high": median, "count": count}}


def work(**ratios: dict[str, Any]) -> dict[str, Any]:
    return {"name": "w", "ratios": {name.replace("__", "/"): found for name, found in ratios.items()}}


def test_a_bar_is_held_against_each_peer() -> None:
    near, fast = verdicts(
        [work(near_exact__llama=ratio(2.5), near_exact__vllm=ratio(1.9), fast__llama=ratio(3.0))], (BAR,)
    )
    assert (near["passed"], near["worst"], near["median"]) == (False, "vllm", 1.9)
    assert (fast["passed"], fast["worst"], fast["repetitions"]) == (True, "llama", 5)
    (missing, _) = verdicts([], (BAR,))
    assert missing["passed"] is None


def test_a_time_is_wanted_at_most_and_a_peer_that_ran_once_does_not_count_as_few_repetitions() -> None:
    bar = Bar(workload="w", metric="output_tokens_per_s", near_exact=0.5, fast=0.5, peers=("a", "b"), is_rate=False)
    near, fast = verdicts([work(near_exact__a=ratio(0.4), near_exact__b=ratio(0.1, 1), fast__a=ratio(0.6, 3))], (bar,))
    assert (near["passed"], near["worst"], near["repetitions"]) == (True, "a", 5)
    assert (fast["passed"], fast["repetitions"]) == (False, 3)


def test_memory() -> None:
    def result(ours_mb: float, kv_bytes: int) -> dict[str, Any]:
        sizes = {"headrace_16x512": ours_mb, "llama_16x512": 300.0}
        servers = {name: {"metrics": {"pss_mb": {"median": mb}}} for name, mb in sizes.items()}
        contract = {"engine": {"kv_bytes_per_token": kv_bytes}}
        return {
            "workloads": [{"name": "memory-16x512", "servers": servers}],
            "servers": {"fast": {"contract": contract}, "llama": {"contract": None}},
        }

    assert [bar["passed"] for bar in memory_verdicts(result(640.0, 23_040), 23_040)] == [True, True]
    assert [bar["passed"] for bar in memory_verdicts(result(651.0, 46_080), 23_040)] == [False, False]
    assert [bar["passed"] for bar in memory_verdicts({"workloads": [], "servers": {}}, 1)] == [None, None]


def test_the_file_has_what_the_bars_ask_for() -> None:
    comparison = load_comparison(FILE, {"gguf": "/a b/m.gguf"})
    names = {server.name: server for server in comparison.servers}
    for bar in BARS:
        (workload,) = (each for each in comparison.workloads if each.name == bar.workload)
        taking = {server.name for server in comparison.taking(workload)}
        assert {"near_exact", "fast"} <= taking and taking & set(bar.peers)
        assert (workload.repetitions or comparison.repetitions) >= 5
    assert "/a b/m.gguf" in names["llama"].command and names["vllm_bf16"].repetitions == 1
    assert all(server.stops for server in comparison.servers)
    assert (Path(FILE).parent / "README.md").exists()
