"""Every row of a step through the one sampler, with its own parameters, history and position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from truespec.batch import Batch
from truespec.engine.rows import StepRows
from truespec.layers.sampler import SampledRows, SamplingRows, sample, sampling_rows
from truespec.speculative.contract import Draft


@dataclass(frozen=True, slots=True)
class ProcessedStep:
    """What the sampler made of a step's rows, kept for the logprobs of the processed modes.

    Attributes:
        logits: [num draft rows, V] after penalties, bias and masks; the raw tensor if none acts.
        rows: parameters per row.
        sampled: choices per row.
    """

    logits: Tensor
    rows: SamplingRows
    sampled: SampledRows


def process_step(
    batch: Batch, draft: Draft, rows: StepRows, raw_logits: Tensor, vocab_size: int
) -> ProcessedStep:
    """Edit and sample the rows of a draft.

    Args:
        raw_logits: [num draft rows, V] fp32, not modified.
    """
    params = [chunk.req.params for chunk in batch.chunks if chunk.samples]
    positions = rows.forward.positions[torch.from_numpy(rows.sample_rows)] + 1
    values = sampling_rows(params, np.diff(draft.cu_rows.numpy()).tolist(), positions)
    return ProcessedStep(raw_logits, values, sample(raw_logits, values, vocab_size))
