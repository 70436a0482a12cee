import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest

from headrace.model.decoder import pool_shape
from headrace.serving.core.errors import InvariantError
from headrace.serving.core.plan import PageCopy, SlotRef, StepPlan
from headrace.serving.core.request import FinishReason, SamplingParams
from headrace.serving.engine.ports import CompiledProgram
from headrace.serving.runner.runner import JaxRunner
from tests.model.tiny import TINY
from tests.serving.runner.plans import (
    CONFIG,
    DECODE,
    GREEDY,
    MIXED,
    end_of,
    greedy_ids,
    ids_of,
    load,
    plan,
    prompt,
    request,
    row,
    segment,
    serve,
    tiny_model,
)
from tests.serving.runner.row_bits import row_bits

A, B = SlotRef(0, 1), SlotRef(1, 1)


@pytest.fixture(scope="module")
def warm() -> Iterator[tuple[JaxRunner, tuple[CompiledProgram, ...], list[tuple[str, int, int]]]]:
    """One warm runner for the file: sequences write what they read, so tests cannot disturb each other."""
    runner = JaxRunner.of_host(tiny_model(), replace(CONFIG, num_swap_pages=6))
    seen: list[tuple[str, int, int]] = []
    ledger = runner.warm_up(lambda *progress: seen.append(progress))
    yield runner, ledger, seen
    runner.close()


@pytest.fixture
def runner(warm: tuple[JaxRunner, tuple[CompiledProgram, ...], list[tuple[str, int, int]]]) -> JaxRunner:
    return warm[0]


def run(runner: JaxRunner, step: StepPlan) -> list[int | None]:
    """Token ids: decode rows, then segments. (The oracle compiles in this process too, but not in here.)"""
    compiles = runner.compiles_after_ready()
    result = runner.collect(runner.dispatch(step))
    assert runner.compiles_after_ready() == compiles
    return [None if token is None else token.token_id for token in (*result.decode, *result.prefill)]


class TestWarmUp:
    def test_the_ledger_names_every_program_once(self, warm: tuple) -> None:
        _, ledger, seen = warm
        names = [
            "decode-1",
            "decode-4",
            "mixed-4+8",
            "mixed-4+16",
            "load-slot",
            "load-slot-rows",
            "swap-out",
            "swap-in",
        ]
        assert [program.name for program in ledger] == names
        assert all(program.seconds > 0 and program.temp_bytes >= 0 for program in ledger)
        assert [done for _, done, _ in seen] == list(range(1, 9)) and {total for _, _, total in seen} == {8}
        assert {what for what, _, _ in seen} == {f"compiling {name}" for name in names}

    def test_no_program_copies_the_pool(self, warm: tuple) -> None:
        pool_bytes = 4 * math.prod(pool_shape(TINY, CONFIG.num_pages, CONFIG.page_size))
        _, ledger, _ = warm
        assert max(program.temp_bytes for program in ledger) < pool_bytes / 2


class TestSteps:
    def test_prefill_then_decode_on_the_devices_own_token(self, runner: JaxRunner) -> None:
        ids = prompt(1, 9)
        loads = (load(A, request(1, ids)),)
        first = run(runner, plan(1, MIXED, loads=loads, prefill=(segment(A, ids, (1, 2, 3)),)))
        second = run(runner, plan(2, DECODE, decode=(row(A, 9, (1, 2, 3)),)))
        third = run(runner, plan(3, DECODE, decode=(row(A, 10, (1, 2, 3), output_index=2),)))
        assert first + second + third == greedy_ids(ids, 3)

    def test_a_chunk_that_does_not_sample_returns_none_and_leaves_the_slot_alone(self, runner: JaxRunner) -> None:
        ids, other = prompt(2, 13), prompt(3, 5)
        loads = (load(A, request(1, ids)), load(B, request(2, other)))
        parts = (segment(A, ids[:8], (1, 2), samples=False), segment(B, other, (5, 6)))
        assert run(runner, plan(1, MIXED, loads=loads, prefill=parts)) == [None, greedy_ids(other, 1)[0]]
        tokens = run(
            runner,
            plan(
                2,
                MIXED,
                decode=(row(B, 5, (5, 6)),),
                prefill=(segment(A, ids[8:], (1, 2, 3, 4), start=8),),
            ),
        )
        assert tokens == [greedy_ids(other, 2)[1], greedy_ids(ids, 1)[0]]

    def test_results_come_in_the_plans_order_whatever_the_lengths(self, runner: JaxRunner) -> None:
        short, long = prompt(4, 3), prompt(5, 7)
        loads = (load(A, request(1, short)), load(B, request(2, long)))
        parts = (segment(A, short, (1,)), segment(B, long, (2, 3)))
        run(runner, plan(1, MIXED, loads=loads, prefill=parts))
        tokens = run(runner, plan(2, DECODE, decode=(row(A, 3, (1,)), row(B, 7, (2, 3)))))
        assert tokens == [greedy_ids(short, 2)[1], greedy_ids(long, 2)[1]]

    def test_two_steps_in_flight(self, runner: JaxRunner) -> None:
        ids = prompt(6, 6)
        first = plan(1, MIXED, loads=(load(A, request(1, ids)),), prefill=(segment(A, ids, (1, 2)),))
        tickets = [runner.dispatch(first), runner.dispatch(plan(2, DECODE, decode=(row(A, 6, (1, 2)),)))]
        with pytest.raises(InvariantError, match="2 steps are in flight"):
            runner.dispatch(plan(3, DECODE, decode=(row(A, 7, (1, 2)),)))
        with pytest.raises(InvariantError, match="step 2 is not the oldest"):
            runner.collect(tickets[1])
        results = [runner.collect(ticket) for ticket in tickets]
        assert [results[0].prefill[0].token_id, results[1].decode[0].token_id] == greedy_ids(ids, 2)

    def test_recompute_after_preemption_goes_on_where_it_stopped(self, runner: JaxRunner) -> None:
        """Penalties count what was generated before, and min_tokens counts on."""
        params = SamplingParams(temperature=0.0, frequency_penalty=0.8, repetition_penalty=1.2)
        ids = prompt(7, 6)
        whole = ids_of(serve(runner, CONFIG, [request(1, ids, params, max_tokens=6)])[1])
        again = request(1, ids, params, max_tokens=6)
        output = tuple(whole[:3])
        recompute = segment(A, ids + output, (7, 8, 9), output_index=3)
        tokens = run(runner, plan(1, MIXED, loads=(load(A, again, output),), prefill=(recompute,)))
        tokens += run(runner, plan(2, DECODE, decode=(row(A, 9, (7, 8, 9), output_index=4),)))
        tokens += run(runner, plan(3, DECODE, decode=(row(A, 10, (7, 8, 9), output_index=5),)))
        assert tokens == whole[3:]

    def test_min_tokens_follow_output_index(self, runner: JaxRunner) -> None:
        ids = prompt(8, 6)
        stop = greedy_ids(ids, 1)[0]
        held = request(1, ids, stop_token_ids=(stop,), min_tokens=2)
        one = plan(1, MIXED, loads=(load(A, held),), prefill=(segment(A, ids, (1, 2)),))
        assert run(runner, one) != [stop]
        two = plan(2, MIXED, loads=(load(A, held),), prefill=(segment(A, ids, (1, 2), output_index=2),))
        assert run(runner, two) == [stop]

    def test_logprobs_go_only_to_who_asked(self, runner: JaxRunner) -> None:
        ids = prompt(9, 5)
        loads = (load(A, request(1, ids, replace(GREEDY, num_logprobs=3))), load(B, request(2, ids)))
        parts = (segment(A, ids, (1, 2)), segment(B, ids, (3, 4)))
        result = runner.collect(runner.dispatch(plan(1, MIXED, loads=loads, prefill=parts)))
        asked, other = result.prefill
        assert other.logprobs is None and asked.token_id == other.token_id
        assert asked.logprobs.rank == 1 and len(asked.logprobs.top) == 3
        assert asked.logprobs.top[0] == (asked.token_id, asked.logprobs.chosen)

    def test_a_broken_sequence_is_reported_alone(self, runner: JaxRunner) -> None:
        ids = prompt(10, 8)
        loads = (load(A, request(1, ids, replace(GREEDY, num_logprobs=2))), load(B, request(2, ids)))
        run(runner, plan(1, MIXED, loads=loads, prefill=(segment(A, ids, (1, 2)), segment(B, ids, (3, 4)))))
        runner.poison_pages([1])
        result = runner.collect(runner.dispatch(plan(2, DECODE, decode=(row(A, 8, (1, 2, 5)), row(B, 8, (3, 4, 6))))))
        assert [token.is_finite for token in result.decode] == [False, True]
        assert result.decode[0].logprobs is None
        assert result.decode[1].token_id == greedy_ids(ids, 2)[1]


class TestBits:
    """What deterministic mode stands on: within one program a row's bits are its own."""

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(temperature=0.0, num_logprobs=20),
            SamplingParams(temperature=1.0, seed=3, num_logprobs=20),
            SamplingParams(temperature=0.8, top_p=0.8, frequency_penalty=0.4, seed=3, num_logprobs=20),
        ],
        ids=("greedy", "drawn", "cut and penalized"),
    )
    def test_neighbours_slots_pages_and_places_change_no_bit(self, runner: JaxRunner, params: SamplingParams) -> None:
        alone = row_bits(runner, params, company=None)
        assert alone[:, 2].any()
        for company in range(1, 9):
            np.testing.assert_array_equal(row_bits(runner, params, company=company), alone)


class TestSwap:
    def test_a_sequence_leaves_for_another_and_comes_back_elsewhere(self, runner: JaxRunner) -> None:
        """Its pages are written again in the very step that they leave in, and spoiled afterwards."""
        ids, other = prompt(21, 9), prompt(22, 11)
        params = replace(GREEDY, num_logprobs=3)
        loads = (load(A, request(1, ids, params)),)
        tokens = run(runner, plan(1, MIXED, loads=loads, prefill=(segment(A, ids, (1, 2, 3)),)))
        out = (PageCopy(1, 4), PageCopy(2, 0), PageCopy(3, 5))
        taken = segment(B, other, (3, 2, 1))
        leaving = plan(2, MIXED, loads=(load(B, request(2, other)),), prefill=(taken,), swap_out=out)
        assert run(runner, leaving) == greedy_ids(other, 1)
        runner.poison_pages([1, 2, 3])
        back = (PageCopy(8, 4), PageCopy(1, 0), PageCopy(9, 5))
        loads = (load(A, request(1, ids, params), tuple(tokens)),)
        tokens += run(runner, plan(3, DECODE, loads=loads, decode=(row(A, 9, (8, 1, 9)),), swap_in=back))
        tokens += run(runner, plan(4, DECODE, decode=(row(A, 10, (8, 1, 9), output_index=2),)))
        assert tokens == greedy_ids(ids, 3)

    def test_out_and_in_while_two_steps_are_in_flight(self, runner: JaxRunner) -> None:
        ids, other = prompt(23, 8), prompt(24, 7)
        loads = (load(A, request(1, ids)), load(B, request(2, other)))
        tickets = [
            runner.dispatch(plan(1, MIXED, loads=loads, prefill=(segment(A, ids, (1, 2)), segment(B, other, (3, 4))))),
            # A leaves as step 1 makes it, which nobody has waited for.
            runner.dispatch(plan(2, DECODE, decode=(row(B, 7, (3, 4)),), swap_out=(PageCopy(1, 1), PageCopy(2, 2)))),
        ]
        first, second = runner.collect(tickets[0]), None
        out, back = (PageCopy(3, 3), PageCopy(4, 4)), (PageCopy(4, 1), PageCopy(3, 2))
        again = (load(A, request(1, ids), (first.prefill[0].token_id,)),)
        third = runner.dispatch(
            plan(3, DECODE, loads=again, decode=(row(A, 8, (4, 3, 5)),), swap_out=out, swap_in=back)
        )
        second, third = runner.collect(tickets[1]), runner.collect(third)
        found = [result.decode[0].token_id for result in (second, third)]
        assert found == [greedy_ids(other, 2)[1], greedy_ids(ids, 2)[1]]

    def test_a_page_takes_measured_time(self, runner: JaxRunner) -> None:
        assert 0 < runner.swap_page_seconds < 1

    def test_a_copy_that_does_not_fit_is_refused_before_anything_runs(self, runner: JaxRunner) -> None:
        ids = prompt(25, 6)
        run(runner, plan(1, MIXED, loads=(load(A, request(1, ids)),), prefill=(segment(A, ids, (1, 2)),)))
        for parts in ({"swap_out": (PageCopy(1, 6),)}, {"swap_in": (PageCopy(0, 1),)}):
            with pytest.raises(InvariantError, match="out of range"):
                runner.dispatch(plan(2, DECODE, decode=(row(A, 6, (1, 2)),), **parts))
        assert run(runner, plan(3, DECODE, decode=(row(A, 6, (1, 2)),))) == [greedy_ids(ids, 2)[1]]


class TestRefusals:
    """A plan that does not fit is refused before anything runs: the next step still works."""

    ids = prompt(11, 6)

    @pytest.mark.parametrize(
        ("why", "parts"),
        [
            ("not loaded", {"decode": (row(SlotRef(0, 2), 6, (1, 2)),)}),
            ("page ids 0..2", {"decode": (row(A, 6, (0, 2)),)}),
            ("page ids 1..4000", {"decode": (row(A, 6, (1, 4000)),)}),
            ("1 pages for 7 tokens", {"decode": (row(A, 6, (1,)),)}),
            ("0 tokens of 64", {"decode": (row(A, -1, (1,)),)}),
            ("65 tokens of 64", {"decode": (row(A, 64, tuple(range(1, 17))),)}),
            ("token 96", {"decode": (row(A, 6, (1, 2), input_token=96),)}),
            ("two rows write to one page", {"decode": (row(A, 6, (1, 2)), row(B, 6, (3, 2)))}),
            ("a slot has two rows", {"decode": (row(A, 6, (1, 2)), row(A, 6, (3, 4)))}),
            ("do not fit", {"decode": tuple(row(A, 6, (1, 2)) for _ in range(5))}),
            ("start 2 in a page", {"prefill": (segment(A, ids, (1, 2), start=2),)}),
            ("no whole pages", {"prefill": (segment(A, ids, (1, 2), samples=False),)}),
            ("17 tokens", {"prefill": (segment(A, prompt(1, 17), (1, 2, 3, 4, 5)),)}),
            ("0 tokens", {"prefill": (segment(A, (), (1,)),)}),
            ("a token id", {"prefill": (segment(A, (5, 96), (1,)),)}),
            ("a token id", {"prefill": (segment(A, (5, -1), (1,)),)}),
        ],
        ids=itertools.count(),
    )
    def test_out_of_range(self, runner: JaxRunner, why: str, parts: dict) -> None:
        loads = (load(A, request(1, self.ids)), load(B, request(2, self.ids)))
        run(runner, plan(1, MIXED, loads=loads, prefill=(segment(A, self.ids, (1, 2)),)))
        with pytest.raises(InvariantError, match=why):
            runner.dispatch(plan(2, MIXED, **parts))
        assert run(runner, plan(3, DECODE, decode=(row(A, 6, (1, 2)),))) == [greedy_ids(self.ids, 2)[1]]

    def test_loads_out_of_range(self, runner: JaxRunner) -> None:
        far = request(1, self.ids, replace(GREEDY, logit_bias=((96, 1.0),)))
        with pytest.raises(InvariantError, match="not in the vocabulary of 96"):
            runner.dispatch(plan(1, MIXED, loads=(load(A, far),), prefill=(segment(A, self.ids, (1, 2)),)))
        beyond = SlotRef(4, 0)
        step = plan(1, MIXED, loads=(load(beyond, request(1, self.ids)),), prefill=(segment(beyond, self.ids, (1, 2)),))
        with pytest.raises(InvariantError, match="slot"):
            runner.dispatch(step)

    def test_a_bucket_without_a_program(self, runner: JaxRunner) -> None:
        with pytest.raises(InvariantError, match="no program decode-3"):
            runner.dispatch(plan(1, replace(DECODE, decode_rows=3)))


class TestWithScheduler:
    def test_greedy_ids_equal_the_oracle(self, runner: JaxRunner) -> None:
        """More requests than slots, prompts of every length around pages, blocks and chunks."""
        lengths = [1, 3, 4, 5, 8, 9, 15, 16, 17, 31, 33, 40]
        requests = [request(n, prompt(100 + n, length), max_tokens=7) for n, length in enumerate(lengths)]
        events = serve(runner, CONFIG, requests)
        for one in requests:
            assert ids_of(events[int(one.request_id)]) == greedy_ids(one.prompt_ids, 7)

    def test_preempted_requests_give_the_same_ids(self, runner: JaxRunner) -> None:
        tight = replace(CONFIG, num_pages=14, prefix_cache=False)
        requests = [
            request(n, prompt(200 + n, 10), replace(GREEDY, presence_penalty=0.5 * n), max_tokens=20) for n in range(4)
        ]
        calm = {n: ids_of(serve(runner, CONFIG, [one])[n]) for n, one in enumerate(requests)}
        events = serve(runner, tight, requests)
        assert sum(end_of(events[n]).timings.preemptions for n in range(4)) > 0
        assert {n: ids_of(events[n]) for n in range(4)} == calm

    def test_freed_pages_are_never_read(self, runner: JaxRunner) -> None:
        """Every page is NaN at the start and again between the two rounds, which get each other's pages."""
        runner.poison_pages(range(1, CONFIG.num_pages))
        for first in (300, 400):
            requests = [request(n, prompt(first + n, 5 + 9 * n), max_tokens=6) for n in range(4)]
            events = serve(runner, CONFIG, requests)
            for one in requests:
                assert end_of(events[int(one.request_id)]).reason is FinishReason.LENGTH
                assert ids_of(events[int(one.request_id)]) == greedy_ids(one.prompt_ids, 6)
            runner.poison_pages(range(1, CONFIG.num_pages))

    def test_no_compile_over_the_option_matrix(self, runner: JaxRunner) -> None:
        """Every option on and off, and all kinds at once in one batch."""
        options: list[dict] = [
            {"temperature": 0.7},
            {"top_k": 5},
            {"top_p": 0.5},
            {"min_p": 0.1},
            {"repetition_penalty": 1.2},
            {"presence_penalty": 0.5},
            {"frequency_penalty": -0.5},
            {"logit_bias": ((3, 5.0),)},
            {"allowed_token_ids": (4, 5, 6)},
            {"num_logprobs": 0},
            {"num_logprobs": 20},
            {"seed": 2**63 - 1},
        ]
        cases = [{"temperature": 0.0}, *options, *[a | b for a, b in itertools.combinations(options, 2)]]
        requests = [
            request(n, prompt(n, 1 + n % 20), SamplingParams(**case), max_tokens=1 + n % 4, min_tokens=n % 2)
            for n, case in enumerate(cases)
        ]
        events = serve(runner, CONFIG, requests)
        assert all(end_of(events[n]).reason is FinishReason.LENGTH for n in range(len(cases)))

    def test_sampled_ids_do_not_depend_on_company(self, runner: JaxRunner) -> None:
        requests = [
            request(n, prompt(n, 6 + n), SamplingParams(temperature=1.0, seed=n, top_p=0.9), max_tokens=10)
            for n in range(6)
        ]
        together = serve(runner, CONFIG, requests)
        for one in requests:
            number = int(one.request_id)
            assert ids_of(serve(runner, CONFIG, [one])[number]) == ids_of(together[number])


def test_memory_of_a_step_does_not_grow(runner: JaxRunner) -> None:
    """Inputs, results and old states are released: the live arrays are the same after 50 steps as after 5."""

    def live() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    serve(runner, CONFIG, [request(1, prompt(1, 5), max_tokens=5)])
    before = live()
    serve(runner, CONFIG, [request(1, prompt(1, 5), max_tokens=50)])
    assert live() <= before + np.int64(4096)
