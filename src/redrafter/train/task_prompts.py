"""Prompts that set a task: on a text that the target wrote, in a conversation with the target, or of a given kind.

User turns that a model writes freely are mostly questions. Users also let a model summarise, translate, correct and
quote, and there the answer copies from the prompt. Every k-th task is one of three kinds:

- start: the user's turn begins with given words ("Write a Python function that"), and the target continues it;
- document: the target writes one to four articles, and a template asks for something about them;
- conversation: the target answers a user's turn of its own, and a second user's turn follows.
"""

from collections.abc import Callable, Sequence

from redrafter.core.noise import fold
from redrafter.targets import Target
from redrafter.train.self_prompts import Piece, SelfPrompts, UserTurn, user_turn

STARTS = (
    "Write a Python function that",
    "Solve this problem step by step:",
    "Translate into French:",
    "Write an email to",
    "What is the difference between",
    "Explain this code:\n\n```python\n",
    "Imagine you are",
    "List ten",
    "Write a short story about",
    "Correct the mistakes in this sentence:",
    "Answer yes or no and give your reasons:",
    "Extract the names and dates from this text:",
)
TASKS = (
    "Summarize the following text in a few sentences.\n\n{text}",
    "Correct the spelling and grammar of the following text and write the whole text again.\n\n{text}",
    "{text}\n\nWhat are the main points of the text above? Quote a sentence for each point.",
    "Translate the following text into Spanish.\n\n{text}",
    "Extract all names, numbers and technical terms from the following text, as a list.\n\n{text}",
    "Read the document and answer: what is it about, and why does it matter?\n\nDocument:\n{text}",
    "Rewrite the following text in simpler words. Keep its order.\n\n{text}",
    "Repeat the first paragraph of the following text word for word.\n\n{text}",
    "Here is a document:\n\n{text}\n\nWrite three questions about the document and answer each from the document.",
    "Turn the following text into a list of bullet points.\n\n{text}",
)
FOLLOW_UPS = (
    "",
    "Rewrite your answer in fewer words.",
    "Explain the first point in more detail.",
    "",
    "Translate your answer into German.",
    "Check your answer and write it again without mistakes.",
)
"""The second user's turn of a conversation; empty: the target writes the turn."""
ARTICLE = "Write a detailed article about"
ARTICLE_TOKENS = 384
MOST_ARTICLES = 4
TASKS_PER_DOCUMENT = 5

OPENING, ARTICLES, ANSWERS, FOLLOWING = range(-2, -6, -1)
"""Branches of the seed, beside those of free turns and answers (`self_prompts.TURNS`)."""


Answer = Callable[[Sequence[tuple[str, ...]], Sequence[int], int], list[str]]
"""Chats, seeds and a limit of tokens -> the target's answers, as text."""


class TaskPrompts:
    """Endless prompts of which `percent` % set a task and the rest are free user turns; the i-th is a function of i."""

    endless = True

    def __init__(self, free: SelfPrompts, answer: Answer, percent: int, seed: int) -> None:
        self.free, self.answer, self.percent = free, answer, percent
        self.seeds = {branch: fold(seed, branch) for branch in (OPENING, ARTICLES, ANSWERS, FOLLOWING)}
        self.target: Target = free.target
        self.starts = [user_turn(self.target, start=start) for start in STARTS]
        self.article = user_turn(self.target, start=ARTICLE)
        self.documents: dict[int, str] = {}

    def take(self, first: int, count: int) -> list[Piece]:
        pieces = range(first, first + count)
        wanted: dict[Callable[[list[int]], list[Piece]], list[tuple[int, int]]] = {}  # (piece, number within its kind)
        for i in pieces:
            write, number = self._kind(i)
            wanted.setdefault(write, []).append((i, number))
        made: dict[int, Piece] = {}
        for write, some in wanted.items():
            made |= zip([i for i, _ in some], write([n for _, n in some]), strict=True)
        return [made[i] for i in pieces]

    def _kind(self, i: int) -> tuple[Callable[[list[int]], list[Piece]], int]:
        """What writes piece i, and its number there. Tasks come in pairs: answers have two temperatures in turn."""
        before, after = (2 * (pair * self.percent // 100) for pair in (i // 2, i // 2 + 1))
        if before == after:
            return self._free, i - before
        task = before + i % 2
        return (self._started, self._on_documents, self._conversations)[task % 3], task // 3

    def _free(self, numbers: list[int]) -> list[Piece]:
        """Free turns, whose numbers are consecutive."""
        return self.free.take(numbers[0], len(numbers))

    def _turns(
        self, branch: int, numbers: Sequence[int], turns: Sequence[UserTurn]
    ) -> tuple[list[str], list[str | None]]:
        return self.free.turns([fold(self.seeds[branch], n) for n in numbers], turns)

    def _started(self, numbers: Sequence[int]) -> list[Piece]:
        which = [n % len(STARTS) for n in numbers]
        texts, reasons = self._turns(OPENING, [2 * n for n in numbers], [self.starts[k] for k in which])
        gaps = ["" if STARTS[k].endswith("\n") else " " for k in which]
        chats = [(STARTS[k] + gap + text,) for k, gap, text in zip(which, gaps, texts, strict=True)]
        return self.free.pieces(chats, reasons)

    def _on_documents(self, numbers: Sequence[int]) -> list[Piece]:
        wanted = dict.fromkeys(n // TASKS_PER_DOCUMENT for n in numbers)
        self.documents = {d: text for d, text in self.documents.items() if d in wanted}
        self._write_documents([d for d in wanted if d not in self.documents])
        texts = [self.documents[n // TASKS_PER_DOCUMENT] for n in numbers]
        chats = [(TASKS[n % len(TASKS)].format(text=text),) for n, text in zip(numbers, texts, strict=True)]
        return self.free.pieces(chats, [None if text else "no document" for text in texts])

    def _write_documents(self, numbers: Sequence[int]) -> None:
        """Document d is one to four articles; an article whose title is of no use is left out."""
        articles = [(d, MOST_ARTICLES * d + k) for d in numbers for k in range(1 + d % MOST_ARTICLES)]
        titles, reasons = self._turns(ARTICLES, [a for _, a in articles], [self.article] * len(articles))
        chats = [(f"{ARTICLE} {title}",) for title in titles]
        good = [j for j, why in enumerate(reasons) if why is None]
        seeds = [fold(self.seeds[ANSWERS], 2 * articles[j][1]) for j in good]
        parts: dict[int, list[str]] = {d: [] for d in numbers}
        for j, text in zip(good, self.answer([chats[j] for j in good], seeds, ARTICLE_TOKENS), strict=True):
            parts[articles[j][0]].append(text)
        self.documents |= {d: "\n\n".join(filter(None, some)) for d, some in parts.items()}

    def _conversations(self, numbers: Sequence[int]) -> list[Piece]:
        assert self.free.turn is not None
        texts, reasons = self._turns(OPENING, [2 * n + 1 for n in numbers], [self.free.turn] * len(numbers))
        good = [j for j, why in enumerate(reasons) if why is None]
        seeds = [fold(self.seeds[ANSWERS], 2 * numbers[j] + 1) for j in good]
        answers = self.answer([(texts[j],) for j in good], seeds, ARTICLE_TOKENS)
        chats: list[tuple[str, ...]] = [(text,) for text in texts]
        for j, text in zip(good, answers, strict=True):
            chats[j] = (texts[j], text)
        own = [j for j in good if not FOLLOW_UPS[numbers[j] % len(FOLLOW_UPS)]]
        second, why = self._turns(FOLLOWING, [numbers[j] for j in own], [user_turn(self.target, chats[j]) for j in own])
        said = dict(zip(own, second, strict=True))
        failed = dict(zip(own, why, strict=True))
        chats = [(*chat, said.get(j) or FOLLOW_UPS[numbers[j] % len(FOLLOW_UPS)]) for j, chat in enumerate(chats)]
        return self.free.pieces(chats, [failed.get(j) or first for j, first in enumerate(reasons)])
