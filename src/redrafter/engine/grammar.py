"""Texts that follow a grammar: JSON schemas, regular expressions, Lark grammars, choices, by the library `llguidance`.

The mask of allowed tokens belongs to the filters of each tree node and follows the node's own path, in plain decoding
as in a tree. So texts with a grammar are the same with and without a drafter.
"""

import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redrafter.config import Grammar
from redrafter.core.sampling import Processor
from redrafter.core.tree import Tree
from redrafter.engine.processors import DeadEnds, dead_nodes
from redrafter.errors import ConfigError
from redrafter.runtime.guide import DEEPEST, Branches, by_depth, forbidden
from redrafter.targets import Target

ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written: as Python's `json.dumps` does. Free white space lets a small model write blanks for ever."""
LIMITS = {"initial_lexer_fuel": 200_000, "max_grammar_size": 8_000}
"""What a grammar may cost to compile, in llguidance's units: well below a second."""
SLOW = 0.25
"""CPU seconds that a row's grammar may take for the guesses of one step; a row with a slower grammar guesses less."""
ALLOWANCE, PER_TOKEN = 2.0, 0.01
"""CPU seconds that a text's grammar may take, and more for each token. A slower grammar would hold up all other rows.

Guesses do not count, so a text with guesses fails only where plain decoding fails.
"""
MULTIPLES = 10_000
"""Largest least common multiple of all `multipleOf` in a grammar, without its trailing zeros.

llguidance makes a state for each remainder, outside its own limits: 999983 takes ten seconds and 370 MB.
"""
PROBE = 'a {"b": 1}'
"""llguidance must read the same characters from this text's tokens as the tokenizer does."""
KEPT = 64
"""Compiled grammars that are kept for the next request with the same one."""


class Grammars:
    """Compiles grammars for one target. The first grammar also reads the tokenizer, which takes about a second."""

    def __init__(self, target: Target, eos: Sequence[int]) -> None:
        self.target, self.eos = target, tuple(eos)
        self.lock = threading.Lock()
        self.compiling = threading.Lock()  # one compilation at a time: many would slow down every step
        self.tokenizer: Any = None
        self.kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    def compiled(self, grammar: Grammar) -> "CompiledGrammar":
        """Raises ConfigError for a grammar that is wrong, too large, or that no text satisfies."""
        with self.lock:
            if self.tokenizer is None:
                self.tokenizer = self._read_tokenizer()
            found = self.kept.pop(grammar, None)
        if found is None:
            with self.compiling:
                found = CompiledGrammar(make_matcher(self.tokenizer, grammar), self.target.vocab_size, self.eos)
        with self.lock:
            self.kept[grammar] = found
            while len(self.kept) > KEPT:
                self.kept.popitem(last=False)
        return found

    def _read_tokenizer(self) -> Any:
        if self.target.tokenizer is None:
            raise ConfigError(f"a grammar needs a tokenizer, and {self.target.name} came without one")
        if not self.eos:
            raise ConfigError(f"a grammar needs a token that ends the text, and {self.target.name} names none")
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError as error:
            raise ConfigError("a grammar needs the package llguidance: pip install llguidance") from error
        refused = f"the tokenizer of {self.target.name} cannot be used with a grammar"
        try:
            described = tokenizer_json(self.target.tokenizer)
            made = LLTokenizer(described, n_vocab=self.target.vocab_size, eos_token=list(self.eos))
        except Exception as error:  # a tokenizer that is slow, or of a kind that llguidance does not know
            raise ConfigError(f"{refused}: {error}") from error
        probe = self.target.tokenizer.encode(PROBE, add_special_tokens=False)
        read = made.decode_bytes(probe).strip()
        if self.target.tokenizer.decode(probe).strip() == PROBE and read != PROBE.encode():
            raise ConfigError(f"{refused}: llguidance reads {read!r} from the tokens of {PROBE!r}")
        return made


def tokenizer_json(tokenizer: Any) -> str:
    """A fast tokenizer in the form that llguidance reads."""
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    made = json.loads(backend.to_str())
    # transformers 5.17 gives a byte-level tokenizer of a GGUF file several decoders, the byte-level one last.
    # llguidance goes by the others and reads the names of tokens as their text.
    several = (made["decoder"] or {}).get("decoders", [])
    made["decoder"] = next((d for d in several if d["type"] == "ByteLevel"), made["decoder"])
    return json.dumps(made)


def make_matcher(tokenizer: Any, grammar: Grammar) -> Any:
    """An `LLMatcher` before its first token, tried once so that what cannot work is refused here."""
    from llguidance import LLMatcher, LLParserLimits, grammar_from

    check_multiples(grammar.text)
    try:
        if grammar.kind == "json_schema":
            text = LLMatcher.grammar_from_json_schema(grammar.text, defaults=ONE_LINE)
        else:
            text = grammar_from(grammar.kind, grammar.text)
    except ValueError as error:
        raise ConfigError(f"the grammar is not valid: {first_line(str(error))}") from None
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))
    trial = matcher.deep_copy()
    for _ in range(2):  # some grammars fail at the first token
        if trial.is_error() or trial.is_stopped():
            break
        bits = np.unpackbits(np.frombuffer(trial.compute_bitmask(), dtype=np.uint8), bitorder="little")
        trial.consume_tokens(bits.nonzero()[0][:1].tolist())
    if trial.is_error():
        raise ConfigError(f"the grammar is not valid or too large: {first_line(trial.get_error())}")
    return matcher


NUMBERED = re.compile(r'("(?:[^"\\]|\\.)*")\s*:\s*-?([\d.]+)(?:[eE]([-+]?\d+))?')
"""A key and its number in JSON, which may stand inside a Lark grammar."""


def check_multiples(text: str) -> None:
    """Raise ConfigError if the `multipleOf` of a grammar would take too long to compile.

    >>> check_multiples('{"multipleOf": 250, "title": "x"} {"multipleOf": 0.01}')
    """
    least = 1
    for key, digits, exponent in NUMBERED.findall(text):
        if unescaped(key) != "multipleOf":
            continue
        coefficient = digits.replace(".", "").strip("0")
        if len(coefficient) <= len(str(MULTIPLES)):
            least = math.lcm(least, int(coefficient or "1"))
        if len(coefficient) > len(str(MULTIPLES)) or least > MULTIPLES:
            shown = digits[:20] + (f"e{exponent[:9]}" if exponent else "")
            raise ConfigError(
                f"multipleOf {shown} takes too long to compile: the least common multiple of all multipleOf must be at "
                f"most {MULTIPLES} without its trailing zeros"
            )


def unescaped(key: str) -> str:
    try:
        return str(json.loads(key))
    except ValueError:
        return key


def first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "no reason given")[:200]


class CompiledGrammar:
    """A `runtime.guide.Constraint`."""

    def __init__(self, matcher: Any, vocab_size: int, eos: Sequence[int]) -> None:
        self.matcher, self.vocab_size, self.eos = matcher, vocab_size, frozenset(eos)

    def guide(self, ids: Callable[[], list[int]], before: Processor | None = None) -> "GrammarGuide":
        return GrammarGuide(self.matcher, self.vocab_size, self.eos, ids, before)


class GrammarGuide:
    """A `runtime.guide.Guide`: one row's place in its grammar.

    The matcher stands after the last decided token between two calls. A call walks the tree depth first, consumes a
    token on the way down and rolls back on the way up.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        eos: frozenset[int],
        ids: Callable[[], list[int]],
        before: Processor | None,
    ) -> None:
        self.start, self.vocab_size, self.eos, self.ids, self.before = matcher, vocab_size, eos, ids, before
        self.matcher = matcher.deep_copy()
        self.prompt = self.known = len(ids())  # the grammar begins after the prompt
        self.spent = 0.0  # CPU seconds for decided tokens
        self.cost = 0.0  # CPU seconds for the root of the last call: what a guess may cost
        self.guessed: Branches | None = None  # the tree that is being verified, if it went through `guess`
        self.dead_ends = DeadEnds(ids)

    def guess(self, tree: Branches, room: int) -> Branches:
        """Drop guesses that the grammar forbids, and plant the tokens that it forces.

        Tokens that the text must continue with are accepted in any case. Below a guess, forced tokens take the places
        of guesses that were dropped, since each node costs time.
        """
        self._follow()
        most = int(SLOW / max(self.cost, 1e-6))  # guesses that are not too slow
        below = children(tree.parents)
        tokens, parents, forced = [tree.tokens[0]], [0], [False]
        drafted, sure = len(tree.tokens) - 1, 0

        def grow(place: int, guesses: list[int], depth: int, certain: bool) -> None:
            nonlocal sure
            if self.matcher.is_stopped():  # the end of the text comes next, and needs no guess
                return
            wanted: dict[int, list[int] | None] = {tree.tokens[node]: below[node] for node in guesses}
            only = self.matcher.compute_ff_tokens() if depth < DEEPEST else []
            if only:
                wanted = {only[0]: wanted.get(only[0])}
            certain = certain and bool(only)
            for token, further in wanted.items():
                full = sure >= room if certain else len(tokens) - 1 - sure >= drafted
                if token in self.eos or len(tokens) > most or (further is None and full):
                    continue
                if self.matcher.try_consume_tokens([token]):
                    tokens.append(token)
                    parents.append(place)
                    forced.append(further is None)
                    sure += certain
                    grow(len(tokens) - 1, further or [], depth + 1, certain)
                    self.matcher.rollback(1)

        grow(0, below[0], 0, certain=True)
        if self.matcher.is_error():  # by a guess: plain decoding may go on
            self.matcher, self.known = self.start.deep_copy(), self.prompt
            self._follow()
            tokens, parents, forced = tokens[:1], parents[:1], forced[:1]
        # Below a planted node all nodes are planted, so cutting the last ones first leaves no node without its parent.
        planted = [node for node, by_grammar in enumerate(forced) if by_grammar]
        excess = max(0, len(tokens) - 1 - room)
        self.guessed = by_depth(without(Branches(tokens, parents), cut=set(planted[len(planted) - excess :])))
        return self.guessed

    def __call__(self, logits: Tensor, tree: Tree) -> Tensor:
        """(1, N+1, V) logits -> the same tensor, -inf for tokens that may not follow a node's path."""
        if self.before is not None:
            logits = self.before(logits, tree)
        words = np.full((logits.shape[1], -(-self.vocab_size // 32)), -1, dtype=np.int32)
        branches = self.guessed or read(tree)
        self.mask(branches, words)
        logits.masked_fill_(unpacked(words, logits.shape[2], logits.device), -torch.inf)
        if self.before is not None:
            self._note(dead_nodes(logits[:, : len(branches.tokens)]), branches)
        return logits

    def check(self) -> None:
        self.dead_ends.check()
        self._follow()

    def _note(self, nodes: list[int], tree: Branches) -> None:
        """Remember where processor and grammar together leave no token; the token chosen there may be allowed."""
        self.dead_ends.begin()
        for node in nodes:
            path, at = [], node
            while at:
                path.append(tree.tokens[at])
                at = tree.parents[at]
            self.dead_ends.add(path[::-1], "the grammar and a logits processor leave no token to choose")

    def mask(self, tree: Branches, words: NDArray[np.int32]) -> None:
        """Write into `words` (N+1, V/32) which tokens may follow each node; nodes that the grammar forbids are left."""
        self._follow()
        self.guessed = None
        tokens, below = tree.tokens, children(tree.parents)

        def look(node: int) -> None:
            began, row = time.thread_time(), words[node]
            self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if node == 0:
                self.cost = time.thread_time() - began
                self._spend(self.cost)
            for child in below[node]:
                token = tokens[child]
                if token not in self.eos and self.matcher.try_consume_tokens([token]):
                    look(child)
                    self.matcher.rollback(1)

        look(0)
        self._check()

    def _follow(self) -> None:
        """Take in what was decided since the last call."""
        ids, began = self.ids(), time.thread_time()
        new, self.known = ids[self.known :], len(ids)
        if new:
            ends = new[-1] in self.eos  # a matcher that has stopped takes no token, not even this one
            inner = new[:-1] if ends else new
            taken = self.matcher.try_consume_tokens(inner)
            self._check()
            if taken < len(inner) or (ends and not self.matcher.is_accepting()):
                at = self.known - self.prompt - len(new) + taken + 1
                cause = "logit_bias" if self.before is None else "logit_bias or a logits processor"
                raise ConfigError(f"the grammar and {cause} leave no token to choose at token {at} of the text")
            self._spend(time.thread_time() - began)

    def _check(self) -> None:
        """Raise if the matcher failed, since it then allows everything."""
        if self.matcher.is_error():
            raise ConfigError(f"the grammar became too complex for this text: {first_line(self.matcher.get_error())}")

    def _spend(self, seconds: float) -> None:
        """Raise if the decided tokens took too long."""
        self.spent += seconds
        tokens = self.known - self.prompt
        if self.spent > ALLOWANCE + PER_TOKEN * tokens:
            raise ConfigError(
                f"the grammar is too complex: {tokens} tokens of it took {self.spent:.1f} s; make it smaller"
            )


def read(tree: Tree) -> Branches:
    """A single row's tree, from its device; a root alone is not read, since a GPU would be waited for."""
    if tree.tokens.shape[1] == 1:
        return Branches([0], [0])
    count = int(tree.valid.sum())
    return Branches(tree.tokens[0, :count].tolist(), tree.parents[0, :count].tolist())


def children(parents: Sequence[int]) -> list[list[int]]:
    """Parent indices (the root is its own parent) -> each node's children.

    >>> children([0, 0, 0, 1])
    [[1, 2], [3], [], []]
    """
    below: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        below[parent].append(node)
    return below


def without(tree: Branches, cut: set[int]) -> Branches:
    """The tree without these nodes, none of which is the root or has a child that stays.

    >>> without(Branches([7, 8, 9, 5], [0, 0, 1, 0]), {2})
    Branches(tokens=[7, 8, 5], parents=[0, 0, 0])
    """
    kept = [node for node in range(len(tree.tokens)) if node not in cut]
    place = {node: at for at, node in enumerate(kept)}
    return Branches([tree.tokens[node] for node in kept], [place[tree.parents[node]] for node in kept])


def unpacked(words: NDArray[np.int32], vocab_size: int, device: torch.device) -> Tensor:
    """(n, V/32) bits of allowed tokens, the lowest first -> (n, V) bool, true for all others."""
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(words.view(np.uint8), axis=1, count=vocab_size, bitorder="little") == 0)
    return forbidden(torch.from_numpy(words).to(device), vocab_size)  # bits: eight times fewer bytes to copy
