"""SGLang's model as a drafter wants to know it, and the drafter for it."""

from typing import Any

from torch import nn

from redrafter.drafters import RecurrentDrafter, RecurrentNet, shipped
from redrafter.errors import ConfigError, DrafterMismatch, UnsupportedTarget
from redrafter.interop import folders
from redrafter.interop.embeddings import split_embeddings
from redrafter.interop.find import find
from redrafter.interop.sglang.settings import VARIABLE


class SglangTarget:
    """Split embeddings are put together, on every rank."""

    def __init__(self, runner: Any, tokenizer: Any, name: str) -> None:
        from sglang.srt.distributed import get_tp_group
        from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        config = runner.model_config
        text = config.hf_text_config
        group = get_tp_group()
        self.name, self.tokenizer = name, tokenizer
        self.layer_count: int = text.num_hidden_layers
        self.hidden_size: int = text.hidden_size
        embedding, head = split_embeddings(
            runner.model,
            name,
            VocabParallelEmbedding,
            ParallelLMHead,
            (lambda rows: group.all_gather(rows, dim=0)) if group.world_size > 1 else None,
        )
        self.vocab_size, width = head.shape
        self.input_embedding = nn.Embedding(self.vocab_size, width, _weight=embedding)
        self.output_embedding = nn.Embedding(self.vocab_size, width, _weight=head)
        self.dtype, self.device = embedding.dtype, embedding.device


def drafter_for(name: str, target: SglangTarget) -> RecurrentDrafter:
    """The named drafter on this target; `recurrent` is the one that comes with the package."""
    if name == "recurrent":
        found = shipped.find(target)
        if found is None:
            raise DrafterMismatch(
                f"no drafter comes with the package for {target.name}; make one (redrafter train) and name its folder: "
                f'{VARIABLE}=\'{{"drafter": "FOLDER"}}\''
            )
        name = str(found)
    net = folders.read_for(find(name), target)
    if not isinstance(net, RecurrentNet):
        raise ConfigError(f"{name} is no recurrent drafter; SGLang itself takes other kinds")
    last = {-1, target.layer_count}
    if not set(net.config.layers) <= last or len(net.config.layers) > 1:
        raise UnsupportedTarget(
            f"the drafter reads layers {list(net.config.layers)}, but SGLang gives only the last; "
            "train one with --layers -1"
        )
    return RecurrentDrafter(net, target).use_int8()
