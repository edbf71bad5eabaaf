"""The story of one call, and of one ahead of time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from fkv._backends import choose, load
from fkv._errors import sentence
from fkv._frameworks import (
    cache_spec_of,
    carry_back,
    carry_in,
    framework_of,
    join_caches,
    spec_of,
    split_caches,
)
from fkv._spec import (
    MATERIALIZE,
    as_size,
    as_sizes,
    cache_arguments,
    check_cache_values,
    check_layout,
    check_overlap,
    check_values,
)


def materialize(
    kv: Any,
    k_norm_weight: Any,
    eps: Any,
    cos_sin_cache: Any,
    positions: Any,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary_dim: int | None = None,
    k_out: Any = None,
    v_out: Any = None,
    *,
    backend: Literal["triton", "pallas"] | None = None,
) -> tuple[Any, Any]:
    """Turn the stacked KV projection of all draft layers into the context KV cache, in one kernel.

    For token t, layer l, head h, with p = positions[t] and i < R/2 (neox pairing)::

        k     = kv[t, l, h*D : (h+1)*D]
        k_n   = k * rsqrt(mean(k**2) + eps[l]) * k_norm_weight[l]
        k_out[l, t, h, i]       = k_n[i] * cos[p, i] - k_n[i + R/2] * sin[p, i]
        k_out[l, t, h, i + R/2] = k_n[i + R/2] * cos[p, i] + k_n[i] * sin[p, i]
        k_out[l, t, h, R:]      = k_n[R:]
        v_out[l, t, h]          = kv[t, l, (H+h)*D : (H+h+1)*D]      (bit for bit)

    in float32 with one rounding, to nearest even, at the store.

    Args:
        kv: [T, L, 2*H*D], bfloat16, float16 or float32: per token and layer all K heads, then all
            V heads. T and L may be strided, the last dim is contiguous.
        k_norm_weight: [L, D], any of the three dtypes: the K RMSNorm weight of each layer.
        eps: [L], float32: the K RMSNorm epsilon of each layer, 0 or more.
        cos_sin_cache: [P, R], any of the three dtypes: row p is the cosines of R/2 angles, then
            their sines.
        positions: [T], int32 or int64: each token's row of cos_sin_cache.
        num_kv_heads: H; by default from kv.
        head_dim: D; by default from k_norm_weight.
        rotary_dim: R, even, from 2 to D; by default from cos_sin_cache.
        k_out, v_out: [L, T, H, D], kv's dtype: torch tensors to write into, by default new ones.
            The last dim is contiguous, the others may be strided. jax arrays are immutable.
        backend: "triton" or "pallas"; by default the native one of the arrays (torch: triton, jax:
            pallas). The other one gets them through DLPack, and may want contiguous tensors.

    Returns:
        (k, v): each [L, T, H, D] in kv's dtype, framework and device; k_out and v_out where given.

    Raises:
        TypeError: not an array, arrays of two frameworks, a traced array for backend="triton".
        ValueError: shape, dtype, stride, device, overlap; on the host also a position outside the
            table and an eps that is negative or not finite. Nothing has been written then.
        NotImplementedError: valid, but not on this backend or GPU; the message names the other one.
        ImportError: the backend's packages are not installed.

    Values on a GPU are not read back. There a position outside the table makes the K rows of its
    token NaN; its V rows and all other tokens are right.

    Source: SGLang, python/sglang/kernels/ops/speculative/fused_kv_materialize.py.
    """
    arrays = (kv, k_norm_weight, eps, cos_sin_cache, positions, k_out, v_out)
    home = framework_of(arrays, MATERIALIZE)
    chosen = choose(home.name, backend)
    sizes = as_sizes(num_kv_heads, head_dim, rotary_dim)
    spec = spec_of(home, home.signature(arrays, MATERIALIZE), *sizes)
    check_overlap(spec, home.pointers(arrays, MATERIALIZE))
    check_values(spec, *home.values(spec, eps, positions))
    results = load(chosen).run(spec, *carry_in(arrays, spec, home, chosen.framework))
    k, v = carry_back(results, arrays, spec, home)
    return k, v


def write_cache(
    kv: Any,
    k_norm_weight: Any,
    eps: Any,
    cos_sin_cache: Any,
    positions: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary_dim: int | None = None,
    *,
    commit_lens: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    layout: Literal["NHD", "HND"] = "NHD",
    backend: Literal["triton", "pallas"] | None = None,
) -> tuple[Any, Any]:
    """Turn the stacked KV projection into context KV where it belongs: the slots of a cache.

    With k and v as :func:`materialize` defines them, before its rounding, slot = slot_mapping[t],
    page = slot // page_size and offset = slot % page_size::

        k_cache[l, page, offset, h] = round(k[l, t, h] / k_scale[l])
        v_cache[l, page, offset, h] = round(v[l, t, h] / v_scale[l])

    in one launch for all layers. No other cell of the caches is read or written.

    Args:
        kv, k_norm_weight, eps, cos_sin_cache, positions, num_kv_heads, head_dim, rotary_dim,
            backend: those of :func:`materialize`.
        k_cache, v_cache: of one shape, bfloat16, float16, float32, float8_e4m3fn or float8_e5m2:

            - flat, [L, num_slots, H, D];
            - paged, [L, num_pages, page_size, H, D], or with layout="HND"
              [L, num_pages, H, page_size, D];
            - or a list of L arrays of such a shape without L.

            torch tensors are written in place; the last dim is contiguous, the others may be
            strided, in the same way in each layer. jax arrays are immutable, see Returns.
        slot_mapping: [T], or [L, T] with a map of its own for each layer; int32 or int64. A
            negative slot skips its token, whose position and kv may then be anything. Tokens with
            one slot are written at the same time: do not ask what is there afterwards.
        commit_lens: [B], int32 or int64: slot_mapping is then [B, W] with B*W = T, and only the
            first commit_lens[b] tokens of row b are written.
        k_scale, v_scale: [L], float32, with float8 caches only; None is 1. Values are divided,
            clamped to the largest finite one with NaN kept, and rounded to nearest even.
        layout: of a page: tokens before heads ("NHD"), or heads before tokens ("HND").

    Returns:
        (k_cache, v_cache): in torch the same objects. In jax new arrays; under jax.jit they take
        the memory of the old ones where those are donated, else XLA copies the caches first.

    Raises:
        What :func:`materialize` raises. ValueError on the host also for a slot at or past the
        capacity of the caches, a count outside of the window, a scale that is not finite and above
        0. On a GPU such a slot is not written, and such a scale makes its layer's rows NaN.
        NotImplementedError: lists of caches with backend="pallas".

    Source: SGLang, python/sglang/kernels/ops/speculative/dspark/fused_kv_write.py.
    """
    check_layout(layout)
    caches, counts = split_caches(k_cache, v_cache)
    arguments = cache_arguments(*counts)
    where = (slot_mapping, commit_lens, k_scale, v_scale)
    arrays = (kv, k_norm_weight, eps, cos_sin_cache, positions, *where, *caches)
    home = framework_of(arrays, arguments)
    chosen = choose(home.name, backend)
    sizes = as_sizes(num_kv_heads, head_dim, rotary_dim)
    spec = cache_spec_of(home, arguments, home.signature(arrays, arguments), layout, *sizes)
    check_overlap(spec, home.pointers(arrays, arguments))
    check_cache_values(spec, *home.values(spec, eps, positions, *where))
    results = load(chosen).write(spec, *carry_in(arrays, spec, home, chosen.framework))
    results = carry_back(results, arrays, spec, home)
    if home.name == "torch":
        return k_cache, v_cache
    return join_caches(results, counts)


def warmup(
    k_norm_weight: Any,
    eps: Any,
    cos_sin_cache: Any,
    num_kv_heads: int,
    total_ctx: Iterable[int],
    *,
    dtype: str = "bfloat16",
    positions_dtype: str | None = None,
    backend: Literal["triton", "pallas"] | None = None,
) -> None:
    """Compile what :func:`materialize` will need, so that nothing compiles while serving.

    Runs it on zeros, once for each number of tokens, and waits. Triton compiles one kernel for all
    of them, and another one where strides or addresses are not multiples of 16 bytes; jax compiles
    one for each, so pad to a few sizes.

    Args:
        k_norm_weight, eps, cos_sin_cache: the model's own, as they will be in the calls.
        num_kv_heads: H.
        total_ctx: the numbers of tokens, T, that are to come.
        dtype: of kv: "bfloat16", "float16" or "float32".
        positions_dtype: "int32" or "int64"; by default int64 in torch, int32 in jax.
        backend: as in the calls.

    Raises:
        What :func:`materialize` raises for these arrays.
    """
    arrays = (k_norm_weight, k_norm_weight, eps, cos_sin_cache, eps, None, None)
    home = framework_of(arrays, MATERIALIZE)
    n_layers, head_dim = k_norm_weight.shape
    positions_dtype = positions_dtype or ("int64" if home.name == "torch" else "int32")
    if not isinstance(total_ctx, Iterable):
        got = f"{type(total_ctx).__name__} {total_ctx!r}"
        raise TypeError(sentence("total_ctx", "a list of numbers of tokens", got))
    for tokens in map(_tokens, total_ctx):
        kv = home.zeros((tokens, n_layers, 2 * num_kv_heads * head_dim), dtype, k_norm_weight)
        positions = home.zeros((tokens,), positions_dtype, k_norm_weight)
        home.wait(materialize(kv, k_norm_weight, eps, cos_sin_cache, positions, backend=backend))


def _tokens(value: Any) -> int:
    size = as_size("total_ctx", value)
    if size is None or size < 0:
        raise ValueError(sentence("total_ctx", "numbers of 0 or more tokens", str(value)))
    return size
