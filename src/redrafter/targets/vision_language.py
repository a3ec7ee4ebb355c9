"""Checkpoints of models that also read images or sounds: the language model is loaded alone, and reads text.

The model keeps its own class, whose forward knows the positions of text. What feeds images into it is taken out before
weights are read, so theirs are never read.
"""

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedModel

from redrafter.errors import CorruptCheckpoint, UnsupportedTarget


def model_class(config: Any) -> Any:
    """The class that loads a checkpoint of this configuration: a causal LM's, or that of a language model alone.

    A configuration may belong to both (Gemma 3, Llama 4, Qwen3.5); then the checkpoint says which class wrote it.
    """
    # `_model_mapping` is what transformers itself looks into, from configuration classes to model classes.
    seeing = AutoModelForMultimodalLM._model_mapping.get(type(config), None)
    known = type(config) in AutoModelForCausalLM._model_mapping or hasattr(config, "auto_map")
    if seeing is not None and not config.is_encoder_decoder:
        if not known or seeing.__name__ in (config.architectures or ()):
            return text_only(seeing)
    elif not known:
        raise UnsupportedTarget(
            f"transformers has no causal LM of the model type {config.model_type}; use a language model, or one that "
            "also reads images"
        )
    return AutoModelForCausalLM


def text_only(seeing: type[PreTrainedModel]) -> Any:
    """This class without the parts that read images: as it builds itself, it drops them."""

    class TextOnly(seeing):  # type: ignore[misc]
        # transformers reports weights in the files that the model has no place for; these are left out on purpose.
        _keys_to_ignore_on_load_unexpected = (".",)

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            keep_language_model(self)

        @classmethod
        def from_pretrained(cls, source: Any, *args: Any, **kwargs: Any) -> Any:
            module, info = super().from_pretrained(source, *args, output_loading_info=True, **kwargs)
            if missing := sorted(info["missing_keys"]):
                raise CorruptCheckpoint(
                    f"its files lack {len(missing)} weights of the language model: {missing[0]}, ..."
                )
            module.__class__ = seeing
            return module

    for name in ("__name__", "__qualname__", "__module__"):  # by which transformers finds how to rename weights
        setattr(TextOnly, name, getattr(seeing, name))
    return TextOnly


def keep_language_model(model: Any) -> None:
    """Take out all modules beside the path to the decoder, except the output embedding."""
    kept = [model.get_decoder(), model.get_output_embeddings()]
    if kept[0] is model:
        raise UnsupportedTarget(f"{type(model).__name__} does not say which of its parts is the language model")

    def reduce(parent: nn.Module) -> None:
        for name, child in list(parent.named_children()):
            inside = set(child.modules())
            if child in kept:
                continue
            if any(one in inside for one in kept if one is not None):
                reduce(child)
            else:
                setattr(parent, name, None)

    reduce(model)
