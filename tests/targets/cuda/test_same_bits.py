"""Passes of a dense random model: a token has the same bits in each. On a CPU the passes agree up to rounding.

The check at load (`same_bits`) is tried on a CPU too, with products and attention that add up in a fixed order.
"""

import copy
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import pytest
import torch
import transformers as tf

from redrafter import kernels
from redrafter.core.cache import KVCache
from redrafter.core.flat import Flat, Piece, of_pieces
from redrafter.core.tree import Tree, ancestors, root_tree
from redrafter.kernels import norm_gate
from redrafter.kernels import tree_attention as attention
from redrafter.kernels.gated_product import naive as naive_gated_product
from redrafter.kernels.product import naive as naive_product
from redrafter.kernels.product import parts_of
from redrafter.kernels.tree_attention.naive import INDEX, NEWEST, PLACE, SLOTS, visible
from redrafter.targets import load_target
from redrafter.targets.cuda import fused_layer, model_ends
from redrafter.targets.cuda.same_bits import same_bits
from redrafter.targets.cuda.tree_target import TreeTarget
from tests.helpers.zoo import make_model

BIG = torch.cuda.is_available()
DEVICE = "cuda" if BIG else "cpu"
needs_gpu = pytest.mark.skipif(not BIG, reason="needs a GPU")

NODES = (1, 2, 5, 16, 63, 64, 130) if BIG else (1, 5, 20)
ROWS = (3, 8, 32) if BIG else (3,)
BORDERS = (16, 64, 128, 144, 512, 528, 2048, 2064) if BIG else (16,)
LENGTHS = sorted({0, 5, *(b + d for b in BORDERS for d in (-1, 0, 1))})
TOKENS = max(LENGTHS) + 40
CACHE_SLOTS = TOKENS + max(NODES)
PIECES = (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 130, 256, 400, 512)

COMMON = {
    "vocab_size": 1000,
    "hidden_size": 512 if BIG else 64,
    "intermediate_size": 1536 if BIG else 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}
"""On a GPU: products of two and of four parts."""
WINDOW = 100 if BIG else 20
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[type, dict[str, object]]] = {
    "llama": (tf.LlamaConfig, {}),
    "mistral": (tf.MistralConfig, {"sliding_window": WINDOW}),
    "qwen2": (tf.Qwen2Config, {}),
    "qwen3": (tf.Qwen3Config, {"head_dim": 128}),
    "gemma3": (tf.Gemma3TextConfig, {"head_dim": 256, "sliding_window": WINDOW, "layer_types": KINDS}),
    "phi3": (tf.Phi3Config, {"partial_rotary_factor": 0.5}),
    "olmo2": (tf.Olmo2Config, {}),
}
CASES = [(family, torch.bfloat16) for family in FAMILIES] + [("llama", torch.float16)]


def dense(family: str, dtype: torch.dtype, **changes: int) -> TreeTarget:
    """A model whose weights are all random, so that another order of a sum shows."""
    torch.manual_seed(3)
    config, own = FAMILIES[family]
    model = tf.AutoModelForCausalLM.from_config(config(**(COMMON | own | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
    return TreeTarget(load_target(model.to(DEVICE, dtype)))


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """On a GPU: the same bits. On a CPU in fp32: the same up to rounding."""
    return torch.equal(one, other) if BIG else torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


def empty_cache(verifier: TreeTarget, rows: int) -> KVCache:
    cache = KVCache(slots=CACHE_SLOTS)
    for layer, kinds in verifier.target.kv_layout().items():
        keys, values = (torch.zeros(rows, heads, CACHE_SLOTS, size, dtype=d, device=w) for heads, size, d, w in kinds)
        cache.layers[layer] = keys, values
    return cache


def rows_of(cache: KVCache, rows: int) -> KVCache:
    """The same first row many times."""
    made = KVCache(slots=cache.slots)
    made.layers = {i: tuple(x[:1].repeat(rows, 1, 1, 1) for x in pair) for i, pair in cache.layers.items()}
    return made


def read(verifier: TreeTarget, cache: KVCache, tokens: torch.Tensor, begin: int, places=None) -> torch.Tensor:
    """Logits of a piece of a prompt (B, n) -> (B, n, V)."""
    where = range(len(tokens)) if places is None else places
    flat = of_pieces([Piece(at, begin, row) for at, row in zip(where, tokens.tolist(), strict=True)], verifier.longest)
    logits, _ = verifier.run(Flat(flat.lines.to(DEVICE), flat.runs.to(DEVICE)), cache, ())
    return logits.view(*tokens.shape, -1)


def single(verifier: TreeTarget, cache: KVCache, token: int, length: int) -> torch.Tensor:
    """Logits of one token in a step of plain decoding."""
    return verified(verifier, cache, root_tree(integers(token)), [length])[0, 0]


def verified(verifier: TreeTarget, cache: KVCache, tree: Tree, lengths: list[int]) -> torch.Tensor:
    return verifier.verify(tree, integers(*lengths), cache, ())[0]


def pieces(random: torch.Generator) -> list[tuple[int, int]]:
    """Borders of random pieces of a prompt."""
    ends = [0]
    while ends[-1] < TOKENS:
        ends.append(min(TOKENS, ends[-1] + PIECES[int(torch.randint(len(PIECES), (), generator=random))]))
    return list(pairwise(ends))


def random_tree(nodes: int, random: torch.Generator, deep: int = 7) -> Tree:
    parents, depths = [0], [0]
    while len(parents) < nodes:
        above = int(torch.randint(len(parents), (), generator=random))
        if depths[above] < deep:
            parents.append(above)
            depths.append(depths[above] + 1)
    above = torch.tensor([parents])
    tokens = torch.randint(COMMON["vocab_size"], (1, nodes), generator=random)
    found = tokens, above, torch.tensor([depths]), tokens >= 0, ancestors(above, deep)
    return Tree(*(x.to(DEVICE) for x in found), length=deep)


def stacked(trees: list[Tree]) -> Tree:
    columns = zip(*((t.tokens, t.parents, t.depths, t.valid, t.mask) for t in trees), strict=True)
    return Tree(*(torch.cat(column) for column in columns), length=trees[0].length)


def differing_tree(verifier: TreeTarget, cache: KVCache, tree: Tree, length: int, together: torch.Tensor) -> bool:
    """Whether a node of the deepest path gets other logits in plain decoding, or in a piece of a prompt."""
    path = tree.mask[0, int(tree.depths[0].argmax())].nonzero()[:, 0]
    tokens = tree.tokens[:, path]
    want = together[path]
    plain = torch.stack([single(verifier, cache, int(t), length + i) for i, t in enumerate(tokens[0])])
    return not (equal(plain, want) and equal(read(verifier, cache, tokens, length)[0], want))


def the_text(verifier: TreeTarget) -> tuple[torch.Tensor, KVCache, torch.Tensor]:
    """A random text, its KV cache and its logits. Tokens around the borders are read one by one, as in decoding."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(COMMON["vocab_size"], (1, TOKENS), generator=random).to(DEVICE)
    cache, logits, begin = empty_cache(verifier, 1), [], 0
    near = {b + d for b in BORDERS for d in range(-2, 3)}
    for i in range(TOKENS):
        if i + 1 == TOKENS or i in near or i + 1 in near or i + 1 - begin == 512:
            piece = tokens[:, begin : i + 1]
            alone = piece.shape[1] == 1
            logits.append(
                single(verifier, cache, int(piece), i)[None] if alone else read(verifier, cache, piece, begin)[0]
            )
            begin = i + 1
    return tokens, cache, torch.cat(logits)


@torch.no_grad()
@pytest.mark.parametrize(("family", "dtype"), CASES if BIG else [(f, torch.float32) for f in FAMILIES])
def test_every_pass_gives_a_token_the_same_bits(family, dtype):
    verifier = dense(family, dtype)
    assert verifier.forwards.fused
    if BIG:
        assert same_bits(verifier)
    tokens, cache, logits = the_text(verifier)
    assert logits.isfinite().all()

    random = torch.Generator().manual_seed(1)
    for prompts, places in ((tokens, [0]), (torch.cat([tokens, tokens.flip(1)]), [2, 0])):  # alone; beside another
        other = empty_cache(verifier, 3)
        found = [read(verifier, other, prompts[:, a:b], a, places)[0] for a, b in pieces(random)]
        assert equal(torch.cat(found), logits), "logits of a prompt in random pieces"
        for layer, pair in cache.layers.items():
            for one, mine in zip(pair, other.layers[layer], strict=True):
                assert equal(mine[places[0], :, :TOKENS], one[0, :, :TOKENS]), "the prompt's KV cache"

    copies = rows_of(cache, max(ROWS))
    for nodes in NODES:
        trees = [random_tree(nodes, random) for _ in LENGTHS]
        alone = []
        for length, tree in zip(LENGTHS, trees, strict=True):
            mine = rows_of(cache, 1)
            alone.append(verified(verifier, mine, tree, [length])[0])
            assert not differing_tree(verifier, mine, tree, length, alone[-1]), (nodes, length)
        assert differing_tree(verifier, mine, tree, length, alone[0]), "twin: logits of another tree"
        for rows in ROWS:
            chosen = torch.randint(len(LENGTHS), (rows,), generator=random).tolist()
            batch = KVCache(slots=CACHE_SLOTS)
            batch.layers = {i: tuple(x[:rows].clone() for x in pair) for i, pair in copies.layers.items()}
            got = verified(verifier, batch, stacked([trees[i] for i in chosen]), [LENGTHS[i] for i in chosen])
            for row, i in enumerate(chosen):
                assert equal(got[row], alone[i]), (nodes, rows, LENGTHS[i])


def other_parts(monkeypatch):
    """Products of several tokens are not split."""
    from redrafter.kernels.product import triton as kernel

    right = kernel.own_product

    def wrong(x, weight, bias=None):
        with mock.patch.object(kernel, "parts_of", (lambda weight: 1) if len(x) > 1 else parts_of):
            return right(x, weight, bias)

    monkeypatch.setattr(kernel, "own_product", wrong)


def other_block(monkeypatch):
    """Passes of several tokens read the older keys in smaller blocks."""
    from redrafter.kernels.tree_attention import triton as kernel

    right = kernel.attend

    def wrong(query, keys, values, lines, table, settings, *args):
        smaller = {"BLOCK": 16} if len(query) > 1 else {}
        return right(query, keys, values, lines, table, settings | smaller, *args)

    monkeypatch.setattr(kernel, "attend", wrong)


def other_order(monkeypatch):
    """Parts of several tokens are added last to first."""
    right = norm_gate.add_norm

    def wrong(x, parts, *args, **kwargs):
        return right(x, parts.flip(0) if parts is not None and len(x) > 1 else parts, *args, **kwargs)

    monkeypatch.setattr(norm_gate, "add_norm", wrong)


TWINS = [other_parts, other_block, other_order]


@needs_gpu
@torch.no_grad()
@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_twins_with_another_order_of_sums_differ(twin, family, monkeypatch):
    verifier = dense(family, torch.bfloat16)
    tokens, _, logits = the_text(verifier)

    def differs() -> bool:
        """Whether one long piece gives other bits than the text, part of which was read token by token."""
        return not equal(read(verifier, empty_cache(verifier, 1), tokens[:, :700], 0)[0], logits[:700])

    assert not differs()
    twin(monkeypatch)
    assert differs()
    if twin is not other_order:  # its few changed bits may miss the check's few tokens in so small a model
        assert not same_bits(verifier)


@torch.no_grad()
@pytest.mark.skipif(BIG, reason="on a GPU the kernels run for real, without the interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter, warns of inf - inf
def test_a_tiny_model_in_tritons_interpreter(monkeypatch):
    """Up to 16 tokens have tiles of one size, whose sums the interpreter adds in one order: the bits are equal."""
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 256}
    verifier = dense("llama", torch.float16, **small, vocab_size=64)
    tree, length = random_tree(6, torch.Generator().manual_seed(1)), 70
    tree = replace(tree, tokens=tree.tokens % 64)
    cache = empty_cache(verifier, 1)
    monkeypatch.setattr(f"{__name__}.equal", torch.equal)

    def differs() -> bool:
        return differing_tree(verifier, cache, tree, length, verified(verifier, cache, tree, [length])[0])

    with kernels.force("triton"):
        read(verifier, cache, torch.arange(length)[None] % 64, 0)
        assert not differs()
        for twin in TWINS[:2]:
            with pytest.MonkeyPatch.context() as patch:
                twin(patch)
                assert differs(), twin.__name__


def product_by_row(x, weight, bias=None):
    return torch.cat([naive_product.product(row[None], weight, bias) for row in x], dim=1)


def attention_by_token(query, keys, values, lines, runs, scaling):
    """Each token by itself, its keys in the order of their positions: the older ones, then the newest as listed."""
    out = torch.zeros_like(query)
    groups = query.shape[1] // keys.shape[1]
    for first, count in runs.tolist():
        for line in range(first, first + count):
            place, older = int(lines[line, PLACE]), max(0, int(lines[line, INDEX]) + 1 - NEWEST)
            newest = lines[line, SLOTS:]
            slots = torch.cat([torch.arange(older), newest[newest >= 0]])
            slots = slots[visible(lines[line : line + 1], keys.shape[2])[0, slots]]
            k, v = (x[place, :, slots].double().repeat_interleave(groups, 0) for x in (keys, values))
            weights = (query[line, :, None].double() @ k.mT * scaling).softmax(-1)
            out[line] = (weights @ v)[:, 0].to(out.dtype)
    return out


@pytest.fixture
def fixed_order(monkeypatch):
    """On a CPU: products and attention whose sums have one order."""
    for module in (fused_layer, model_ends, naive_gated_product):
        monkeypatch.setattr(module, "product", product_by_row)
    monkeypatch.setattr(attention.naive, "attend", attention_by_token)


@pytest.fixture
def llama() -> TreeTarget:
    model = copy.deepcopy(make_model("llama", torch.float32, max_position_embeddings=96))
    return TreeTarget(load_target(model))


def rounds_otherwise(function, when):
    """The function, its result changed in the last bits in some passes."""
    return lambda x, *args, **kwargs: function(x, *args, **kwargs) * (1 + 2e-7 if when(x) else 1)


@pytest.mark.skipif(BIG, reason="on a GPU the kernels decide, and other tests here try them")
class TestSameBitsOnACPU:
    def test_it_is_true_where_sums_have_one_order(self, llama, fixed_order):
        assert same_bits(llama)

    @pytest.mark.parametrize("kind", ["gpt-neox", "mixtral"])
    def test_it_is_false_for_a_model_that_is_not_fused(self, kind, fixed_order):
        assert not same_bits(TreeTarget(load_target(copy.deepcopy(make_model(kind, torch.float32)))))

    @pytest.mark.parametrize("rows", [64, 296], ids=["a tree", "a mixture"])
    def test_it_is_false_if_a_product_depends_on_the_number_of_rows(self, rows, llama, fixed_order, monkeypatch):
        wrong = rounds_otherwise(product_by_row, lambda x: len(x) == rows)
        monkeypatch.setattr(fused_layer, "product", wrong)
        assert not same_bits(llama)

    @pytest.mark.parametrize("other", [lambda runs: len(runs) > 1, lambda runs: len(runs) == 1 and runs[0, 1] < 9])
    def test_it_is_false_if_attention_depends_on_the_pass(self, other, llama, fixed_order, monkeypatch):
        def wrong(query, keys, values, lines, runs, scaling):
            return attention_by_token(query, keys, values, lines, runs, scaling) * (1 + 2e-7 if other(runs) else 1)

        monkeypatch.setattr(attention.naive, "attend", wrong)
        assert not same_bits(llama)
