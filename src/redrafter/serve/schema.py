"""What clients may ask, field by field: OpenAI's names, and a few of our own, marked so."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_CHOICES, MOST_STOPS, MOST_LOGPROBS = 16, 16, 20
SEED = 2**63

Text = Annotated[str, Field(min_length=1)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class Strict(BaseModel):
    """Unknown fields are refused by name: silently ignoring one would answer another question than the one asked."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, content: Any) -> Any:
        return {k: v for k, v in content.items() if v is not None} if isinstance(content, dict) else content


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(p.text for p in self.content)


class StreamOptions(Strict):
    include_usage: bool = False


class Asked(Strict):
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
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions = Field(default_factory=StreamOptions)
    user: str | None = Field(None, description="taken and not used")
    metadata: dict[str, str] | None = Field(None, description="taken and not used")
    store: bool | None = Field(None, description="taken and not used: nothing is kept")
    speculative: bool = Field(True, description="ours: false decodes this answer plainly")
    reuse: bool = Field(True, description="ours: false reads the whole prompt, whoever has read its beginning before")
    ignore_eos: bool = Field(False, description="ours: write on past the model's own end")
    trace: bool = Field(False, description="ours: while streaming, tell who wrote each token, and each step's tree")

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "Asked":
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ValueError("stream_options is only for stream=true")
        return self


class ChatAsked(Asked):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> "ChatAsked":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only for logprobs=true")
        return self

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many other tokens to tell with each, None to tell no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionAsked(Asked):
    prompt: str | Ids | Annotated[list[str | Ids], Field(min_length=1, max_length=MOST_CHOICES)]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @property
    def most(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[Any]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class Failure(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Failed(BaseModel):
    """OpenAI's form of an error."""

    error: Failure
