"""Which pages are free. Knows numbers only: not what they hold nor who holds them."""

from __future__ import annotations


class PageAllocator:
    """A stack of free page numbers; what was freed last is given out first, still warm."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that can be taken at once."""
        return len(self._free)

    def alloc(self, count: int) -> list[int]:
        """Take `count` pages; there must be so many."""
        assert 0 <= count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        if count == 0:
            return []
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back."""
        self._free.extend(reversed(pages))
        assert len(self._free) <= self.num_pages, "a page was freed twice"
