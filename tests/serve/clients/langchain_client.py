"""LangChain against a server: `python langchain_client.py URL MODEL`, in the environment of `make test-clients`."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(pattern="^[A-Z][a-z]{1,6}$")
    age: int = Field(ge=0, le=99)


@tool
def weather(hour: int) -> str:
    """The weather at an hour."""
    return f"sunny at {hour}"


def main(url: str, model: str) -> None:
    for responses in (False, True):
        chat = ChatOpenAI(
            base_url=f"{url}/v1", api_key="x", model=model, temperature=0, max_tokens=150, use_responses_api=responses,
            max_retries=0,
        )  # fmt: skip
        said = chat.invoke("name").text
        assert "".join(chunk.text for chunk in chat.stream("name")) == said
        person = chat.with_structured_output(Person, method="json_schema").invoke("name")
        assert isinstance(person, Person)
        assert 0 <= person.age <= 99
    chat = ChatOpenAI(base_url=f"{url}/v1", api_key="x", model=model, temperature=0, max_tokens=200, max_retries=0)
    asked = HumanMessage("name")
    called = chat.bind_tools([weather], tool_choice="weather").invoke([asked])
    (call,) = called.tool_calls
    assert call["name"] == "weather"
    assert isinstance(call["args"]["hour"], int)
    told = chat.bind_tools([weather]).invoke([asked, called, ToolMessage("sunny", tool_call_id=call["id"])])
    assert told.response_metadata["finish_reason"] in ("stop", "length", "tool_calls")
    print("ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
