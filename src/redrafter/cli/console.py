"""The console that all commands print through."""

from typing import Any

import rich.console


class Console(rich.console.Console):
    """Prints text as it is: a name or a path may hold what Rich reads as markup."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False} | given)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # `main` says how every command ends then

    def note(self, text: str) -> None:
        """A line of less weight."""
        self.print(text, style="dim", soft_wrap=True)
