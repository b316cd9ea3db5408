"""Options of a training run. Knows numbers and names only; no tensors, no files."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DSparkShape:
    """Shape of a DSpark drafter; everything else is copied from the target's config."""

    target_layer_ids: tuple[int, ...] = (1, 8, 14, 20, 27)  # id i is the output of layer i
    num_layers: int = 2
    num_kv_heads: int = 9
    block_size: int = 7  # rows of a block = draft tokens per round
    draft_vocab_size: int = 12288
    markov_rank: int = 32


@dataclass(frozen=True, slots=True)
class DFlashShape:
    """Shape of a DFlash drafter; everything else is copied from the target's config."""

    target_layer_ids: tuple[int, ...] = (1, 8, 14, 20, 27)  # id i is the output of layer i
    num_layers: int = 2
    num_kv_heads: int = 9
    block_size: int = 7  # rows of a block = draft tokens per round
    draft_vocab_size: int = 12288


@dataclass(frozen=True, slots=True)
class Answering:
    """How the target answers prompts: each prompt once at every temperature."""

    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    max_tokens: int = 256
    answer_seed: int = 0  # another seed adds other answers at T > 0
    group_size: int = 64  # answers between two writes


@dataclass(frozen=True, slots=True)
class Collecting:
    """Which recorded answers are run through the target, and in which order."""

    num_dev: int = 150  # answers held out, by whole prompts
    max_train: int = 1 << 30  # answers to train on; fewer for a quick run
    greedy_weight: float = 2.0  # how much earlier answers at T = 0 come in the random order
    shard_size: int = 256  # answers
    split_seed: int = 0
    order_seed: int = 1


@dataclass(frozen=True, slots=True)
class DSparkLoss:
    """Loss of one block row i: `exp(-i / decay) * (ce * CE + overlap * L1) + confidence * BCE`."""

    ce: float = 0.1
    overlap: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    ce_only_fraction: float = 0.3  # of all steps, at the start: CE with weight 1, no L1
    teacher_top_k: int = 64  # entries kept of a target distribution; the rest counts as missed mass


@dataclass(frozen=True, slots=True)
class DFlashLoss:
    """Loss of one block row i: `exp(-i / decay) * (ce * CE + overlap * L1)`."""

    ce: float = 0.1
    overlap: float = 0.9
    decay: float = 4.0
    ce_only_fraction: float = 0.3  # of all steps, at the start: CE with weight 1, no L1
    teacher_top_k: int = 64  # entries kept of a target distribution; the rest counts as missed mass


@dataclass(frozen=True, slots=True)
class Batching:
    """A batch has `num_sequences * anchors_per_sequence` blocks; a step has a batch per thread."""

    num_sequences: int = 10
    anchors_per_sequence: int = 28
    category_balance: float = 0.5  # 0: as recorded, 1: every category equally often
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """Optimiser, schedule and how often to write; times in seconds."""

    num_steps: int = 1200
    num_threads: int = 2  # batches per step, each computed by one thread
    device: str = "cpu"  # or cuda, where one batch is computed after the other
    learning_rate: float = 2e-3
    muon_min_dim: int = 128  # matrices with no side below it are trained by Muon, the rest by AdamW
    warmup_fraction: float = 0.04
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    beta2: float = 0.98
    rounding: str = "none"  # q4_1: train for weights that serving rounds to 4 bits
    average_decay: float = 0.998  # of the weight average that is measured and exported
    measure_every: int = 100  # steps
    save_every_s: float = 180.0

    @property
    def num_workers(self) -> int:
        """Threads that compute batches at a time."""
        return self.num_threads if self.device == "cpu" else 1


@dataclass(frozen=True, slots=True)
class Calibrating:
    """What the confidence head is fitted on."""

    num_answers: int = 200  # training answers at T = 0
