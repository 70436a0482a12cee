import pytest

from headrace.serving.core.plan import Bucket, DecodeRow, PageCopy, PrefillSegment, ProgramKind, SlotRef, StepPlan
from headrace.serving.core.step_cost import MARGIN, StepCost
from tests.serving.core.driver import make_config

CONFIG = make_config(
    chunk_tokens=64, block_tokens=4, prefill_tokens=(4, 16, 64), num_pages=400, max_context=1000, inter_token_s=0.25
)


def plan(tokens: int = 0, start: int = 0, copies: int = 0, program: int | None = None) -> StepPlan:
    slot = SlotRef(0, 1)
    row = DecodeRow(slot=slot, position=1, input_token=1, page_ids=(1,), output_index=1)
    segment = PrefillSegment(
        slot=SlotRef(1, 1), start=start, token_ids=(1,) * tokens, page_ids=(), samples=False, output_index=0
    )
    bucket = Bucket(ProgramKind.MIXED, 4, program or tokens) if tokens else Bucket(ProgramKind.DECODE, 4)
    return StepPlan(
        step_id=0,
        bucket=bucket,
        loads=(),
        decode=(row,),
        prefill=(segment,) if tokens else (),
        swap_out=tuple(PageCopy(1 + i, i) for i in range(copies)),
    )


class Machine:
    """Steps one after the other, each planned while the one before runs."""

    def __init__(self, cost: StepCost, decode_s: float = 0.05, token_s: float = 0.002, pair_s: float = 0.0) -> None:
        self.cost, self.decode_s, self.token_s, self.pair_s = cost, decode_s, token_s, pair_s
        self.now_s = self.planned_s = 100.0

    def run(
        self, tokens: int = 0, start: int = 0, copies: int = 0, slow: float = 1.0, program: int | None = None
    ) -> None:
        seconds = self.decode_s + self.token_s * tokens + self.pair_s * tokens * start + 0.01 * copies
        planned_s, self.planned_s = self.planned_s, self.now_s
        self.now_s += slow * seconds
        self.cost.learn(plan(tokens, start, copies, program), planned_s, self.now_s)


def test_without_an_objective_the_budget_is_the_chunk() -> None:
    assert StepCost(make_config()).budget_tokens(0) == 16


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    cost = StepCost(CONFIG)
    machine = Machine(cost)
    for _ in range(4):
        machine.run()
        machine.run(64)
    assert cost.decode_s == pytest.approx(0.05)
    assert cost.prefill_token_s == pytest.approx(0.002)


def test_a_prompt_token_costs_what_those_that_were_read_cost() -> None:
    """Of kernels that skip padding: 10 tokens in a program of 64 take the time of 10."""
    cost = StepCost(CONFIG)
    machine = Machine(cost)
    for _ in range(4):
        machine.run()
        machine.run(10, program=64)
    assert cost.prefill_token_s == pytest.approx(0.002)
    assert cost.least_prefill_token_s == pytest.approx(0.002 * 10 / 64)
    for _ in range(40):
        machine.token_s = 0.004
        machine.run()
        machine.run(40, program=64)
    assert cost.prefill_token_s == pytest.approx(0.004, rel=0.01)


def test_an_idle_time_is_no_step() -> None:
    cost = StepCost(CONFIG)
    machine = Machine(cost)
    machine.run()
    machine.now_s = machine.planned_s = 1e6
    machine.run()
    assert cost.decode_s == pytest.approx(0.05)


def test_the_budget_is_the_largest_program_inside_the_objective() -> None:
    cost = StepCost(CONFIG)
    assert cost.budget_tokens(0) == 4, "nothing is known"
    machine = Machine(cost)
    machine.run()
    machine.run(64)  # 0.178 s of 0.225
    assert cost.budget_tokens(0) == 64
    slower = StepCost(CONFIG)
    machine = Machine(slower, token_s=0.005)
    machine.run()
    machine.run(64)  # 0.37 s; 16 tokens: 0.13
    assert slower.budget_tokens(0) == 16
    assert slower.mixed_s(16, 0) == pytest.approx(0.05 + 16 * 0.005)


def test_a_block_always_runs() -> None:
    cost = StepCost(CONFIG)
    machine = Machine(cost, decode_s=1.0)
    machine.run()
    machine.run(64)
    assert cost.budget_tokens(0) == CONFIG.block_tokens


def test_attention_makes_late_chunks_dearer_and_shorter() -> None:
    cost = StepCost(CONFIG)
    machine = Machine(cost, token_s=0.002, pair_s=4e-6)
    machine.run()
    for i in range(60):
        machine.run(64, start=(i % 10) * 64)
    assert cost.pair_s == pytest.approx(4e-6, rel=0.3)
    near, far = cost.budget_tokens(0), cost.budget_tokens(640)
    assert near == 64 and far < 64 and far % CONFIG.block_tokens == 0
    assert 0.05 + 0.002 * 64 + 4e-6 * far * 640 <= 0.25 * MARGIN * 1.1


def test_one_hiccup_changes_little_and_a_lasting_change_is_followed() -> None:
    cost = StepCost(CONFIG)
    machine = Machine(cost)
    for _ in range(5):
        machine.run()
    machine.run(slow=100.0)
    assert cost.decode_s < 0.065
    for _ in range(40):
        machine.run(slow=3.0)
    assert cost.decode_s == pytest.approx(0.15, rel=0.05)


def test_a_program_that_was_dear_once_gets_another_chance() -> None:
    cost = StepCost(CONFIG)
    machine = Machine(cost, token_s=0.001)
    machine.run()
    machine.run(64, slow=10.0)
    assert cost.budget_tokens(0) < 64
    for _ in range(200):
        machine.run(16)
    assert cost.budget_tokens(0) == 64


def test_copies_are_measured_apart_from_their_step() -> None:
    cost = StepCost(CONFIG)
    machine = Machine(cost)
    machine.run()
    machine.run(copies=5)
    assert cost.page_s == pytest.approx(0.01)
    assert cost.decode_s == pytest.approx(0.05)
