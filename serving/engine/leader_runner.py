"""The runner of rank 0: every plan goes to all hosts before it runs here."""

import time
from typing import NoReturn

from headrace.serving.core.errors import InvariantError
from headrace.serving.core.plan import StepPlan, StepResult
from headrace.serving.engine.host_leader import Leader
from headrace.serving.engine.ports import CompiledProgram, EngineFailure, ExpertTokens, Progress, Runner, Ticket

VERDICT_S = 1.0
"""A step that fails may fail because a rank is gone; whoever finds out which ends the process within so long."""


class LeaderRunner:
    """Implements ``ports.Runner``. A step that fails ends the engine: some ranks may have run it, others not, and what
    their slots and pages hold is no longer the same."""

    def __init__(self, runner: Runner, leader: Leader) -> None:
        self._runner = runner
        self._leader = leader
        self._steps: dict[int, int] = {}

    def warm_up(self, progress: Progress) -> tuple[CompiledProgram, ...]:
        """See ``ports.Runner``."""
        return self._runner.warm_up(progress)

    def dispatch(self, plan: StepPlan) -> Ticket:
        """See ``ports.Runner``. Raises: EngineFailure."""
        steps = self._leader.run_step(plan)
        try:
            ticket = self._runner.dispatch(plan)
        except InvariantError:
            raise
        except Exception as error:
            self._fail(plan.step_id, error)
        self._steps[plan.step_id] = steps
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        """See ``ports.Runner``. Raises: EngineFailure."""
        self._leader.waits_for(self._steps.pop(ticket.step_id))
        try:
            return self._runner.collect(ticket)
        except InvariantError:
            raise
        except Exception as error:
            self._fail(ticket.step_id, error)
        finally:
            self._leader.waits_for(None)

    def expert_tokens(self) -> ExpertTokens | None:
        """See ``ports.Runner``. It waits for the steps in flight, so a rank that is stuck in one is noticed."""
        self._leader.waits_for(max(self._steps.values(), default=None))
        try:
            return self._runner.expert_tokens()
        finally:
            self._leader.waits_for(None)

    @property
    def swap_page_seconds(self) -> float | None:
        """See ``ports.Runner``."""
        return self._runner.swap_page_seconds

    def compiles_after_ready(self) -> int:
        """See ``ports.Runner``."""
        return self._runner.compiles_after_ready()

    def _fail(self, step_id: int, error: Exception) -> NoReturn:
        time.sleep(VERDICT_S)
        raise EngineFailure(
            f"step {step_id} failed on rank 0 ({type(error).__name__}), and ranks may not agree any more"
        ) from error
