"""Where the state of a row lies: one line of int32 words a slot, its block table at the end.

The last line belongs to no slot: rows that only pad a batch read it. It is dead and its table is zero, so that they
write to block 0, the scratch block.
"""

from __future__ import annotations

import triton.language as tl

PAGE = 64  # tokens a block

DEAD = tl.constexpr(0)  # nothing of the row counts any more
LAST = tl.constexpr(1)  # the token sampled last
TEMPERATURE = tl.constexpr(2)  # float32, 0 is greedy
LOG_MIN_P = tl.constexpr(3)  # float32, -inf is off
TOP_P = tl.constexpr(4)  # float32, 1 is off
TOP_K = tl.constexpr(5)  # 0 is off
SEED = tl.constexpr(6)  # two words, the lower half first
MIN_LEN = tl.constexpr(8)  # positions below it do not stop the row
WIDTH = tl.constexpr(9)  # of the table of logprobs, -1 is none
STOPS = tl.constexpr(10)  # how many stop ids follow
STOP_IDS = tl.constexpr(11)
MAX_STOPS = tl.constexpr(32)
REPETITION = tl.constexpr(43)  # float32, 1 is off
FREQUENCY = tl.constexpr(44)  # float32, 0 is off
PRESENCE = tl.constexpr(45)  # float32, 0 is off
SEEN = tl.constexpr(46)  # line of the table of seen tokens, -1 is none: no penalties
TABLE = tl.constexpr(48)  # the blocks; before it, one word is free

# How a row came out of a step; the numbers are those of `slotline.plan.Status`.
ROW_OK = tl.constexpr(0)
ROW_STOPPED = tl.constexpr(1)
ROW_NOT_FINITE = tl.constexpr(2)
ROW_DEAD = tl.constexpr(3)


def words(pages: int) -> int:
    """Return the length of a line with a table of so many pages, a multiple of 16 bytes."""
    return int(TABLE.value) + -(-pages // 4) * 4
