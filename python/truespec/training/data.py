"""What every drafter is trained on: the target, its features, and the answers they belong to."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .answers import Answer, count_tokens, read_answers
from .cache import FeatureCache
from .start import choose_draft_vocab
from .target import Target, load_target


@dataclass(frozen=True, slots=True)
class TrainingData:
    """A target, and what it computed of its own answers."""

    target: Target
    train: FeatureCache
    dev: FeatureCache
    answers: list[Answer]  # without those to held-out prompts

    def draft_vocab(self, size: int) -> Tensor:
        """The `size` ids the answers use most, ascending; [DV] int64.

        Raises ValueError if the target has fewer.
        """
        vocab_size = self.target.embedding.shape[0]
        if size > vocab_size:
            raise ValueError(f"{size} draft ids, the target has {vocab_size}")
        return choose_draft_vocab(count_tokens(self.answers, vocab_size), size)


def load_data(
    answers_path: Path, target_dir: Path, cache_dir: Path, layers: tuple[int, ...]
) -> TrainingData:
    """Read a target's directory, recorded answers, and the features of `layers`."""
    train, dev = (FeatureCache(cache_dir, split, layers) for split in ("train", "dev"))
    held_out = {tuple(s.token_ids[: s.answer_start].tolist()) for s in dev}
    answers = [a for a in read_answers(answers_path) if tuple(a.prompt_ids) not in held_out]
    return TrainingData(load_target(target_dir), train, dev, answers)
