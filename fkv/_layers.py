"""What a draft model's layers hold, read by the names that SGLang, vLLM and transformers use.

Every guard is here: what one kernel cannot do for all layers is an error that names the layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fkv._errors import sentence
from fkv._frameworks import Torch
from fkv._rope import KINDS, table
from fkv._spec import FLOATS

# What a quantized linear layer has beside its weight, or in place of it.
QUANTIZED = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight", "scales", "qzeros")
CURE = "project=callable takes the place of the projection"


class Layer(NamedTuple):
    """One layer's own tensors, or views of them. Weights are None where `project` is given."""

    weights: tuple[Any, Any] | None  # of K and V: [H*D, hidden]
    biases: tuple[Any, Any] | None  # [H*D]
    k_norm_weight: Any  # [D]
    eps: float


def read_layers(
    layers: Iterable[Any],
    cos_sin_cache: Any,
    rotary_dim: int,
    num_kv_heads: int,
    head_dim: int,
    projected: bool,
) -> list[Layer]:
    """All of `layers`, once every guard has passed; `projected` looks at no weights."""
    if not isinstance(layers, Iterable):
        got, cure = type(layers).__name__, "those of a model, as model.layers"
        raise TypeError(sentence("layers", "the layers of a draft model", got, cure))
    layers = list(layers)
    if not layers:
        raise ValueError(sentence("layers", "at least one layer", "none"))
    sizes = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
    read: list[Any] = []
    tables = [cos_sin_cache]
    for index, layer in enumerate(layers):
        attention = _get(layer, "self_attn", index)
        for name, size in sizes.items():
            _same(name, size, _size_of(attention, name, index), index)
        _check_rope(attention, tables, rotary_dim, head_dim, index)
        _check_cache(attention, index)
        norm, eps = _k_norm(attention, head_dim, index)
        mine = Layer(None, None, norm, eps)
        if not projected:
            mine = Layer(*_projection(attention, num_kv_heads * head_dim, index), norm, eps)
        read.append(mine)
        _same("dtype of k_norm.weight", read[0].k_norm_weight.dtype, norm.dtype, index)
        if mine.weights is not None:
            first, weight = read[0].weights[0], mine.weights[0]
            _same("hidden size", first.shape[1], weight.shape[1], index)
            _same("dtype of the weights", first.dtype, weight.dtype, index)
    return read


def read_table(rotary_emb: Any, head_dim: int, rows: int | None) -> Any:
    """The rotary embedding's [P, R], grown to `rows` if it can grow; computed for transformers'."""
    if not bool(getattr(rotary_emb, "is_neox_style", True)):
        expected = "neox RoPE, element i paired with i + rotary_dim/2"
        raise NotImplementedError(sentence("rotary_emb", expected, "is_neox_style=False"))
    if _find(rotary_emb, "cos_sin_cache") is None and hasattr(rotary_emb, "inv_freq"):
        return _table_of_transformers(rotary_emb, head_dim, rows)
    cos_sin_cache = _find(rotary_emb, "cos_sin_cache")
    if not Torch.owns(cos_sin_cache):
        name = type(rotary_emb).__name__
        got = f"{name} without it" if cos_sin_cache is None else f"{type(cos_sin_cache).__name__}"
        raise TypeError(sentence("rotary_emb", "a cos_sin_cache of type torch.Tensor", got))
    if rows is not None and rows > len(cos_sin_cache):
        cos_sin_cache = grown_table(rotary_emb, rows)
    rotary_dim = int(getattr(rotary_emb, "rotary_dim", head_dim))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        even = f"an even rotary_dim from 2 to head_dim = {head_dim}"
        raise ValueError(sentence("rotary_emb", even, str(rotary_dim)))
    if cos_sin_cache.ndim != 2 or cos_sin_cache.shape[1] != rotary_dim:
        expected = f"a cos_sin_cache of shape [rows, rotary_dim={rotary_dim}]"
        raise ValueError(sentence("rotary_emb", expected, str(list(cos_sin_cache.shape))))
    return cos_sin_cache


def grown_table(rotary_emb: Any, rows: int) -> Any:
    """Its table once it was asked for so many rows, by the method that SGLang's has for it."""
    grow = _find(rotary_emb, "_ensure_cos_sin_cache_length")
    if callable(grow):
        grow(rows - 1)
    return _find(rotary_emb, "cos_sin_cache")


def _table_of_transformers(rotary_emb: Any, head_dim: int, rows: int | None) -> Any:
    import torch

    kind = getattr(rotary_emb, "rope_type", "default")
    if kind not in KINDS:  # its frequencies change with the length
        expected = f"rope_type {' or '.join(KINDS)}"
        raise NotImplementedError(sentence("rotary_emb", expected, repr(kind)))
    if rows is None:
        rows = _find(rotary_emb, "max_seq_len_cached")
    if rows is None:
        got = "a rotary embedding with inv_freq alone"
        cure = "max_position_hint says how many rows to compute"
        raise ValueError(sentence("rotary_emb", "a cos_sin_cache", got, cure))
    inv_freq = rotary_emb.inv_freq.detach().float().cpu().numpy()
    if not 0 < 2 * len(inv_freq) <= head_dim:
        expected = f"inv_freq of at most head_dim/2 = {head_dim // 2} angles"
        raise ValueError(sentence("rotary_emb", expected, str(len(inv_freq))))
    factor = float(getattr(rotary_emb, "attention_scaling", 1.0))
    return torch.from_numpy(table(inv_freq, factor, rows))


def _check_rope(
    attention: Any, tables: list[Any], rotary_dim: int, head_dim: int, index: int
) -> None:
    """The layer's own RoPE is the shared one; `tables` are those known to be equal."""
    import torch

    own = _find(attention, "rotary_emb")
    if own is None:
        if hasattr(attention, "qkv_proj"):  # transformers has one for the model, no layer its own
            raise TypeError(_at("self_attn.rotary_emb", index, "none"))
        return
    _same("rotary_dim", rotary_dim, int(getattr(own, "rotary_dim", head_dim)), index)
    _same("is_neox_style", True, bool(getattr(own, "is_neox_style", True)), index)
    its = _find(own, "cos_sin_cache")
    if not Torch.owns(its):
        raise TypeError(_at("self_attn.rotary_emb.cos_sin_cache", index, "none"))
    if any(its is known for known in tables):
        return
    same = its.shape[1:] == tables[0].shape[1:] and its.dtype == tables[0].dtype
    rows = min(len(its), len(tables[0]))  # one of the two may have grown
    if not (same and torch.equal(its[:rows].to(tables[0].device), tables[0][:rows])):
        got = "other values" if same else f"{list(its.shape)} of {_dtype(its)}"
        why = "one kernel rotates all layers by one table"
        raise ValueError(_at("the cos_sin_cache of `rotary_emb`", index, got, why))
    tables.append(its)


def _check_cache(attention: Any, index: int) -> None:
    """What the cache write would do to K and V, and what the model would do to V."""
    if _find(attention, "v_norm") is not None:
        raise ValueError(_at("no v_norm", index, "one", "V is copied as it was projected"))
    for owner in (attention, _find(attention, "attn")):
        for name in ("k_scale", "v_scale", "_k_scale", "_v_scale"):
            scale = _find(owner, name)
            if scale is None or (bool((scale == 1).all()) if Torch.owns(scale) else scale == 1):
                continue
            got = str(scale.tolist() if Torch.owns(scale) else scale)
            why = "K and V are not scaled"
            raise ValueError(_at(f"{name.removeprefix('_')} 1", index, got, why))


def _k_norm(attention: Any, head_dim: int, index: int) -> tuple[Any, float]:
    norm = _get(attention, "k_norm", index, "self_attn.k_norm")
    if "gemma" in type(norm).__name__.lower():
        expected, got = "a k_norm that multiplies by its weight", type(norm).__name__
        raise NotImplementedError(_at(expected, index, got, "Gemma's multiplies by 1 + weight"))
    weight = _get(norm, "weight", index, "k_norm.weight")
    if not Torch.owns(weight):
        raise TypeError(_at("a torch.Tensor as k_norm.weight", index, type(weight).__name__))
    if tuple(weight.shape) != (head_dim,):
        expected = f"k_norm.weight of shape [head_dim={head_dim}]"
        why = "each head is normalized by itself"
        raise ValueError(_at(expected, index, str(list(weight.shape)), why))
    if _find(norm, "bias") is not None:
        raise ValueError(_at("a k_norm without bias", index, "one with it"))
    if _dtype(weight) not in FLOATS:
        expected = f"k_norm.weight of dtype {' or '.join(FLOATS)}"
        raise ValueError(_at(expected, index, _dtype(weight)))
    _check_memory("k_norm.weight", weight, index)
    for owner, name in (
        (norm, "variance_epsilon"),
        (norm, "eps"),
        (_find(attention, "config"), "rms_norm_eps"),
    ):
        eps = _find(owner, name)
        if eps is not None:
            return weight.detach(), _eps(eps, name, index)
    raise TypeError(_at("k_norm.variance_epsilon", index, "none"))


def _eps(value: Any, name: str, index: int) -> float:
    try:
        eps = float(value)
    except (TypeError, ValueError):
        eps = math.nan
    if not 0 <= eps < float(np.finfo(np.float32).max):
        raise ValueError(_at(f"a finite number of 0 or more as {name}", index, repr(value)))
    return eps


def _projection(attention: Any, kv_size: int, index: int) -> tuple[tuple, tuple | None]:
    """Weights and biases of K and V."""
    if hasattr(attention, "qkv_proj"):
        q_size = int(_get(attention, "q_size", index, "self_attn.q_size"))
        own = _find(attention, "kv_size")
        if own is not None and own != kv_size:
            expected = f"kv_size = num_kv_heads*head_dim = {kv_size}"
            raise ValueError(_at(expected, index, str(own)))
        rows = q_size + 2 * kv_size
        sizes = f"q_size + 2*kv_size = {q_size} + 2*{kv_size} = {rows} rows"
        weight, bias = _linear(attention.qkv_proj, "qkv_proj", sizes, rows, index)
        k, v = slice(q_size, q_size + kv_size), slice(q_size + kv_size, rows)
        biases = None if bias is None else (bias[k], bias[v])
        return (weight[k], weight[v]), biases
    sizes = f"num_kv_heads*head_dim = {kv_size} rows"
    weights, found = [], []
    for name in ("k_proj", "v_proj"):
        linear = _get(attention, name, index, f"self_attn.qkv_proj or self_attn.{name}")
        weight, bias = _linear(linear, name, sizes, kv_size, index)
        weights.append(weight)
        found.append(bias)
    _same("dtype of v_proj.weight", weights[0].dtype, weights[1].dtype, index)
    _same("hidden size", weights[0].shape[1], weights[1].shape[1], index)
    if found == [None, None]:
        return tuple(weights), None
    biases = (weights[0].new_zeros(kv_size) if bias is None else bias for bias in found)
    return tuple(weights), tuple(biases)


def _linear(linear: Any, name: str, sizes: str, rows: int, index: int) -> tuple[Any, Any]:
    """Weight and bias of one linear layer that is not quantized."""
    method = _find(linear, "quant_method")
    extra = next((q for q in QUANTIZED if _find(linear, q) is not None), None)
    weight = _find(linear, "weight")
    if extra or not (method is None or type(method).__name__.startswith("Unquantized")):
        got = extra or f"quant_method {type(method).__name__}"
        got = f"{_dtype(weight)} with {got}" if Torch.owns(weight) else got
        raise TypeError(_at(f"a {name} that is not quantized", index, got, CURE))
    if not Torch.owns(weight):
        got = "none" if weight is None else type(weight).__name__
        raise TypeError(_at(f"a torch.Tensor as {name}.weight", index, got, CURE))
    if _dtype(weight) not in FLOATS:
        expected = f"{name}.weight of dtype {' or '.join(FLOATS)}"
        raise TypeError(_at(expected, index, _dtype(weight), f"quantized? {CURE}"))
    if weight.ndim != 2 or weight.shape[0] != rows:
        raise ValueError(_at(f"{name}.weight of {sizes}", index, f"shape {list(weight.shape)}"))
    _check_memory(f"{name}.weight", weight, index)
    bias = _find(linear, "bias")
    if bias is not None and (not Torch.owns(bias) or tuple(bias.shape) != (rows,)):
        got = str(list(bias.shape)) if Torch.owns(bias) else type(bias).__name__
        raise ValueError(_at(f"{name}.bias of shape [{rows}]", index, got))
    if bias is not None and bias.dtype != weight.dtype:
        why = "the dtype of its weight"
        raise ValueError(_at(f"{name}.bias of {_dtype(weight)}", index, _dtype(bias), why))
    return weight.detach(), None if bias is None else bias.detach()


def _check_memory(name: str, tensor: Any, index: int) -> None:
    if tensor.is_meta:
        expected = f"{name} with its values in memory"
        raise ValueError(_at(expected, index, "a meta tensor", "load the weights first"))


def _size_of(attention: Any, name: str, index: int) -> int:
    config = _find(attention, "config")
    if name == "num_kv_heads" and not hasattr(attention, name):
        size = _find(config, "num_key_value_heads")
    else:
        size = _find(attention, name)
    if size is None:
        raise TypeError(_at(f"self_attn.{name}", index, "none"))
    return int(size)


def _same(name: str, expected: Any, got: Any, index: int) -> None:
    if expected != got:
        expected, got = (str(x).removeprefix("torch.") for x in (expected, got))
        raise ValueError(_at(f"{name} {expected}", index, got, "one kernel serves all layers"))


def _find(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


def _get(owner: Any, name: str, index: int, path: str = "") -> Any:
    value = _find(owner, name)
    if value is None:
        raise TypeError(_at(path or name, index, "none"))
    return value


def _at(expected: str, index: int, got: str, hint: str = "") -> str:
    return sentence("layers", f"{expected} at layer {index}", got, hint)


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def copy_layers(
    read: Sequence[Layer], k_norm_weight: Any, eps: Any, kv_weight: Any = None, bias: Any = None
) -> None:
    """Each layer into its place of the stacked tensors."""
    for index, layer in enumerate(read):
        k_norm_weight[index].copy_(layer.k_norm_weight)
        eps[index] = layer.eps
        if layer.weights is None:
            continue
        for weight, rows in zip(layer.weights, kv_weight[index].chunk(2), strict=True):
            rows.copy_(weight)
        if bias is not None:
            bias[index].zero_()
            for part, rows in zip(layer.biases or (), bias[index].chunk(2), strict=False):
                rows.copy_(part)


def check_same(read: Sequence[Layer], k_norm_weight: Any, kv_weight: Any, bias: Any) -> None:
    """The layers are of the sizes and dtypes that these were made with."""
    if len(read) != len(k_norm_weight):
        expected = f"n_layers={len(k_norm_weight)} as at construction"
        raise ValueError(sentence("layers", expected, str(len(read))))
    pairs = [("k_norm.weight", k_norm_weight, read[0].k_norm_weight)]
    if read[0].weights is not None:
        pairs.append(("the projection", kv_weight, read[0].weights[0]))
    for name, ours, its in pairs:
        if (ours.shape[-1], ours.dtype) != (its.shape[-1], its.dtype):
            expected = f"{name} of width {ours.shape[-1]} and {_dtype(ours)} as at construction"
            got = f"{its.shape[-1]} and {_dtype(its)}"
            raise ValueError(sentence("layers", expected, got))
    biased = [index for index, layer in enumerate(read) if layer.biases is not None]
    if bias is None and biased:
        raise ValueError(_at("no bias, as at construction,", biased[0], "one"))
