"""Measures how a published drafter is meant to be run: it guesses along a short text that the target writes.

A wrong convention raises no error; it only makes the guesses bad. So each reading that a format leaves open is tried,
and the best is taken. A drafter that guesses no better than the most frequent token is refused. The verdict is kept on
disk. The text stays exact whatever is chosen here.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from redrafter.config import SamplingParams, Shape
from redrafter.core.accept import Accepted
from redrafter.core.beam import Advance, State
from redrafter.core.fixed_tree import FixedTree
from redrafter.core.tree import Tree, root_tree
from redrafter.drafters.base import NetDrafter
from redrafter.drafters.checkpoint import identity
from redrafter.drafters.load import bind_own
from redrafter.errors import UnsupportedDrafter
from redrafter.interop.readings import Published, Reading
from redrafter.runtime.bulk import write_texts
from redrafter.runtime.row import Request
from redrafter.targets import Target, verdicts
from redrafter.version import __version__

log = logging.getLogger(__name__)

TOKENS, DEPTH = 48, 3
"""Length of the text, and how far the drafter guesses ahead at each of its positions."""
QUESTION = "Explain in a few sentences why the sky is blue."
TELLING = 0.5
"""A text in which one token is more frequent than this says nothing about a drafter."""


@dataclass(frozen=True)
class Agreement:
    """How often guesses along the text were right."""

    right: tuple[float, ...]
    """By depth, after the text's own tokens."""
    likely: float
    """How many of the text's next tokens in a row the drafter would have drawn, on average."""


def choose(published: Published, target: Target) -> NetDrafter[Any]:
    """The drafter with the reading that guesses best, bound to the target."""
    tried = {reading.label: reading for reading in published.readings}
    drafter = bind_own(published.net, target)  # moves the weights once; a reading changes how they are run
    key = {
        "check": "conventions",
        "version": __version__,
        "target": identity(target),
        "dtype": str(target.dtype),
        "drafter": drafter.identity,
        "readings": [repr(reading) for reading in published.readings],
    }
    path = verdicts.file_for(key)
    kept = _kept(verdicts.read(path), tried)
    if kept is not None:
        label, found = kept
    else:
        text, first = _written(target)
        found_by = {label: _agreement(drafter, reading.config, target, text, first) for label, reading in tried.items()}
        label = max(found_by, key=lambda name: found_by[name].likely)
        found = found_by[label]
        if _judge(published, target, found_by, label, text[first:]):
            verdicts.write(path, {"reading": label} | asdict(found))
        _log_choice(published, found_by, label)
    _use(drafter, tried[label].config)
    drafter.about = _about(published, drafter, label, found)
    return drafter


def _kept(verdict: Any, tried: Mapping[str, Reading]) -> tuple[str, Agreement] | None:
    """The reading and its agreement of a kept verdict; None for what is none."""
    try:
        label, found = verdict["reading"], Agreement(tuple(map(float, verdict["right"])), float(verdict["likely"]))
    except (TypeError, KeyError, ValueError):
        return None
    return (label, found) if isinstance(label, str) and label in tried and found.right else None


def _use(drafter: NetDrafter[Any], config: Any) -> None:
    drafter.net.config = replace(config, draft_vocab_size=drafter.net.config.draft_vocab_size)


def _written(target: Target) -> tuple[list[int], int]:
    """A short greedy text of the target with its prompt, and where it begins."""
    prompt = [i % target.vocab_size for i in range(1, 9)]
    if target.tokenizer is not None:
        prompt = list(target.tokenizer(QUESTION)["input_ids"]) or prompt
        if getattr(target.tokenizer, "chat_template", None) is not None:
            asked = [{"role": "user", "content": QUESTION}]
            try:
                prompt = list(
                    target.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)[
                        "input_ids"
                    ]
                )
            except Exception as error:  # the template is a program that came with the model
                log.debug("%s: the text begins without the chat template: %s", target.name, error)
    request = Request(prompt=prompt, max_new_tokens=TOKENS, seed=0, sampling=SamplingParams(), eos=())
    if len(prompt) + DEPTH >= target.max_positions:
        raise UnsupportedDrafter(
            f"whether the drafter suits {target.name} cannot be measured: its context of {target.max_positions} tokens "
            f"leaves no room for a text behind a prompt of {len(prompt)}; use a drafter made by `redrafter train`"
        )
    [new] = write_texts(target, [request], rows=1)
    return [*prompt, *new], len(prompt)


class Follow:
    """A search that follows given tokens (B, depths) and keeps the logits of the guesses it did not take."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self.logits: list[Tensor] = []
        self.token_ids: Tensor | None = None
        self.visited = tokens.shape[1]
        self.shape = Shape(width=1, length=self.visited)

    def tree(
        self,
        advance: Advance[State],
        state: State,
        last: Tensor,
        token_ids: Tensor | None = None,
        grow: Any = None,  # noqa: ARG002
    ) -> Tree:
        token, first, self.token_ids = last[:, None], torch.zeros_like(last)[:, None], token_ids
        for following in self.tokens.T:
            logits, state = advance(state, token, first)
            if logits is None:
                break
            self.logits.append(logits[:, 0])
            token = following[:, None]
        return root_tree(last)

    def fixed(
        self,
        logits: Tensor,
        tree: FixedTree,  # noqa: ARG002
        last: Tensor,
        token_ids: Tensor | None = None,
    ) -> Tree:
        self.logits += logits[:, : self.visited].unbind(1)
        self.token_ids = token_ids
        return root_tree(last)

    def candidates(self, beam: Tensor, scores: Tensor, last: Tensor) -> Tree:
        raise NotImplementedError("a drafter with a network searches its network")


@torch.no_grad()
def _agreement(drafter: NetDrafter[Any], config: Any, target: Target, text: list[int], first: int) -> Agreement:
    """The drafter's best guesses at all positions of the text at once, each position a row of a batch."""
    _use(drafter, config)
    tokens = torch.tensor([text], device=target.device)
    hidden = target.states(tokens, drafter.layers).to(target.dtype)
    last = torch.arange(first, len(text) - DEPTH, device=target.device)  # where each row's last token stands
    rows = len(last)
    state = drafter.begin(tokens.expand(rows, -1), last, hidden.expand(rows, -1, -1), len(text) + DEPTH + 1)
    one = torch.ones_like(last)
    newest = tokens[0, last]
    accepted = Accepted(0 * newest[:, None], newest[:, None], one, 0 * one, 0 * one)
    state = drafter.advance(state, accepted, hidden[0, last - 1][:, None])
    truth = tokens[0, last[:, None] + 1 + torch.arange(DEPTH, device=target.device)]
    search = Follow(truth)
    drafter.draft(state, newest, search)
    logits = torch.stack(search.logits, 1).float()  # (rows, depths, V')
    ids = torch.arange(logits.shape[2], device=last.device) if search.token_ids is None else search.token_ids
    wanted = ids == truth[:, : logits.shape[1], None]  # nowhere for a token that it cannot guess
    right = wanted.gather(2, logits.argmax(2, keepdim=True))[..., 0].double()
    odds = (logits.softmax(2) * wanted).sum(2)
    return Agreement(tuple(right.mean(0).tolist()), float(odds.cumprod(1).sum(1).mean()))


def _judge(published: Published, target: Target, tried: dict[str, Agreement], best: str, text: list[int]) -> bool:
    """Refuse a drafter that knows nothing of the text; warn of one that knows little. Whether the text tells."""
    right = tried[best].right[0]
    frequent = Counter(text).most_common(1)[0][1] / len(text)
    if frequent > TELLING:
        log.warning("%s repeats itself: whether the drafter suits it was not measured", target.name)
    elif right <= frequent:
        each = "; ".join(f"{label}: {found.right[0]:.0%}" for label, found in tried.items())
        raise UnsupportedDrafter(
            f"the drafter ({published.format}) guesses {right:.0%} of the tokens of a text of {target.name}, and "
            f"always guessing the most frequent one {frequent:.0%}: it was made for another model, or is run in "
            f"another way than it was trained (tried: {each})"
        )
    elif right < published.usual:
        log.warning(
            "the drafter (%s) guesses %.0f%% of the next tokens of a text of %s; of such a drafter, %.0f%% or more are "
            "usual: it may have been made for another version of the model",
            published.format, 100 * right, target.name, 100 * published.usual,
        )  # fmt: skip
    return frequent <= TELLING


def _log_choice(published: Published, tried: dict[str, Agreement], best: str) -> None:
    others = "; ".join(f"{k}: {v.likely:.2f}" for k, v in tried.items() if k != best)
    log.info(
        "%s with %s: would have drawn %.2f of %d tokens in a row%s",
        published.format, best, tried[best].likely, DEPTH, f" (others: {others})" if others else "",
    )  # fmt: skip


def _about(published: Published, drafter: NetDrafter[Any], label: str, found: Agreement) -> str:
    config = drafter.net.config
    vocabulary = "all" if config.draft_vocab_size is None else f"{config.draft_vocab_size}"
    return (
        f"{published.format}: {label}; guesses among {vocabulary} of {config.vocab_size} tokens; "
        f"{found.right[0]:.0%} of the next tokens of a short text were right"
    )
