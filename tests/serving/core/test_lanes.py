"""Several copies of the model in one scheduler: who goes where, and that lanes keep to themselves."""

from headrace.serving.core.policy import PLACEMENT_STREAM_TOKENS
from tests.serving.core.driver import Drive, ids_alone, make_config, make_request


def lanes_of(drive: Drive) -> dict[int, int]:
    """Lane by request id, of all plans so far."""
    return {
        load.request.request_id: drive.config.lane_of_slot(load.slot.slot)
        for plan in drive.plans
        for load in plan.loads
    }


def test_requests_spread_over_the_lanes_and_all_give_their_own_tokens() -> None:
    drive = Drive(make_config(num_lanes=3, num_slots=2, num_pages=16))
    requests = [make_request(i, 3 + 4 * i, 9) for i in range(6)]
    drive.submit(*requests)
    drive.run()
    assert sorted(lanes_of(drive).values()) == [0, 0, 1, 1, 2, 2]
    assert [drive.ids(r.request_id) for r in requests] == [ids_alone(r) for r in requests]


def test_one_program_holds_the_fullest_lane() -> None:
    drive = Drive(make_config(num_lanes=2, num_slots=4))
    drive.submit(*(make_request(i, 4, 8) for i in range(3)))
    drive.run()
    most = [
        max(sum(drive.config.lane_of_slot(r.slot.slot) == lane for r in p.decode) for lane in (0, 1))
        for p in drive.plans
    ]
    assert all(rows <= plan.bucket.decode_rows for rows, plan in zip(most, drive.plans, strict=True))
    assert max(most) == 2


def test_a_cached_prefix_draws_its_requests_until_other_lanes_are_much_freer() -> None:
    drive = Drive(make_config(num_lanes=2, num_slots=4, num_pages=200, max_context=300))
    prompt = tuple(i % 60 for i in range(PLACEMENT_STREAM_TOKENS + 42))
    drive.submit(make_request(0, (*prompt, 61), 2))
    drive.run()
    drive.submit(*(make_request(i, (*prompt, i), 60) for i in range(1, 4)))
    drive.run()
    assert drive.finished[1].cached_tokens > PLACEMENT_STREAM_TOKENS
    lanes = lanes_of(drive)
    # The hit saves 168 tokens: more than one stream weighs, less than two.
    assert [lanes[i] for i in range(4)] == [0, 0, 0, 1]


def test_a_full_lane_takes_no_pages_from_another_and_preempts_its_own() -> None:
    drive = Drive(make_config(num_lanes=2, num_slots=2, num_pages=12, max_context=44))
    requests = [make_request(i, 12, 30) for i in range(4)]
    drive.submit(*requests)
    drive.run()
    assert drive.scheduler.stats().preemptions > 0
    assert [drive.ids(r.request_id) for r in requests] == [ids_alone(r) for r in requests]


def test_a_request_that_fits_no_single_lane_is_refused() -> None:
    drive = Drive(make_config(num_lanes=2, num_pages=4, max_context=64))
    assert "page" in drive.refused(make_request(0, 12, 8)).message


def test_counts_are_those_of_all_lanes() -> None:
    drive = Drive(make_config(num_lanes=2, num_pages=16))
    assert drive.scheduler.stats().pages_total == 30
