"""Ask a running server with OpenAI's client: pip install openai; redrafter serve; python examples/openai_client.py

The address of another server: python examples/openai_client.py http://127.0.0.1:9000
"""

import sys

from openai import OpenAI

address = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{address}/v1", api_key="none")  # the key of --api-key, if the server has one
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Why is the sky blue?"}],
    max_tokens=64,
    temperature=0.8,
    seed=7,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        speculative = chunk.usage.model_dump()["speculative"]  # redrafter's own field
        print(f"\n\n{speculative['tokens_per_step']:.2f} tokens per pass of the model")
