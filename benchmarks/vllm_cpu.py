"""The drafter inside vLLM on a CPU: texts compared with plain vLLM, tokens/step with redrafter's engine.

    .venv-vllm/bin/python benchmarks/vllm_cpu.py          (`make setup-vllm` makes that environment)

Parts: `turns` (MT-Bench's first turns, no prefix cache), `mixed` (32 concurrent requests of mixed lengths, many with a
common prefix, prefix cache on), `ranks` (both again on two tensor-parallel ranks, with a copy of the model whose heads
can be split), `speed` (plain and speculative decoding taking turns, one text at a time and eight at once). tokens/step
is the sum of (tokens - 1) over all texts, divided by the number of drafts that vLLM counted. vLLM's own formula,
1 + accepted / drafts, also counts tokens accepted past the end of a text, and so does `uncut` here.
"""

import sys
from pathlib import Path

if not __package__:  # run as `python benchmarks/vllm_cpu.py`
    sys.path.insert(0, str(Path(__file__).parents[1]))

import contextlib
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB per rank
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in the CLI, for all contenders

import torch

import redrafter
from benchmarks.common import arguments, parse
from benchmarks.smoke import TinyFiles
from redrafter import Shape
from redrafter.engine.ties import explain
from redrafter.questions import read_questions
from redrafter.results import check_new, write_results
from redrafter.targets.default import default_model

PROPOSER = "redrafter.interop.vllm.Proposer"
PARTS = ("turns", "mixed", "ranks", "speed")
PREFIXES = [
    "You are a careful assistant. Read the question twice, think about what is really asked, and answer it in plain "
    "words, without lists, in as few sentences as you can. If you do not know something, say so; never make it up. "
    * 2,
    "The following text is a letter from a reader of our newspaper, who has followed our series on the lighthouses of "
    "the northern coast and would like an answer from the editors, friendly, exact, and not too long. " * 3,
]


def twelve_heads(folder: Path) -> Path:
    """Save the default model with a fourth group of heads that adds zero: 9 heads cannot be split over two ranks."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    small = AutoModelForCausalLM.from_pretrained(default_model(), dtype=torch.float32)
    config = copy.deepcopy(small.config)
    groups = small.config.num_key_value_heads
    config.num_attention_heads = small.config.num_attention_heads // groups * (groups + 1)
    config.num_key_value_heads = groups + 1
    config.head_dim = small.config.hidden_size // small.config.num_attention_heads
    wide = type(small)(config)
    given = small.state_dict()
    with torch.no_grad():
        for name, weight in wide.state_dict().items():
            rows, columns = (*given[name].shape, 1)[:2]
            weight.zero_()
            weight.view(len(weight), -1)[:rows, :columns] = given[name].view(rows, -1)
    wide.save_pretrained(folder)
    AutoTokenizer.from_pretrained(default_model()).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def engine(depth: int, model: Path | None = None, **options: Any) -> Iterator[Any]:
    """Start vLLM with the default model, and with our drafter unless `depth` is 0; stop it when the block ends.

    Every step drafts, also where drafting loses time, so that vLLM's counters tell of all steps.
    """
    from vllm import LLM

    if depth:
        options["speculative_config"] = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": depth}
        section = options.get("additional_config", {}).get("redrafter", {})
        options["additional_config"] = {"redrafter": {"adaptive": False} | section}
    usual = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "enable_prefix_caching": False}
    cores = sorted(os.sched_getaffinity(0))
    if options.get("tensor_parallel_size", 1) == 2:  # vLLM assigns NUMA nodes, and there may be only one
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{_list(cores[: len(cores) // 2])}|{_list(cores[len(cores) // 2 :])}"
    else:
        os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
    llm = LLM(str(model or default_model()), disable_log_stats=False, **(usual | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def _list(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores)) or "0"


def write(llm: Any, prompts: Sequence[list[int]], tokens: Sequence[int]) -> list[list[int]]:
    """Write greedy texts of at most `tokens` tokens each, all requests at once."""
    from vllm import SamplingParams

    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in tokens]
    done = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
    return [list(d.outputs[0].token_ids) for d in done]


def counted(llm: Any) -> dict[str, int]:
    """Read vLLM's counters of speculative decoding and of preempted requests."""
    wanted = {
        "vllm:spec_decode_num_drafts": "drafts",
        "vllm:spec_decode_num_draft_tokens": "drafted",
        "vllm:spec_decode_num_accepted_tokens": "accepted",
        "vllm:num_preemptions": "preemptions",
        "vllm:prefix_cache_hits": "prefix_hits",
    }
    found = {wanted[m.name]: int(m.value) for m in llm.get_metrics() if m.name in wanted}
    return dict.fromkeys(wanted.values(), 0) | found


def since(llm: Any, before: dict[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in counted(llm).items()}


def figures(texts: Sequence[list[int]], counts: dict[str, int]) -> dict[str, float]:
    drafts = max(1, counts["drafts"])
    return {
        "tokens_per_step": sum(len(t) - 1 for t in texts) / drafts,
        "uncut": 1 + counts["accepted"] / drafts,
        **counts,
    }


def compare(own: redrafter.Engine, prompts: Sequence[list[int]], plain: Any, other: Any) -> dict[str, Any]:
    """Count equal texts, and differences at a numerical tie and elsewhere."""
    requests = own.requests(list(prompts), max_new_tokens=1)
    found = [explain(own.target, r, a, b) for r, a, b in zip(requests, plain, other, strict=True)]
    apart = [(i, d) for i, d in enumerate(found) if d is not None]
    return {
        "texts": len(found),
        "equal": sum(d is None for d in found),
        "ties": sum(d.is_tie for _, d in apart),
        "wrong": sum(not d.is_tie for _, d in apart),
        "differences": [{"text": i, "index": d.index, "gap": d.gap} for i, d in apart],
    }


def own_chain(own: redrafter.Engine, prompts: Sequence[list[int]], tokens: int, batch: int = 8) -> dict[str, float]:
    """Return tokens/step of redrafter's engine with a chain; `uncut` counts a text's last step in full, as vLLM."""
    steps, gained, whole = 0, 0, 0
    for i in range(0, len(prompts), batch):
        # The last step can reach this far past the end.
        longer = own.requests(list(prompts[i : i + batch]), max_new_tokens=tokens + own.shape.length)
        for done in own.complete(longer):
            so_far = 1
            for accepted in done.stats.accepted_per_step:
                if so_far >= min(tokens, len(done.tokens)):
                    break
                steps += 1
                so_far += accepted + 1
            gained += min(tokens, len(done.tokens)) - 1
            whole += so_far - 1
    return {"tokens_per_step": gained / steps, "uncut": whole / steps}


def turns(own: redrafter.Engine, questions: Path, count: int | None) -> list[list[int]]:
    return [own.encode([{"role": "user", "content": q.text}]) for q in read_questions(questions, count)]


def mixed(own: redrafter.Engine, questions: Path, count: int = 32) -> tuple[list[list[int]], list[int]]:
    """Return requests of very different lengths; two of three share a prefix of several cache blocks."""
    texts = [q.text for q in read_questions(questions, count)]
    given = [(PREFIXES[i % 3] if i % 3 < 2 else "") + text for i, text in enumerate(texts)]
    return [own.encode([{"role": "user", "content": g}]) for g in given], [16 + 7 * (i % 9) for i in range(len(given))]


def speed(plain: Any, fast: Any, prompts: Sequence[list[int]], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Time both, taking turns: one request at a time, then all at once."""
    rows = []
    for at_once in (1, len(prompts)):
        groups = [prompts[i : i + at_once] for i in range(0, len(prompts), at_once)]
        taken: dict[str, list[list[float]]] = {"plain": [[] for _ in groups], "speculative": [[] for _ in groups]}
        for _ in range(rounds):
            for i, group in enumerate(groups):
                for name, llm in (("plain", plain), ("speculative", fast)):
                    began = time.perf_counter()
                    write(llm, group, [tokens] * len(group))
                    taken[name][i].append(time.perf_counter() - began)
        seconds = {name: sum(statistics.median(t) for t in each) for name, each in taken.items()}
        row = {"part": "speed", "at_once": at_once, "texts": len(prompts), "rounds": rounds}
        row |= {f"{name}_seconds": s for name, s in seconds.items()}
        rows.append(row | {"vs_plain": seconds["plain"] / seconds["speculative"], "load": os.getloadavg()})
        print(rows[-1], flush=True)
    return rows


def smoke(tiny: TinyFiles) -> list[object]:
    words = ["--questions", tiny.questions, "--prompts", 1, "--tokens", 4, "--timed", 1, "--rounds", 1]
    return [*words, "--mixed", 2, "--parts", "turns", "mixed", "speed"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__, "vllm_cpu.json")
    parser.add_argument("--prompts", type=int, default=80, help="number of questions, spread over the categories")
    parser.add_argument("--tokens", type=int, default=64, help="at most this many new tokens per text")
    parser.add_argument("--depth", type=int, default=3, help="tokens drafted per step")
    parser.add_argument("--timed", type=int, default=8, help="number of questions to time")
    parser.add_argument("--mixed", type=int, default=32, help="number of concurrent requests in the part `mixed`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parse(parser, argv, smoke)
    check_new(args.save, args.overwrite)
    own = redrafter.load(device="cpu", dtype="fp32", shape=Shape(width=1, length=args.depth))
    prompts = turns(own, args.questions, args.prompts)
    many, lengths = mixed(own, args.questions, args.mixed)
    whole = [args.tokens] * len(prompts)
    rows: list[dict[str, Any]] = []
    chain = own_chain(own, prompts, args.tokens, batch=16)
    print("our engine's chain", chain, flush=True)

    def note(part: str, ranks: int, llm: Any, before: dict[str, int], texts: Any, reference: Any, given: Any) -> None:
        row = {"part": part, "ranks": ranks, "depth": args.depth} | figures(texts, since(llm, before))
        rows.append(row | compare(own, given, reference, texts))
        print({k: v for k, v in rows[-1].items() if k != "differences"}, flush=True)

    with tempfile.TemporaryDirectory() as scratch, engine(0, enable_prefix_caching=True) as plain:
        plain_turns, plain_mixed = write(plain, prompts, whole), write(plain, many, lengths)
        for ranks in (1, 2) if "ranks" in args.parts else (1,):
            where: dict[str, Any] = {"tensor_parallel_size": ranks}
            if ranks > 1:
                where["model"] = twelve_heads(Path(scratch))
            if "turns" in args.parts:
                with engine(args.depth, **where) as fast:
                    before = counted(fast)
                    note("turns", ranks, fast, before, write(fast, prompts, whole), plain_turns, prompts)
                    if ranks == 1 and "speed" in args.parts:
                        few = prompts[:: max(1, len(prompts) // args.timed)][: args.timed]
                        rows += speed(plain, fast, few, args.tokens, args.rounds)
            if "mixed" in args.parts:
                with engine(args.depth, enable_prefix_caching=True, **where) as fast:
                    before = counted(fast)
                    note("mixed", ranks, fast, before, write(fast, many, lengths), plain_mixed, many)
    texts = [r for r in rows if "equal" in r]
    headline = {name: float(sum(r[name] for r in texts)) for name in ("texts", "equal", "ties", "wrong")}
    first = next((r for r in texts if r["part"] == "turns" and r["ranks"] == 1), None)
    if first:
        headline |= {"tokens_per_step": first["tokens_per_step"], "own_tokens_per_step": chain["tokens_per_step"]}
        headline |= {"uncut": first["uncut"], "own_uncut": chain["uncut"]}
    if timed := next((r for r in rows if r["part"] == "speed"), None):
        headline["vs_plain"] = timed["vs_plain"]
    write_results(args.save, headline, rows)
    print(headline)


if __name__ == "__main__":
    main()
