"""Multi-layer EAGLE: one MTP head per draft step, each with a KV cache of its own.

Head j at position i reads token i + 1 + j, so its last j rows before the root hold drafts of the
step before. They are run again whenever better tokens are known: a step carries the hidden states
of the last positions, and shared pages hold rows only whose tokens are all known.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from truespec.config import EngineConfig
from truespec.kernels.api import KVBuffers
from truespec.kvcache import LayerSpec
from truespec.models.drafters.mtp import MtpHeads, load_mtp
from truespec.models.llama import CausalLM
from truespec.speculative.backlog import FreshRows
from truespec.speculative.base import EngineParts, WorkerPlan
from truespec.speculative.chains import stack_steps
from truespec.speculative.contract import Draft
from truespec.speculative.drafter_worker import Drafting, draft_weight_type
from truespec.speculative.eagle_base import (
    Carried,
    EagleBase,
    Window,
    known_from,
    make_window,
    read,
)


class MultiLayerEagleWorker(EagleBase):
    """Head j drafts token j + 1 after the root."""

    options = EagleBase.options | {
        "enable_multi_layer_eagle",
        "speculative_eagle_topk",
        "speculative_accept",
    }

    def __init__(self, parts: EngineParts, plan: WorkerPlan, drafter: MtpHeads) -> None:
        super().__init__(parts, plan, drafter.heads[0].target_ids)
        self.heads, self.is_chained = drafter.heads[: self.num_drafts], drafter.is_chained
        self.capture = self.heads[0].capture

    @classmethod
    def plan(cls, config: EngineConfig, target: CausalLM, path: Path | None) -> WorkerPlan:
        assert path is not None, "MTP heads have weights"
        weight_type = draft_weight_type(config, target)
        drafter = load_mtp(path, target, num_extra_positions=0, weight_type=weight_type)
        if drafter is None:
            raise ValueError(f"{path.name} holds no MTP heads")
        num_steps = _num_steps(config, len(drafter.heads))
        layer = drafter.heads[0].layer
        return WorkerPlan(
            make=lambda parts, plan: cls(parts, plan, drafter),
            num_drafts=num_steps,
            num_draft_slots=num_steps,
            draft_layers=LayerSpec(num_steps, layer.num_kv_heads, layer.head_dim),
            lookahead=num_steps,
        )

    def drafts_from_carried(self, drafting: Drafting) -> Draft:
        values = self.sampler.rows(drafting.chunks)
        window = self._carried_window(drafting)
        everything = np.arange(len(window.positions))
        lasts = torch.tensor(list(window.last_rows(everything).values()))
        rows = self.window_rows(window, everything)
        hidden, steps = window.hidden, []
        for step, head in enumerate(self.heads[: max(drafting.counts)]):
            token_ids = window.token_ids(everything, 1 + step)
            out = head.forward(hidden, token_ids, rows, self._head_kv(step))
            steps.append(self.sampler.choose(head.logits(out[lasts]), values, step))
            for known, token_id in zip(window.tokens, steps[-1].token_ids.tolist(), strict=True):
                known.append(token_id)
            if self.is_chained:
                hidden = out
        return self.draft_of(drafting, stack_steps(steps))

    def extend_rows(self, fresh: FreshRows) -> None:
        window = self.window(fresh, read(self.heads[0], fresh), num_before=len(self.heads) - 1)
        hidden = window.hidden
        for step, head in enumerate(self.heads):
            rows = window.known(1 + step)
            placed = self.window_rows(window, rows)
            index = torch.from_numpy(rows)
            out = head.forward(
                hidden[index], window.token_ids(rows, 1 + step), placed, self._head_kv(step)
            )
            if self.is_chained:
                hidden = hidden.index_copy(0, index, out)
        self._carry(window)

    def describe(self) -> dict[str, object]:
        return super().describe() | {"num_heads": len(self.heads), "is_chained": self.is_chained}

    def _carry(self, window: Window) -> None:
        """Keep the states of the rows that the next draft runs again, and at least one."""
        count = max(1, len(self.heads) - 1)
        lengths = np.bincount(window.row_to_req, minlength=len(window.reqs)).tolist()
        ends = (window.firsts + np.array(lengths)).tolist()
        for req, own, end in zip(
            window.reqs, torch.split(window.hidden, lengths), ends, strict=True
        ):
            self.carried[req.rid] = Carried(end, own[-count:].clone())

    def _carried_window(self, drafting: Drafting) -> Window:
        """The carried rows of decoding requests, with their known tokens."""
        states = [self.carried_of(chunk) for chunk in drafting.chunks]
        lengths = np.array([len(own) for own in states])
        firsts = np.array([chunk.start for chunk in drafting.chunks]) - lengths
        reqs = drafting.reqs
        tokens = [known_from(req, first) for req, first in zip(reqs, firsts.tolist(), strict=True)]
        return make_window(reqs, firsts, lengths, torch.cat(states), tokens)

    def _head_kv(self, index: int) -> KVBuffers:
        kv = self.draft_kv
        return KVBuffers(kv.k[index : index + 1], kv.v[index : index + 1])


def _num_steps(config: EngineConfig, num_heads: int) -> int:
    """Draft steps: one per head, or fewer where the options say so.

    Raises ValueError where they cannot be met.
    """
    if config.speculative_eagle_topk not in (None, 1):
        raise ValueError(
            f"--speculative-eagle-topk is {config.speculative_eagle_topk}: "
            "one head per step drafts chains only"
        )
    rows, steps = config.speculative_num_draft_tokens, config.speculative_num_steps
    if steps is None:
        steps = num_heads if rows is None else rows - 1
    if not 1 <= steps <= num_heads:
        raise ValueError(f"{steps} draft steps asked for, the drafter has {num_heads} heads")
    if rows not in (None, steps + 1):
        raise ValueError(
            f"--speculative-num-draft-tokens is {rows}, {steps} steps verify {steps + 1} rows"
        )
    return steps
