"""The wave clock: every number is one that no rank ignores."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tszmq.core.wave import WaveClock
from tszmq.wire.base import StartWave, WaveComplete

WAVES = st.integers(0, 1000)
SIGNALS = st.builds(WaveComplete, WAVES) | st.builds(StartWave, WAVES)


@given(st.lists(SIGNALS | st.none()))
def test_every_number_is_new_and_no_lower_than_any_rank_s_own(events):
    """A rank that completed wave n is in n + 1; one that asks for wave n is in n."""
    clock = WaveClock()
    last = own = 0
    for event in events:
        if event is None:
            wave = clock.next()
            assert wave > last
            assert wave >= own
            last = wave
        else:
            clock.observe(event)
            own = max(own, event.wave + isinstance(event, WaveComplete))
