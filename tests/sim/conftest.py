"""Fixtures of the simulator's suites."""

from __future__ import annotations

import pytest

from tests.sim.raw_frontend import Engine, RawFrontend
from tszmq.sim import Fleet


@pytest.fixture
def frontend(tmp_path):
    front = RawFrontend(tmp_path)
    yield front
    front.close()


@pytest.fixture
def start(frontend):
    fleets = []

    def start(**options) -> Engine:
        fleet = Fleet(1, capture=True, **options)
        fleets.append(fleet)
        fleet.start(frontend.address)
        return Engine(frontend, fleet)

    yield start
    for fleet in fleets:
        fleet.terminate()
