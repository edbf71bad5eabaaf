"""The RoPE table of a model's config, as transformers computes it; NumPy alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fkv._errors import sentence

MOST_ROWS = 1 << 24  # positions that float32 tells apart
BLOCK = 1 << 16  # rows whose float64 angles are in memory at a time


NUMBERS = (
    *("rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor"),
    *("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"),
    *("max_position_embeddings", "original_max_position_embeddings"),
)


def rope_table(config: Mapping[str, Any], rows: int) -> np.ndarray:
    """[rows, R] float32: the cosines of each position's R/2 angles, then their sines.

    The attention factor of yarn is a factor of both, so that K comes out with it.
    """
    return table(*frequencies(config), rows)


def table(inv_freq: np.ndarray, attention_factor: float, rows: int) -> np.ndarray:
    """Angles are float32, as in transformers; each of their cosines and sines is rounded once."""
    half, factor = len(inv_freq), np.float32(attention_factor)
    result = np.empty((rows, 2 * half), np.float32)
    for start in range(0, rows, BLOCK):
        part = slice(start, min(start + BLOCK, rows))
        positions = np.arange(part.start, part.stop, dtype=np.float32)
        angles = (positions[:, None] * inv_freq).astype(np.float64)
        result[part, :half], result[part, half:] = np.cos(angles), np.sin(angles)
    result *= factor
    return result


def frequencies(config: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """The R/2 angles of position 1 in float32, and the attention factor.

    Source: transformers, modeling_rope_utils.py. Both of its generations of keys are read:
    `rope_parameters`, and `rope_scaling` beside `rope_theta`.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ValueError(sentence("config.json", "an object as rope_scaling", repr(rope)))
    rope = dict(rope)
    if any(isinstance(value, Mapping) for value in rope.values()):
        got = f"one each for {', '.join(rope)}"
        raise NotImplementedError(sentence("config.json", "one RoPE for all layers", got))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in KINDS:
        raise NotImplementedError(
            sentence("config.json", f"rope_type {' or '.join(KINDS)}", repr(kind))
        )
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise ValueError(sentence("config.json", "rope_theta", "none"))
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    longest = config.get("max_position_embeddings")
    original = config.get(
        "original_max_position_embeddings", rope.get("original_max_position_embeddings", longest)
    )
    numbers = rope | {
        "rope_theta": theta,
        "partial_rotary_factor": part,
        "max_position_embeddings": longest,
        "original_max_position_embeddings": original,
    }
    for name, value in numbers.items():
        least = "0 or more" if name.startswith("mscale") else "above 0"
        if name in NUMBERS and value is not None and not _is_number(value, least):
            expected = f"a finite number {least} as {name}"
            raise ValueError(sentence("config.json", expected, repr(value)))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    dim = int(head_dim * (1.0 if part is None else part))
    if dim % 2 or not 0 < dim <= head_dim:
        even = f"an even rotary size up to head_dim = {head_dim}"
        raise ValueError(sentence("config.json", even, f"{dim}", f"partial_rotary_factor {part}"))
    steps = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    periods = np.power(float(theta), steps.astype(np.float64)).astype(np.float32)
    try:
        lengths = {"original": original, "longest": longest}
        inv_freq, factor = KINDS[kind](periods, rope | lengths, float(theta))
    except (KeyError, TypeError, ArithmeticError) as error:
        missing = error.args[0] if isinstance(error, KeyError) else "numbers"
        expected = f"{missing} for rope_type {kind!r}"
        raise ValueError(sentence("config.json", expected, repr(rope))) from error
    if not (np.isfinite(inv_freq).all() and (inv_freq > 0).all() and 0 < factor < math.inf):
        expected = f"numbers that make a RoPE of rope_type {kind!r}"
        raise ValueError(sentence("config.json", expected, repr(rope)))
    return inv_freq, factor


def _is_number(value: Any, least: str) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf and (value > 0 or least == "0 or more")


def _default(periods: np.ndarray, rope: dict[str, Any], theta: float) -> tuple[np.ndarray, float]:
    return 1 / periods, 1.0


def _linear(periods: np.ndarray, rope: dict[str, Any], theta: float) -> tuple[np.ndarray, float]:
    return 1 / periods / rope["factor"], 1.0


def _llama3(periods: np.ndarray, rope: dict[str, Any], theta: float) -> tuple[np.ndarray, float]:
    """Slower by the factor where a turn is longer than the context, smoothly in between."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    if low >= high:
        got = f"{low} and {high}"
        raise ValueError(sentence("config.json", "low_freq_factor below high_freq_factor", got))
    fast, length = 1 / periods, rope["original"]
    turn = 2 * math.pi / fast
    slow = np.where(turn > length / low, fast / factor, fast)
    smooth = (length / turn - low) / (high - low)
    between = (1 - smooth) * slow / factor + smooth * slow
    medium = (turn >= length / high) & (turn <= length / low)
    return np.where(medium, between, slow), 1.0


def _yarn(periods: np.ndarray, rope: dict[str, Any], theta: float) -> tuple[np.ndarray, float]:
    """Slower by the factor below `beta_slow` turns in the context, a ramp up to `beta_fast`."""
    dim, length = 2 * len(periods), rope["original"]
    factor = rope["factor"]
    if factor is None:
        factor = rope["longest"] / length

    def scale(mscale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        ours, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
        attention_factor = scale(ours) / scale(all_dim) if ours and all_dim else scale()

    def dimension(turns: float) -> float:
        """Which makes so many turns in the context."""
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    fast, slow = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1
    if fast < slow:
        raise ValueError(sentence("config.json", "beta_slow up to beta_fast", f"{slow} and {fast}"))
    low, high = dimension(fast), dimension(slow)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    keep = 1 - np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return 1 / (factor * periods) * (1 - keep) + 1 / periods * keep, float(attention_factor)


KINDS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
