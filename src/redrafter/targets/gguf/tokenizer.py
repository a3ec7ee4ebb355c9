"""The tokenizer of a GGUF file. transformers converts it, which takes seconds, so the result is kept on disk."""

import contextlib
import hashlib
import json
import logging
from importlib import import_module
from pathlib import Path
from typing import Any

from redrafter.cache_folder import TOKENIZERS, cache_folder, is_intact, keep
from redrafter.errors import CacheUnavailable
from redrafter.results import versions
from redrafter.targets.gguf.file import GGUFFile

log = logging.getLogger(__name__)

FORMAT = 3
"""Counts changes of the conversion, so that tokenizers kept from an earlier one are not used."""
CLASSES = {"qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "gemma3": "GemmaTokenizer"}
"""transformers' tokenizer for an architecture, where it has one for it alone."""
GENERAL_CLASS = "TokenizersBackend"
BOS_BY_DEFAULT = ("llama3", "llama-v3", "llama-bpe")
"""Values of tokenizer.ggml.pre with which llama.cpp begins texts with BOS unless the file says otherwise."""


def tokenizer_of(file: GGUFFile) -> Any:
    """The tokenizer, or None with one line in the log: token ids in and out still work without one."""
    if "tokenizer.ggml.tokens" not in file.metadata:
        log.info("%s has no tokenizer: give token ids, or a tokenizer", file.path)
        return None
    kept = _kept(file)
    if kept is not None and is_intact(kept):
        with contextlib.suppress(Exception):  # transformers cannot read what it wrote: convert again
            return _read(kept)
    try:
        made = convert(file)
    except Exception as error:  # whatever transformers meets in the file
        text = str(error).strip().splitlines()
        log.info("%s has no tokenizer that transformers can convert (%s)", file.path, text[0] if text else error)
        return None
    if kept is not None:
        with contextlib.suppress(OSError):  # a cache folder that cannot be written
            keep(kept, made.save_pretrained)
    return made


def convert(file: GGUFFile) -> Any:
    """The tokenizer as transformers converts it. AutoTokenizer would need the package `gguf` to find the class."""
    name = CLASSES.get(str(file.metadata.get("general.architecture")), GENERAL_CLASS)
    made = _class(name).from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    _begin_with_bos(made, file)
    return made


def _class(name: str) -> Any:
    return getattr(import_module("transformers"), name)


def _read(kept: Path) -> Any:
    """A kept tokenizer, by its own class: AutoTokenizer imports every model's configuration, which takes seconds."""
    name = json.loads((kept / "tokenizer_config.json").read_text())["tokenizer_class"]
    return _class(name).from_pretrained(kept)


def _begin_with_bos(tokenizer: Any, file: GGUFFile) -> None:
    """Texts begin with BOS exactly if the file says so; transformers' conversion does not ask."""
    from tokenizers.processors import TemplateProcessing

    kind, pre = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    wanted = file.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in BOS_BY_DEFAULT)
    bos, number = tokenizer.bos_token, tokenizer.bos_token_id
    if number is None or bool(wanted) == (tokenizer("a")["input_ids"][:1] == [number]):
        return
    begin = "BOS " if wanted else ""  # a name within the template: the token itself may contain spaces
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin}$A",
        pair=f"{begin}$A {begin}$B:1",
        special_tokens=[{"id": "BOS", "ids": [number], "tokens": [bos]}],
    )


def _kept(file: GGUFFile) -> Path | None:
    """The folder of the converted tokenizer: one for each vocabulary, architecture and version of transformers."""
    about = [(k, v) for k, v in sorted(file.metadata.items()) if k.startswith("tokenizer.")]
    made_by = [FORMAT, file.metadata.get("general.architecture"), versions().get("transformers")]
    digest = hashlib.sha256(repr([about, made_by]).encode()).hexdigest()
    try:
        return cache_folder() / TOKENIZERS / digest[:16]
    except CacheUnavailable:
        return None
