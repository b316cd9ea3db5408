"""Prefix cache: a tree of full pages, keyed by the tokens they hold.

A node is one page. Where drafters need it, a page is keyed by its own tokens and by the
`lookahead` tokens after it: their KV at position i also depends on tokens up to i + lookahead, so
a page may only be found by a prompt that goes on in the same way.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from truespec.kvcache.pages import PageAllocator

Key = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """A cached page.

    Attributes:
        num_locks: running requests whose pages include this one (they hold the path to the root).
        last_used: logical time of the last match or unlock.
    """

    page: int
    key: Key
    parent: Node | None
    children: dict[Key, Node] = field(default_factory=dict)
    num_locks: int = 0
    last_used: int = 0


class PrefixCache:
    """Finds, keeps and evicts pages that hold the start of a token sequence.

    Args:
        allocator: pages that are evicted go back to it.
        page_size: tokens per page.
        lookahead: further tokens a page's draft KV depends on.
        enabled: off finds nothing and keeps nothing.
    """

    def __init__(
        self, allocator: PageAllocator, *, page_size: int, lookahead: int, enabled: bool
    ) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._lookahead = lookahead
        self.enabled = enabled
        self._clock = 0
        self._idle_heap: list[tuple[int, int, Node]] = []  # (last_used, push number, node)
        self._num_pushes = 0
        self.root = Node(page=-1, key=(), parent=None)
        self.num_pages = 0
        self.num_idle_pages = 0

    def match(self, token_ids: list[int], max_tokens: int) -> tuple[Node, list[int]]:
        """Longest cached prefix of `token_ids` with at most `max_tokens` tokens.

        Returns the last node (the root if nothing matches) and the pages from the start.
        """
        node, pages = self.root, []
        if self.enabled:
            for index in range(max_tokens // self._page_size):
                child = node.children.get(self._key(token_ids, index))
                if child is None:
                    break
                node = child
                pages.append(node.page)
        return node, pages

    def lock(self, node: Node) -> None:
        """Keep `node` and its ancestors from eviction until `unlock`."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            if step.num_locks == 0:
                self.num_idle_pages -= 1
            step.num_locks += 1
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        self._clock += 1
        step: Node | None = node
        while step is not None and step.parent is not None:
            assert step.num_locks > 0, "unlock of an unlocked page"
            step.num_locks -= 1
            if step.num_locks == 0:
                self.num_idle_pages += 1
                step.last_used = self._clock
                self._push_if_evictable(step)
            step = step.parent

    def insert(
        self, token_ids: list[int], pages: list[int], num_valid: int
    ) -> tuple[Node, list[int]]:
        """Hand pages to the cache that hold KV of `token_ids[:num_valid]`.

        Only full pages whose lookahead is known are kept. Where the cache already has a page for
        the same tokens, that one is kept and the given one is freed.

        Returns the last node and the cache's pages along the path (they replace the given ones).
        """
        node = self.root
        kept: list[int] = []
        if not self.enabled:
            return node, kept
        known = min(num_valid, len(token_ids) - self._lookahead)
        for index in range(max(0, known) // self._page_size):
            key = self._key(token_ids, index)
            child = node.children.get(key)
            if child is None:
                child = Node(page=pages[index], key=key, parent=node)
                node.children[key] = child
                self.num_pages += 1
                self.num_idle_pages += 1
                child.last_used = self._clock
                self._push_if_evictable(child)
            elif child.page != pages[index]:
                self._allocator.free([pages[index]])
            node = child
            kept.append(child.page)
        return node, kept

    def evict(self, count: int) -> int:
        """Free up to `count` idle pages, least recently used first; returns how many."""
        freed: list[int] = []
        while len(freed) < count and self._idle_heap:
            last_used, _, node = heapq.heappop(self._idle_heap)
            if (
                node.parent is None
                or node.num_locks
                or node.children
                or node.last_used != last_used
            ):
                continue  # an old entry: the node was removed, locked, extended or used again
            parent = node.parent
            del parent.children[node.key]
            node.parent = None
            freed.append(node.page)
            self._push_if_evictable(parent)
        self.num_pages -= len(freed)
        self.num_idle_pages -= len(freed)
        self._allocator.free(freed)
        return len(freed)

    def _key(self, token_ids: list[int], index: int) -> Key:
        start = index * self._page_size
        return tuple(token_ids[start : start + self._page_size + self._lookahead])

    def _push_if_evictable(self, node: Node) -> None:
        if node.parent is not None and node.num_locks == 0 and not node.children:
            self._num_pushes += 1
            heapq.heappush(self._idle_heap, (node.last_used, self._num_pushes, node))
