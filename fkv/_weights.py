"""The arrays of one materializer, and every rule about them and about what it is called with."""

from __future__ import annotations

from typing import Any, NamedTuple

from fkv._errors import sentence
from fkv._frameworks import FRAMEWORKS, Framework, type_name
from fkv._spec import FLOATS, INTEGERS, as_size


class Weights(NamedTuple):
    """On jax the leaves of a pytree."""

    kv_weight: Any  # [L, 2*H*D, hidden]; None where `project` takes its place
    bias: Any  # [L, 2*H*D] or None
    k_norm_weight: Any  # [L, D]
    eps: Any  # [L] float32
    cos_sin_cache: Any  # [P, R]
    fc_weight: Any  # [hidden, n_features*hidden] or None
    hidden_norm_weight: Any  # [hidden] or None


def framework_of(weights: Weights, projected: bool) -> Framework:
    """The one of all weights that are given."""
    norm = weights.k_norm_weight
    home = next((one for one in FRAMEWORKS if one.owns(norm)), None)
    if home is None:
        got = type_name(norm)
        raise TypeError(sentence("k_norm_weight", "a torch.Tensor or a jax.Array", got))
    optional = {"bias", "fc_weight", "hidden_norm_weight"} | ({"kv_weight"} if projected else set())
    for name, array in weights._asdict().items():
        if not home.owns(array) and not (array is None and name in optional):
            expected = f"a {home.kind} as `k_norm_weight` is"
            raise TypeError(sentence(name, expected, type_name(array)))
    return home


def check_weights(weights: Weights, num_kv_heads: int | None) -> int:
    """H, once kv_weight and bias agree with the norm; the rest are rules of fkv.materialize."""
    kv_weight, bias, norm = weights.kv_weight, weights.bias, weights.k_norm_weight
    if len(norm.shape) != 2 or norm.shape[0] < 1 or norm.shape[1] < 1:
        expected, got = "shape [n_layers >= 1, head_dim >= 1]", str(list(norm.shape))
        raise ValueError(sentence("k_norm_weight", expected, got))
    n_layers, head_dim = norm.shape
    if kv_weight is None:
        if num_kv_heads is None:
            raise ValueError(sentence("num_kv_heads", "a number with `project`", "None"))
        return num_kv_heads
    shape = tuple(kv_weight.shape)
    heads = shape[1] // (2 * head_dim) if len(shape) == 3 else 0
    heads = max(1, heads if num_kv_heads is None else num_kv_heads)
    width = 2 * heads * head_dim
    if len(shape) != 3 or shape[:2] != (n_layers, width) or shape[2] < 1:
        rows = f"2*num_kv_heads*head_dim = {width}"
        if num_kv_heads is None:
            rows = f"a multiple of 2*head_dim = {2 * head_dim}"
        expected = f"shape [n_layers={n_layers}, {rows}, hidden]"
        raise ValueError(sentence("kv_weight", expected, str(list(shape))))
    if dtype_name(kv_weight.dtype) not in FLOATS:
        expected, got = f"dtype {' or '.join(FLOATS)}", dtype_name(kv_weight.dtype)
        cure = "quantized? project=callable takes its place"
        raise ValueError(sentence("kv_weight", expected, got, cure))
    if bias is not None:
        if tuple(bias.shape) != shape[:2]:
            expected = f"shape [n_layers={n_layers}, 2*num_kv_heads*head_dim={width}]"
            raise ValueError(sentence("bias", expected, str(list(bias.shape))))
        check_dtype("bias", bias, kv_weight, "the dtype of kv_weight")
    for name, array in (("kv_weight", kv_weight), ("bias", bias)):
        if array is not None and FRAMEWORKS[0].owns(array):
            if not array.is_contiguous():
                got = f"strides {list(array.stride())} for shape {list(array.shape)}"
                raise ValueError(sentence(name, "a contiguous tensor", got, f"{name}.contiguous()"))
            check_device(name, array, norm, "where `k_norm_weight` is")
    return heads


def check_target(weights: Weights, eps: float | None) -> None:
    """fc and its norm come together, and lead to the hidden size."""
    fc, norm = weights.fc_weight, weights.hidden_norm_weight
    given = {"fc_weight": fc, "hidden_norm_weight": norm, "hidden_norm_eps": eps}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return
    if missing:
        others = " and ".join(name for name in given if name not in missing)
        raise ValueError(sentence(missing[0], f"a value beside {others}", "None"))
    hidden = norm.shape[0] if weights.kv_weight is None else weights.kv_weight.shape[2]
    if len(fc.shape) != 2 or fc.shape[0] != hidden:
        expected = f"shape [hidden={hidden}, n_features*hidden]"
        raise ValueError(sentence("fc_weight", expected, str(list(fc.shape))))
    if weights.kv_weight is not None:
        check_dtype("fc_weight", fc, weights.kv_weight, "the dtype of kv_weight")
    if not (isinstance(eps, int | float) and 0 <= eps < float("inf")):
        raise ValueError(sentence("hidden_norm_eps", "a finite number of 0 or more", repr(eps)))
    if tuple(norm.shape) != (hidden,):
        expected, got = f"shape [hidden={hidden}]", str(list(norm.shape))
        raise ValueError(sentence("hidden_norm_weight", expected, got))


def check_hidden(home: Framework, name: str, array: Any, weight: Any, width: int | None) -> None:
    """[T, width] like `weight`; without a width `project` decides about it."""
    check_kind(home, name, array)
    if len(array.shape) != 2 or width not in (None, array.shape[1]):
        expected = f"shape [total_ctx, hidden{'' if width is None else f'={width}'}]"
        raise ValueError(sentence(name, expected, str(list(array.shape))))
    if width is not None:
        check_dtype(name, array, weight, "the dtype of the weights")
        check_device(name, array, weight, "where the weights are")


def check_position_layout(home: Framework, positions: Any, total_ctx: int, weight: Any) -> None:
    """[T]; their values are another matter."""
    check_kind(home, "positions", positions)
    if tuple(positions.shape) != (total_ctx,):
        expected, why = f"shape [total_ctx={total_ctx}]", "one row of the table a token"
        raise ValueError(sentence("positions", expected, str(list(positions.shape)), why))
    if dtype_name(positions.dtype) not in INTEGERS:
        expected, got = f"dtype {' or '.join(INTEGERS)}", dtype_name(positions.dtype)
        raise ValueError(sentence("positions", expected, got))
    check_device("positions", positions, weight, "where the weights are")


def check_kind(home: Framework, name: str, array: Any) -> None:
    if not home.owns(array):
        expected = f"a {home.kind} as the weights are"
        raise TypeError(sentence(name, expected, type_name(array)))
    if home.name == "torch" and array.requires_grad:
        import torch

        if torch.is_grad_enabled():
            expected, got = "a tensor that needs no gradient", "requires_grad=True"
            cure = f"no gradient is computed: {name}.detach(), or call under torch.no_grad()"
            raise ValueError(sentence(name, expected, got, cure))


def check_dtype(name: str, array: Any, like: Any, why: str) -> None:
    if array.dtype != like.dtype:
        expected, got = f"dtype {dtype_name(like.dtype)}", dtype_name(array.dtype)
        raise ValueError(sentence(name, expected, got, why))


def check_device(name: str, array: Any, like: Any, why: str) -> None:
    """Of torch tensors; jax has its own say."""
    if FRAMEWORKS[0].owns(array) and array.device != like.device:
        raise ValueError(sentence(name, f"device {like.device}", str(array.device), why))


def check_size(name: str, value: Any) -> int:
    """A size of at least 1, as a Python int."""
    size = as_size(name, value)
    if size is None or size < 1:
        raise ValueError(sentence(name, "at least 1", str(value)))
    return size


def dtype_name(dtype: Any) -> str:
    """bfloat16 of torch.bfloat16, jnp.bfloat16, np.dtype and the name itself."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return name.removeprefix("torch.")
