"""The fixtures of these suites."""

from __future__ import annotations

from tests.client_fixtures import client_and_engines, run_script, short_dir

__all__ = ["client_and_engines", "run_script", "short_dir"]
