"""Room of the KV cache: pages, the prefix cache over them, and the pools they index."""

from truespec.kvcache.cache import KVCache
from truespec.kvcache.pages import PageAllocator
from truespec.kvcache.pool import KVPool, LayerSpec
from truespec.kvcache.prefix import PrefixCache

__all__ = ["KVCache", "KVPool", "LayerSpec", "PageAllocator", "PrefixCache"]
