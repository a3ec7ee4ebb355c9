"""The official client, against a live server."""

import concurrent.futures
from typing import Any

import openai
import pytest

from redrafter.serve.model import Served
from tests.helpers.serving import NAME, make_served, plain, running, wait_until

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served() -> Served:
    return make_served()


def ask(client: openai.OpenAI, **options: Any) -> Any:
    extra = {
        k: options.pop(k) for k in ("top_k", "min_p", "ignore_eos", "speculative", "trace", "robots") if k in options
    }
    return client.chat.completions.create(**({"model": NAME, "messages": HELLO} | options), extra_body=extra)


def test_chat_is_what_plain_decoding_writes(client: openai.OpenAI, served: Served) -> None:
    for options in ({"temperature": 0}, {"temperature": 1.0, "seed": 5, "top_k": 7, "frequency_penalty": 0.4}):
        done = ask(client, max_tokens=20, **options)
        alone = plain(served).generate([HELLO], max_new_tokens=20, **options)[0]
        assert done.choices[0].message.content == alone.text
        assert done.choices[0].finish_reason == alone.finish_reason
        assert done.choices[0].message.role == "assistant"
        usage = done.usage
        assert usage.completion_tokens == len(alone.tokens)
        assert usage.prompt_tokens == len(served.engine.encode(HELLO))
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert usage.speculative["lossless"]
        assert usage.speculative["steps"] > 0
        assert usage.completion_tokens_details.accepted_prediction_tokens == usage.speculative["accepted_tokens"]


def test_streaming_gives_the_same_text_and_the_usage_at_the_end(client: openai.OpenAI) -> None:
    options = {"temperature": 1.0, "seed": 8, "max_tokens": 25}
    whole = ask(client, **options)
    chunks = list(ask(client, **options, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])
    assert len(chunks) > 4, "in pieces"
    without = list(ask(client, **options, stream=True))
    assert all(c.usage is None for c in without)


def test_stop(client: openai.OpenAI) -> None:
    options = {"temperature": 1.0, "seed": 2, "max_tokens": 40, "ignore_eos": True}
    whole = ask(client, **options).choices[0].message.content
    stop = whole[10:12]
    done = ask(client, **options, stop=[stop, "nowhere in it"]).choices[0]
    assert done.message.content == whole[: whole.index(stop)]
    assert done.finish_reason == "stop"
    streamed = "".join(c.choices[0].delta.content or "" for c in ask(client, **options, stop=stop, stream=True))
    assert streamed == done.message.content


def test_same_seed_same_text_alone_or_under_load(client: openai.OpenAI) -> None:
    options = {"temperature": 1.0, "seed": 11, "max_tokens": 40}
    alone = ask(client, **options).choices[0].message.content
    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        others = [threads.submit(ask, client, temperature=1.0, seed=s, max_tokens=40) for s in range(20, 28)]
        again = [threads.submit(ask, client, **options) for _ in range(4)]
        texts = [f.result().choices[0].message.content for f in again]
        different = [f.result().choices[0].message.content for f in others]
    assert texts == [alone] * 4
    assert len({alone, *different}) == 9
    free = [ask(client, temperature=1.0, max_tokens=40).choices[0].message.content for _ in range(2)]
    assert free[0] != free[1], "without a seed each text is another"


def test_n_choices(client: openai.OpenAI, served: Served) -> None:
    options = {"temperature": 1.0, "seed": 4, "max_tokens": 15}
    done = ask(client, n=3, **options)
    texts = [c.message.content for c in done.choices]
    alone = plain(served).generate([HELLO], max_new_tokens=15, temperature=1.0, seed=4, n=3)
    assert texts == [c.text for c in alone]
    assert [c.index for c in done.choices] == [0, 1, 2]
    assert done.usage.completion_tokens == sum(len(c.tokens) for c in alone)
    streamed = ["", "", ""]
    for chunk in ask(client, n=3, **options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_logprobs(client: openai.OpenAI) -> None:
    done = ask(client, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3)
    found = done.choices[0].logprobs.content
    assert "".join(t.token for t in found) == done.choices[0].message.content
    for token in found:
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token, "greedy: the best of all"
        assert token.logprob == token.top_logprobs[0].logprob <= 0
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    streamed = ask(client, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3, stream=True)
    pieces = [t for c in streamed if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [t.token for t in pieces] == [t.token for t in found]
    assert [t.logprob for t in pieces] == pytest.approx([t.logprob for t in found], abs=1e-4)
    bare = ask(client, temperature=0, max_tokens=4, logprobs=True).choices[0].logprobs.content
    assert [len(t.top_logprobs) for t in bare] == [0] * 4


def test_completions(client: openai.OpenAI, served: Served) -> None:
    alone = plain(served).generate(["hello", "world"], max_new_tokens=12)
    done = client.completions.create(model=NAME, prompt=["hello", "world"], max_tokens=12, temperature=0, logprobs=2)
    assert [c.text for c in done.choices] == [c.text for c in alone]
    assert done.choices[0].logprobs.tokens[0] == alone[0].text[0]
    ids = served.engine.encode("hello")
    for prompt in (ids, [ids]):
        again = client.completions.create(model=NAME, prompt=prompt, max_tokens=12, temperature=0)
        assert again.choices[0].text == alone[0].text
    streamed = client.completions.create(model=NAME, prompt="hello", max_tokens=12, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in streamed) == alone[0].text


def test_plain_on_request_writes_the_same(client: openai.OpenAI) -> None:
    options = {"temperature": 1.0, "seed": 6, "max_tokens": 30}
    fast, slow = ask(client, **options), ask(client, **options, speculative=False)
    assert slow.choices[0].message.content == fast.choices[0].message.content
    assert slow.usage.speculative["drafted_nodes"] == 0 < fast.usage.speculative["drafted_nodes"]
    assert slow.usage.speculative["steps"] == slow.usage.completion_tokens - 1
    assert fast.usage.speculative["steps"] < slow.usage.speculative["steps"]


def test_a_conversation_skips_what_was_read(client: openai.OpenAI) -> None:
    first = ask(client, temperature=0, max_tokens=20, messages=[{"role": "user", "content": "abcdefghijklmnop"}])
    talk = [
        {"role": "user", "content": "abcdefghijklmnop"},
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "more"},
    ]
    second = ask(client, temperature=0, max_tokens=5, messages=talk)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


def test_a_key_learns_nothing_of_what_others_asked(url: str) -> None:
    def cached(key: str) -> int:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client:
            asked = ask(client, max_tokens=2, messages=[{"role": "user", "content": "a secret that nobody else asks"}])
            return int(asked.usage.prompt_tokens_details.cached_tokens)

    assert cached("Ada") == 0
    assert cached("Ada") > 20
    assert cached("Bob") == 0


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


@pytest.mark.parametrize(
    ("options", "param", "what"),
    [
        ({"temperature": 3}, "temperature", "less than or equal to 2"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "outside the vocabulary"),
        ({"logit_bias": {"abc": 1}}, "logit_bias", "keyed by token ids"),
        ({"stop": ""}, "stop", ""),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "role"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        ({"service_tier": "flex"}, "service_tier", "there is one tier"),
        ({"robots": 1}, "robots", "no parameter 'robots'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_a_bad_parameter_is_named(client: openai.OpenAI, options: Any, param: str | None, what: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **options)
    assert caught.value.param == param
    assert what in caught.value.message
    assert caught.value.type == "invalid_request_error"


def test_too_long(client: openai.OpenAI) -> None:
    for options in ({"messages": [{"role": "user", "content": "a" * 200}]}, {"max_tokens": 89}):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, **options)
        assert caught.value.code == "context_length_exceeded"


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, model="gpt-4")
    assert caught.value.code == "model_not_found"
    assert "letters" in caught.value.message


def test_a_key_where_one_is_set() -> None:
    with running(make_served(), api_key="sesame") as url:
        for key, known in (("sesame", True), ("sesamé", False), ("sesam", False)):
            headers = {"Authorization": f"Bearer {key}".encode("latin-1").decode("latin-1")}
            with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, default_headers=headers) as client:
                if known:
                    assert ask(client, max_tokens=2).choices
                else:
                    with pytest.raises((openai.AuthenticationError, UnicodeEncodeError, openai.APIConnectionError)):
                        ask(client, max_tokens=2)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                client.models.list()
            assert caught.value.code == "invalid_api_key"


def test_a_full_queue_says_when_to_come_back() -> None:
    served = make_served(rows=1, queue=1)
    with running(served) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        slow = {"max_tokens": 70, "ignore_eos": True, "temperature": 1.0}
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            several = [threads.submit(ask, client, **slow, n=1) for _ in range(2)]
            assert wait_until(lambda: served.scheduler.waiting + len(served.scheduler.jobs) == 2)
            with pytest.raises(openai.RateLimitError) as caught:
                ask(client, max_tokens=2)
            assert caught.value.code == "queue_full"
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert all(f.result().choices for f in several)


def test_a_draining_server_says_so() -> None:
    served = make_served()
    with running(served) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        served.scheduler.draining = True
        with pytest.raises(openai.InternalServerError) as caught:
            ask(client, max_tokens=2)
        assert caught.value.status_code == 503
        assert caught.value.code == "draining"
        served.scheduler.draining = False
