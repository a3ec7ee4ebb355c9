"""What clients may ask, field by field: OpenAI's names, and a few of our own, marked so."""

from typing import Annotated, Any

from pydantic import BaseModel, Field, model_validator

from redrafter.serve.messages import Many, Message, Strict
from redrafter.serve.neutral import NEUTRAL, not_supported, without_neutral
from redrafter.serve.structured import Structured
from redrafter.serve.tools import MOST_TOOLS, NamedTool, Tool, ToolChoice

MOST_CHOICES, MOST_PROMPTS, MOST_STOPS, MOST_LOGPROBS = 16, 16, 16, 20
SEED = 2**63
MOST_TOKENS = 2**20
MOST_TEXT = 2**18
"""Characters that `/tokenize` takes: a tokenizer reads one text at a time, and requests wait meanwhile."""

LONGEST_STOP = 1024
"""Characters of a stop string: each new token's text is compared with its beginnings."""

Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Ids = Annotated[Many[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = Field(default=False, description="taken and not used: nothing is obfuscated")


class Asked(Structured):
    """What chat and completions have in common."""

    model: str
    n: int = Field(1, ge=1, le=MOST_CHOICES, description="answers to each prompt; each is a row of its own")
    seed: int | None = Field(
        None,
        ge=-SEED,
        le=SEED - 1,
        description="same seed, same text, alone or under load; except at ties unless exactness is bitwise",
    )
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, le=2**31 - 1, description="ours: keep the k most probable tokens (0: all)")
    min_p: float = Field(0.0, ge=0, le=1, description="ours: keep tokens at least this probable, relative to the best")
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10, description="ours: as transformers has it")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    user: str | None = Field(None, description="taken and not used")
    metadata: dict[str, str] | None = Field(None, description="taken and not used")
    store: bool | None = Field(None, description="false: `redrafter serve --remember-answers` leaves this answer out")
    safety_identifier: str | None = Field(None, description="taken and not used")
    prompt_cache_key: str | None = Field(None, description="taken and not used: prefixes are found by their tokens")
    request_id: str | None = Field(None, description="taken and not used: send the header X-Request-Id")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MOST_LOGPROBS, description="vLLM's: log-probabilities of the prompt's tokens"
    )
    speculative: bool = Field(True, description="ours: false decodes this answer plainly")
    reuse: bool = Field(True, description="ours: false reads the whole prompt, whoever has read its beginning before")
    ignore_eos: bool = Field(False, description="ours: write on past the model's own end")
    trace: bool = Field(False, description="ours: while streaming, tell who wrote each token, and each step's tree")

    @model_validator(mode="before")
    @classmethod
    def _defaults_ask_for_nothing(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        given = {k: v for k, v in content.items() if v is not None}
        return without_neutral(given, {k: v for k, v in NEUTRAL.items() if k not in cls.model_fields})

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "Asked":
        if "stream_options" in self.model_fields_set and not self.stream:
            raise not_supported("stream_options", "stream_options is only for stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise not_supported("prompt_logprobs", "prompt_logprobs is only for stream=false")
        return self


class ChatAsked(Asked):
    messages: Many[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    add_generation_prompt: bool = Field(True, description="vLLM's: begin an assistant's turn after the messages")
    continue_final_message: bool = Field(False, description="vLLM's: continue the last message, an assistant's")
    tools: list[Tool] = Field(default_factory=list, max_length=MOST_TOOLS)
    tool_choice: ToolChoice = Field("auto", description="none, auto, required, or a named tool")
    parallel_tool_calls: bool = Field(True, description="false: at most one call")

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatAsked":
        if self.top_logprobs and not self.logprobs:
            raise not_supported("top_logprobs", "top_logprobs is only for logprobs=true")
        self._check_tools()
        if self.continue_final_message:
            if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
                raise not_supported(
                    "continue_final_message", "continue_final_message needs add_generation_prompt=false"
                )
            if self.messages[-1].role != "assistant":
                raise not_supported(
                    "continue_final_message", "continue_final_message needs a last message of the role 'assistant'"
                )
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise not_supported("tools", "two tools have the same name")
        if isinstance(self.tool_choice, NamedTool):
            wanted = self.tool_choice.function.name
            if wanted not in names:
                raise not_supported("tool_choice", f"tool_choice names {wanted[:64]!r}, which is not among the tools")
        elif self.tool_choice == "required" and not names:
            raise not_supported("tool_choice", "tool_choice 'required' needs tools")
        if self.offered and self.response_format is not None and self.response_format.type != "text":
            raise not_supported(
                "response_format", "response_format leaves no room for calls: send tools or a format, not both"
            )
        if self.must_call and self._asked():
            raise not_supported("tool_choice", "an answer that must call a tool cannot have another format too")

    @property
    def compiles(self) -> bool:
        return bool(self.must_call) or super().compiles

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> list[Tool]:
        """The tools of which one must be called; none if the model is free."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return self.tools if self.tool_choice == "required" else []

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def written(self) -> int:
        """Answers to write for each prompt."""
        return self.n

    @property
    def alternatives(self) -> int | None:
        """How many other tokens to tell with each, None to tell no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompt_alternatives(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs


class CompletionAsked(Asked):
    prompt: str | Ids | Annotated[list[str | Ids], Field(min_length=1, max_length=MOST_PROMPTS)]
    max_tokens: int = Field(16, ge=0, description="0 is only for echo=true: nothing is written")
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = Field(False, description="give the prompt back before the text, with its log-probabilities if asked")
    best_of: int | None = Field(
        None, ge=1, le=MOST_CHOICES, description="write so many answers, give the n most probable per token"
    )

    @model_validator(mode="before")
    @classmethod
    def _not_too_many_prompts(cls, content: Any) -> Any:
        prompt = content.get("prompt") if isinstance(content, dict) else None
        if isinstance(prompt, list) and len(prompt) > MOST_PROMPTS and not isinstance(prompt[0], int):
            raise not_supported("prompt", f"prompt is a list of {len(prompt)}, at most {MOST_PROMPTS} fit a request")
        return content

    @model_validator(mode="after")
    def _fits_together(self) -> "CompletionAsked":
        if not self.max_tokens and not self.echo:
            raise not_supported("max_tokens", "max_tokens must be at least 1 without echo=true")
        if self.best_of is not None and self.best_of < self.n:
            raise not_supported("best_of", f"best_of must be at least n, got {self.best_of} and {self.n}")
        if (self.best_of or self.n) > self.n and self.stream:
            raise not_supported("best_of", "best_of above n is only for stream=false: the best is known at the end")
        return self

    @property
    def most(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def written(self) -> int:
        """Answers to write for each prompt."""
        return self.best_of or self.n

    @property
    def prompt_alternatives(self) -> int | None:
        return self.logprobs if self.echo and self.logprobs is not None else self.prompt_logprobs

    @property
    def prompts(self) -> list[Any]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TokenizeAsked(Strict):
    """vLLM's `/tokenize`: a text, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    tools: list[Tool] = Field(default_factory=list, max_length=MOST_TOOLS)

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizeAsked":
        if (self.prompt is None) == (self.messages is None):
            raise not_supported("prompt", "give either prompt or messages")
        size = len(self.prompt or "") + sum(len(message.text) for message in self.messages or ())
        if size > MOST_TEXT:
            name = "prompt" if self.messages is None else "messages"
            raise not_supported(name, f"{name} has {size} characters and at most {MOST_TEXT} are taken: send less")
        return self

    @property
    def offered(self) -> list[Tool]:
        return self.tools


class DetokenizeAsked(Strict):
    model: str | None = None
    tokens: Annotated[Many[Annotated[int, Field(ge=0)]], Field(max_length=MOST_TOKENS)]


class Failure(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Failed(BaseModel):
    """OpenAI's form of an error."""

    error: Failure
