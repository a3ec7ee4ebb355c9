"""The command: every verb with a tiny model on disk, quick help, one-line errors with exit code 2, the server."""

import http.client
import json
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from benchmarks.smoke import TinyFiles
from redrafter_mlx import api, profiles
from redrafter_mlx.cli import main as cli
from redrafter_mlx.cli.main import VERBS, main
from redrafter_mlx.config import Shape
from redrafter_mlx.server import Server, read_request


@pytest.fixture(scope="module")
def tiny():
    return TinyFiles.shared()


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REDRAFTER_CACHE", str(tmp_path / "cache"))


def words(tiny, *more):
    return ["--model", str(tiny.model), "--drafter", f"{tiny.drafter}+ngram", *more]


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_imports_no_mlx(verb):
    code = (
        "import sys\nfrom redrafter_mlx.cli.main import main\n"
        f"try: main({[verb, '--help'] if verb else ['--help']!r})\nexcept SystemExit: pass\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm', 'transformers', 'rich', 'numpy')])"
    )
    if verb in ("", "generate"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"
        assert "usage: redrafter-mlx" in done.stdout
    else:  # the same code, without starting Python again
        with pytest.raises(SystemExit):
            cli.parser().parse_args([verb, "--help"])


def test_generate_and_compare(tiny, capsys):
    assert main(["generate", "Why?", *words(tiny, "--max-new-tokens", "12", "--stats")]) == 0
    text, stats = capsys.readouterr()
    assert text.strip()
    assert "tokens/step (recurrent+ngram, 2x3:4)" in stats
    assert main(["generate", "Why?", *words(tiny, "--max-new-tokens", "12"), "--drafter", "none"]) == 0
    assert capsys.readouterr().out == text
    assert main(["compare", *words(tiny, "--max-new-tokens", "10", "--temperature", "1"), "--prompt", "Hi"]) == 0
    assert "1 of 1 texts are the same" in capsys.readouterr().out


def test_chat(tiny, capsys, monkeypatch):
    said = iter(["Hello", "And then?"])
    monkeypatch.setattr("builtins.input", lambda _: next(said, ""))
    assert main(["chat", *words(tiny, "--max-new-tokens", "6", "--system", "Be brief.")]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.long
def test_tune_decides_what_runs(tiny, capsys, monkeypatch):
    name = f"{tiny.drafter}+ngram"
    assert main(["tune", *words(tiny, "--shapes", "1x1", "2x2:3", "--tokens", "4")]) == 0
    out = capsys.readouterr().out
    assert "plain" in out
    assert "fastest:" in out
    engine, _ = api.load(str(tiny.model), drafter=name)
    saved = json.loads(profiles.path(engine.target, "recurrent+ngram").read_text())
    assert saved["tokens_per_second"].keys() == {"plain", "1x1:1", "2x2:3"}
    profiles.save(engine.target, "recurrent+ngram", {"fastest": "1x2:2"})
    assert api.load(str(tiny.model), drafter=name)[0].shape == Shape(width=1, length=2, nodes=2)
    profiles.save(engine.target, "recurrent+ngram", {"fastest": "plain"})
    assert api.load(str(tiny.model), drafter=name)[0].drafter.name == "none"
    assert api.load(str(tiny.model), drafter=name, shape="3x1")[0].shape.width == 3


@pytest.mark.long
def test_bench(tiny, capsys, tmp_path):
    out = tmp_path / "bench.json"
    sizes = ["--widths", "1", "--lengths", "2", "--tokens", "4", "--precisions", "fp16", "4bit", "--out", str(out)]
    assert main(["bench", *words(tiny), *sizes]) == 0
    found = json.loads(out.read_text())
    assert [row["precision"] for row in found["rows"]] == ["fp16", "4bit"]
    assert all(row["speedup"] > 0 and row["texts"] == 4 for row in found["rows"])
    assert found["machine"]["mlx"]


def test_doctor(tiny, capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "device" in out
    assert "glibc" in out
    assert main(["doctor", *words(tiny)]) == 0
    assert "self-check  passed" in capsys.readouterr().out


def test_wrong_input_is_one_line(tiny, capsys, tmp_path, monkeypatch):
    for argv, message in (
        (["generate"], "the following arguments are required"),
        (["fly"], "invalid choice"),
        (["generate", "", *words(tiny)], "the prompt is empty"),
        (["generate", "Hi", *words(tiny, "--temperature", "-1")], "temperature must be 0 or more"),
        (["generate", "Hi", *words(tiny, "--shape", "3")], "a shape is written WxL"),
        (["generate", "Hi", *words(tiny, "--max-new-tokens", "0")], "max_new_tokens must be at least 1"),
        (["generate", "Hi", "--model", str(tmp_path / "no")], "cannot find the model"),
        (["generate", "Hi", "--model", str(tmp_path)], "mlx-lm cannot load"),
        (["generate", "Hi", "--model", str(tiny.model), "--drafter", str(tmp_path / "no")], "no drafter folder"),
        (
            ["generate", "Hi", "--model", str(tiny.model), "--drafter", str(tiny.drafters / "eagle")],
            "no recurrent drafter",
        ),
        (["generate", "Hi", "--model", str(tiny.model), "--drafter", "recurrent"], "no drafter for model comes with"),
        (["tune", "--model", str(tiny.model)], "nothing to tune"),
        (["tune", *words(tiny, "--tokens", "1")], "tune needs"),
        (["bench", *words(tiny, "--tokens", "1")], "bench needs"),
        (["serve", *words(tiny, "--port", "99999")], "a port is between"),
    ):
        assert main(argv) == 2, argv
        err = capsys.readouterr().err.strip().splitlines()
        assert len(err) == 1, (argv, err)
        assert err[0].startswith("redrafter-mlx: ")
        assert message in err[0]


def test_without_mlx():
    """One line that says how to install it; `doctor` still runs."""
    code = (
        "import sys\nsys.modules['mlx'] = sys.modules['mlx.core'] = None\n"
        "from redrafter_mlx.cli.main import main\n"
        "print(main(['doctor']), main(['generate', 'Hi', '--model', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 2"
    (line,) = done.stderr.strip().splitlines()
    assert "pip install 'mlx-lm[cpu]' on Linux" in line


@pytest.fixture(scope="module")
def server(tiny):
    made = Server("127.0.0.1", 0)
    ready = threading.Event()

    def run():  # MLX's streams belong to the thread that uses them
        made.engine, _ = api.load(str(tiny.model), drafter=f"{tiny.drafter}+ngram", shape="2x2")
        ready.set()
        made.serve_forever(poll_interval=0.05)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    ready.wait()
    yield SimpleNamespace(port=made.server_address[1], engine=made.engine)
    made.shutdown()
    made.server_close()


def ask(server, path, body=None):
    link = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    link.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
    answer = link.getresponse()
    return answer.status, answer.read().decode()


def test_the_server(server):
    assert ask(server, "/health") == (200, '{"status": "ok"}')
    assert json.loads(ask(server, "/v1/models")[1])["data"][0]["id"] == "model"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 1, "seed": 3}
    status, body = ask(server, "/v1/chat/completions", chat)
    whole = json.loads(body)
    assert status == 200
    text = whole["choices"][0]["message"]["content"]
    assert whole["usage"]["completion_tokens"] == 8
    assert whole["choices"][0]["finish_reason"] == "length"
    status, body = ask(
        server, "/v1/chat/completions", chat | {"stream": True, "stream_options": {"include_usage": True}}
    )
    chunks = [json.loads(line[6:]) for line in body.split("\n\n") if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1]) == text
    assert body.endswith("data: [DONE]\n\n")
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "the prompt was read before"
    status, body = ask(server, "/v1/completions", {"prompt": "Hi", "max_tokens": 4, "temperature": 0})
    assert status == 200
    assert json.loads(body)["object"] == "text_completion"


def test_the_server_refuses(server):
    message = {"messages": [{"role": "user", "content": "Hi"}]}
    for path, body, status, said in (
        ("/v1/nothing", {}, 404, "there is no"),
        ("/v1/chat/completions", {}, 400, "messages is missing"),
        ("/v1/chat/completions", message | {"n": 2}, 400, "n=2 is not supported"),
        ("/v1/chat/completions", message | {"colour": 2}, 400, "colour=2 is not supported"),
        ("/v1/chat/completions", message | {"temperature": -1}, 400, "temperature"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "content"),
        ("/v1/completions", {"prompt": ["a", "b"]}, 400, "one text"),
        ("/v1/completions", {"prompt": "a", "stop": 5}, 400, "stop must be"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "at least 1"),
        ("/v1/completions", {"prompt": "a", "stream": True, "stream_options": "x"}, 400, "stream_options"),
        ("/v1/chat/completions", {"messages": 5}, 400, "content"),
        ("/v1/chat/completions", {"messages": "Hi"}, 400, "content"),
        ("/v1/completions", {"prompt": message["messages"]}, 400, "one text"),
    ):
        found, text = ask(server, path, body)
        assert found == status, text
        assert said in json.loads(text)["error"]["message"]
    assert ask(server, "/v1/nothing")[0] == 404
    assert read_request(message | {"n": 1, "tools": []}, chat=True)[1]["temperature"] == 1.0
