"""Use a drafter that another project has published: python examples/published_drafter.py MODEL DRAFTER

DRAFTER is a folder or a Hub id: EAGLE-3, DFlash, DSpark or JetSpec, trained for MODEL. With +ngram behind it, it may
copy from the text, too. `redrafter doctor --model MODEL --drafter DRAFTER` says how it is read.
"""

import sys

import redrafter

model, drafter = sys.argv[1:3]
with redrafter.load(model, drafter=drafter) as engine:
    done = engine.generate("Why is the sky blue?", max_new_tokens=48)
    plain = engine.plain().generate("Why is the sky blue?", max_new_tokens=48)
    print(done.text)
    print(f"{done.stats.tokens_per_step:.2f} tokens per pass of the model; {engine.drafter.name}")
    print("the same text as without a drafter:", done.tokens == plain.tokens)
