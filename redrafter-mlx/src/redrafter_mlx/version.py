"""The version number, the same as redrafter's."""

__version__ = "0.1.0"
