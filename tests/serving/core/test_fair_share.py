from headrace.serving.core.fair_share import FairShare


def test_a_tenant_that_was_idle_starts_at_the_least_served_of_the_active() -> None:
    shares = FairShare()
    first, second = shares.join("a", 1.0), shares.join("b", 1.0)
    first.charge(output_tokens=500)
    second.charge(prompt_tokens=300)
    assert shares.join("c", 1.0).served == 300
    assert shares.join("a", 1.0) is first and first.served == 1000, "an active one keeps its place"


def test_a_tenant_cannot_shed_what_it_had_by_a_pause() -> None:
    shares = FairShare()
    first, second = shares.join("a", 1.0), shares.join("b", 1.0)
    first.charge(prompt_tokens=1000)
    shares.leave(first, 1.0)
    assert shares.join("a", 1.0).served == 1000
    second.charge(prompt_tokens=5000)
    shares.leave(first, 2.0)
    assert shares.join("a", 1.0).served == 5000, "and earns nothing by it"


def test_accounts_are_closed_when_nobody_is_active_and_stay_few() -> None:
    shares = FairShare()
    busy = shares.join("busy", 1.0)
    for i in range(100):
        shares.leave(shares.join(f"t{i}", 1.0), 0.0)
    assert len(shares._tenants) == 1
    busy.charge(prompt_tokens=1)
    shares.leave(busy, 1.0)
    assert shares._tenants == {} and not shares.awaits_another(1.0, 10.0)


def test_slots_are_shared_by_weight_among_the_active() -> None:
    shares = FairShare()
    _, heavy = shares.join("light", 1.0), shares.join("heavy", 3.0)
    assert shares.parts_of(8) == {"light": 2.0, "heavy": 6.0}
    shares.leave(heavy, 5.0)
    assert shares.parts_of(8) == {"light": 8.0}
    assert shares.awaits_another(6.0, 10.0) and not shares.awaits_another(15.0, 10.0)


def test_a_tenant_whose_requests_all_run_saves_nothing_for_later() -> None:
    shares = FairShare()
    light, heavy = shares.join("light", 1.0), shares.join("heavy", 1.0)
    light.num_running = heavy.num_running = 1
    shares.join("heavy", 1.0)
    heavy.charge(output_tokens=500)
    light.charge(output_tokens=5)
    shares.join("light", 1.0)
    assert light.served == 1000, "another of its requests begins beside those that wait"
    heavy.charge(output_tokens=500)
    shares.join("light", 1.0)
    assert light.served == 1000, "while one of its own waits it is owed"


def test_while_nobody_waits_all_who_come_are_equal() -> None:
    shares = FairShare()
    first, second = shares.join("a", 1.0), shares.join("b", 1.0)
    first.num_running = second.num_running = 1
    first.charge(output_tokens=500)
    assert shares.join("b", 1.0).served == shares.join("c", 1.0).served == 1000


def test_a_tenant_is_awaited_only_until_it_is_back() -> None:
    shares = FairShare()
    _, first, second = (shares.join(name, 1.0) for name in ("busy", "a", "b"))
    shares.leave(first, 1.0)
    shares.leave(second, 3.0)
    second = shares.join("b", 1.0)
    assert shares.awaits_another(10.0, 10.0), "a is not back"
    first = shares.join("a", 1.0)
    assert not shares.awaits_another(10.0, 10.0)
    shares.leave(first, 11.0)
    shares.leave(second, 13.0)
    assert shares.awaits_another(22.0, 10.0) and not shares.awaits_another(23.0, 10.0)
