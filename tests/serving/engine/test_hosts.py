"""Hosts of one engine over real sockets, with fake runners: how they meet, serve, differ and lose each other."""

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import pytest

from headrace.serving.core.events import TokenEvent
from headrace.serving.core.plan import StepPlan, StepResult
from headrace.serving.core.scheduler import Scheduler
from headrace.serving.engine import host_follower, host_start, leader_runner
from headrace.serving.engine.engine import StepLoop
from headrace.serving.engine.fake_runner import FakeRunner, FakeTicket
from headrace.serving.engine.host_follower import Follower
from headrace.serving.engine.host_leader import Leader
from headrace.serving.engine.host_messages import Hello, HostPlace, HostsError, Loaded
from headrace.serving.engine.host_start import free_port, join, lead
from headrace.serving.engine.host_watch import HostLimits
from headrace.serving.engine.leader_runner import LeaderRunner
from headrace.serving.engine.lifecycle import SystemClock
from headrace.serving.engine.link import encode_frame
from headrace.serving.engine.ports import EngineFailure, Ticket
from tests.serving.engine.bench import VOCAB, config_of, expected_ids, request

QUICK = HostLimits(beat_s=0.05, silent_s=1.2, starting_silent_s=30.0, step_s=0.4)
FACTS = {"--mesh": "tensor=2"}
LOADED = Loaded(facts={}, model_hash="f0", digests={"t": "00"}, num_pages=40)
WAIT_S = 20.0


def quiet(what: str, done: int, total: int) -> None:
    """Progress that nobody looks at."""


@dataclass
class Group:
    """Rank 0 and the others, and what each was told of an end."""

    leader: Leader
    followers: list[Follower]
    lost: "queue.Queue[str]"
    ends: list["queue.Queue[str | None]"]


def place_of(num_hosts: int = 2, join_s: float = WAIT_S) -> HostPlace:
    return HostPlace(num_hosts=num_hosts, rank=0, coordinator=f"127.0.0.1:{free_port('127.0.0.1')}", join_s=join_s)


@contextmanager
def met(num_hosts: int = 2) -> Iterator[Group]:
    place, clock = place_of(num_hosts), SystemClock()
    lost: queue.Queue[str] = queue.Queue()
    ends: list[queue.Queue[str | None]] = [queue.Queue() for _ in range(num_hosts - 1)]
    with ThreadPoolExecutor(num_hosts) as pool, ExitStack() as stack:
        first = pool.submit(lead, place, FACTS, clock, lost.put, quiet, QUICK)
        others = [
            pool.submit(join, replace(place, rank=1 + i), FACTS, clock, end.put, quiet, QUICK)
            for i, end in enumerate(ends)
        ]
        followers = [other.result(WAIT_S) for other in others]
        leader = first.result(WAIT_S)
        for follower in followers:
            stack.callback(follower.close)
            stack.callback(follower.stop)
        stack.callback(leader.farewell)
        yield Group(leader, followers, lost, ends)


class FaultyRunner(FakeRunner):
    """fault: called with each plan before it is dispatched here."""

    def __init__(self, fault: Callable[[StepPlan], None] = lambda plan: None) -> None:
        super().__init__(config_of(), vocab_size=VOCAB)
        self._fault = fault
        self.results: list[StepResult] = []

    def dispatch(self, plan: StepPlan) -> FakeTicket:
        self._fault(plan)
        return super().dispatch(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        self.results.append(super().collect(ticket))
        return self.results[-1]


class Following(threading.Thread):
    """A follower's main thread."""

    def __init__(self, follower: Follower, runner: FakeRunner) -> None:
        super().__init__(daemon=True)
        self._follower = follower
        self._runner = runner
        self.probes: queue.Queue[int] = queue.Queue()
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._follower.follow(self._runner, 2, self.probes.put)
        except EngineFailure as error:
            self.error = error
            self._follower.give_up(str(error))


def run_requests(leader: Leader, runner: FakeRunner, count: int = 3) -> dict[int, list[int]]:
    """Ids by request."""
    loop = StepLoop(Scheduler(config_of()), LeaderRunner(runner, leader), SystemClock())
    for number in range(1, count + 1):
        assert loop.submit(request(number)) is None
    ids: dict[int, list[int]] = {}
    while not loop.is_idle:
        output = loop.turn()
        for event in () if output is None else output.events:
            if isinstance(event, TokenEvent):
                ids.setdefault(event.request_id, []).append(event.token_id)
    return ids


def both(*calls: Callable[[], object]) -> list[object]:
    """What each came to, or its error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures: list[Future[object]] = [pool.submit(call) for call in calls]
        return [future.exception(WAIT_S) or future.result() for future in futures]


def test_hosts_meet_agree_run_the_same_steps_and_part() -> None:
    with met(3) as group:
        leader, followers = group.leader, group.followers
        assert {f.service for f in followers} == {leader.service}
        small = replace(LOADED, num_pages=30)
        pages = both(
            lambda: leader.agree(LOADED, quiet),
            lambda: followers[0].agree(small, quiet),
            lambda: followers[1].agree(LOADED, quiet),
        )
        assert pages == [30, 30, 30], "the host with least memory decides"
        both(*(lambda member=member: member.meet("compile", quiet) for member in (leader, *followers)))
        runners = [FaultyRunner() for _ in range(3)]
        threads = [Following(f, runner) for f, runner in zip(followers, runners[1:], strict=True)]
        for member in (leader, *followers):
            member.serves()
        ids = run_requests(leader, runners[0])
        assert ids == {number: expected_ids(request(number)) for number in ids} and len(ids) == 3
        followers[0].probe(5)
        assert threads[0].probes.get(timeout=WAIT_S) == 5
        leader.farewell()
        assert [end.get(timeout=WAIT_S) for end in group.ends] == [None, None]
        for follower, thread in zip(followers, threads, strict=True):
            follower.stop()
            thread.join(WAIT_S)
        assert runners[1].results == runners[2].results == runners[0].results
        assert group.lost.empty() and all(thread.error is None for thread in threads)


def test_beats_keep_idle_hosts_together() -> None:
    with met() as group:
        group.leader.serves()
        group.followers[0].serves()
        time.sleep(1.5 * QUICK.silent_s)
        assert group.lost.empty() and group.ends[0].empty()


def test_a_rank_that_goes_is_named_to_all_others() -> None:
    with met(3) as group:
        group.followers[1].close()
        reason = group.lost.get(timeout=WAIT_S)
        assert reason.startswith("rank 2 (127.0.0.1:") and reason.endswith("is lost: its connection ended")
        assert group.ends[0].get(timeout=WAIT_S) == reason


def test_a_rank_that_is_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Follower, "_beat", lambda self: None)
    with met() as group:
        group.leader.serves()
        assert "is lost: no sign of life for 1." in group.lost.get(timeout=WAIT_S)
        assert "rank 1" in (group.ends[0].get(timeout=WAIT_S) or "")


def test_a_silent_rank_0_is_noticed_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leader, "_beat", lambda self: None)
    with met() as group:
        group.followers[0].serves()
        assert "rank 0 is lost: no sign of life for 1." in (group.ends[0].get(timeout=WAIT_S) or "")


def test_a_rank_whose_main_thread_is_stuck_is_named_though_it_beats() -> None:
    released = threading.Event()

    def slow_collect(plan: StepPlan) -> None:
        released.wait(WAIT_S)

    with met() as group:
        Following(group.followers[0], FaultyRunner(slow_collect))
        own = FakeRunner(config_of(), vocab_size=VOCAB, on_collect=slow_collect)  # as a collective would
        server = threading.Thread(target=run_requests, args=(group.leader, own), daemon=True)
        server.start()
        assert "it has not begun step 1" in group.lost.get(timeout=WAIT_S)
        released.set()
        server.join(WAIT_S)


def test_a_step_that_fails_on_rank_0_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_runner, "VERDICT_S", 0.1)

    def fault(plan: StepPlan) -> None:
        raise RuntimeError("secret detail")

    with met() as group, pytest.raises(EngineFailure, match=r"step 0 failed on rank 0 \(RuntimeError\)"):
        Following(group.followers[0], FaultyRunner())
        run_requests(group.leader, FaultyRunner(fault))


def test_a_step_that_fails_elsewhere_ends_the_engine_and_names_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_follower, "VERDICT_S", 0.1)

    def fault(plan: StepPlan) -> None:
        raise RuntimeError("secret detail")

    with met() as group:
        Following(group.followers[0], FaultyRunner(fault))
        run_requests(group.leader, FaultyRunner(), 1)
        reason = group.lost.get(timeout=WAIT_S)
        assert "gave up: a step failed on rank 1 (RuntimeError)" in reason
        assert "secret" not in reason


def test_another_weight_file_is_refused_with_the_tensor_named() -> None:
    with met() as group:
        other = replace(LOADED, digests={"t": "01"})
        threading.Thread(target=group.followers[0].agree, args=(other, quiet), daemon=True).start()
        with pytest.raises(HostsError, match=r"rank 1 \(.*\) does not fit rank 0: tensor t has other bytes"):
            group.leader.agree(LOADED, quiet)
        group.leader.give_up("as rank 0 says")
        assert group.ends[0].get(timeout=WAIT_S) == "as rank 0 says"


def test_another_option_ends_the_start_on_both_sides_by_name() -> None:
    place, clock = place_of(3), SystemClock()
    found = both(
        lambda: lead(place, FACTS, clock, print, quiet),
        lambda: join(replace(place, rank=2), {"--mesh": "tensor=4"}, clock, print, quiet),
    )
    for error in found:
        assert isinstance(error, HostsError)
        assert "rank 2 (127.0.0.1:" in str(error)
        assert "does not fit rank 0: --mesh is tensor=4, and tensor=2 on rank 0" in str(error)


def test_missing_ranks_are_named_in_time_to_those_that_came() -> None:
    place, clock = place_of(4, join_s=1.0), SystemClock()
    started_s = time.monotonic()
    found = both(
        lambda: lead(place, FACTS, clock, print, quiet),
        lambda: join(replace(place, rank=2, join_s=WAIT_S), FACTS, clock, print, quiet),
    )
    assert time.monotonic() - started_s < 10
    for error in found:
        assert isinstance(error, HostsError) and "ranks 1, 3 did not come to 127.0.0.1:" in str(error)


def test_a_rank_0_that_is_not_there_is_given_up() -> None:
    place = replace(place_of(join_s=0.7), rank=1)
    with pytest.raises(HostsError, match=r"rank 0 was not found at .* within 0.7 s \(Connection refused\)"):
        join(place, FACTS, SystemClock(), print, quiet)


def test_an_address_that_is_taken_or_foreign_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = replace(place_of(), coordinator=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(HostsError, match="--coordinator .* cannot listen there"):
            lead(place, FACTS, SystemClock(), print, quiet)
    with pytest.raises(HostsError, match="--coordinator .* cannot listen there"):
        lead(replace(place_of(), coordinator="192.0.2.1:9"), FACTS, SystemClock(), print, quiet)


def test_whoever_answers_instead_of_rank_0_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                sock.recv(1 << 16)

        threading.Thread(target=answer, daemon=True).start()
        place = replace(place_of(), rank=1, coordinator=f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(HostsError, match="what answers as rank 0 is not understood"):
            join(place, FACTS, SystemClock(), print, quiet)


STRANGERS = {
    "garbage": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a frame that is too large": (1 << 30).to_bytes(4, "big"),
    "half a frame": encode_frame(Hello(1, FACTS))[:-1],
    "no hello": encode_frame({"type": "beat"}),
    "two hellos": 2 * encode_frame(Hello(1, FACTS)),
    "another protocol": encode_frame([1, 2, 3]),
    "a rank that is none": encode_frame(Hello(7, FACTS)),
    "rank 0": encode_frame(Hello(0, FACTS)),
    "nothing": b"",
}


def test_strangers_neither_block_the_start_nor_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_start, "MAX_STRANGERS", 4)
    monkeypatch.setattr(host_start, "HELLO_S", 0.3)
    place, clock = place_of(), SystemClock()
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        first = pool.submit(lead, place, FACTS, clock, print, quiet, QUICK)
        for said in STRANGERS.values():
            for _ in range(3):
                sock = stack.enter_context(knock(place))
                sock.sendall(said)
        assert not first.done()
        follower = join(replace(place, rank=1), FACTS, clock, print, quiet, QUICK)
        assert follower.service == first.result(WAIT_S).service
        first.result().farewell()
        follower.close()


def test_a_silent_stranger_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_start, "HELLO_S", 0.2)
    place = place_of(join_s=1.5)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(lead, place, FACTS, SystemClock(), print, quiet)
        with knock(place) as sock:
            sock.settimeout(2.5)
            assert sock.recv(100) == b""
        with pytest.raises(HostsError, match="rank 1 did not come"):
            first.result(WAIT_S)


def test_a_second_of_the_same_rank_is_turned_away_and_a_first_may_come_back() -> None:
    place, clock = place_of(3), SystemClock()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lead, place, FACTS, clock, print, quiet, QUICK)
        with knock(place) as sock:
            sock.sendall(encode_frame(Hello(1, FACTS)))
            time.sleep(0.2)
            with pytest.raises(HostsError, match=r"rank 1 is there already, at 127\.0\.0\.1"):
                join(replace(place, rank=1), FACTS, clock, print, quiet)
        other = pool.submit(join, replace(place, rank=1), FACTS, clock, print, quiet, QUICK)
        second = join(replace(place, rank=2), FACTS, clock, print, quiet, QUICK)
        first.result(WAIT_S).farewell()
        for follower in (second, other.result(WAIT_S)):
            follower.close()


def knock(place: HostPlace) -> socket.socket:
    """A connection to rank 0, as soon as it listens."""
    host, _, port = place.coordinator.rpartition(":")
    for _ in range(200):
        try:
            return socket.create_connection((host, int(port)), timeout=5)
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise AssertionError(f"nobody listens at {place.coordinator}")


class Waits:
    """What a leader is told that the main thread waits for."""

    def __init__(self) -> None:
        self.steps, self.told = 0, list[int | None]()

    def run_step(self, plan: StepPlan) -> int:
        self.steps += 1
        return self.steps

    def waits_for(self, steps: int | None) -> None:
        self.told.append(steps)


def test_a_reading_of_the_experts_load_waits_for_the_last_step_in_flight() -> None:
    leader, inner = Waits(), FaultyRunner()
    runner = LeaderRunner(inner, leader)  # type: ignore[arg-type]
    scheduler = Scheduler(config_of())
    assert scheduler.submit(request(1), 0.0) is None
    tickets = [runner.dispatch(plan) for plan in (scheduler.plan_step(0.0), scheduler.plan_step(0.0)) if plan]
    assert len(tickets) == 2 and runner.expert_tokens() is None
    assert leader.told == [2, None]
    for ticket in tickets:
        runner.collect(ticket)
    runner.expert_tokens()
    assert leader.told[-2:] == [None, None]
