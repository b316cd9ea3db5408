"""B25 through the engine: NaN in a drafter costs speed only, NaN in the target its own request."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from drafters import DRAFTERS, drafter_path
from harness import (
    HIDDEN_SIZE,
    NUM_LAYERS,
    VOCAB_SIZE,
    Engine,
    Job,
    engine_config,
    expect_plain,
    kernels,
    make_engine,
    make_prompts,
    total,
)
from safetensors.torch import load_file, save_file

from tiny import tiny_model
from truespec.models.loader import load_model
from truespec.params import SamplingParams
from truespec.speculative.registry import build_from_plan, worker_class

FAMILY = "qwen2"
PROMPTS = make_prompts(4, seed=2)
BROKEN = [
    "dspark",
    "dspark threshold",
    "dflash",
    "eagle3 chain",
    "eagle3 tree 4x4",
    "multi-layer chained",
]


@pytest.mark.parametrize("accept", ["coupled", "rejection"])
@pytest.mark.parametrize("name", BROKEN)
def test_b25_a_drafter_full_of_nan_changes_nothing(name: str, accept: str, tmp_path: Path) -> None:
    if "tree" in name and accept == "rejection":
        pytest.skip("rejection takes chains only")
    source, drafter = drafter_path(name), DRAFTERS[name]
    assert source is not None
    tensors = load_file(source / "model.safetensors")
    broken = {n: t * torch.nan if n.endswith("o_proj.weight") else t for n, t in tensors.items()}
    save_file(broken, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    config = engine_config(drafter.algorithm, drafter=tmp_path, accept=accept, **drafter.options)
    engine = make_engine(FAMILY, config)
    # At T > 0 rejection draws from p as it is, not as plain decoding does.
    temperature = 0.8 if accept == "coupled" else 0.0
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=12, ignore_eos=True)
    jobs = [Job(ids, params) for ids in PROMPTS]
    results = engine.run(jobs)
    expect_plain(FAMILY, jobs, results)
    # A confidence that is no number is below every threshold: nothing is verified.
    assert (total(results).num_drafts > 20) != (name == "dspark threshold")
    sampled = [Job(ids, SamplingParams(temperature=1.0, seed=3, max_tokens=12)) for ids in PROMPTS]
    for result in engine.run(sampled):
        assert result.finish is not None
        assert result.finish.kind != "error"
        assert all(0 <= token_id < VOCAB_SIZE for token_id in result.token_ids)


def _target_with_a_bad_token(name: str, bad: int) -> Engine:
    """An engine whose target embeds one token as NaN."""
    model = tiny_model(
        FAMILY,
        seed=len(FAMILY),
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=NUM_LAYERS,
        hidden_size=HIDDEN_SIZE,
    )
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = torch.nan
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        target = load_model(Path(directory), kernels())
    drafter = DRAFTERS[name]
    config = engine_config(drafter.algorithm, drafter=drafter_path(name), **drafter.options)
    plan = worker_class(config).plan(config, target, drafter_path(name))
    worker, resolved = build_from_plan(config, target, plan)
    return Engine(worker, resolved)


@pytest.mark.parametrize("name", ["dspark", "eagle3 tree 2x2", "multi-layer not chained"])
def test_b25_a_nan_row_of_the_target_fails_its_own_request_only(name: str) -> None:
    bad = VOCAB_SIZE - 2
    params = SamplingParams(
        temperature=0.0, seed=1, max_tokens=10, logit_bias=((bad, -100.0),), ignore_eos=True
    )
    good = [Job(tuple(i for i in ids if i != bad), params) for ids in PROMPTS]
    engine = _target_with_a_bad_token(name, bad)
    for _ in range(2):  # the pages of the failed request must not have entered the prefix cache
        *results, failed = engine.run([*good, Job((*PROMPTS[0], bad, 5), params)])
        expect_plain(FAMILY, good, results)
        assert failed.finish is not None
        assert failed.finish.kind == "error"
        assert "not a number" in failed.finish.message
        assert failed.records == []
