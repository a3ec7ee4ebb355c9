"""Chat messages and tools to token ids, by the model's chat template; and how its answers write tool calls."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from redrafter.config import Grammar, require
from redrafter.engine import Engine
from redrafter.engine.text import special_tokens
from redrafter.serve.messages import Message
from redrafter.serve.schema import ChatAsked
from redrafter.serve.tool_calls import FORMS, CallParser, FormName
from redrafter.serve.tools import Tool, call_grammar, described, explained, form_of

MARKERS = ("[ARGS]", "[CALL_ID]", *(m for form in FORMS.values() for m in (form.opens, form.closes) if m))

SHORT = 4096
"""Characters of messages and tools that are not worth a look before they become tokens."""


class ChatPrompts:
    """`form` is one of `FORMS`; None: what the chat template says."""

    def __init__(self, engine: Engine, form: str | None = None) -> None:
        require(form is None or form in FORMS, f"the tool parser must be one of {', '.join(FORMS)}, got {form!r}")
        self.engine = engine
        template = str(getattr(engine.target.tokenizer, "chat_template", None) or "")
        self.knows_tools = re.search(r"\btools\b", template) is not None
        own: FormName = form_of(template) if self.knows_tools else "json"
        self.form: FormName = own if form is None else form  # type: ignore[assignment]
        tokenizer = engine.target.tokenizer
        ids = {} if tokenizer is None else {m: tokenizer.convert_tokens_to_ids(m) for m in MARKERS}
        self.special = {marker: token for marker, token in ids.items() if token in special_tokens(tokenizer)}
        """Markers of calls that are special tokens."""

    def ids(
        self,
        messages: Sequence[Message],
        *,
        opens: bool = True,
        continues: bool = False,
        tools: Sequence[Tool] = (),
        check: Callable[[str], None] | None = None,
    ) -> list[int]:
        """`opens`: with the beginning of an assistant's turn; `continues`: without the end of the last message.

        check: sees a long text before it becomes tokens, and may raise.
        """
        options: dict[str, Any] = {
            "add_generation_prompt": opens and not continues,
            "continue_final_message": continues,
        }
        if self.knows_tools:
            options |= {"tools": described(tools)} if tools else {}
            given = [message.as_template() for message in messages]
        else:
            given = explained(messages, tools)
        if check is not None and len(json.dumps([given, options])) > SHORT:
            check(self.engine.target.tokenizer.apply_chat_template(given, tokenize=False, **options))
        return self.engine.encode(given, **options)

    def grammar(self, asked: ChatAsked) -> Grammar | None:
        """The grammar of an answer that must call a tool."""
        if not asked.must_call:
            return None
        return call_grammar(self.form, asked.must_call, asked.parallel_tool_calls, self.special)

    def parser(self, asked: ChatAsked) -> CallParser | None:
        """Finds the calls of one answer; None if no tool is offered."""
        if not asked.offered:
            return None
        names = {tool.function.name for tool in asked.offered}
        return CallParser(FORMS[self.form], names, None if asked.parallel_tool_calls else 1)
