"""The block drafter: one bidirectional pass over an anchor and masks, on the target's features.

DSpark (arXiv 2607.05147) and DFlash share this backbone; they differ in the row rule and the heads.
Symbols: H hidden, m taps, G block size, r Markov rank, DV draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from truespec.kernels.api import (
    AttentionRows,
    ContextRows,
    DecoderStack,
    KernelSet,
    KVBuffers,
    PackedLinear,
)
from truespec.kernels.draft_chain import ChainRule, Chains, Transition, tiled
from truespec.models.drafters.block_config import MARKOV_W1, BlockConfig, block_config
from truespec.models.drafters.checkpoint import DrafterCheckpoint, read_fields, target_ids
from truespec.models.drafters.heads import (
    ConfidenceHead,
    GatedMarkov,
    MarkovHead,
    RnnMarkov,
    VanillaMarkov,
)
from truespec.models.fields import CheckpointError
from truespec.models.layer_weights import read_layer, stack_shape
from truespec.models.llama import CausalLM

RENAMES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
MAX_TRANSITION = 2**20  # elements of W2 that one thread reads faster than several by turns
TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight", "t2d")


@dataclass(frozen=True, slots=True)
class BlockDrafter:
    """A loaded block drafter on the engine's kernels.

    Attributes:
        target_ids: [DV] int64 target id of every draft id, `None` for the identity.
        mask_embedding: [H] fp32 input of rows 1...
        markov, confidence: `None` where the checkpoint has none.
    """

    config: BlockConfig
    target: CausalLM
    fc: PackedLinear
    hidden_norm: Tensor
    stack: DecoderStack
    norm: Tensor
    head: PackedLinear
    target_ids: Tensor | None
    mask_embedding: Tensor
    markov: MarkovHead | None
    confidence: ConfidenceHead | None
    _masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def context(self, features: Tensor, positions: Tensor, out_slots: Tensor) -> ContextRows:
        """Positions whose target features are known, for the draft KV.

        Args:
            features: [n, m * H] fp32 in the order of `config.target_layer_ids`.
            positions: [n] int32. out_slots: [n] int64.
        """
        return ContextRows(features, self.fc, self.hidden_norm, positions, out_slots)

    def run(
        self,
        anchor_ids: Tensor,
        rows: AttentionRows,
        kv: KVBuffers,
        context: ContextRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The block pass.

        Args:
            anchor_ids: [n] int64 last committed tokens.
            rows: of n blocks of as many rows each, the keys of every row ending with its block.
            context: what the draft KV lacks before the blocks.

        Returns [n, rows of a block, H] fp32 after the final norm, and [n, rows of a block, DV] fp32
        draft logits.
        """
        hidden, logits = self.stack.forward_to_logits(
            self._inputs(anchor_ids, rows),
            rows,
            kv,
            final_norm=self.norm,
            head=self.head,
            context=context,
        )
        num_blocks = len(anchor_ids)
        return hidden.view(num_blocks, -1, hidden.shape[1]), logits.view(
            num_blocks, -1, logits.shape[1]
        )

    def run_chains(
        self,
        rows: AttentionRows,
        kv: KVBuffers,
        context: ContextRows | None,
        rule: ChainRule,
        num_steps: int,
    ) -> Chains:
        """The block pass, and drafts of the first `num_steps` rows that draft.

        Args as in `run`; the anchors are the tokens before the rule's chains.
        """
        return self.stack.draft_chains(
            self._inputs(rule.previous, rows),
            rows,
            kv,
            final_norm=self.norm,
            head=self.head,
            rule=rule,
            first_row=self.first_row,
            num_steps=num_steps,
            context=context,
        )

    @property
    def first_row(self) -> int:
        """The row of a block that gives its first draft."""
        return 1 if self.config.skip_first_row else 0

    def _inputs(self, anchor_ids: Tensor, rows: AttentionRows) -> Tensor:
        """[n * size, H]: anchors, and masks that stay from call to call.

        NOTE: small operations are slow in a process that has just read all weights; this saves one.
        """
        num_rows, num_blocks = len(rows.positions), len(anchor_ids)
        x = self._masks.get((num_rows, num_blocks))
        if x is None:
            x = self._masks[num_rows, num_blocks] = self.mask_embedding.repeat(num_rows, 1)
        x[:: num_rows // num_blocks] = self.target.embed(anchor_ids)
        return x


def load_block_drafter(
    path: Path,
    target: CausalLM,
    block_size: int | None = None,
    weight_type: str | None = None,
) -> BlockDrafter:
    """Read a DSpark or DFlash checkpoint for `target`.

    Args:
        block_size: rows of a block, at most those it was trained for; `None` for these.
        weight_type: block type of its matrices; `None` leaves them as they are stored.

    Raises CheckpointError when a tensor or field does not fit, naming both values.
    """
    checkpoint = DrafterCheckpoint(path, _own_name, weight_type)
    if checkpoint.has("mtp.0.main_proj.weight"):
        raise CheckpointError(
            f"{path.name} holds a DSpark drafter bundled with DeepSeek-V4 (mtp.*), which is not "
            "supported"
        )
    if not (checkpoint.has("fc.weight") and checkpoint.has("hidden_norm.weight")):
        raise CheckpointError(f"{path} is no block drafter: it needs fc and hidden_norm tensors")
    fields = read_fields(path)
    config = block_config(fields, target.config, checkpoint.has)
    if block_size is not None:
        config = _shortened(config, block_size)
    layer, kernels, hidden = config.layer, target.kernels, config.layer.hidden_size
    ids = target_ids(checkpoint, fields, target.config)
    # Blocks at the end of the context reach past it.
    long = replace(layer, context_length=layer.context_length + config.block_size)
    layers = [
        read_layer(checkpoint, f"layers.{index}.", layer) for index in range(layer.num_layers)
    ]
    num_draft_ids = layer.vocab_size if ids is None else len(ids)
    taps = len(config.target_layer_ids)
    drafter = BlockDrafter(
        config=config,
        target=target,
        fc=kernels.linear(checkpoint.weight("fc.weight", (hidden, hidden * taps))),
        hidden_norm=checkpoint.vector("hidden_norm.weight", hidden),
        stack=kernels.decoder_stack(layers, stack_shape(long)),
        norm=checkpoint.vector("norm.weight", hidden),
        head=target.head if ids is None else target.head_rows(ids, weight_type),
        target_ids=ids,
        mask_embedding=_mask_embedding(checkpoint, config, target),
        markov=_markov(checkpoint, config, kernels, num_draft_ids),
        confidence=_confidence(checkpoint, config),
    )
    checkpoint.check_all_used()
    return drafter


def _shortened(config: BlockConfig, block_size: int) -> BlockConfig:
    fewest = 2 if config.skip_first_row else 1
    if not fewest <= block_size <= config.block_size:
        raise CheckpointError(
            f"the block size asked for is {block_size}, "
            f"the drafter was trained for {config.block_size} (at least {fewest})"
        )
    temperatures = config.confidence_temperatures
    return replace(
        config,
        block_size=block_size,
        confidence_temperatures=None if temperatures is None else temperatures[:block_size],
    )


def _own_name(stored: str) -> str | None:
    name = stored.removeprefix("model.").removeprefix("logit_head.")
    name = RENAMES.get(name, name)
    return None if name in TARGET_COPIES else name


def _mask_embedding(checkpoint: DrafterCheckpoint, config: BlockConfig, target: CausalLM) -> Tensor:
    if checkpoint.has("mask_embedding"):
        return checkpoint.vector("mask_embedding", config.layer.hidden_size)
    mask, vocab = config.mask_token_id, target.config.vocab_size
    if mask is None:
        raise CheckpointError("the drafter has neither a mask_token_id nor a mask_embedding")
    if not 0 <= mask < vocab:
        raise CheckpointError(f"the drafter's mask_token_id is {mask}, the target has {vocab} ids")
    return target.embed(torch.tensor([mask]))[0]


def _markov(
    checkpoint: DrafterCheckpoint, config: BlockConfig, kernels: KernelSet, num_draft_ids: int
) -> MarkovHead | None:
    rank, hidden = config.markov_rank, config.layer.hidden_size
    if rank == 0:
        return None
    w1 = checkpoint.stored(MARKOV_W1, (config.layer.vocab_size, rank)).data
    w2 = checkpoint.stored("markov_head.markov_w2.weight", (num_draft_ids, rank))
    if config.markov_type == "vanilla":
        is_small = num_draft_ids * rank <= MAX_TRANSITION and w2.data.dtype == torch.bfloat16
        transition = Transition(w1.float(), tiled(w2.data)) if is_small else None
        return VanillaMarkov(w1, kernels.linear(w2), transition)
    gated = config.markov_type == "gated"
    name, size = ("gate_proj", rank) if gated else ("joint_proj", 3 * rank)
    width = hidden + rank if gated else hidden + 2 * rank
    weight = checkpoint.stored(f"markov_head.{name}.weight", (size, width))
    inner = kernels.linear(weight, checkpoint.vector(f"markov_head.{name}.bias", size))
    return (GatedMarkov if gated else RnnMarkov)(w1, kernels.linear(w2), inner)


def _confidence(checkpoint: DrafterCheckpoint, config: BlockConfig) -> ConfidenceHead | None:
    name = "confidence_head.proj."
    if not checkpoint.has(f"{name}weight"):
        return None
    width = config.layer.hidden_size
    width += config.markov_rank if config.confidence_with_markov else 0
    bias = checkpoint.vector(f"{name}bias", 1) if checkpoint.has(f"{name}bias") else None
    weight = checkpoint.stored(f"{name}weight", (1, width)).data[0].float()
    temperatures = config.confidence_temperatures or (1.0,) * config.block_size
    return ConfidenceHead(weight, bias, torch.tensor(temperatures))
