"""Spec, and every rule about shapes, dtypes, strides and devices.

make_spec looks at layouts only, never at values, so that one answer serves every call with the
same layouts. What needs pointers or values is in check_overlap and check_values.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fkv._errors import sentence

INPUTS = ("kv", "k_norm_weight", "eps", "cos_sin_cache", "positions")
OUTPUTS = ("k_out", "v_out")
FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4}  # dtype -> bytes
INTEGERS = {"int32": 4, "int64": 8}


class Layout(NamedTuple):
    """What the rules look at of one array."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in elements; None is packed (jax has no strides)
    dtype: str
    device: str | None  # None while jax traces


class Strides(NamedTuple):
    """Every stride that a kernel needs, in elements and in the kernel's argument order."""

    kv_t: int
    kv_l: int
    weight_l: int
    weight_d: int
    eps_l: int
    table_p: int
    table_r: int
    positions_t: int
    k_l: int
    k_t: int
    k_h: int
    v_l: int
    v_t: int
    v_h: int


@dataclass(frozen=True, eq=False)
class Spec:
    """One problem, checked: what a backend needs to know besides the arrays.

    Compared and hashed by identity, as the front-end keeps one for each combination of layouts:
    what a backend has for it is one look-up away.
    """

    total_ctx: int  # T
    n_layers: int  # L
    num_kv_heads: int  # H
    head_dim: int  # D
    rotary_dim: int  # R
    table_rows: int  # P
    dtype: str  # of kv, k_out and v_out
    table_dtype: str
    positions_dtype: str
    device: str | None  # "cpu", "cuda:0"; None while jax traces
    strides: Strides
    layouts: tuple[Layout | None, ...]  # of INPUTS + OUTPUTS; None for an output not given
    extents: tuple[int, ...]  # bytes from the first to past the last element, of the same

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return (self.n_layers, self.total_ctx, self.num_kv_heads, self.head_dim)


def as_sizes(num_kv_heads: Any, head_dim: Any, rotary_dim: Any) -> tuple[int | None, ...]:
    """The sizes as Python ints. Whatever has __index__ is an integer; a bool or a float is not."""
    sizes = (num_kv_heads, head_dim, rotary_dim)
    if num_kv_heads is None and head_dim is None and rotary_dim is None:
        return sizes
    return tuple(map(as_size, ("num_kv_heads", "head_dim", "rotary_dim"), sizes))


def as_size(name: str, value: Any) -> int | None:
    if value is None or type(value) is int:
        return value
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    try:
        if not is_bool:  # which has __index__ too
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(sentence(name, "an integer or None", f"{type(value).__name__} {value!r}"))


def make_spec(
    framework: str,
    layouts: Sequence[Layout | None],
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary_dim: int | None = None,
) -> Spec:
    """Check the layouts of INPUTS + OUTPUTS together.

    Raises ValueError at the first rule that is broken, in the order of the arguments.
    """
    kv, weight, eps, table, positions, k_out, v_out = named = tuple(layouts)
    assert kv and weight and eps and table and positions  # the front-end refuses None

    _check_rank("kv", kv, 3, "[total_ctx, n_layers, 2*num_kv_heads*head_dim]")
    _check_dtype("kv", kv, FLOATS)
    _check_rank("k_norm_weight", weight, 2, "[n_layers, head_dim]")
    total_ctx, n_layers, width = kv.shape
    if head_dim is None:
        head_dim = weight.shape[1]
        origin = "head_dim from k_norm_weight"
    else:
        origin = "head_dim as given"
    if head_dim < 1:
        raise ValueError(sentence("head_dim", "at least 1", str(head_dim), origin))
    if num_kv_heads is None:
        if width == 0 or width % (2 * head_dim):
            multiple = f"trailing dim a multiple of 2*head_dim = {2 * head_dim}"
            raise ValueError(
                sentence("kv", multiple, f"{width} from shape {list(kv.shape)}", origin)
            )
        num_kv_heads = width // (2 * head_dim)
    if num_kv_heads < 1:
        raise ValueError(sentence("num_kv_heads", "at least 1", str(num_kv_heads)))
    if width != 2 * num_kv_heads * head_dim:
        product = f"trailing dim 2*num_kv_heads*head_dim = {2 * num_kv_heads * head_dim}"
        raise ValueError(sentence("kv", product, f"{width} from shape {list(kv.shape)}"))
    _check_last_stride("kv", kv)

    _check_shape("k_norm_weight", weight, n_layers=n_layers, head_dim=head_dim)
    _check_dtype("k_norm_weight", weight, FLOATS)

    full = "jnp.full" if framework == "jax" else "torch.full"
    one_each = f"one epsilon a layer: {full}(({n_layers},), 1e-06)"
    _check_shape("eps", eps, one_each, n_layers=n_layers)
    _check_dtype("eps", eps, {"float32": 4}, one_each)

    _check_rank("cos_sin_cache", table, 2, "[rows, rotary_dim]")
    if rotary_dim is None:
        rotary_dim, origin = table.shape[1], "rotary_dim from cos_sin_cache"
    else:
        origin = "rotary_dim as given"
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        even = f"an even number from 2 to head_dim = {head_dim}"
        raise ValueError(sentence("rotary_dim", even, str(rotary_dim), origin))
    table_rows = table.shape[0]
    if table_rows < 1 or table.shape[1] != rotary_dim:
        shape = f"shape [rows >= 1, rotary_dim={rotary_dim}]"
        halves = "a row is the cosines of rotary_dim/2 angles, then their sines"
        raise ValueError(sentence("cos_sin_cache", shape, str(list(table.shape)), halves))
    _check_dtype("cos_sin_cache", table, FLOATS)

    _check_shape("positions", positions, "one row of the table a token", total_ctx=total_ctx)
    _check_dtype("positions", positions, INTEGERS)

    out_shape = dict(
        n_layers=n_layers, total_ctx=total_ctx, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    for name, out in (("k_out", k_out), ("v_out", v_out)):
        if out is None:
            continue
        _check_shape(name, out, **out_shape)
        _check_dtype(name, out, {kv.dtype: FLOATS[kv.dtype]}, "the dtype of kv")
        _check_last_stride(name, out)
        _check_disjoint(name, out)

    device = _one_device(named)
    dense = _packed(tuple(out_shape.values()))
    k_strides = k_out.strides or dense if k_out else dense
    v_strides = v_out.strides or dense if v_out else dense
    return Spec(
        **out_shape,
        rotary_dim=rotary_dim,
        table_rows=table_rows,
        dtype=kv.dtype,
        table_dtype=table.dtype,
        positions_dtype=positions.dtype,
        device=device,
        strides=Strides(
            *_strides(kv)[:2],
            *_strides(weight),
            *_strides(eps),
            *_strides(table),
            *_strides(positions),
            *k_strides[:3],
            *v_strides[:3],
        ),
        layouts=named,
        extents=tuple(_extent(array) for array in named),
    )


@functools.lru_cache(maxsize=4096)
def check_overlap(spec: Spec, pointers: tuple[int | None, ...]) -> None:
    """Refuse what has no memory, and outputs that share it with each other or with an input.

    `pointers` are the addresses of INPUTS + OUTPUTS, None for an output that is not given.
    """
    for name, pointer, size in zip(INPUTS + OUTPUTS, pointers, spec.extents, strict=True):
        if pointer == 0 and size:
            expected, got = "an array with its values in memory", "one without memory"
            raise ValueError(sentence(name, expected, got, "a meta tensor, or freed storage"))
    for mine in range(len(INPUTS), len(pointers)):
        start, size = pointers[mine], spec.extents[mine]
        if start is None:
            continue
        for other in range(mine):
            its = pointers[other]
            if its is None or its >= start + size or start >= its + spec.extents[other]:
                continue
            # The ranges meet; the K and V halves of one packed buffer are disjoint all the same.
            if _share_memory(spec, pointers, mine, other):
                name, user = (INPUTS + OUTPUTS)[mine], (INPUTS + OUTPUTS)[other]
                raise ValueError(
                    sentence(
                        name,
                        "memory of its own",
                        f"memory that overlaps `{user}`",
                        f"{name} is written while {user} is in use",
                    )
                )


def check_positions(positions: np.ndarray, rows: int) -> None:
    """Refuse what is no row of the table."""
    if positions.size:
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= rows:
            worst = low if low < 0 else high
            where = f"{worst} at token {int(np.flatnonzero(positions == worst)[0])}"
            expected = f"0 <= position < {rows}"
            raise ValueError(sentence("positions", expected, where, "the rows of cos_sin_cache"))


def check_eps(eps: np.ndarray) -> None:
    """Refuse what is no epsilon."""
    if not (np.isfinite(eps) & (eps >= 0)).all():
        layer = int(np.flatnonzero(~(np.isfinite(eps) & (eps >= 0)))[0])
        raise ValueError(sentence("eps", "finite values >= 0", f"{eps[layer]} at layer {layer}"))


def check_values(spec: Spec, eps: np.ndarray | None, positions: np.ndarray | None) -> None:
    """Look at the values that sit on the host; None is on a GPU, or traced, and not looked at."""
    if positions is not None:
        check_positions(positions, spec.table_rows)
    if eps is not None:
        check_eps(eps)


def _check_rank(name: str, array: Layout, rank: int, shape: str) -> None:
    if len(array.shape) != rank:
        raise ValueError(sentence(name, f"shape {shape}", str(list(array.shape))))


def _check_shape(name: str, array: Layout, hint: str = "", /, **sizes: int) -> None:
    if array.shape != tuple(sizes.values()):
        expected = ", ".join(f"{size}={value}" for size, value in sizes.items())
        raise ValueError(sentence(name, f"shape [{expected}]", str(list(array.shape)), hint))


def _check_dtype(name: str, array: Layout, allowed: dict[str, int], hint: str = "") -> None:
    if array.dtype not in allowed:
        raise ValueError(sentence(name, f"dtype {' or '.join(allowed)}", array.dtype, hint))


def _check_last_stride(name: str, array: Layout) -> None:
    if _strides(array)[-1] != 1 and array.shape[-1] > 1 and 0 not in array.shape:
        raise ValueError(
            sentence(
                name,
                "a contiguous last dim",
                f"stride {_strides(array)[-1]} there, from strides {list(_strides(array))}",
                "tokens, layers and heads may be strided, a row may not",
            )
        )


def _check_disjoint(name: str, array: Layout) -> None:
    """No two elements of an output at one address."""
    reach = 0  # the furthest element of the dims seen so far, smallest stride first
    dims = [(s, n) for n, s in zip(array.shape, _strides(array), strict=True) if n > 1]
    if 0 in array.shape:
        return
    for stride, size in sorted(dims):
        if stride <= reach:
            raise ValueError(
                sentence(
                    name,
                    "one address for each element",
                    f"strides {list(_strides(array))} for shape {list(array.shape)}",
                    "an expanded or overlapping view cannot hold a result",
                )
            )
        reach += stride * (size - 1)


def _one_device(named: Sequence[Layout | None]) -> str | None:
    """The device of all arrays."""
    device, first = None, ""
    for name, array in zip(INPUTS + OUTPUTS, named, strict=True):
        if array is None or array.device is None:
            continue
        if device is None:
            device, first = array.device, name
        elif array.device != device:
            raise ValueError(
                sentence(name, f"device {device}", array.device, f"where `{first}` is")
            )
    return device


def _strides(array: Layout) -> tuple[int, ...]:
    return _packed(array.shape) if array.strides is None else array.strides


def _packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _extent(array: Layout | None) -> int:
    """Bytes from the first element to the end of the last."""
    if array is None or 0 in array.shape:
        return 0
    last = sum((n - 1) * s for n, s in zip(array.shape, _strides(array), strict=True))
    return (last + 1) * _itemsize(array)


def _itemsize(array: Layout) -> int:
    return (FLOATS | INTEGERS)[array.dtype]


def _share_memory(spec: Spec, pointers: Sequence[int | None], *pair: int) -> bool:
    """Exactly, by NumPy, which computes with the addresses and reads nothing behind them."""
    views = []
    for index in pair:
        array, pointer = spec.layouts[index], pointers[index]
        assert array is not None and pointer is not None
        interface = {
            "shape": array.shape,
            "typestr": f"|V{_itemsize(array)}",
            "data": (pointer, True),
            "strides": tuple(s * _itemsize(array) for s in _strides(array)),
            "version": 3,
        }
        views.append(np.asarray(type("View", (), {"__array_interface__": interface})()))
    try:
        return np.shares_memory(*views, max_work=100_000)
    except np.exceptions.TooHardError:
        return True
