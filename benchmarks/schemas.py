"""Generated JSON schemas: nested objects, enums, patterns, ranges, arrays, alternatives and references."""

import random
from typing import Any

Schema = dict[str, Any]
WORDS = (
    "name", "title", "city", "country", "status", "kind", "owner", "label", "price", "count", "rating", "year", "email",
    "phone", "colour", "size", "weight", "notes", "address", "author", "language", "priority", "category", "date",
)  # fmt: skip
CHOICES = ("red", "green", "blue", "small", "large", "open", "closed", "north", "south", "low", "high", "yes", "no")
PATTERNS = (
    r"^[A-Z]{3}-[0-9]{4}$",
    r"^[a-z]+@[a-z]+\.com$",
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$",
    r"^(\+[0-9]{2} )?[0-9]{6,9}$",
)
THINGS = ("a person", "a book", "a film", "a shop", "a trip", "a recipe", "an order", "a device", "a song", "a house")


def leaf(chance: random.Random) -> Schema:
    match chance.randrange(8):
        case 0:
            return {"enum": chance.sample(CHOICES, chance.randint(2, 5))}
        case 1:
            return {"type": "string", "pattern": chance.choice(PATTERNS)}
        case 2:
            return {"type": "integer", "minimum": 0, "maximum": chance.choice((9, 99, 2030))}
        case 3:
            return {"type": "boolean"}
        case 4:
            return {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 12}]}
        case 5:
            return {"type": "number", "minimum": 0, "maximum": 100}
        case 6:
            return {"const": chance.choice(CHOICES)}
        case _:
            return {"type": "string", "minLength": 1, "maxLength": chance.choice((8, 16, 24))}


def value(chance: random.Random, depth: int, shared: list[str]) -> Schema:
    """A leaf, an array, an object or a reference to one of the shared definitions."""
    draw = chance.random()
    if depth and draw < 0.2:
        return {"type": "array", "items": value(chance, depth - 1, shared), "minItems": 1, "maxItems": 3}
    if depth and draw < 0.4:
        return fields(chance, depth - 1, shared)
    if shared and draw < 0.55:
        return {"$ref": f"#/$defs/{chance.choice(shared)}"}
    return leaf(chance)


def fields(chance: random.Random, depth: int, shared: list[str]) -> Schema:
    """An object with two to four fields, most of them required."""
    names = chance.sample(WORDS, chance.randint(2, 4))
    return {
        "type": "object",
        "properties": {name: value(chance, depth, shared) for name in names},
        "required": [name for name in names if chance.random() < 0.8],
        "additionalProperties": False,
    }


def make_schema(index: int) -> tuple[str, Schema]:
    """A question and the schema of its answer; the same each time."""
    chance = random.Random(index)
    shared = ["first", "second"][: chance.randrange(3)]
    schema = fields(chance, 2, shared)
    if shared:
        schema["$defs"] = {name: fields(chance, 0, []) for name in shared}
    return f"Invent {chance.choice(THINGS)}. Answer in JSON.", schema
