"""The algorithm: pure tensor functions, batch first, no I/O, no host synchronisation.

Read `step.py` first, then `rules/`. Axes: B rows, W beam width, L beam length, N nodes, S cache slots, H hidden,
V vocabulary, K KV heads, D head size, C context.
"""
