"""What training needs of the frozen target, from a directory in Hugging Face's Llama layout."""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Target:
    """Config and weights of the target; names are Hugging Face's, without the `model.` prefix."""

    config: dict[str, object]
    weights: dict[str, Tensor]

    @property
    def embedding(self) -> Tensor:
        return self.weights["embed_tokens.weight"]  # [V, H]

    @property
    def head(self) -> Tensor:
        return self.weights.get("lm_head.weight", self.embedding)  # [V, H]

    @property
    def norm(self) -> Tensor:
        return self.weights["norm.weight"]  # [H]

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def rope_theta(self) -> float:
        rope = self.config.get("rope_parameters")
        theta = rope["rope_theta"] if isinstance(rope, dict) else self.config["rope_theta"]
        return float(str(theta))

    def number(self, name: str) -> float:
        """A numeric entry of the config."""
        return float(str(self.config[name]))

    def layer(self, index: int) -> dict[str, Tensor]:
        """Weights of one decoder layer, names relative to the layer."""
        prefix = f"layers.{index}."
        return {k.removeprefix(prefix): v for k, v in self.weights.items() if k.startswith(prefix)}


def load_target(path: Path) -> Target:
    """Read `config.json` and all `*.safetensors` of a Llama-shaped target."""
    config = json.loads((path / "config.json").read_text())
    files = sorted(path.glob("*.safetensors"))
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return Target(config, {k.removeprefix("model."): v for k, v in weights.items()})
