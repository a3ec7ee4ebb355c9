"""A profile with made-up prices."""

from typing import Any

from redrafter.planning.costs import Costs
from redrafter.tuning.store import Profile


def make_profile(seconds: float = 0.01, **changes: Any) -> Profile:
    """A pass over one token takes so many seconds, a draft a fifth of that."""
    costs = Costs()
    costs.learn_pass(seconds, 1)
    costs.learn_draft(0.2 * seconds, 1, 1, 4)
    known: dict[str, Any] = {"key": {"target": "made up"}, "target_name": "made/up", "prices": costs.saved()}
    return Profile(**(known | changes))
