"""Runs every row kernel once on a tiny input, so that no request waits for a compiler.

Knows the public calls of sampling, drafting, paths and logprobs; the compiled code stays on disk.
"""

from __future__ import annotations

import torch

from truespec.kernels.paths import follow_paths
from truespec.params import LOGPROB_MODES, LogprobParams, SamplingParams

from .sampler import sample, sample_draft, sampling_rows, top_k_draft
from .utils.logprob import ProcessedRows, compute_spec_v2_logprobs, logprob_spec

_VOCAB_SIZE = 8


def compile_row_kernels() -> None:
    """Compile or load the CPU kernels behind sampler, drafts, verification and logprobs.

    Seconds the first time on a machine, a fraction of one later. Types alone decide what is
    compiled, so tiny inputs do.
    """
    logits = torch.zeros(1, _VOCAB_SIZE)
    params = SamplingParams(seed=0, top_k=2, top_p=0.5, min_p=0.1)
    rows = sampling_rows([params], [1], torch.zeros(1, dtype=torch.int64))
    sampled = sample(logits, rows, _VOCAB_SIZE)
    temperature, seed, position = rows.temperature, rows.seed, rows.position
    sample_draft(logits, temperature=temperature, seed=seed, position=position)
    top_k_draft(logits, 1, temperature=temperature, seed=seed, position=position)
    ids, row_index, num_tokens, _ = follow_paths(
        torch.zeros(1, dtype=torch.int64),
        torch.full((1,), -1),
        torch.tensor([0, 1], dtype=torch.int32),
        sampled.token_ids,
        sampled.failed,
        max_rows=1,
    )
    wish = LogprobParams(top_k=1, token_ids=(0,), modes=LOGPROB_MODES)
    compute_spec_v2_logprobs(
        logits,
        ids,
        row_index,
        num_tokens,
        vocab_size=_VOCAB_SIZE,
        spec=logprob_spec([wish]),
        processed=ProcessedRows(logits, rows.temperature, sampled.keep_threshold, sampled.tie_id),
    )
