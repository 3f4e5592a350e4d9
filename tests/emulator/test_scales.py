"""The search for the least honest scale of the clock ends soon and close to it, whatever lateness depends on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.model.scales import CLOSE, Trial, bounds, guess, least_honest, next_scale, rounded

ALLOWED = 1.05

LAWS: dict[str, Callable[[float], float]] = {  # stretch of a scale that is this multiple of the least honest one
    "saturated": lambda times: 1.01 if times >= 1 else 1.1 / times,
    "the same delay": lambda times: 1 + (ALLOWED - 1) / times,
    "ever shorter delays": lambda times: 1 + (ALLOWED - 1) / times**2,
    "in between": lambda times: max(1.0, ALLOWED / times),
}


def search(least: float, law: Callable[[float], float]) -> list[Trial]:
    trials: list[Trial] = []
    while (scale := next_scale(trials, ALLOWED)) is not None:
        trials.append(Trial(scale, law(scale / least)))
    return trials


@pytest.mark.parametrize("law", LAWS)
@given(st.floats(1.0, 500.0))
def test_the_search_ends_soon_and_close_to_the_least_honest_scale(law: str, least: float) -> None:
    trials = search(least, LAWS[law])
    found = least_honest(trials, ALLOWED)
    assert found is not None
    assert least * (1 - 1e-9) <= found <= CLOSE * least
    assert len(trials) <= 10
    assert trials[0].scale == 1.0


def test_a_host_that_keeps_up_is_probed_once() -> None:
    assert search(1.0, LAWS["the same delay"]) == [Trial(1.0, ALLOWED)]


@given(st.floats(1.0, 100.0), st.floats(1.06, 50.0))
def test_the_longer_a_trial_took_the_more_the_host_counts_as_saturated(scale: float, stretch: float) -> None:
    low, high = bounds(Trial(scale, stretch), ALLOWED)
    assert scale < low <= guess(Trial(scale, stretch), ALLOWED) * (1 + 1e-9)
    assert guess(Trial(scale, stretch), ALLOWED) <= high * (1 + 1e-9)


@pytest.mark.parametrize(("scale", "told"), [(13.2, 14.0), (1.01, 1.1), (2.0, 2.0), (151.0, 160.0), (99.5, 100.0)])
def test_scales_are_round_numbers(scale: float, told: float) -> None:
    assert rounded(scale) == told
