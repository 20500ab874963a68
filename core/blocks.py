"""The block pool: KV pages as numbers, and which of them hold a reusable prefix.

A block is **free** (nothing in it), **active** (named by at least one table) or **cached**
(named by none, but its content is known and may be used again; the least recently used goes
first). A block whose last user is gone while a launched step still names it is *pending*: it
becomes cached or free when that step has completed. Block 0 is scratch and never handed out.

What identifies cached content is exact: the node number of the parent block, the block's own
tokens, the salt and the adapter, compared in full by the dictionary. A node number is never
used twice, so a child cannot outlive the content it followed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from slotline.plan import IntArray

ROOT = 0  # the parent of first blocks

NodeKey = tuple[int, bytes, str | None, int]


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks are in which state; pending ones count as active."""

    total: int
    free: int
    active: int
    cached: int


class BlockPool:
    """Hand out blocks, count their users, and find cached prefixes."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.reset()

    def reset(self) -> None:
        """Forget everything: all blocks free, nothing cached."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks - 1, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._refs = [0] * self.num_blocks
        self._index: dict[NodeKey, int] = {}
        self._key: dict[int, NodeKey] = {}
        self._node: dict[int, int] = {}
        self._holder: dict[int, int] = {}  # the block of each node
        self._next_node = ROOT + 1
        self._pending: deque[tuple[int, int]] = deque()
        self._pending_until: dict[int, int] = {}
        self._child_until: dict[int, int] = {}  # by node: the step that pending blocks behind it wait for
        self._completed = 0

    # --- queries ----------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Return the number of blocks that can be handed out."""
        return self.num_blocks - 1

    @property
    def available(self) -> int:
        """Return how many blocks can be allocated now."""
        return len(self._free) + len(self._cached)

    @property
    def pending(self) -> int:
        """Return how many blocks wait for a launched step."""
        return len(self._pending_until)

    def counts(self) -> BlockCounts:
        """Return the number of blocks in each state."""
        free, cached = len(self._free), len(self._cached)
        return BlockCounts(self.capacity, free, self.capacity - free - cached, cached)

    def refs(self, block: int) -> int:
        """Return how many tables name the block."""
        return self._refs[block]

    def node(self, block: int) -> int | None:
        """Return the node number of a block with published content."""
        return self._node.get(block)

    def is_cached(self, block: int) -> bool:
        """Tell whether the block is cached and used by nobody."""
        return block in self._cached

    def lookup(self, tokens: IntArray, salt: str | None, adapter: int) -> list[int]:
        """Return the blocks of the longest cached prefix of ``tokens``.

        At least one token is left over: a request needs a logit of its own.
        """
        if not self.prefix_caching:
            return []
        size, parent, found = self.block_size, ROOT, []
        for start in range(0, (len(tokens) - 1) // size * size, size):
            key = (parent, tokens[start : start + size].tobytes(), salt, adapter)
            block = self._index.get(key)
            if block is None:
                break
            found.append(block)
            parent = self._node[block]
        return found

    def peek(self, count: int, claimed: set[int], freed: Sequence[int] = ()) -> list[int]:
        """Return the ``count`` blocks that would be allocated next, leaving out ``claimed`` ones.

        Args:
            freed: blocks that will be free by then; they come last.
        """
        ids = chain(self._allocatable(), freed)
        return list(islice((b for b in ids if b not in claimed) if claimed else ids, count))

    def _allocatable(self) -> Iterator[int]:
        yield from reversed(self._free)
        yield from self._cached

    # --- mutators ---------------------------------------------------------------------

    def allocate(self, blocks: Iterable[int]) -> None:
        """Take free or cached blocks for one user; cached content is forgotten."""
        for block in blocks:
            if block in self._free:
                del self._free[block]
            else:
                del self._cached[block]
                self._forget(block)
            self._refs[block] = 1

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a user to blocks found by ``lookup``."""
        for block in blocks:
            if self._refs[block] == 0:
                self._cached.pop(block, None)
                self._pending_until.pop(block, None)
            self._refs[block] += 1

    def release(self, blocks: Sequence[int], *, after_step: int | None = None) -> None:
        """Take one user away from each block, the last of the sequence first.

        Args:
            after_step: a launched step that still names them; they stay pending until it completes.
        """
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if after_step is None and block not in self._node:  # most blocks, where nothing is cached
                self._free[block] = None
                continue
            # A parent stays as long as what hangs on it waits, or it could be evicted from under it.
            node = self._node.get(block)
            until = max(after_step or 0, self._child_until.get(node, 0) if node is not None else 0)
            if until <= self._completed:
                self._retire(block)
                continue
            self._pending_until[block] = until
            self._pending.append((until, block))
            if block in self._key:
                parent = self._key[block][0]
                self._child_until[parent] = max(until, self._child_until.get(parent, 0))

    def complete(self, step_id: int) -> None:
        """Retire blocks that waited for steps up to ``step_id``."""
        self._completed = max(self._completed, step_id)
        while self._pending and self._pending[0][0] <= step_id:
            step, block = self._pending.popleft()
            if self._pending_until.get(block) == step:
                del self._pending_until[block]
                self._retire(block)

    def publish(self, block: int, parent: int, tokens: bytes, salt: str | None, adapter: int) -> int | None:
        """Make a full block's content known; return its node number.

        None means that equal content is known already under another block: the caller stops
        publishing, since its later blocks would hang on a parent that it does not hold.
        """
        key = (parent, tokens, salt, adapter)
        if not self.prefix_caching or key in self._index:
            return None
        node = self._next_node
        self._next_node += 1
        self._index[key], self._key[block], self._node[block], self._holder[node] = block, key, node, block
        return node

    def forget_cached(self) -> None:
        """Turn every cached block into a free one."""
        for block in list(self._cached):
            del self._cached[block]
            self._forget(block)
            self._free[block] = None

    def _retire(self, block: int) -> None:
        if block not in self._node:
            self._free[block] = None
            return
        self._cached[block] = None
        # A parent that others used may have come here while this block waited for a step; it must not go first.
        parent = self._holder.get(self._key[block][0])
        while parent is not None and parent in self._cached:
            self._cached.move_to_end(parent)
            parent = self._holder.get(self._key[parent][0])

    def _forget(self, block: int) -> None:
        del self._index[self._key.pop(block)]
        node = self._node.pop(block)
        del self._holder[node]
        self._child_until.pop(node, None)

    # --- checks -----------------------------------------------------------------------

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raise AssertionError if the books do not balance.

        Args:
            tables: the block tables of all rows; with them, reference counts are compared too.
        """
        free, cached, pending = set(self._free), set(self._cached), set(self._pending_until)
        active = {b for b in range(self.num_blocks) if self._refs[b]}
        groups = (free, cached, pending, active)
        assert sum(map(len, groups)) == self.capacity, "free + cached + pending + active != total"
        assert set().union(*groups) == set(range(1, self.num_blocks)), "states overlap, or block 0 is in use"
        assert all(count >= 0 for count in self._refs), "negative reference count"
        assert len(self._index) == len(self._key) == len(self._node), "index and nodes disagree"
        assert not free & self._node.keys(), "a free block has content"
        live_nodes = {ROOT, *self._node.values()}
        for block, (parent, tokens, _, _) in self._key.items():
            assert parent in live_nodes, f"block {block} is cached under a parent that is gone"
            assert len(tokens) == 4 * self.block_size, f"block {block} is published but not full"
        if tables is not None:
            self._check_tables(tables)

    def _check_tables(self, tables: Iterable[Sequence[int]]) -> None:
        named = [0] * self.num_blocks
        for table in tables:
            for block in table:
                named[block] += 1
        assert named == self._refs, "reference counts do not match the tables"
        for block, users in enumerate(named):
            assert users <= 1 or block in self._node, f"block {block} is shared but not published"
