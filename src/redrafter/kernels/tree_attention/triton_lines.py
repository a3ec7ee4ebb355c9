"""The columns of a pass's line (naive.py), as kernels read them."""

import triton.language as tl

from redrafter.kernels.tree_attention import naive

TOKEN = tl.constexpr(naive.TOKEN)
POSITION = tl.constexpr(naive.POSITION)
INDEX = tl.constexpr(naive.INDEX)
WINDOW = tl.constexpr(naive.WINDOW)
PLACE = tl.constexpr(naive.PLACE)
SLOT = tl.constexpr(naive.SLOT)
SLOTS = tl.constexpr(naive.SLOTS)
COLUMNS = tl.constexpr(naive.COLUMNS)
NEWEST = tl.constexpr(naive.NEWEST)
EVERYTHING = tl.constexpr(naive.EVERYTHING)
