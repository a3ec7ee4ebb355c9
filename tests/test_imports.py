"""What `from redrafter import Engine` costs: transformers' own model class, and little more."""

import subprocess
import sys

PROGRAM = """
import gc, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
needed = set(sys.modules)
import redrafter
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
redrafter.Engine
assert gc.isenabled()
assert collections.count("start") <= 1, collections  # one is due as soon as the import has ended
print(*sorted({name.split(".")[0] for name in set(sys.modules) - needed}))
"""


def test_the_engine_imports_no_package_that_transformers_does_not():
    """Every package more would make each start slower."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["redrafter"]
