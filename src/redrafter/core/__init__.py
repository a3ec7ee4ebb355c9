"""The algorithm: pure tensor functions, batch first, no I/O, no host synchronisation.

Read `step.py` first. Axes: B rows, W beam width, L beam length, N nodes, S cache slots,
H hidden, V vocabulary, K kv heads, D head size.
"""
