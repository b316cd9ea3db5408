"""Every drafter under test, with random weights, and engines that run it on a tiny target."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

from harness import PLENTY, Engine, engine_config, make_engine

import tiny_drafters
from truespec.config import Algorithm

Value = int | float | str | bool | None


@dataclass(frozen=True, slots=True)
class Drafter:
    """How a drafter is written and run.

    Attributes:
        options: of the engine, without the prefix `speculative_`.
    """

    algorithm: Algorithm
    make: Callable[[Path], Path] | None = None
    options: dict[str, Value] = field(default_factory=dict)


DRAFTERS = {
    "ngram": Drafter("NGRAM", None, {"num_draft_tokens": 5}),
    "dspark": Drafter("DSPARK", tiny_drafters.dspark),
    "dspark threshold": Drafter(
        "DSPARK", tiny_drafters.dspark, {"dspark_confidence_threshold": 0.4}
    ),
    "dspark short": Drafter(
        "DSPARK", partial(tiny_drafters.dspark, markov="rnn"), {"dspark_block_size": 3}
    ),
    "dflash": Drafter("DFLASH", tiny_drafters.dflash),
    "eagle3 chain": Drafter(
        "EAGLE3", partial(tiny_drafters.eagle3, num_layers=2), {"num_steps": 4}
    ),
    "eagle3 tree 2x2": Drafter("EAGLE3", tiny_drafters.eagle3, {"num_steps": 2, "eagle_topk": 2}),
    "eagle3 tree 4x4": Drafter(
        "EAGLE3", tiny_drafters.eagle3, {"num_steps": 4, "eagle_topk": 4, "num_draft_tokens": 17}
    ),
    "eagle3 tree 7x4 of 8": Drafter(
        "EAGLE3", tiny_drafters.eagle3, {"num_steps": 7, "eagle_topk": 4, "num_draft_tokens": 8}
    ),
    "eagle chain": Drafter("EAGLE", tiny_drafters.eagle1, {"num_steps": 3}),
    "nextn": Drafter("NEXTN", partial(tiny_drafters.mtp, family="mimo"), {"num_steps": 3}),
    "multi-layer chained": Drafter(
        "EAGLE",
        partial(tiny_drafters.mtp, family="step", num_heads=3),
        {"enable_multi_layer_eagle": True},
    ),
    "multi-layer with few draft ids": Drafter(
        "NEXTN",
        partial(tiny_drafters.mtp, family="mimo_v2", num_heads=2, draft_vocab=30),
        {"enable_multi_layer_eagle": True},
    ),
    "multi-layer not chained": Drafter(
        "NEXTN",
        partial(tiny_drafters.mtp, family="mimo_v2", num_heads=4),
        {"enable_multi_layer_eagle": True},
    ),
}


def drafter_engine(
    name: str,
    family: str,
    *,
    pool: int = PLENTY,
    chunk: int = 256,
    prefix: bool = True,
    **more: Value,
) -> Engine:
    """An engine with one of `DRAFTERS`; `more` are further options of speculation."""
    drafter = DRAFTERS[name]
    config = engine_config(
        drafter.algorithm,
        drafter=drafter_path(name),
        pool=pool,
        chunk=chunk,
        prefix=prefix,
        **(drafter.options | more),
    )
    return make_engine(family, config)


@lru_cache(maxsize=len(DRAFTERS))
def drafter_path(name: str) -> Path | None:
    """The files of a drafter, `None` where it has none."""
    make = DRAFTERS[name].make
    return None if make is None else make(Path(_root().name) / name)


@lru_cache(maxsize=1)
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()
