"""``headrace bench compare``: turns, ratios and checks on records by hand; its file and its refusals."""

import pytest

from headrace.serving.bench.compare import Done, slowest_per_s
from headrace.serving.bench.compare_figures import agreement, checks, common_share, compared, figures_of
from headrace.serving.bench.compare_file import parse_comparison, parse_server
from headrace.serving.bench.compare_plan import ComparedServer, ComparedWorkload, Comparison, Turn
from headrace.serving.bench.dialect import Door
from headrace.serving.bench.intervals import median_of, paired_ratio
from headrace.serving.bench.outcome import Outcome
from headrace.serving.core.errors import ConfigError

WORK = ComparedWorkload(name="w", max_tokens=4, requests=2, streams=2, prompt_words=3)


def servers(*names: str) -> tuple[ComparedServer, ...]:
    return tuple(ComparedServer(name=name, base=f"http://h:{at}") for at, name in enumerate(names, 1))


def done(
    server: str,
    repetition: int,
    seconds: float,
    *,
    texts: tuple[str, ...] = ("a b", "c d"),
    tokens: int = 4,
    idle: float = 0.0,
    workload: ComparedWorkload = WORK,
) -> Done:
    """Two requests sent at 0, whose answers begin at half of the time."""
    outcomes = tuple(
        Outcome(
            index=index, sent_s=0.0, ended_s=seconds, first_s=seconds / 2, last_s=seconds, prompt_tokens=3,
            output_tokens=tokens, first_tokens=1, gaps_ms=(seconds * 100,) * 3, text=text,
        )
        for index, text in enumerate(texts)
    )  # fmt: skip
    turn = Turn(workload=workload, repetition=repetition, server=servers(server)[0], place=0)
    return Done(turn=turn, outcomes=outcomes, start_s=0.0, seconds=seconds, idle_shares={"other": idle})


# Whose turn it is


def test_each_server_has_each_place_and_nobody_always_follows_the_same_other() -> None:
    for count in (2, 3, 4):
        names = "abcd"[:count]
        plan = Comparison(servers=servers(*names), workloads=(WORK,), repetitions=2 * count)
        orders = ["".join(turn.server.name for turn in turns) for turns in plan.all_turns()]
        assert all(sorted(order) == sorted(names) for order in orders)
        for place in range(count):
            assert sorted(order[place] for order in orders) == sorted(names * 2)
        follows = {order[at : at + 2] for order in orders for at in range(count - 1)}
        assert {"ab", "ba"} <= follows


def test_servers_and_workloads_may_be_left_out() -> None:
    plan = parse_comparison(
        'format="headrace-compare/1"\nrepetitions=3\n'
        '[servers.a]\nurl="http://h:1"\n[servers.b]\nurl="http://h:2"\nrepetitions=1\nworkloads=["w"]\n'
        '[[workloads]]\nname="w"\nmax_tokens=2\nprompt_words=3\n[[workloads]]\nname="v"\nmax_tokens=2\nprompt_words=3\n',
        "f",
    )
    assert [len(plan.turns(plan.workloads[0], r)) for r in range(4)] == [2, 1, 1, 0]
    assert [len(plan.turns(plan.workloads[1], r)) for r in range(4)] == [1, 1, 1, 0]
    order = [(turns[0].workload.name, turns[0].repetition) for turns in plan.all_turns()]
    assert order == [("w", 0), ("v", 0), ("w", 1), ("v", 1), ("w", 2), ("v", 2)]
    assert [server.name for server in plan.only(workloads=("v",)).servers] == ["a"]
    short = plan.only(servers=("b",), repetitions=2)
    assert [len(short.turns(plan.workloads[0], r)) for r in range(4)] == [1, 0, 0, 0]
    with pytest.raises(ConfigError, match="no server 'x'; there are a, b"):
        plan.only(servers=("x",))


def test_prompts_are_the_same_for_all_servers_and_new_everywhere_else() -> None:
    other = ComparedWorkload(name="v", max_tokens=4, requests=2, prompt_words=300)
    plan = Comparison(servers=servers("a"), workloads=(WORK, other), repetitions=3)
    prompts = [
        work.closed(plan.seed_of(work, repetition, part)).prompt(index)
        for work in (WORK, other)
        for repetition in range(3)
        for part in ("", "warm-up")
        for index in range(2)
    ]
    starts = [str(prompt)[:12] for prompt in prompts]
    assert len(set(starts)) == len(starts), "two prompts begin alike"
    assert plan.seed_of(WORK, 1) == plan.seed_of(WORK, 1)
    opened = ComparedWorkload(name="o", loop="poisson", rate=2.0, max_tokens=4, requests=200, prompt_words=3)
    first, again = opened.opened(5, 2.0), opened.opened(5, 2.0)
    assert first.hash == again.hash and opened.opened(6, 2.0).hash != first.hash
    gaps = [b.at_s - a.at_s for a, b in zip(first.requests, first.requests[1:], strict=False)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.5, rel=0.2)
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(0.37, abs=0.1)  # e^-1 of exponential gaps


# Figures


def test_medians_have_intervals_whose_confidence_is_known() -> None:
    assert median_of([]) is None
    one = median_of([3.0])
    assert one is not None and (one.median, one.low, one.confidence) == (3.0, None, None)
    five = median_of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert five is not None and (five.median, five.low, five.high) == (3.0, 1.0, 5.0)
    assert five.confidence == pytest.approx(1 - 2 * 0.5**5)
    many = median_of([float(value) for value in range(1, 21)])
    assert many is not None and (many.low, many.high) == (6.0, 15.0)  # binomial tables for n = 20
    assert many.confidence == pytest.approx(0.9586, abs=1e-3)


def test_ratios_are_of_the_same_repetition() -> None:
    # Both halve in speed from one repetition to the next; the ratio does not move.
    ratio = paired_ratio([8.0, 4.0, 2.0], [4.0, 2.0, 1.0])
    assert ratio is not None and (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    ratio = paired_ratio([8.0, None, 2.0], [4.0, 2.0, 0.0])
    assert ratio is not None and ratio.count == 1


def test_figures_of_a_turn_and_of_a_comparison() -> None:
    found = figures_of(done("a", 0, 2.0))
    assert found["output_tokens_per_s"] == pytest.approx(4.0)
    assert found["first_token_p95_ms"] == pytest.approx(1000) and found["inter_token_p50_ms"] == pytest.approx(200)
    assert found["per_token_p50_ms"] == pytest.approx(1000 / 3) and found["prefill_tokens_per_s"] is None
    alone = ComparedWorkload(name="w", max_tokens=4, requests=2, prompt_words=3)
    assert figures_of(done("a", 0, 2.0, workload=alone))["prefill_tokens_per_s"] == pytest.approx(3.0)
    turns = [done("a", r, 1.0 + r) for r in range(5)] + [done("b", r, 3.0 + 3 * r) for r in range(5)]
    (work,) = compared(turns)
    ratio = work["ratios"]["a/b"]["output_tokens_per_s"]
    assert (ratio["median"], ratio["low"], ratio["high"], ratio["count"]) == (3.0, 3.0, 3.0, 5)
    assert work["ratios"]["b/a"]["first_token_p50_ms"]["median"] == 3.0
    assert work["servers"]["a"]["metrics"]["output_tokens_per_s"]["median"] == pytest.approx(8 / 3, rel=1e-4)
    assert work["agreement"]["a~b"] == {"answers": 10, "equal": 1.0, "common": 1.0}
    assert slowest_per_s(turns, "w", {"a", "b"}) == pytest.approx(2 / 9)
    assert slowest_per_s(turns, "w", {"a"}) == pytest.approx(2 / 3)
    assert slowest_per_s(turns, "v", {"a"}) is None


def test_agreement_is_what_comes_before_the_first_difference() -> None:
    assert common_share("", "") == 1.0 and common_share("abcd", "abxd") == 0.5 and common_share("ab", "abcd") == 0.5
    one, other = {0: done("a", 0, 1.0, texts=("same", "abcd"))}, {0: done("b", 0, 1.0, texts=("same", "abxx"))}
    assert agreement(one, other) == {"answers": 2, "equal": 0.5, "common": 0.75}
    assert agreement(one, {})["equal"] is None


def test_checks_say_when_the_work_was_another() -> None:
    good = {"a": {0: done("a", 0, 1.0)}, "b": {0: done("b", 0, 1.0)}}
    assert all(check["passed"] for check in checks(good))
    for other, name in (
        (done("b", 0, 1.0, tokens=3), "same output tokens"),
        (done("b", 0, 1.0, idle=0.02), "others idle"),
    ):
        failed = [
            check["name"] for check in checks({"a": {0: done("a", 0, 1.0)}, "b": {0: other}}) if not check["passed"]
        ]
        assert failed == [name]


# Files and flags


def test_servers_of_a_command_line() -> None:
    server = parse_server("llama=http://127.0.0.1:8080/v1,kind=llama,pid=4242,api=chat")
    assert (server.name, server.base, server.kind, server.pid) == ("llama", "http://127.0.0.1:8080", "llama", 4242)
    assert server.door is Door.CHAT and server.stops
    assert not parse_server("a=http://h").stops


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("http://h", "a name has 1 to 64 characters"),
        ("a=h", "is not a server's URL"),
        ("a=http://h,kind=lama", "kind 'lama' is not one of"),
        ("a=http://h,colour=red", "'colour' is none of"),
        ("a=http://h,kind=vllm,api=native", "the native door is headrace's"),
        ("a=http://h,idle=stop", "'idle' stop needs 'command' or 'pid'"),
        ("a=http://h,pid=x", "'pid' must be a whole number"),
    ],
)
def test_what_is_no_server(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_server(text)


HEAD = 'format="headrace-compare/1"\n'
SERVER = '[servers.a]\nurl="http://h:1"\n'
WORKLOAD = '[[workloads]]\nname="w"\nmax_tokens=2\nprompt_words=3\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = [", "f is no TOML"),
        (SERVER + WORKLOAD, "'format' is missing"),
        (HEAD, "0 servers; a comparison has 1 to 16"),
        (HEAD + SERVER, r"no workload; give a table \[\[workloads\]\]"),
        (HEAD + "repetition=3\n" + SERVER, "did you mean 'repetitions'"),
        (HEAD + "[servers.a]\n" + WORKLOAD, r"f, \[servers.a\]: 'url' is missing"),
        (HEAD + SERVER + 'command="run $port"\n' + WORKLOAD, r"names \$port, and \[values\] has nothing"),
        (HEAD + SERVER + 'command="run"\n' + WORKLOAD, "'command' starts a server on this machine"),
        (HEAD + SERVER + "pid=0\n" + WORKLOAD, "'pid' must be a whole number from 1"),
        (HEAD + SERVER + '[servers.b]\nurl="http://h:1/v1"\n' + WORKLOAD, "would find the first one's prompts cached"),
        (HEAD + SERVER + WORKLOAD + WORKLOAD, "two workloads are w"),
        (HEAD + SERVER + WORKLOAD + "prompt_tokens=3\n", "number 1: give one of 'prompt_words' and"),
        (HEAD + SERVER + WORKLOAD + "rate=3\n", "'rate' is of an open loop"),
        (HEAD + SERVER + WORKLOAD + 'loop="poisson"\nrequests=2\n', "has one of 'rate' and 'share_of'"),
        (HEAD + SERVER + WORKLOAD + 'loop="poisson"\nrequests=2\nshare_of="v"\n', "is no closed workload above it"),
        (HEAD + SERVER + 'workloads=["v"]\n' + WORKLOAD, "there is no workload 'v'"),
    ],
)
def test_what_is_no_comparison(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_comparison(text, "f")


def test_values_are_filled_in() -> None:
    text = (
        HEAD
        + '[values]\nport="1"\n[servers.a]\nurl="http://127.0.0.1:$port"\ncommand=["run", "$port", "$$x"]\n'
        + WORKLOAD
    )
    (server,) = parse_comparison(text, "f", {"port": "7"}).servers
    assert (server.base, server.command) == ("http://127.0.0.1:7", ("run", "7", "$x"))
    with pytest.raises(ConfigError, match="--set prot"):
        parse_comparison(text, "f", {"prot": "7"})
