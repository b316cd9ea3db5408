"""truespec: LLM serving whose speculative decoding returns exactly what plain decoding would."""

from __future__ import annotations

from typing import TYPE_CHECKING

from truespec.config import EngineConfig
from truespec.params import Grammar, LogprobParams, SamplingParams

if TYPE_CHECKING:
    from truespec.llm import LLM, Generation

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "Generation", "Grammar", "LogprobParams", "SamplingParams"]


def __getattr__(name: str) -> object:
    """Import torch only for those who run a model in this process."""
    if name in ("LLM", "Generation"):
        from truespec import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'truespec' has no attribute {name!r}")
