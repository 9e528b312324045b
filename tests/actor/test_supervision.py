"""Restart or escalate, on virtual time."""

from __future__ import annotations

from itertools import pairwise

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.virtual import run_virtual
from vime.eval.actor import Supervisor


def test_each_death_in_a_row_waits_twice_as_long_up_to_the_longest_backoff() -> None:
    supervisor = Supervisor(max_restarts=5, window_s=100, backoff_s=1, max_backoff_s=6)
    assert [supervisor.next_delay_s(0) for _ in range(6)] == [1, 2, 4, 6, 6, None]


def test_deaths_before_the_window_are_forgotten() -> None:
    supervisor = Supervisor(max_restarts=2, window_s=100, backoff_s=1)
    assert [supervisor.next_delay_s(now) for now in (0, 50, 100, 149)] == [1, 2, 2, None]
    assert supervisor.next_delay_s(1000) == 1


def test_no_restart_is_allowed_where_none_was_asked_for() -> None:
    assert Supervisor(max_restarts=0).next_delay_s(0) is None


def test_ever_so_many_restarts_overflow_nothing() -> None:
    supervisor = Supervisor(max_restarts=5000, window_s=1e9, max_backoff_s=60)
    assert {supervisor.next_delay_s(now) for now in range(5000)} >= {60.0}


@given(
    st.lists(st.floats(0, 1000), max_size=60).map(sorted),
    st.integers(0, 5),
    st.floats(0.5, 500),
)
def test_no_window_ever_holds_more_restarts_than_allowed(
    deaths: list[float], max_restarts: int, window_s: float
) -> None:
    supervisor = Supervisor(max_restarts=max_restarts, window_s=window_s)
    restarts = [now for now in deaths if supervisor.next_delay_s(now) is not None]
    for first, last in zip(restarts, restarts[max_restarts:], strict=False):
        assert first <= last - window_s or first == last - window_s


@pytest.mark.parametrize(
    "setting",
    [
        {"max_restarts": -1},
        {"window_s": 0},
        {"backoff_s": -1},
        {"backoff_s": 2, "max_backoff_s": 1},
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected max_restarts >= 0"):
        Supervisor(**setting)  # type: ignore[arg-type]


def test_run_restarts_after_the_backoff_and_returns_with_the_life() -> None:
    starts: list[float] = []
    told: list[tuple[str, float]] = []

    async def live() -> None:
        starts.append(anyio.current_time())
        await anyio.sleep(10)
        if len(starts) < 4:
            raise OSError(f"death {len(starts)}")

    async def main() -> None:
        supervisor = Supervisor(
            max_restarts=3, restarting=lambda error, delay_s: told.append((str(error), delay_s))
        )
        await supervisor.run(live)

    run_virtual(main)
    assert [later - sooner for sooner, later in pairwise(starts)] == [11, 12, 14]
    assert told == [("death 1", 1), ("death 2", 2), ("death 3", 4)]


def test_run_escalates_with_the_last_error_and_says_why() -> None:
    deaths = iter(range(1, 100))

    async def live() -> None:
        raise OSError(f"death {next(deaths)}")

    with pytest.raises(OSError, match="death 3") as caught:
        run_virtual(lambda: Supervisor(max_restarts=2, window_s=60).run(live))
    assert caught.value.__notes__ == ["not restarted: it died 3 times within 60 s"]


def test_a_cancelled_backoff_starts_nothing_more() -> None:
    starts: list[float] = []

    async def live() -> None:
        starts.append(anyio.current_time())
        raise OSError

    async def main() -> None:
        with anyio.move_on_after(2.5):
            await Supervisor(max_restarts=9, backoff_s=1).run(live)

    run_virtual(main)
    assert starts == [0, 1]


def test_a_cancelled_life_is_no_death() -> None:
    async def main() -> None:
        supervisor = Supervisor(restarting=lambda *_: pytest.fail("it was restarted"))
        with anyio.move_on_after(5) as scope:
            await supervisor.run(anyio.sleep_forever)
        assert scope.cancelled_caught

    run_virtual(main)
