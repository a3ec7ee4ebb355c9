"""Finds the folder that a drafter's name stands for. Imports neither torch nor transformers."""

from pathlib import Path

from redrafter.bounds import check_path
from redrafter.drafters import registry
from redrafter.errors import ModelNotFound

WITH_NGRAMS = "+ngram"
"""At the end of a drafter's name: mix the text's own n-grams into what this drafter guesses."""
BUILT_IN = ("auto", *registry.named())
"""Names that stand for no folder, besides those of other packages."""


def stands_alone(drafter: str) -> bool:
    """Whether a name, with n-grams or without, may stand for no folder."""
    name = drafter.removesuffix(WITH_NGRAMS)
    return name in BUILT_IN or name in registry.packages()


def find(drafter: str) -> Path:
    """A local folder, or the downloaded folder of a Hugging Face id."""
    check_path("drafter", drafter)
    missing = ModelNotFound(
        f"no drafter {drafter!r}: no such folder here, and no Hugging Face id that can be reached; built in are "
        f"{', '.join(BUILT_IN)}"
    )
    if not drafter:  # as a path, the current folder
        raise missing
    if Path(drafter).is_dir():
        return Path(drafter)
    if Path(drafter).exists():
        raise ModelNotFound(f"the drafter {drafter!r} is a file; give the folder that contains the file")
    if drafter.startswith((".", "/", "~")) or drafter.count("/") > 1:  # never a Hugging Face id
        raise missing
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(drafter))
    except Exception as error:
        raise missing from error
