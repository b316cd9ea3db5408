"""Options of training EAGLE-3 and MTP drafters. Knows numbers and names only."""

from dataclasses import dataclass

from .config import Batching


@dataclass(frozen=True, slots=True)
class Eagle3Shape:
    """Shape of an EAGLE-3 drafter; everything else is copied from the target's config."""

    target_layer_ids: tuple[int, ...] = (1, 14, 27)  # id i is the output of layer i
    num_kv_heads: int = 3
    num_drafts: int = 5  # draft steps that are unrolled, as many as serving takes
    draft_vocab_size: int = 12288


@dataclass(frozen=True, slots=True)
class MtpShape:
    """Shape of chained MTP heads; everything else is copied from the target's config."""

    num_heads: int = 3  # head j drafts token j + 1 after the root
    num_kv_heads: int = 3
    draft_vocab_size: int = 12288
    # They read the target's final hidden state; the layer behind this one gives their first values.
    target_layer_ids: tuple[int, ...] = (27,)


@dataclass(frozen=True, slots=True)
class ChainLoss:
    """Loss of a draft: `ce * CE + overlap * L1`, the same for every draft step.

    Later steps count less because fewer chains get there, which saves their cost as well.
    """

    ce: float = 0.1
    overlap: float = 0.9
    decay: float = 0.75  # share of the chains at step j that go on to step j + 1
    ce_only_fraction: float = 0.3  # of all steps, at the start: CE with weight 1, no L1
    teacher_top_k: int = 64  # entries kept of a target distribution; the rest counts as missed mass


EAGLE3_BATCHING = Batching(num_sequences=10, anchors_per_sequence=64)
MTP_BATCHING = Batching(num_sequences=5, anchors_per_sequence=128)  # heads run on all rows anyway
