"""One world of the simulator on the fake runner."""

from headrace.serving.core.plan import SampledToken
from headrace.serving.core.request import Request
from headrace.serving.core.simulated_world import World, draw_world
from headrace.serving.core.simulator import Report, Simulation, SimulationFailure
from headrace.serving.engine.fake_runner import FakeRunner, expected_tokens


def run_world(world: World) -> Report:
    """Raises: SimulationFailure with the first broken promise."""

    def alone(request: Request) -> tuple[SampledToken, ...]:
        return expected_tokens(request, world.vocab_size)

    def make_model() -> FakeRunner:
        return FakeRunner(world.config, vocab_size=world.vocab_size, non_finite=world.faults.non_finite)

    return Simulation(world, make_model, alone).run()


def run_seed(seed: int) -> Report:
    """Raises: SimulationFailure."""
    return run_world(draw_world(seed))


def broken_promise(world: World) -> str | None:
    """Which promise a world breaks, for the shrinker: the invariant's number, or the type of the error; None = none."""
    try:
        run_world(world)
    except SimulationFailure as failure:
        return failure.broken.partition(":")[0]
    return None
