"""Training for the rounding with which a drafter will be served.

Gradients are taken at the rounded weights and applied to the exact ones (the straight-through
estimator, arXiv 1308.3432), so weights settle where rounding costs least.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

ROUNDINGS = ("none", "q4_1")
BLOCK = 32  # values of a row that share a scale and a minimum
LEVELS = 15
OWN_TYPE = ("markov_head", "confidence_head")  # parts whose values serving keeps


@contextmanager
def rounded(model: nn.Module, rounding: str) -> Iterator[None]:
    """While it lasts, the model's matrices hold what serving would read of its export.

    Args:
        rounding: one of `ROUNDINGS`; "none" changes nothing.
    """
    exact: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for name, module in model.named_modules():
            if not isinstance(module, nn.Linear) or name.split(".")[0] in OWN_TYPE:
                continue
            weight = module.weight
            if rounding == "none" or weight.shape[1] % BLOCK:
                continue
            exact.append((weight, weight.clone()))
            # NOTE: `fc` acts on scaled taps; its export has the scale folded in.
            scale = getattr(model, "tap_scale", 1.0) if name == "fc" else 1.0
            weight.copy_(round_q4_1(weight / scale) * scale)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, values in exact:
                weight.copy_(values)


def round_q4_1(weight: Tensor) -> Tensor:
    """Values of a stored matrix as gguf's Q4_1 has them; fp32 [n, k] -> [n, k], k % 32 == 0.

    NOTE: the gguf library rounds on the host, in numpy; this is done in every step, on the device.
    """
    blocks = weight.bfloat16().float().unflatten(1, (-1, BLOCK))
    least = blocks.amin(-1, keepdim=True)
    step = (blocks.amax(-1, keepdim=True) - least) / LEVELS
    inverse = torch.where(step == 0, 0.0, 1.0 / step)
    codes = ((blocks - least) * inverse + 0.5).floor().clamp(0, LEVELS)
    values: Tensor = codes * step.half().float() + least.half().float()
    return values.flatten(1)
