"""What the plug-in refuses before anything is loaded."""

from typing import Any

from redrafter.config import require
from redrafter.errors import UnsupportedTarget
from redrafter.interop.plugged import check_tested

NAME = "REDRAFTER"
TESTED = ("0.5.16",)


def check(server_args: Any) -> None:
    """Raise if this version, or what the server was asked for, cannot work."""
    check_version()
    if not server_args.enable_return_hidden_states:
        raise UnsupportedTarget(
            f"{NAME} reads the target's hidden states; start SGLang with --enable-return-hidden-states"
        )
    require(
        server_args.disaggregation_mode == "null",
        f"{NAME} drafts from the prompt's hidden states, which a server for decoding alone does not compute; leave out "
        "--disaggregation-mode",
    )
    require(server_args.pp_size == 1, f"{NAME} works on one pipeline stage; use tensor parallelism instead")


def check_version() -> None:
    import sglang

    check_tested("SGLang", sglang.__version__, TESTED, f"sglang=={TESTED[-1]}")
