"""Fields that SDKs and frameworks send at their defaults; what is refused, and by which name; echo and best_of."""

import asyncio
import contextlib
import http.client
import json
import math
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import torch

from redrafter.serve.completion import TextAnswer
from redrafter.serve.model import Served
from redrafter.serve.prompts import Prompts
from tests.helpers.serving import NAME, make_served, plain, running

HELLO = [{"role": "user", "content": "hello"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def served() -> Served:
    return make_served()


def post(url: str, path: str, body: Any, kind: str | None = "application/json") -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    headers = {} if kind is None else {"Content-Type": kind}
    connection.request("POST", path, body if isinstance(body, str) else json.dumps(body), headers)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text)


def chat(url: str, **fields: Any) -> tuple[int, Any]:
    return post(url, CHAT, {"model": NAME, "messages": HELLO, "max_tokens": 6, "temperature": 0} | fields)


def complete(url: str, **fields: Any) -> tuple[int, Any]:
    return post(url, TEXT, {"model": NAME, "prompt": "hello", "max_tokens": 6, "temperature": 0} | fields)


def test_neutral_defaults_ask_for_nothing(url: str) -> None:
    _, bare = chat(url)
    status, done = chat(
        url, tools=[], tool_choice="none", response_format={"type": "text"}, parallel_tool_calls=False,
        service_tier="auto", modalities=["text"], echo=False, best_of=1, functions=[], function_call="none",
        logprobs=False, top_logprobs=0, stream_options=None, n=1, store=False, metadata={}, user="u", logit_bias={},
        presence_penalty=0, frequency_penalty=0, safety_identifier="s", prompt_cache_key="k", audio=None, stop=None,
        use_beam_search=False, length_penalty=1.0, min_tokens=0, skip_special_tokens=True, priority=0,
    )  # fmt: skip
    assert status == 200, done
    assert done["choices"] == bare["choices"]
    status, _ = complete(url, echo=False, best_of=1, suffix="", logprobs=None, n=1)
    assert status == 200


def test_an_answer_can_be_sent_back_as_it_came(url: str) -> None:
    turn = {"role": "assistant", "content": "hi", "refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    assert chat(url, messages=[*HELLO, turn, *HELLO])[0] == 200
    assert chat(url, messages=[*HELLO, turn | {"content": None}, *HELLO])[0] == 200


@pytest.mark.parametrize(
    ("fields", "param", "what"),
    [
        ({"service_tier": "priority"}, "service_tier", "send 'auto'"),
        ({"modalities": ["text", "audio"]}, "modalities", "answers are text"),
        ({"audio": {"voice": "x"}}, "audio", "leave the field out"),
        ({"use_beam_search": True}, "use_beam_search", "not supported"),
        ({"echo": True}, "echo", "/v1/completions"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages",
         "got 'image_url': the model reads text"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "needs content"),
        ({"continue_final_message": True}, "continue_final_message", "role 'assistant'"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream=false"),
    ],
    ids=lambda x: str(x)[:30],
)  # fmt: skip
def test_what_is_not_supported_is_named(url: str, fields: Any, param: str, what: str) -> None:
    status, answer = chat(url, **fields)
    assert (status, answer["error"]["param"]) == (400, param)
    assert what in answer["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "what"),
    [
        ({"prompt": ["a"] * 17}, "prompt", "a list of 17, at most 16"),
        ({"best_of": 1, "n": 2}, "best_of", "at least n"),
        ({"best_of": 2, "stream": True}, "best_of", "stream=false"),
        ({"max_tokens": 0}, "max_tokens", "without echo"),
        ({"suffix": "x"}, "suffix", "not supported"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_what_completions_do_not_support(url: str, fields: Any, param: str, what: str) -> None:
    status, answer = complete(url, **fields)
    assert (status, answer["error"]["param"]) == (400, param)
    assert what in answer["error"]["message"]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_declared_as_json(url: str, kind: str | None) -> None:
    status, answer = post(url, CHAT, {"model": NAME, "messages": HELLO}, kind)
    assert status == 415
    assert "send the header 'Content-Type: application/json'" in answer["error"]["message"]


def test_tokenize_and_back(url: str, served: Served) -> None:
    status, made = post(url, "/tokenize", {"prompt": "hello", "return_token_strs": True})
    assert (status, made["tokens"], made["count"]) == (200, served.engine.encode("hello"), 5)
    assert "".join(made["token_strs"]) == "hello"
    assert post(url, "/detokenize", {"tokens": made["tokens"]}) == (200, {"prompt": "hello"})
    assert post(url, "/tokenize", {"messages": HELLO})[1]["tokens"] == served.engine.encode(HELLO)
    assert post(url, "/tokenize", {})[0] == post(url, "/detokenize", {"tokens": [10**6]})[0] == 400
    assert post(url, "/tokenize", {"prompt": "a" * (2**18 + 1)})[0] == 400
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert post(url, path, body | {"model": "other"})[0] == 404
        assert post(url, path, body | {"model": NAME})[0] == 200
    with running(make_served(), api_key="sesame") as closed:
        assert post(closed, "/tokenize", {"prompt": "a"})[0] == 401


def test_long_work_leaves_the_event_loop_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens are turned into text in threads, so that other requests are answered meanwhile."""
    seen: list[tuple[str, bool]] = []

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*given: Any, **options: Any) -> Any:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                seen.append((name, True))
            seen.append((name, False))
            return real(*given, **options)

        monkeypatch.setattr(owner, name, watched)

    watch(Served, "tokenize")
    watch(Prompts, "decode")
    watch(TextAnswer, "_legacy")
    assert post(url, "/tokenize", {"prompt": "hello", "return_token_strs": True})[0] == 200
    asked = {"prompt": [1, 2, 3], "echo": True, "logprobs": 2, "max_tokens": 1}
    assert complete(url, **asked)[0] == 200
    assert {name for name, _ in seen} == {"tokenize", "decode", "_legacy"}
    assert not any(in_loop for _, in_loop in seen)


def test_offsets_of_a_stream_continue(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    options: dict[str, Any] = {"model": NAME, "prompt": "a", "max_tokens": 12, "logprobs": 0, "seed": 3, "echo": True}
    whole = client.completions.create(**options).choices[0].logprobs
    chunks = [c.choices[0].logprobs for c in client.completions.create(**options, stream=True)]
    assert whole is not None
    assert [at for c in chunks if c is not None for at in c.text_offset or ()] == whole.text_offset


def test_a_turn_is_continued(url: str, served: Served) -> None:
    talk = [*HELLO, {"role": "assistant", "content": "abc"}]
    whole = served.engine.encode(talk, add_generation_prompt=False)
    _, made = post(url, "/tokenize", {"messages": talk, "add_generation_prompt": False, "continue_final_message": True})
    assert made["tokens"] == whole[: len(made["tokens"])]
    assert served.tokenizer.decode(made["tokens"]).endswith("abc")
    status, done = chat(url, messages=talk, continue_final_message=True, add_generation_prompt=False)
    assert status == 200
    alone = plain(served).generate([made["tokens"]], max_new_tokens=6)[0]
    assert done["choices"][0]["message"]["content"] == alone.text


def reference(served: Served, ids: list[int]) -> list[float]:
    """Log-probabilities of the tokens from the second on, by one pass of the model."""
    with torch.no_grad():
        logits = served.engine.target.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(logits[i, token]) for i, token in enumerate(ids[1:])]


def test_echo_gives_the_log_likelihood_of_a_prompt(url: str, served: Served) -> None:
    """As lm-eval asks: ids, one token, `logprobs` and `echo`."""
    ids = served.engine.encode("hellothere" * 7)
    assert len(ids) > 64, "read in more than one piece"
    for fields in ({"max_tokens": 1}, {"max_tokens": 0}, {"max_tokens": 1, "stream": True}):
        if fields.get("stream"):
            with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
                chunks = client.completions.create(
                    model=NAME, prompt=ids, temperature=0, logprobs=1, echo=True, max_tokens=1, stream=True
                )
                choice = next(iter(chunks)).choices[0].model_dump()
        else:
            status, done = complete(url, prompt=ids, logprobs=1, echo=True, **fields)
            assert status == 200
            choice = done["choices"][0]
            assert done["usage"]["completion_tokens"] == fields["max_tokens"]
        told, new = choice["logprobs"], fields["max_tokens"]
        assert choice["text"][: len(ids)] == "hellothere" * 7
        assert "".join(told["tokens"]) == choice["text"]
        assert len(told["tokens"]) == len(ids) + new
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        assert told["token_logprobs"][1 : len(ids)] == pytest.approx(reference(served, ids), abs=1e-4)
        if new:  # greedy: the most probable one
            assert told["token_logprobs"][-1] == max(told["top_logprobs"][-1].values())


def test_best_of_gives_the_most_probable(url: str) -> None:
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 8, "logprobs": 0}
    _, every = complete(url, n=5, **options)
    mean = {c["text"]: sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["tokens"]) for c in every["choices"]}
    best = sorted(mean, key=lambda text: -mean[text])[:2]
    status, done = complete(url, n=2, best_of=5, **options)
    assert status == 200
    assert [c["text"] for c in done["choices"]] == best
    assert [c["index"] for c in done["choices"]] == [0, 1]
    _, silent = complete(url, n=1, best_of=5, **(options | {"logprobs": None}))
    assert [c["text"] for c in silent["choices"]] == best[:1]
    assert silent["choices"][0]["logprobs"] is None


def test_prompt_logprobs(url: str, served: Served) -> None:
    _, done = chat(url, prompt_logprobs=2)
    told = done["choices"][0]["prompt_logprobs"]
    ids = served.engine.encode(HELLO)
    assert told[0] is None
    found = [row[str(token)]["logprob"] for row, token in zip(told[1:], ids[1:], strict=True)]
    assert found == pytest.approx(reference(served, ids), abs=1e-4)
    assert all(math.isfinite(x) for x in found)
