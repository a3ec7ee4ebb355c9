"""What callers need to know about a target's tokenizer before they build a prompt."""

from redrafter.targets.target import Target


def has_chat_template(target: Target) -> bool:
    return getattr(target.tokenizer, "chat_template", None) is not None


def first_token(target: Target, seed: int) -> int:
    """The token that begins a text without a chat template: BOS, else EOS, else a token picked by the seed."""
    for source in (target.tokenizer, target.config):
        for name in ("bos_token_id", "eos_token_id"):
            token = getattr(source, name, None)
            if isinstance(token, int) and 0 <= token < target.vocab_size:
                return token
    return seed % target.vocab_size
