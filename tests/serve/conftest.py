"""A running server and the official client; each test file makes its own `served`."""

from collections.abc import Iterator

import openai
import pytest

from redrafter.serve.model import Served
from tests.helpers.serving import running


@pytest.fixture(scope="module")
def url(served: Served) -> Iterator[str]:
    with running(served) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made
