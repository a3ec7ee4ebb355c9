"""Write JSON that follows a schema: pip install llguidance; python examples/structured.py [MODEL]

Tokens that the schema forces (keys, quotes, brackets) cost no guess and no pass of their own.
"""

import json
import sys

import redrafter

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "job": {"enum": ["baker", "pilot", "teacher"]},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
    },
    "required": ["name", "job", "age"],
    "additionalProperties": False,
}

model = sys.argv[1] if len(sys.argv) > 1 else None  # None: the default model
with redrafter.load(model) as engine:
    person = engine.generate("Invent a person. ", grammar=PERSON, temperature=0.7, seed=1, max_new_tokens=80)
    print(json.loads(person.text))
    answer = engine.generate("Is water wet? ", grammar=redrafter.Grammar.choices(["yes", "no"]), max_new_tokens=8)
    print(answer.text)
    print(f"{person.stats.tokens_per_step:.2f} tokens per pass of the model")
