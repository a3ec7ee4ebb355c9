"""Make transformers' own `generate` faster: python examples/transformers_generate.py MODEL

MODEL is a Hugging Face id or a folder. The drafter copies from the text itself, so nothing has to be trained.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import redrafter

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)

inputs = tokenizer("a list of letters: a b c d e f a b c d e f a b c", return_tensors="pt")
options = {"max_new_tokens": 32, "do_sample": False}
plain = model.generate(**inputs, **options)
fast = model.generate(**inputs, **options, custom_generate=redrafter.custom_generate, drafter="ngram")
print(tokenizer.decode(fast[0], skip_special_tokens=True))
print("the same text as without redrafter:", torch.equal(plain, fast))
