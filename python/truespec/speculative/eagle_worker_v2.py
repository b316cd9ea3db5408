"""EAGLE-1/2/3 and rolled MTP heads: the drafter goes token by token on its own hidden state.

Drafts are chains, or dynamic trees with the best k children per node. Draft KV at position i needs
token i + 1; the state after the last known position is carried to the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from truespec.config import EngineConfig
from truespec.kernels.api import AttentionRows
from truespec.kvcache import LayerSpec
from truespec.layers.sampler import SamplingRows, top_k_draft
from truespec.models.drafters.eagle import Eagle3Drafter, load_eagle
from truespec.models.drafters.mtp import load_mtp
from truespec.models.drafters.recurrent import RecurrentDrafter
from truespec.models.llama import CausalLM
from truespec.speculative.backlog import FreshRows, Ints
from truespec.speculative.base import EngineParts, WorkerPlan
from truespec.speculative.chains import stack_steps
from truespec.speculative.contract import Draft
from truespec.speculative.drafter_worker import Drafting, draft_weight_type
from truespec.speculative.eagle_base import Carried, EagleBase, read
from truespec.speculative.tree import TreePool, draft_of_trees

DEFAULT_NUM_STEPS = 5


@dataclass(frozen=True, slots=True)
class DraftShape:
    """How far and how wide to draft.

    Attributes:
        num_steps: depth of a draft.
        top_k: children per node, 1 for a chain.
        num_drafts: drafts that are verified.
    """

    num_steps: int
    top_k: int
    num_drafts: int


class EagleWorker(EagleBase):
    """One drafter, rolled on its own output."""

    options = EagleBase.options | {"speculative_eagle_topk", "speculative_accept"}

    def __init__(
        self, parts: EngineParts, plan: WorkerPlan, drafter: RecurrentDrafter, shape: DraftShape
    ) -> None:
        super().__init__(parts, plan, drafter.target_ids)
        self.drafter, self.shape = drafter, shape
        self.capture = drafter.capture
        self.planner.is_whole = shape.top_k > 1
        self._columns = _columns(drafter.target_ids, self.info.vocab_size)

    @classmethod
    def plan(cls, config: EngineConfig, target: CausalLM, path: Path | None) -> WorkerPlan:
        assert path is not None, "an EAGLE head has weights"
        shape = draft_shape(config)
        drafter = _load(config, path, target, shape.num_steps)
        num_ids = (
            len(drafter.target_ids) if drafter.target_ids is not None else target.config.vocab_size
        )
        if shape.top_k > num_ids:
            raise ValueError(f"--speculative-eagle-topk is {shape.top_k} of {num_ids} draft ids")
        layer = drafter.layer
        return WorkerPlan(
            make=lambda parts, plan: cls(parts, plan, drafter, shape),
            num_drafts=shape.num_drafts,
            # Nodes that are expanded write draft KV from the root's slot on.
            num_draft_slots=max(shape.num_drafts, (shape.num_steps - 1) * shape.top_k - 1),
            draft_layers=LayerSpec(layer.num_layers, layer.num_kv_heads, layer.head_dim),
            lookahead=1,
        )

    def drafts_from_carried(self, drafting: Drafting) -> Draft:
        states = torch.cat([self.carried_of(chunk) for chunk in drafting.chunks])
        if self.shape.top_k == 1:
            return self._draft_chains(drafting, states)
        # The plan, which thinks in chains, says whether to draft; the nodes' scores say how many.
        caps = [self.most_drafts(chunk) for chunk in drafting.chunks]
        pool = self._grow_trees(drafting._replace(counts=caps), states)
        counts = self.planner.trim(pool.survivals(caps), drafting.other_rows)
        kept = pool.select(counts, self.shape.num_drafts)
        return draft_of_trees(drafting.batch, drafting.places, pool, kept)

    def extend_rows(self, fresh: FreshRows) -> None:
        window = self.window(fresh, read(self.drafter, fresh), num_before=0)
        rows = window.known(1)
        placed = self.window_rows(window, rows)
        carried = self.drafter.forward(
            window.hidden[torch.from_numpy(rows)], window.token_ids(rows, 1), placed, self.draft_kv
        )
        for rid, place in window.last_rows(rows).items():
            end = int(window.positions[rows[place]]) + 1
            self.carried[rid] = Carried(end, carried[place : place + 1].clone())

    def describe(self) -> dict[str, object]:
        shape = {"num_steps": self.shape.num_steps, "eagle_topk": self.shape.top_k}
        return super().describe() | shape | {"target_layer_ids": list(self.capture)}

    def _draft_chains(self, drafting: Drafting, states: Tensor) -> Draft:
        values = self.sampler.rows(drafting.chunks)
        roots = [chunk.start for chunk in drafting.chunks]
        steps = [self.sampler.choose(self.drafter.logits(states), values)]
        for step in range(1, max(drafting.counts)):
            firsts = [root + step - 1 for root in roots]
            rows = self.causal_rows(drafting.reqs, firsts, [1] * len(firsts))
            states = self.drafter.forward(states, steps[-1].token_ids, rows, self.draft_kv)
            steps.append(self.sampler.choose(self.drafter.logits(states), values, step))
        return self.draft_of(drafting, stack_steps(steps))

    def _grow_trees(self, drafting: Drafting, states: Tensor) -> TreePool:
        """Expand the best k nodes of each level, as deep as drafts may go."""
        k, n = self.shape.top_k, len(drafting.chunks)
        values = self.sampler.rows(drafting.chunks)
        pool = TreePool(*self._children(states, values))
        frontier = pool.first_frontier()
        states, values = states.repeat_interleave(k, dim=0), _repeated(values, k)
        slots = np.zeros((n, k, 0), dtype=np.int64)
        for level in range(1, min(max(drafting.counts), self.shape.num_steps)):
            slots, rows = self._tree_rows(drafting, level, slots, frontier.parents.numpy())
            if level > 1:
                states = states.view(n, k, -1)[torch.arange(n).unsqueeze(1), frontier.parents]
                states = states.flatten(0, 1)
            token_ids = frontier.token_ids.flatten()
            states = self.drafter.forward(states, token_ids, rows, self.draft_kv)
            at = values._replace(position=values.position + level)
            ids, scores, logprobs = (part.view(n, k, k) for part in self._children(states, at))
            frontier = pool.grow(frontier, ids, scores, logprobs)
        return pool

    def _children(self, states: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor, Tensor]:
        """The k best tokens after each state: ids, scores and own logprobs, [m, k] each."""
        logits = self.drafter.logits(states)
        token_ids, scores = top_k_draft(
            logits,
            self.shape.top_k,
            temperature=rows.temperature,
            seed=rows.seed,
            position=rows.position,
            target_ids=self.sampler.target_ids,
        )
        scaled = logits / torch.where(rows.temperature > 0, rows.temperature, 1.0).unsqueeze(1)
        columns = token_ids if self._columns is None else self._columns[token_ids]
        logprobs = scaled.gather(1, columns) - scaled.logsumexp(1, keepdim=True)
        # NOTE: rounding must not let a child outrank its parent.
        return token_ids, scores.clamp(max=0.0), logprobs

    def _tree_rows(
        self, drafting: Drafting, level: int, slots: Ints, parents: Ints
    ) -> tuple[Ints, AttentionRows]:
        """Where the k nodes of a level write, and what they see: the past and their ancestors.

        Args:
            slots: [n, k, level - 1] slots of each node of the level before and its ancestors.
            parents: [n, k] place of each node's parent in the level before.

        Returns the slots [n, k, level] of this level, and its rows.
        """
        k, n = self.shape.top_k, len(drafting.chunks)
        roots = [chunk.start for chunk in drafting.chunks]
        own = self.cache.place(drafting.reqs, [root + (level - 1) * k for root in roots], [k] * n)
        ancestors = np.take_along_axis(slots, parents[:, :, None], axis=1)
        slots = np.concatenate([ancestors, own.slots.reshape(n, k, 1)], axis=2)
        first = np.repeat(np.array(roots, np.int32), k)
        return slots, AttentionRows(
            positions=torch.from_numpy(first + np.int32(level - 1)),
            row_to_req=torch.from_numpy(own.row_to_req),
            out_slots=torch.from_numpy(own.slots),
            page_table=self.cache.shared_table,
            kv_lens=torch.from_numpy(first + np.int32(level)),
            tail_starts=torch.from_numpy(first),
            tail_slots=torch.from_numpy(slots.reshape(n * k, level)),
        )


def draft_shape(config: EngineConfig) -> DraftShape:
    """Depth, width and size of a draft, from the three options.

    Raises ValueError where they contradict each other.
    """
    top_k, rows = config.speculative_eagle_topk or 1, config.speculative_num_draft_tokens
    steps = config.speculative_num_steps
    if steps is None:
        steps = DEFAULT_NUM_STEPS if top_k > 1 or rows is None else rows - 1
    if steps < 1 or top_k < 1:
        raise ValueError(
            f"--speculative-num-steps is {steps} and --speculative-eagle-topk {top_k}, "
            "at least 1 is needed"
        )
    if top_k > 1 and config.speculative_accept == "rejection":
        raise ValueError(
            f"--speculative-eagle-topk is {top_k}: rejection is built for chains only "
            "(coupled acceptance takes trees)"
        )
    most = top_k + (steps - 1) * top_k * top_k
    num_drafts = min(most, steps * top_k) if rows is None else rows - 1
    if not 1 <= num_drafts <= most or (top_k == 1 and num_drafts != steps):
        fewest = steps if top_k == 1 else 1
        raise ValueError(
            f"--speculative-num-draft-tokens is {rows}, {steps} steps with {top_k} children per "
            f"node need {fewest + 1} to {most + 1} rows, the root included"
        )
    return DraftShape(steps, top_k, num_drafts)


def _load(config: EngineConfig, path: Path, target: CausalLM, num_steps: int) -> RecurrentDrafter:
    """The drafter at `path`, which must be of the kind that the algorithm names."""
    algorithm, weight_type = config.speculative_algorithm, draft_weight_type(config, target)
    drafter = load_eagle(path, target, num_steps, weight_type)
    if drafter is not None:
        fits = isinstance(drafter, Eagle3Drafter) == (algorithm == "EAGLE3")
        if algorithm == "NEXTN" or not fits:
            kind = "EAGLE3" if isinstance(drafter, Eagle3Drafter) else "EAGLE"
            raise ValueError(f"the drafter {path.name} is to be run as {kind}, not as {algorithm}")
        return drafter
    found = load_mtp(path, target, num_steps, weight_type)
    if found is None:
        raise ValueError(f"{path.name} holds neither an EAGLE head nor MTP heads")
    if algorithm == "EAGLE3":
        raise ValueError(f"the drafter {path.name} is to be run as NEXTN, not as EAGLE3")
    if len(found.heads) > 1:
        raise ValueError(
            f"the drafter {path.name} has {len(found.heads)} heads: --enable-multi-layer-eagle "
            "runs one per step"
        )
    return found.heads[0]


def _columns(target_ids: Tensor | None, vocab_size: int) -> Tensor | None:
    """[V] int64 draft id of every target id that has one."""
    if target_ids is None:
        return None
    return torch.zeros(vocab_size, dtype=torch.int64).index_put_(
        (target_ids,), torch.arange(len(target_ids))
    )


def _repeated(rows: SamplingRows, count: int) -> SamplingRows:
    """Every row `count` times in a row."""
    return SamplingRows(
        temperature=rows.temperature.repeat_interleave(count),
        top_k=rows.top_k.repeat_interleave(count),
        top_p=rows.top_p.repeat_interleave(count),
        log_min_p=rows.log_min_p.repeat_interleave(count),
        seed=rows.seed.repeat_interleave(count),
        position=rows.position.repeat_interleave(count),
    )
