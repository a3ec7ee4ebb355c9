"""What a start imports: transformers' own model class for `from redrafter import Engine`, and little more."""

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


READ = """
import sys
from redrafter.drafters import checkpoint, shipped
for config in shipped.FOLDER.glob("*/config.json"):
    checkpoint.read(config.parent)
    print(*{"sympy", "torch._dynamo", "transformers"} & set(sys.modules), "read")
"""


def test_reading_a_drafter_imports_no_compiler():
    """torch's meta device imports SymPy and torch._dynamo, which took half of the time to the first token."""
    done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["read"]
