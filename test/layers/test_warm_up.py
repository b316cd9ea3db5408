"""After the warm-up nothing is compiled any more, whatever is asked."""

from __future__ import annotations

import pytest
import torch

from truespec.kernels.rows import has_numba
from truespec.layers.sampler import (
    sample,
    sample_draft,
    sampling_rows,
    top_k_draft,
)
from truespec.layers.utils.logprob import ProcessedRows, compute_spec_v2_logprobs, logprob_spec
from truespec.layers.warm_up import compile_row_kernels
from truespec.params import LogprobParams, SamplingParams


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
def test_no_kernel_is_compiled_after_the_warm_up() -> None:
    from truespec.kernels.logprob_numba import logprob_slots
    from truespec.kernels.sampling_draft_numba import draft_rows, top_k_draft_rows
    from truespec.kernels.sampling_numba import sample_rows

    compile_row_kernels()
    kernels = (sample_rows, draft_rows, top_k_draft_rows, logprob_slots)
    before = [len(kernel.signatures) for kernel in kernels]
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(6, 200).to(dtype)[:, :150]
        params = [SamplingParams(seed=1, temperature=0.0), SamplingParams(seed=2, top_k=3)]
        rows = sampling_rows(params, [4, 2], torch.arange(6))
        keys = {"temperature": rows.temperature, "seed": rows.seed, "position": rows.position}
        sampled = sample(logits, rows, 120)
        sample_draft(logits, **keys, target_ids=torch.arange(150) * 2)
        top_k_draft(logits[::2], 4, **{name: key[::2] for name, key in keys.items()})
        wishes = [None, LogprobParams(top_k=9, token_ids=(1, 2), modes=("raw", "processed"))]
        processed = ProcessedRows(logits, rows.temperature, sampled.keep_threshold, sampled.tie_id)
        for wish, edited in ((wishes, processed), ([None, LogprobParams()], None)):
            compute_spec_v2_logprobs(
                logits,
                sampled.token_ids.view(2, 3),
                torch.arange(6).view(2, 3),
                torch.tensor([3, 2], dtype=torch.int32),
                vocab_size=120,
                spec=logprob_spec(wish),
                processed=edited,
            )
    assert [len(kernel.signatures) for kernel in kernels] == before
