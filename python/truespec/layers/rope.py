"""Rotary position tables and their scalings. Knows formulas, not checkpoints.

Formulas: RoFormer (arXiv 2104.09864), linear scaling (arXiv 2306.15595), YaRN (arXiv 2309.00071)
and the smooth cut-off of Llama 3.1. fp32 throughout, as the models were trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """How angles follow from positions.

    Attributes:
        theta: base of the frequencies.
        type: the scaling; the fields below belong to it.
        factor: context extension, for every scaling but "default".
        original_max_positions: context length before the extension (llama3, yarn).
        low_freq_factor, high_freq_factor: bounds of the smooth cut-off (llama3).
        beta_fast, beta_slow, truncate: bounds of the ramp, in rotations (yarn).
        attention_factor: factor of cos and sin; `None` derives it from the factor (yarn).
        mscale, mscale_all_dim: used for the derived attention factor if both are set (yarn).
        freq_divisors: [head_dim / 2] explicit divisors of the frequencies, or empty.
    """

    theta: float = 10000.0
    type: RopeType = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    freq_divisors: tuple[float, ...] = ()


def rope_tables(
    parameters: RopeParameters, head_dim: int, max_positions: int
) -> tuple[Tensor, Tensor]:
    """cos and sin of every position: two [max_positions, head_dim / 2] fp32."""
    frequencies = inverse_frequencies(parameters, head_dim)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    scale = _attention_factor(parameters)
    return angles.cos() * scale, angles.sin() * scale


def inverse_frequencies(parameters: RopeParameters, head_dim: int) -> Tensor:
    """[head_dim / 2] fp32 radians per position, scaling included."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / parameters.theta**exponents
    if parameters.freq_divisors:
        assert len(parameters.freq_divisors) == len(frequencies), len(parameters.freq_divisors)
        frequencies = frequencies / torch.tensor(parameters.freq_divisors, dtype=torch.float32)
    if parameters.type == "linear":
        return frequencies / parameters.factor
    if parameters.type == "llama3":
        return _llama3(parameters, frequencies)
    if parameters.type == "yarn":
        return _yarn(parameters, frequencies, head_dim)
    return frequencies


def _llama3(parameters: RopeParameters, frequencies: Tensor) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend between."""
    low, high = parameters.low_freq_factor, parameters.high_freq_factor
    rotations = parameters.original_max_positions * frequencies / (2 * math.pi)
    blend = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / parameters.factor + blend * frequencies


def _yarn(parameters: RopeParameters, frequencies: Tensor, head_dim: int) -> Tensor:
    """Blend by dimension between kept and divided frequencies (YaRN, section 3.2)."""

    def dimension(rotations: float) -> float:
        ratio = parameters.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(parameters.theta))

    low, high = dimension(parameters.beta_fast), dimension(parameters.beta_slow)
    if parameters.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    dims = torch.arange(head_dim // 2, dtype=torch.float32)
    divided = ((dims - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / parameters.factor * divided + frequencies * (1 - divided)


def _attention_factor(parameters: RopeParameters) -> float:
    """Factor of cos and sin (YaRN, section 3.3)."""
    if parameters.type != "yarn":
        return 1.0
    if parameters.attention_factor is not None:
        return parameters.attention_factor
    if parameters.mscale and parameters.mscale_all_dim:
        numerator = _mscale(parameters.factor, parameters.mscale)
        return numerator / _mscale(parameters.factor, parameters.mscale_all_dim)
    return _mscale(parameters.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
