"""What the journal holds, that a replay reproduces it and finds what was altered, and how its file fails."""

import errno
import logging
import os
import random
import resource
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from headrace.serving.core.errors import ConfigError
from headrace.serving.core.request import CancelReason, Priority, RequestId
from headrace.serving.engine.journal import (
    AnyRecord,
    Applied,
    Cancelled,
    Drained,
    End,
    Expired,
    Header,
    JournalError,
    Planned,
    PlanOutline,
    StepFailed,
    Submitted,
    Torn,
    encode_record,
    read_journal,
    read_steps,
)
from headrace.serving.engine.journal_file import JournalFile, JournalOptions, open_journal
from headrace.serving.engine.messages import Stats
from headrace.serving.engine.replay import replay
from tests.serving.engine.bench import Bench, FakeEdge, close_when_idle, request

LIMIT = 1 << 30


class Kept:
    """Records in a list, after a way through the file's form."""

    def __init__(self) -> None:
        self.records: list[AnyRecord] = []

    def write(self, record: AnyRecord) -> None:
        self.records.append(msgspec.json.decode(encode_record(record), type=AnyRecord))


def mixed_run(records: Kept | JournalFile) -> Bench:
    """Little memory, so requests are preempted; one is cancelled, one refused, one step fails, then a drain."""
    bench = Bench(records, num_pages=14, max_context=52)
    bench.runner.fail_collect = lambda step_id: RuntimeError("planted") if step_id == 9 else None
    for number in range(1, 8):
        bench.inbox.submit(request(number, num_prompt=3 + 2 * number, max_tokens=18))
    bench.inbox.submit(request(9, num_prompt=60))

    def script(edge: FakeEdge) -> None:
        if len(edge.steps) == 5:
            bench.inbox.cancel(RequestId(3), CancelReason.CLIENT)
        if len(edge.steps) == 12:
            bench.inbox.drain()
        close_when_idle(edge)

    bench.run(script)
    return bench


@pytest.fixture(scope="module")
def recorded() -> tuple[AnyRecord, ...]:
    kept = Kept()
    bench = mixed_run(kept)
    assert bench.scheduler.stats().preemptions
    return tuple(kept.records)


def test_all_that_decides_a_plan_is_there(recorded: tuple[AnyRecord, ...]) -> None:
    kinds = {type(record) for record in recorded}
    assert kinds == {Header, Submitted, Cancelled, Drained, Planned, Applied, StepFailed}
    plans = [r.plan for r in recorded if isinstance(r, Planned) and r.plan is not None]
    assert [plan.step_id for plan in plans] == list(range(len(plans)))
    assert any(r.plan is None for r in recorded if isinstance(r, Planned))
    assert [r.refused for r in recorded if isinstance(r, Submitted) and r.refused] == ["context_exceeded"]
    times = next(r.times for r in recorded if isinstance(r, Applied))
    assert times.collect_s is not None and times.collected_s is not None
    assert times.dispatch_s < times.dispatched_s <= times.collect_s < times.collected_s


def test_a_replay_reproduces_every_plan(recorded: tuple[AnyRecord, ...]) -> None:
    report = replay(recorded)
    assert report.difference is None and not report.notes
    assert (report.segments, report.commands) == (1, 10)
    assert report.steps == sum(isinstance(r, Planned) and r.plan is not None for r in recorded) > 20
    assert replay(recorded * 2).segments == 2


def test_random_runs_replay() -> None:
    """Tenants, classes, deadlines, swap, cancels and failing steps, as they come; the clock is moved by the steps."""
    kinds, num_swaps = set[type](), 0
    for seed in range(12):
        records = random_run(seed)
        report = replay(records)
        assert report.difference is None and report.steps > 30, seed
        kinds |= set(map(type, records))
        num_swaps += sum(len(r.plan.swap_out) for r in records if isinstance(r, Planned) and r.plan is not None)
    assert kinds >= {Submitted, Cancelled, Expired, Planned, Applied, StepFailed} and num_swaps > 10


def random_run(seed: int) -> list[AnyRecord]:
    rng, kept = random.Random(seed), Kept()
    sizes = {"num_pages": rng.choice((14, 20)), "num_slots": rng.choice((2, 4)), "num_swap_pages": rng.choice((0, 30))}
    bench = Bench(kept, max_context=52, **sizes)
    bench.runner.fail_collect = lambda step_id: RuntimeError("planted") if step_id % 23 == 22 else None
    left = 25

    def script(edge: FakeEdge) -> None:
        nonlocal left
        if left and rng.random() < 0.4:
            left -= 1
            made = request(30 - left, num_prompt=rng.randrange(1, 30), max_tokens=rng.randrange(1, 20))
            deadline_ms = rng.choice((None, None, 1e4, 1e5))
            extra = {"tenant": rng.choice("ab"), "weight": rng.choice((1.0, 3.0)), "deadline_ms": deadline_ms}
            bench.inbox.submit(replace(made, priority=rng.choice(list(Priority)), **extra))
        elif rng.random() < 0.1:
            bench.inbox.cancel(RequestId(rng.randrange(1, 31)), rng.choice(list(CancelReason)))
        last = edge.messages[-1]
        if not left and isinstance(last, Stats) and last.running == last.waiting == 0:
            bench.inbox.close()
        bench.inbox.probe(0)  # Something has to happen while nothing runs.

    bench.inbox.probe(0)
    bench.run(script)
    return kept.records


def altered(records: tuple[AnyRecord, ...], kind: type, change: Callable[[AnyRecord], AnyRecord], nth: int = 0) -> str:
    """What the replay says of records of which the nth of a kind was changed."""
    places = [i for i, r in enumerate(records) if isinstance(r, kind) and change(r) != r]
    place = places[nth]
    found = replay((*records[:place], change(records[place]), *records[place + 1 :])).difference
    assert found is not None and found.record >= place + 1
    return " ".join([found.what, *(f"{p.part}: {p.recorded} / {p.replayed}" for p in found.parts)])


def test_an_altered_token_is_found_at_its_step(recorded: tuple[AnyRecord, ...]) -> None:
    def change(record: AnyRecord) -> AnyRecord:
        if not isinstance(record, Applied) or not record.decode:
            return record
        return msgspec.structs.replace(record, decode=(record.decode[0] ^ 1, *record.decode[1:]))

    says = altered(recorded, Applied, change, nth=3)
    assert "the result of step" in says and "led to other events" in says and "TokenEvent" in says


def test_an_altered_command_shows_in_the_plan_with_both_sides(recorded: tuple[AnyRecord, ...]) -> None:
    def longer(record: AnyRecord) -> AnyRecord:
        assert isinstance(record, Submitted)
        prompt = (*record.request.prompt_ids, 1)
        return msgspec.structs.replace(record, request=replace(record.request, prompt_ids=prompt))

    says = altered(recorded, Submitted, longer)
    assert "the plan of step 0 differs in" in says
    assert "from 0, 5 tokens, sampled" in says and "from 0, 6 tokens, sampled" in says

    def other_ids(record: AnyRecord) -> AnyRecord:
        assert isinstance(record, Submitted)
        prompt = (*record.request.prompt_ids[:-1], 63)
        return msgspec.structs.replace(record, request=replace(record.request, prompt_ids=prompt))

    assert "of the same rows, with other pages, tokens or sampling" in altered(recorded, Submitted, other_ids)


def test_a_plan_that_was_not_made_and_an_answer_that_was_not_given_are_found(recorded: tuple[AnyRecord, ...]) -> None:
    def dropped(record: AnyRecord) -> AnyRecord:
        return msgspec.structs.replace(record, plan=None) if isinstance(record, Planned) else record

    assert "no step was planned, and the replay plans step 4" in altered(recorded, Planned, dropped, nth=4)

    def refused(record: AnyRecord) -> AnyRecord:
        return msgspec.structs.replace(record, refused="queue_full") if isinstance(record, Submitted) else record

    assert "answered otherwise refused: queue_full / None" in altered(recorded, Submitted, refused)


def test_another_version_is_noted(recorded: tuple[AnyRecord, ...]) -> None:
    header = recorded[0]
    assert isinstance(header, Header)
    report = replay((msgspec.structs.replace(header, policy_version=0), *recorded[1:]))
    assert "scheduler policy 0" in report.notes[0] and report.difference is None


# The file


def write_run(path: Path) -> list[AnyRecord]:
    file = JournalFile(JournalOptions(path=str(path), limit_bytes=LIMIT))
    mixed_run(file)
    file.close()
    return list(read_journal(path))


def test_the_file_is_private_and_a_second_engine_adds_a_segment(
    tmp_path: Path, recorded: tuple[AnyRecord, ...]
) -> None:
    path = tmp_path / "journal"
    first = write_run(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert first[1:-1] == list(recorded[1:]) and isinstance(first[-1], End)
    assert len(write_run(path)) == 2 * len(first)
    report = replay(read_journal(path))
    assert (report.segments, report.difference) == (2, None)
    steps = list(read_steps(path))
    assert {s.segment for s in steps} == {0, 1}
    assert {(s.num_decode_rows, s.num_prefill_tokens) for s in steps} >= {(1, 0)}


def test_a_record_cut_off_by_a_crash_is_reported_and_tolerated(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    whole = write_run(path)
    path.write_bytes(path.read_bytes()[:-30])
    torn = list(read_journal(path))
    assert torn[:-1] == whole[:-1] and isinstance(torn[-1], Torn)
    report = replay(read_journal(path))
    assert report.difference is None and "was cut off" in report.notes[0]
    write_run(path)
    report = replay(read_journal(path))
    assert (report.segments, report.difference) == (2, None)
    assert "segment 1 ends in" in report.notes[0]


def test_damage_elsewhere_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write_run(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], b"{}\n", *lines[5:]]))
    with pytest.raises(JournalError, match="line 5, is no record"):
        list(read_journal(path))
    path.write_bytes(b"".join([*lines, b"nonsense\n"]))
    with pytest.raises(JournalError, match=f"line {len(lines) + 1}, is no record"):
        list(read_journal(path))


def test_the_limit_stops_the_journal_with_a_last_record_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = JournalFile(JournalOptions(path=str(tmp_path / "journal"), limit_bytes=6000))
    with caplog.at_level(logging.ERROR):
        mixed_run(file)
    file.close()
    assert [r.levelname for r in caplog.records if "journal" in r.name] == ["ERROR"]
    assert "has reached its limit of 6000 bytes" in caplog.text
    records = list(read_journal(tmp_path / "journal"))
    assert isinstance(records[-1], End) and "--journal-limit" in records[-1].reason
    size = (tmp_path / "journal").stat().st_size
    assert size < 6000 + 200
    assert replay(records).difference is None
    again = JournalFile(JournalOptions(path=str(tmp_path / "journal"), limit_bytes=6000))
    mixed_run(again)
    again.close()
    assert again.stopped_by is not None and (tmp_path / "journal").stat().st_size == size, "no segment began"


def test_a_full_disk_stops_the_journal_and_not_the_service(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel refuses to let the file grow, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "journal"
    file = JournalFile(JournalOptions(path=str(path), limit_bytes=LIMIT))
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        mixed_run(file)
        file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    reason = os.strerror(errno.EFBIG)
    assert file.stopped_by == f"writing failed ({reason})"
    assert caplog.text.count("the journal") == 1
    assert replay(read_journal(path)).difference is None


def test_files_that_cannot_be_a_journal_are_refused_with_the_remedy(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("hello\n")
    os.mkfifo(tmp_path / "pipe")
    for path, says in (
        (tmp_path / "none" / "journal", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "pipe", "cannot be written"),
        (Path("/dev/null"), "no regular file"),
        (other, "is no journal.*name another file"),
    ):
        with pytest.raises(ConfigError, match=says):
            open_journal(path)
    assert other.read_text() == "hello\n"


def test_an_outline_is_of_its_plan() -> None:
    kept = Kept()
    mixed_run(kept)
    outlines = [r.plan for r in kept.records if isinstance(r, Planned) and r.plan is not None]
    assert all(isinstance(o, PlanOutline) and len(o.digest) == 64 for o in outlines)
    assert outlines[0].loads and outlines[0].prefill
