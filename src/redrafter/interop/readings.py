"""A published drafter as its files describe it: the network, and how it may be meant to be run."""

from dataclasses import dataclass

from redrafter.drafters.base import DrafterConfig, DrafterNet


@dataclass(frozen=True)
class Reading:
    """One way to run the network's weights."""

    label: str
    config: DrafterConfig


@dataclass(frozen=True)
class Published:
    """A network in another project's format."""

    format: str
    """Its name and layout."""
    net: DrafterNet
    readings: tuple[Reading, ...]
    """Every way that its files leave open, the likeliest first."""
    usual: float
    """The share of next tokens that drafters of this kind guess at least, when they are run as they were trained."""
