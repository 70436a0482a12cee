"""Rare meetings of rules: what one of them takes for granted and another one breaks."""

from tests.serving.core.driver import Drive, make_config, make_request


def test_a_step_that_fails_ends_a_request_that_it_only_loaded() -> None:
    """Its slot may not be loaded, and no later plan loads it again."""
    drive = Drive(make_config(max_segments=1, max_steps_in_flight=1))
    drive.submit(make_request(0, 60, 1, tenant="a"))
    drive.tick()
    drive.submit(make_request(1, 60, 60, tenant="b"))
    plan = drive.plan()
    assert plan is not None
    assert [load.request.request_id for load in plan.loads] == [1]
    assert len(plan.prefill) == 1 and plan.prefill[0].slot != plan.loads[0].slot, "the older prompt has its only chunk"
    drive.in_flight.clear()
    drive.runner._tickets.clear()
    drive.take(drive.scheduler.fail_plan(plan, "device_error", "it broke", drive.now_s))
    assert set(drive.finished) == {0, 1}
    drive.run()
