"""Rope parameters in config.json: `rope_theta` with `rope_scaling`, or `rope_parameters`."""

from __future__ import annotations

from truespec.layers.rope import RopeParameters

from .fields import Fields

TYPES = ("default", "linear", "llama3", "yarn")


def read_rope(raw: Fields) -> tuple[RopeParameters, int]:
    """The rope parameters of a config.json and the context length they give.

    Raises:
        CheckpointError: the scaling is not built, or a field of it is missing or malformed.
    """
    positions = raw.integer("max_position_embeddings")
    scaling = raw.nested("rope_parameters") or raw.nested("rope_scaling")
    theta = raw.number("rope_theta", 10000.0)
    if scaling is None:
        return RopeParameters(theta=theta), positions
    theta = scaling.number("rope_theta", theta)
    name = "rope_type" if scaling.get("rope_type") is not None else "type"
    kind = scaling.text(name, "default")
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise scaling.error("partial_rotary_factor", "1 (nothing else is built)")
    if kind == "default":
        return RopeParameters(theta=theta), positions
    if kind == "linear":
        factor = scaling.number("factor")
        return RopeParameters(theta=theta, type="linear", factor=factor), positions
    if kind == "llama3":
        return _llama3(scaling, theta, positions), positions
    if kind == "yarn":
        parameters = _yarn(scaling, theta, positions)
        extended = int(parameters.factor * parameters.original_max_positions)
        return parameters, max(positions, extended)
    raise scaling.error(name, f"one of {', '.join(TYPES)}")


def _llama3(scaling: Fields, theta: float, positions: int) -> RopeParameters:
    return RopeParameters(
        theta=theta,
        type="llama3",
        factor=scaling.number("factor"),
        original_max_positions=scaling.integer("original_max_position_embeddings", positions),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
    )


def _yarn(scaling: Fields, theta: float, positions: int) -> RopeParameters:
    original = scaling.integer("original_max_position_embeddings", positions)
    given = scaling.get("attention_factor") is not None
    return RopeParameters(
        theta=theta,
        type="yarn",
        factor=scaling.number("factor", positions / original),
        original_max_positions=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", default=True),
        attention_factor=scaling.number("attention_factor") if given else None,
        mscale=scaling.number("mscale", 0.0),
        mscale_all_dim=scaling.number("mscale_all_dim", 0.0),
    )
