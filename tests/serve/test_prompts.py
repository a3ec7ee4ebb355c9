"""Large prompts: refused before they cost anything, and nobody else waits for them."""

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tokenizers
import transformers

from redrafter.errors import ConfigError, PromptTooLong
from redrafter.serve.bodies import SMALL
from redrafter.serve.model import Served
from redrafter.serve.prompts import PIECE, SURELY, Prompts
from redrafter.serve.schema import ChatAsked, CompletionAsked
from redrafter.serve.turns import Turn, Turns
from redrafter.targets import load_target
from tests.helpers.letters import make_target
from tests.helpers.serving import NAME, make_served, running
from tests.helpers.zoo import VOCAB, make_model
from tests.serve.test_http import post


def words() -> transformers.PreTrainedTokenizerFast:
    """Tokens of up to 20 letters, and pairs of them."""
    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCAB, show_progress=False)
    raw.train_from_iterator(["abababababababababab" * 5] * 20, trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=raw)
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return made


@pytest.fixture(scope="module")
def served() -> Served:
    target = load_target(make_model("llama"), tokenizer=words())
    return make_served(target)


class Watched:
    """How many characters became tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.characters = 0
        tokens = Prompts._tokens

        def counted(prompts: Prompts, text: str, special: bool = True) -> list[int]:
            self.characters += len(text)
            return tokens(prompts, text, special)

        monkeypatch.setattr(Prompts, "_tokens", counted)


@pytest.mark.parametrize("chat", [False, True])
def test_what_cannot_fit_is_refused_by_its_characters(
    served: Served, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    prompts, watched = served.prompts, Watched(monkeypatch)
    most = prompts.limit * prompts.longest
    assert prompts.longest > 10

    def read(text: str) -> list[int]:
        if chat:
            return prompts.read(
                ChatAsked.model_validate({"model": NAME, "messages": [{"role": "user", "content": text}]})
            )[0]
        return prompts.read(CompletionAsked.model_validate({"model": NAME, "prompt": text}))[0]

    text = "ab" * (prompts.limit * 4)
    assert len(text) < most
    assert len(read(text)) <= prompts.limit, "as few tokens as can be are taken"
    watched.characters = 0
    with pytest.raises(PromptTooLong, match=f"has {4 * most} characters"):
        read("ab" * 2 * most)
    assert watched.characters == 0


def test_many_tokens_are_noticed_in_the_first_pieces(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is short enough for its characters, and has a token for nearly each of them."""
    watched = Watched(monkeypatch)
    limit = served.prompts.limit
    text = "b" * (limit * (served.prompts.longest - 1))
    with pytest.raises(PromptTooLong, match=f"more tokens than the {limit}"):
        served.prompts.read(CompletionAsked.model_validate({"model": NAME, "prompt": text}))
    assert watched.characters <= PIECE * limit < len(text)
    short = "b" * (SURELY * limit)  # not refused here: the error tells how many tokens there are
    assert len(served.prompts.read(CompletionAsked.model_validate({"model": NAME, "prompt": short}))[0]) > limit


def test_threads_read_the_same_tokens(served: Served) -> None:
    chance = random.Random(0)
    texts = ["".join(chance.choice("ab ") for _ in range(chance.randint(1, 300))) for _ in range(200)]
    alone = [served.tokenizer(text)["input_ids"] for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(served.prompts._text, texts)) == alone


def test_a_slow_tokenizer_reads_one_text_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not written in Rust may not stand threads."""
    target = make_target()
    inside, most = 0, 0

    class Slow:
        is_fast, chat_template, added_tokens_decoder = False, None, {}

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

        def convert_tokens_to_ids(self, token: str) -> int:
            return 0

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            inside -= 1
            return {"input_ids": [0] * len(text)}

    served = make_served(target)
    monkeypatch.setattr(served.engine.target, "tokenizer", Slow())
    prompts = Prompts(served.engine, served.chat, NAME, 10)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(prompts._text, ["aaa"] * 8)) == [[0] * 3] * 8
    assert most == 1


@pytest.fixture(scope="module")
def url(served: Served) -> Iterator[str]:
    with running(served, body_bytes=100 * SMALL) as address:
        yield address


def test_a_small_prompt_waits_for_no_large_one(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many large ones there are, and few of them are read at once."""
    tokens, free = Prompts._tokens, threading.Event()
    inside: list[int] = []

    def slow(prompts: Prompts, text: str, special: bool = True) -> list[int]:
        if len(text) > 100:
            inside.append(len(text))
            free.wait(60)  # longer than a client waits
        return tokens(prompts, text, special)

    monkeypatch.setattr(Prompts, "_tokens", slow)
    monkeypatch.setattr(Prompts, "_check", lambda *_: None)
    body = {"model": NAME, "prompt": "ab" * SMALL, "max_tokens": 2}
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(post(url, body)[0])) for _ in range(12)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.5)
        for _ in range(3):
            assert post(url, {"model": NAME, "prompt": "ab", "max_tokens": 2})[0] == 200
        assert len(inside) == 2
        assert not answers
    finally:
        free.set()
    for thread in threads:
        thread.join(20)
    assert answers == [400] * 12
    assert len(inside) == 12


def test_a_prompt_waits_for_no_grammar(url: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """More grammars than the server has threads."""
    free = threading.Event()

    def slow(*_: Any) -> None:
        free.wait(60)  # longer than a client waits
        raise ConfigError("too slow")

    monkeypatch.setattr(served.engine.grammars, "compiled", slow)
    body = {"model": NAME, "prompt": "ab", "max_tokens": 2, "guided_regex": "a"}
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(post(url, body)[0])) for _ in range(45)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.5)
        assert post(url, {"model": NAME, "prompt": "ab", "max_tokens": 2})[0] == 200
    finally:
        free.set()
    for thread in threads:
        thread.join(20)
    assert answers == [400] * 45


def test_clients_take_turns() -> None:
    """In order of arrival for one client; one at a time each for many; whoever gives up leaves no gap."""
    order: list[str] = []

    async def work(turns: Turns, name: str) -> None:
        turn = Turn(turns, name[0])
        await turn.begin()
        await turn.begin()  # it is its turn already
        order.append(name)
        await asyncio.sleep(0)
        turn.end()
        turn.end()

    async def run() -> None:
        turns = Turns(1)
        names = ["a0", "a1", "a2", "a3", "a4", "b0", "b1", "c0"]
        tasks = [asyncio.create_task(work(turns, name)) for name in names]
        await asyncio.sleep(0)
        tasks[2].cancel()
        tasks[6].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert turns.free == 1
        assert not turns.waiting

    asyncio.run(run())
    assert order == ["a0", "a1", "b0", "c0", "a3", "a4"]


def test_a_turn_that_comes_with_its_end_is_passed_on() -> None:
    async def run() -> None:
        turns = Turns(1)
        first, second, third = (Turn(turns, name) for name in "abc")
        await first.begin()
        waiting = asyncio.create_task(second.begin())
        behind = asyncio.create_task(third.begin())
        await asyncio.sleep(0)
        first.end()
        waiting.cancel()
        await asyncio.wait_for(behind, 1)
        third.end()
        assert turns.free == 1

    asyncio.run(run())
