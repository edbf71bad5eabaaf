"""The story of one call, and of one ahead of time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from fkv._backends import choose, load
from fkv._frameworks import carry_back, carry_in, framework_of, spec_of
from fkv._spec import as_sizes, check_overlap, check_values


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
    home = framework_of(arrays)
    chosen = choose(home.name, backend)
    sizes = as_sizes(num_kv_heads, head_dim, rotary_dim)
    spec = spec_of(home, home.signature(arrays), *sizes)
    check_overlap(spec, home.pointers(arrays))
    check_values(spec, *home.values(spec, eps, positions))
    results = load(chosen).run(spec, *carry_in(arrays, spec, home, chosen.framework))
    return carry_back(results, arrays, home)


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
    home = framework_of((k_norm_weight, k_norm_weight, eps, cos_sin_cache, eps, None, None))
    n_layers, head_dim = k_norm_weight.shape
    positions_dtype = positions_dtype or ("int64" if home.name == "torch" else "int32")
    for tokens in total_ctx:
        kv = home.zeros((tokens, n_layers, 2 * num_kv_heads * head_dim), dtype, k_norm_weight)
        positions = home.zeros((tokens,), positions_dtype, k_norm_weight)
        home.wait(materialize(kv, k_norm_weight, eps, cos_sin_cache, positions, backend=backend))
