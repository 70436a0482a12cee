"""The thread team under sanitizers, and that the sanitizers find what is planted."""

import pytest

from tests.pallas_kernels.native.sanitized import ADDRESS, THREAD, run_driver


@pytest.mark.parametrize("sanitizer", [THREAD, ADDRESS])
def test_the_team_runs_every_item_once(sanitizer: str) -> None:
    done = run_driver("team_driver.cc", sanitizer, sources=["native/team.cc"], arguments=["120"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "every item ran once" in done.stdout


def test_a_race_is_found() -> None:
    done = run_driver("racing_driver.cc", THREAD)
    assert done.returncode != 0
    assert "data race" in done.stderr


def test_a_read_behind_an_allocation_is_found() -> None:
    done = run_driver("overrunning_driver.cc", ADDRESS)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
