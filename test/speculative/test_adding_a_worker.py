"""The page docs/adding_a_worker.md: its example runs, and it names what is there."""

from __future__ import annotations

import re
from pathlib import Path

from harness import Engine, Job, engine_config, expect_plain, make_prompts, target, total

from truespec.params import SamplingParams
from truespec.speculative import base, block_worker, drafter_worker, eagle_base
from truespec.speculative.base import SpecWorker, WorkerPlan
from truespec.speculative.registry import build_from_plan

PAGE = (Path(__file__).parents[2] / "docs" / "adding_a_worker.md").read_text(encoding="utf-8")


def test_the_example_is_a_whole_worker() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    namespace: dict[str, object] = {}
    exec(code, namespace)
    worker = namespace["RepeatWorker"]
    assert isinstance(worker, type)
    assert issubclass(worker, SpecWorker)
    config = engine_config(chunk=16)
    plan = worker.plan(config, target("llama"), None)
    engine = Engine(*build_from_plan(config, target("llama"), plan))
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=20, ignore_eos=True)
    jobs = [Job(ids, params) for ids in make_prompts(4)]
    results = engine.run(jobs)
    expect_plain("llama", jobs, results)
    assert total(results).num_drafts > 50


def test_the_page_names_every_declaration_and_class() -> None:
    for name in ("num_drafts", "num_draft_slots", "draft_layers", "lookahead"):
        assert f"`WorkerPlan.{name}`" in PAGE
        assert name in WorkerPlan.__dataclass_fields__
    for module, name in (
        (base, "SpecWorker"),
        (drafter_worker, "DrafterWorker"),
        (block_worker, "BlockWorker"),
        (eagle_base, "EagleBase"),
    ):
        assert hasattr(module, name)
        assert f"`{name}" in PAGE
