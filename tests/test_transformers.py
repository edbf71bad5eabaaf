"""An oracle that nobody here wrote: the Qwen3 attention of `transformers`, its cache read back."""

import functools

import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import DynamicCache, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

import fkv
from cases import DTYPES, to_framework, to_numpy

TOKENS, ROWS, HIDDEN_SIZE, NUM_KV_HEADS = 21, 512, 64, 2
EPS = (1e-6, 1e-5, 1e-3)  # a layer each


@functools.cache
def qwen3(dtype, head_dim):
    """The arguments of materialize and the K and V of transformers, [L, T, H, D], in NumPy.

    Every layer projects the same hidden states, as the draft model does with its context. kv is
    what k_proj and v_proj returned in the forward pass whose cache gives K and V.
    """
    configs = [
        Qwen3Config(
            hidden_size=HIDDEN_SIZE,
            num_hidden_layers=len(EPS),
            num_attention_heads=2 * NUM_KV_HEADS,
            num_key_value_heads=NUM_KV_HEADS,
            head_dim=head_dim,
            rms_norm_eps=eps,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            attn_implementation="eager",
        )
        for eps in EPS
    ]
    random = torch.Generator().manual_seed(head_dim)
    hidden = torch.randn(1, TOKENS, HIDDEN_SIZE, generator=random).to(getattr(torch, dtype))
    positions = torch.randint(ROWS, [TOKENS], generator=random)
    cos, sin = Qwen3RotaryEmbedding(configs[0])(hidden, torch.arange(ROWS)[None])

    projections, weights, cache = [], [], DynamicCache()
    with torch.no_grad():
        for layer, config in enumerate(configs):
            attention = Qwen3Attention(config, layer)
            for parameter in attention.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(std=config.initializer_range, generator=random)
                else:
                    parameter.uniform_(0.5, 1.5, generator=random)
            attention.to(hidden.dtype)
            for projection in (attention.k_proj, attention.v_proj):
                projection.register_forward_hook(lambda *call: projections.append(call[-1][0]))
            # By place, as the cache's name has changed between versions.
            attention(hidden, (cos[:, positions], sin[:, positions]), None, cache)
            weights.append(attention.k_norm.weight)
    problem = {
        "kv": torch.stack(projections, dim=1).reshape(TOKENS, len(EPS), -1),
        "k_norm_weight": torch.stack(weights),
        "eps": torch.tensor(EPS),
        "cos_sin_cache": torch.cat([x[0, :, : head_dim // 2] for x in (cos, sin)], dim=-1),
        "positions": positions,
    }
    results = (
        torch.stack([getattr(layer, name)[0].transpose(0, 1) for layer in cache.layers])
        for name in ("keys", "values")
    )
    return {name: to_numpy(array) for name, array in problem.items()}, *map(to_numpy, results)


def their_bound(kv, k_norm_weight, eps, cos_sin_cache, positions, roundings=3):
    """The largest |transformers - exact| of K that its arithmetic explains, elementwise.

    With u = 2**-24 and U the unit roundoff of kv's dtype, along Qwen3RMSNorm and
    apply_rotary_pos_emb:

    - k * rsqrt(mean(k**2) + eps) in float32: ((D + 3)/2 + 5)*u relative, as in
      `fkv.reference.error_bound` without its product with the weight.
    - That rounded to the dtype, its product with the weight, and the products with cos and sin
      are each rounded to the dtype: a factor 1 + U each. So the two terms a*cos and b*sin are off
      by growth = (1 + ((D + 3)/2 + 5)*u) * (1 + U)**3 - 1 of their size:
      noise = growth * (|a*cos| + |b*sin|). Their products are exact in float32, if the dtype is
      a narrower one, and so rounded once.
    - Where one of these three results is subnormal its rounding adds not U times itself but up to
      h, half the smallest number of the dtype: h*(|w| + 1) on a and on b, and h on each term.
    - The sum is rounded to float32 and to the dtype: (u + U) * (|exact| + noise).

    A fourth of the `roundings` is that of cos and sin, where the table is not of the dtype.
    """
    dim, dtype = k_norm_weight.shape[1], ml_dtypes.finfo(kv.dtype)
    u, U, h = 2.0**-24, float(dtype.eps) / 2, float(dtype.smallest_subnormal) / 2
    cos, sin = np.split(np.abs(cos_sin_cache[positions].astype("f8"))[:, None], 2, axis=-1)
    weight = np.abs(k_norm_weight.astype("f8"))[:, None, None]

    def sizes(k):
        """|a*cos| + |b*sin| and |b*cos| + |a*sin|."""
        a, b = np.split(k, 2, axis=-1)
        return np.concatenate([a * cos + b * sin, b * cos + a * sin], axis=-1)

    k, _ = np.split(kv.astype("f8"), 2, axis=-1)
    k = np.abs(k).reshape(len(kv), len(eps), -1, dim).swapaxes(0, 1)
    k = k / np.sqrt(np.mean(k**2, axis=-1, keepdims=True) + eps[:, None, None, None]) * weight
    growth = (1 + ((dim + 3) / 2 + 5) * u) * (1 + U) ** roundings - 1
    noise = growth * sizes(k) + h * (sizes(weight + 1 + 0 * k) + 2)
    exact, _ = fkv.reference.materialize(kv, k_norm_weight, eps, cos_sin_cache, positions)
    return noise + (u + U) * (np.abs(exact) + noise)


def assert_matches(dtype, head_dim, k, v):
    """K is as near to theirs as both roundings explain, V is theirs bit for bit."""
    problem, their_k, their_v = qwen3(dtype, head_dim)
    bound = fkv.reference.error_bound(**problem, dtype=dtype) + their_bound(**problem)
    worst = fkv.reference.worst_error(to_numpy(k), their_k, bound)
    assert worst <= 1, f"K is not that of transformers: {worst:.4g} times the bound"
    np.testing.assert_array_equal(to_numpy(v).view("u1"), their_v.view("u1"))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_qwen3(dtype, head_dim, route):
    framework, backend = route
    problem, _, _ = qwen3(dtype, head_dim)
    arrays = {name: to_framework(array, framework) for name, array in problem.items()}
    assert_matches(dtype, head_dim, *fkv.materialize(**arrays, backend=backend))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_their_own_error_is_within_their_bound(dtype, head_dim):
    problem, their_k, _ = qwen3(dtype, head_dim)
    exact, _ = fkv.reference.materialize(**problem)
    assert fkv.reference.worst_error(their_k, exact, their_bound(**problem)) <= 1


def swapped(array):
    return np.roll(array, array.shape[-1] // 2, axis=-1)


WRONG = {
    "sine_negated": ("cos_sin_cache", lambda table: np.repeat((1, -1), len(table.T) // 2) * table),
    "cosine_and_sine_swapped": ("cos_sin_cache", swapped),
    "position_off_by_one": ("positions", lambda positions: positions ^ 1),
    "eps_too_large": ("eps", lambda eps: np.full_like(eps, 1e-2)),
    "weight_halves_swapped": ("k_norm_weight", swapped),
    "weight_of_another_layer": ("k_norm_weight", lambda weight: np.roll(weight, 1, axis=0)),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_argument_is_rejected(dtype, wrong):
    problem, _, _ = qwen3(dtype, 64)
    name, spoil = WRONG[wrong]
    spoilt = problem | {name: spoil(problem[name]).astype(problem[name].dtype)}
    arrays = {name: to_framework(array, "torch") for name, array in spoilt.items()}
    with pytest.raises(AssertionError, match="K is not that of transformers"):
        assert_matches(dtype, 64, *fkv.materialize(**arrays))
