"""The judge: contenders on the same target, prompts and machine, taking turns, with equality checked."""
