"""Answers of `/v1/responses`: a chat's answer as items, whole or as a stream of events."""

import json
import secrets
from typing import Any

from redrafter.serve.answer import Content
from redrafter.serve.chat import ChatAnswer
from redrafter.serve.job import Event, Job
from redrafter.serve.model import Served
from redrafter.serve.responses_schema import ResponsesAsked
from redrafter.serve.schema import ChatAsked
from redrafter.serve.tool_calls import Call, Pieces


class ResponsesAnswer(ChatAnswer):
    """One answer. `items` are the words and the calls in the order in which they came."""

    prefix, ending = "resp", ""

    def __init__(self, asked: ResponsesAsked, chat: ChatAsked, jobs: list[Job], served: Served) -> None:
        super().__init__(jobs, served.name, served.text_of, [served.chat.parser(chat)])
        self.asked = asked
        self.items: list[Content] = []
        self.events: list[Content] = []  # what the last event of the scheduler brought
        self.number = 0
        self.blank = ""  # white space that may be followed by a call

    def take(self, index: int, event: Event) -> None:
        super().take(index, event)
        self.events = self._grow(self.fresh[index])
        if not self.open:
            self.events += self._end_item() if self.items else self._speak("", begin=True) + self._end_item()

    def opening(self) -> list[Content]:
        begun = self._response("in_progress")
        return [self._event("response.created", response=begun), self._event("response.in_progress", response=begun)]

    def chunks(self, index: int, event: Event) -> list[Content]:
        return self.events

    def closing(self, usage: bool) -> list[Content]:
        done = self.whole()
        return [self._event(f"response.{done['status']}", response=done)]

    def sent(self, content: Content) -> str:
        if "error" in content and "type" not in content:
            told = content["error"]
            content = self._event("error", code=told["code"], message=told["message"], param=told["param"])
        return f"event: {content['type']}\ndata: {json.dumps(content, ensure_ascii=False)}\n\n"

    def whole(self) -> Content:
        return self._response("incomplete" if self.reasons[0] == "length" else "completed")

    def _response(self, status: str) -> Content:
        asked = self.asked.model_dump(mode="json", exclude_none=True, by_alias=True)
        counts = self.usage() if status != "in_progress" else None
        usage = counts and {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts["prompt_tokens_details"],
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
            "speculative": counts["speculative"],
        }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.head["created"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self.asked.instructions,
            "max_output_tokens": self.asked.max_output_tokens,
            "model": self.head["model"],
            "output": list(self.items),
            "parallel_tool_calls": self.asked.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": self.asked.temperature,
            "text": asked.get("text", {"format": {"type": "text"}}),
            "tool_choice": asked["tool_choice"],
            "tools": asked["tools"],
            "top_p": self.asked.top_p,
            "truncation": "disabled",
            "usage": usage,
            "metadata": self.asked.metadata or {},
        }

    def _event(self, kind: str, **fields: Any) -> Content:
        self.number += 1
        return {"type": kind, "sequence_number": self.number - 1, **fields}

    def _grow(self, fresh: Pieces) -> list[Content]:
        """The events of new words and new pieces of calls."""
        events = []
        for piece in fresh:
            events += self._call(piece) if isinstance(piece, Call) else self._words(piece)
        return events

    def _words(self, words: str) -> list[Content]:
        words, self.blank = self.blank + words, ""
        speaking = bool(self.items) and self.items[-1]["status"] == "in_progress" and "content" in self.items[-1]
        if words.strip() or speaking:
            return self._speak(words, begin=not speaking)
        self.blank = words
        return []

    def _call(self, call: Call) -> list[Content]:
        events = []
        if call.name is not None:
            self.blank = ""
            identity = f"fc_{secrets.token_hex(12)}"
            item = {"type": "function_call", "id": identity, "call_id": call.id, "name": call.name}
            events += self._end_item() + self._begin_item(item | {"arguments": "", "status": "in_progress"})
        if call.arguments:
            self.items[-1]["arguments"] += call.arguments
            events.append(self._event("response.function_call_arguments.delta", **self._where(), delta=call.arguments))
        return events

    def _speak(self, words: str, begin: bool) -> list[Content]:
        events = []
        if begin:
            identity = f"msg_{secrets.token_hex(12)}"
            item = {"type": "message", "id": identity, "status": "in_progress", "role": "assistant", "content": []}
            events += self._end_item() + self._begin_item(item)
            part: Content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self.items[-1]["content"].append(part)
            events.append(self._event("response.content_part.added", **self._where(), content_index=0, part=dict(part)))
        self.items[-1]["content"][0]["text"] += words
        if words:
            where = self._where() | {"content_index": 0}
            events.append(self._event("response.output_text.delta", **where, delta=words, logprobs=[]))
        return events

    def _where(self) -> Content:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _begin_item(self, item: Content) -> list[Content]:
        self.items.append(item)
        told = json.loads(json.dumps(item))
        return [self._event("response.output_item.added", output_index=len(self.items) - 1, item=told)]

    def _end_item(self) -> list[Content]:
        """The events that end the item that is being written, if there is one."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return []
        item, where = self.items[-1], self._where()
        cut = not self.open and self.reasons[0] == "length"
        item["status"] = "incomplete" if cut else "completed"
        if item["type"] == "message":
            part, where = item["content"][0], where | {"content_index": 0}
            events = [
                self._event("response.output_text.done", **where, text=part["text"], logprobs=[]),
                self._event("response.content_part.done", **where, part=dict(part)),
            ]
        else:
            given = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._event("response.function_call_arguments.done", **where, **given)]
        return [*events, self._event("response.output_item.done", output_index=len(self.items) - 1, item=item)]
