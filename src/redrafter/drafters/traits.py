"""What the code around drafters asks of one. Each answer is an optional attribute with a default.

A drafter that a user writes needs none of them: without them it guesses by itself and copies nothing.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from redrafter.core.step import Drafter

    Recall = Callable[[Any, Tensor, Tensor], Any]


def network_of(drafter: "Drafter") -> "Drafter | None":
    """The part that guesses by a network: `network_drafter`, by default the drafter itself; None: there is none."""
    found: Drafter | None = getattr(drafter, "network_drafter", drafter)
    return found


def copies(drafter: "Drafter") -> bool:
    """Whether it copies what followed the end of the text where that occurred before: `copies`, by default False."""
    return getattr(drafter, "copies", False) is True


def only_copies(drafter: "Drafter") -> bool:
    """Whether it copies and has no network: at most positions of a text it has few guesses or none."""
    return copies(drafter) and network_of(drafter) is None


def drafts(drafter: "Drafter") -> bool:
    """Whether it guesses anything at all."""
    return copies(drafter) or network_of(drafter) is not None


def longest_chain(drafter: "Drafter") -> int:
    """The most copied tokens that it mixes into a beam, even one of fewer tokens: `longest_chain`, by default 0."""
    found: int = getattr(drafter, "longest_chain", 0)
    return found


def keeps_cache(drafter: "Drafter") -> bool:
    """Whether its KV cache or its layers keep its steps from being recorded: `keeps_cache`, or False."""
    return getattr(drafter, "keeps_cache", False) is True


def gives_probabilities(drafter: "Drafter") -> bool:
    """Whether its beams have probabilities, into which n-grams can be mixed: `gives_probabilities`, or False."""
    return getattr(drafter, "gives_probabilities", False) is True


def recall_of(drafter: "Drafter") -> "Recall | None":
    """How it copies from other texts before the rows' own (see `NgramDrafter.recall`); None: it does not."""
    return getattr(drafter, "recall", None) if copies(drafter) else None


def identity_of(drafter: "Drafter") -> str:
    """A text that is equal for drafters that draft the same: `identity`, by default the name of the class."""
    found = getattr(drafter, "identity", None)
    return found if isinstance(found, str) else f"{type(drafter).__module__}.{type(drafter).__qualname__}"


def about(drafter: "Drafter") -> str | None:
    """What is to be said of a drafter from another project's files: `about`, by default nothing."""
    found: str | None = getattr(network_of(drafter), "about", None)
    return found
