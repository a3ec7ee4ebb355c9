"""Engines on a CPU that promise what a test asks for."""

import pytest

from redrafter.engine import exactness


def promise_bitwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine with the rule seeded promises bitwise."""
    monkeypatch.setattr(exactness, "why_ties", lambda *a, **k: "")
