"""The definition in NumPy float64, and how far a kernel may be from it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["error_bound", "materialize", "place", "quantize", "worst_error", "write_cache"]

# dtype -> significand bits, smallest normal exponent, largest finite value
_FORMATS = {
    "bfloat16": (8, -126, float.fromhex("0x1.fep127")),
    "float16": (11, -14, 65504.0),
    "float32": (24, -126, float.fromhex("0x1.fffffep127")),
    "float8_e4m3fn": (4, -6, 448.0),
    "float8_e5m2": (3, -14, 57344.0),
}
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")  # saturate
_U = 2.0**-24  # unit roundoff of float32
_TINY = 2.0**-126  # smallest normal float32: below, a GPU may flush to zero


def materialize(
    kv: ArrayLike,
    k_norm_weight: ArrayLike,
    eps: ArrayLike,
    cos_sin_cache: ArrayLike,
    positions: ArrayLike,
) -> tuple[np.ndarray, np.ndarray]:
    """K in float64 and V as it is, each [L, T, H, D], by the formula of :func:`fkv.materialize`.

    The arguments are its arguments as NumPy arrays, already rounded to the dtypes under
    test (the values of a bfloat16 tensor may come as float32). A position outside the table gives
    NaN rows.
    """
    k, v, cos, sin, _ = _normed(kv, k_norm_weight, eps, cos_sin_cache, positions)
    half = cos.shape[-1]
    a, b = k[..., :half], k[..., half : 2 * half]
    rotated = (a * cos - b * sin, b * cos + a * sin, k[..., 2 * half :])
    return np.concatenate(rotated, axis=-1), v


def write_cache(
    kv: ArrayLike,
    k_norm_weight: ArrayLike,
    eps: ArrayLike,
    cos_sin_cache: ArrayLike,
    positions: ArrayLike,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    slot_mapping: ArrayLike,
    *,
    commit_lens: ArrayLike | None = None,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    layout: str = "NHD",
) -> tuple[np.ndarray, np.ndarray]:
    """What the caches hold after :func:`fkv.write_cache`: k_cache in float64, before its rounding.

    The caches, stacked, are not changed. Of tokens with one slot the last one stays.
    """
    k, v = materialize(kv, k_norm_weight, eps, cos_sin_cache, positions)
    if k_cache.dtype.name in _FLOAT8:
        k = _clamped(k / _scale(k_scale), k_cache.dtype.name)
    v = v if v.dtype == v_cache.dtype else quantize(v, v_scale, v_cache.dtype)
    where = (slot_mapping, commit_lens, layout)
    return place(k, k_cache.astype(np.float64), *where), place(v, v_cache, *where)


def quantize(values: ArrayLike, scale: ArrayLike | None, dtype: Any) -> np.ndarray:
    """[L, ...] in `dtype`: in float8 divided by scale [L] in float32, and clamped, NaN kept."""
    values, dtype = np.asarray(values).astype(np.float32), np.dtype(dtype)
    if dtype.name not in _FLOAT8:
        with np.errstate(over="ignore"):
            return values.astype(dtype)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        values = (values / np.float32(_scale(scale))).astype(np.float32)
    rounded = _clamped(values, dtype.name).astype(dtype)
    rounded.view(np.uint8)[np.isnan(values)] = 0x7F
    return rounded


def place(
    values: np.ndarray,
    cache: np.ndarray,
    slot_mapping: ArrayLike,
    commit_lens: ArrayLike | None = None,
    layout: str = "NHD",
) -> np.ndarray:
    """A copy of a stacked cache with values [L, T, H, D] in their slots, by plain loops."""
    cache, slots = cache.copy(), np.asarray(slot_mapping).astype(np.int64)
    if commit_lens is not None:
        columns = np.arange(slots.shape[1])
        slots = np.where(columns < np.asarray(commit_lens)[:, None], slots, -1).ravel()
    n_layers, total_ctx = values.shape[:2]
    slots = np.broadcast_to(slots, (n_layers, total_ctx))
    is_flat = cache.ndim == 4
    page_size = 1 if is_flat else cache.shape[2 if layout == "NHD" else 3]
    for layer, token in np.ndindex(n_layers, total_ctx):
        page, offset = divmod(int(slots[layer, token]), page_size)
        if 0 <= page < cache.shape[1]:
            if is_flat:
                cache[layer, page] = values[layer, token]
            elif layout == "NHD":
                cache[layer, page, offset] = values[layer, token]
            else:
                cache[layer, page, :, offset] = values[layer, token]
    return cache


def error_bound(
    kv: ArrayLike,
    k_norm_weight: ArrayLike,
    eps: ArrayLike,
    cos_sin_cache: ArrayLike,
    positions: ArrayLike,
    dtype: str,
    k_scale: ArrayLike | None = None,
) -> np.ndarray:
    """The largest |kernel - exact| of K that float32 and one rounding to `dtype` explain.

    Elementwise, [L, T, H, D]. With u = 2**-24, to first order:

    - the sum of D squares in any order: D*u relative; the mean and the sum with eps: 3*u more;
      rsqrt halves that and adds 4*u (hardware approximates it to 2 ulp); the products with k and
      with the weight: 2*u. So k_n carries delta = ((D + 3)/2 + 6)*u.
    - a*cos - b*sin: two products and a sum, (delta + 2*u) * (|a*cos| + |b*sin|), which is large
      beside the result where the two cancel.
    - float32 flushed to zero below 2**-126: the squares, beside mean + eps, and the products.
    - the store: half a unit in the last place of `dtype` at the result.
    - float8: all of that divided by k_scale [L], which k_n may be multiplied with the reciprocal
      of: 2*u more; clamping moves no value away from another.

    Infinite where the sum of squares leaves float32's range (values of about 1e18 and more, where
    the kernels return 0) and where the result, rounded up, leaves that of `dtype`.
    """
    if dtype not in _FORMATS:
        raise ValueError(f"`dtype`: expected {' or '.join(_FORMATS)}, got {dtype!r}")
    exact, _ = materialize(kv, k_norm_weight, eps, cos_sin_cache, positions)
    k, _, cos, sin, mean = _normed(kv, k_norm_weight, eps, cos_sin_cache, positions)
    weight = np.abs(np.asarray(k_norm_weight, np.float64))[:, None, None, :]
    eps = np.asarray(eps, np.float64)[:, None, None, None]
    dim, half = k.shape[-1], cos.shape[-1]

    def rotated(x: np.ndarray) -> np.ndarray:
        """The sizes of what is added up in each element of the result."""
        a, b, c, s = x[..., :half], x[..., half : 2 * half], np.abs(cos), np.abs(sin)
        return np.concatenate([a * c + b * s, b * c + a * s, x[..., 2 * half :]], axis=-1)

    with np.errstate(divide="ignore", invalid="ignore"):
        delta = ((dim + 3) / 2 + 6) * _U + 0.5 * _TINY / (mean + eps)
        flushed = _TINY * weight * (1 + 1 / np.sqrt(mean + eps))
        delta += 2 * _U * (k_scale is not None)
        tiny = rotated(flushed + 0 * k) + 2 * _TINY
        noise = (delta + 2 * _U) * rotated(np.abs(k)) + tiny
        noise = np.where(dim * mean < _FORMATS["float32"][2], noise, np.inf)
        if dtype in _FLOAT8:
            exact, noise = exact / _scale(k_scale), noise / _scale(k_scale) + tiny
            return noise + _half_ulp(_clamped(np.abs(exact) + noise, dtype), dtype)
        return noise + _half_ulp(np.abs(exact) + noise, dtype)


def worst_error(actual: ArrayLike, exact: ArrayLike, bound: ArrayLike) -> float:
    """The largest error as a multiple of its bound: right is 1 or less.

    Infinite where one of the two is NaN and the other is not.
    """
    actual, exact, bound = (np.asarray(x, np.float64) for x in (actual, exact, bound))
    if actual.shape != exact.shape:
        raise ValueError(f"`actual`: expected shape {list(exact.shape)}, got {list(actual.shape)}")
    if not actual.size:
        return 0.0
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.where(actual == exact, 0.0, np.abs(actual - exact) / bound)
    error = np.where(np.isinf(bound) & ~np.isnan(actual), 0.0, error)
    error = np.where(np.isnan(actual) & np.isnan(exact), 0.0, error)
    return float(np.where(np.isnan(error), np.inf, error).max())


def _normed(
    kv: ArrayLike, weight: ArrayLike, eps: ArrayLike, table: ArrayLike, positions: ArrayLike
) -> tuple[Any, ...]:
    """k_n, v, cos, sin and mean(k**2), laid out [L, T, H, ...]."""
    kv, positions = np.asarray(kv), np.asarray(positions).astype(np.int64)
    weight, eps, table = (np.asarray(x, np.float64) for x in (weight, eps, table))
    (total_ctx, n_layers, width), dim = kv.shape, weight.shape[1]
    heads = kv.reshape(total_ctx, n_layers, 2, width // (2 * dim), dim).transpose(2, 1, 0, 3, 4)
    k, v = heads[0].astype(np.float64), heads[1]
    mean = np.mean(k * k, axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        k = k / np.sqrt(mean + eps[:, None, None, None]) * weight[:, None, None, :]
    inside = (positions >= 0) & (positions < len(table))
    k = np.where(inside[None, :, None, None], k, np.nan)
    rows = table[np.where(inside, positions, 0)][None, :, None, :]
    half = table.shape[1] // 2
    return k, v, rows[..., :half], rows[..., half:], mean


def _scale(scale: ArrayLike | None) -> Any:
    """Of each layer, beside [L, T, H, D]; NaN for what is no scale."""
    if scale is None:
        return 1.0
    scale = np.asarray(scale, np.float64)[:, None, None, None]
    return np.where((scale > 0) & np.isfinite(scale), scale, np.nan)


def _clamped(values: np.ndarray, dtype: str) -> np.ndarray:
    largest = _FORMATS[dtype][2]
    return np.clip(values, -largest, largest)


def _half_ulp(value: np.ndarray, dtype: str) -> np.ndarray:
    """Half the distance between neighbours of `dtype` at |value|; infinite past its range."""
    bits, lowest, largest = _FORMATS[dtype]
    _, exponent = np.frexp(value)
    half = np.ldexp(1.0, np.maximum(exponent - 1, lowest) - bits)
    return np.where(value >= largest + half, np.inf, half)
