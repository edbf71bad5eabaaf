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
CACHE_INPUTS = (*INPUTS, "slot_mapping", "commit_lens", "k_scale", "v_scale")
CACHES = ("k_cache", "v_cache")
OPTIONAL = {*OUTPUTS, "commit_lens", "k_scale", "v_scale"}
LAYOUTS = ("NHD", "HND")  # of a page: tokens, heads, head_dim; or heads before tokens
FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4}  # dtype -> bytes
FLOAT8 = {"float8_e4m3fn": 1, "float8_e5m2": 1}
INTEGERS = {"int32": 4, "int64": 8}


class Arguments(NamedTuple):
    """The names of a call's arrays, in order."""

    names: tuple[str, ...]
    num_inputs: int  # that come first; the others are written to


MATERIALIZE = Arguments(INPUTS + OUTPUTS, len(INPUTS))


@functools.cache
def cache_arguments(*num_arrays: int | None) -> Arguments:
    """Of write_cache, with so many arrays in k_cache and in v_cache; None for a stack."""
    names = list(CACHE_INPUTS)
    for name, num in zip(CACHES, num_arrays, strict=True):
        names += [name] if num is None else [f"{name}[{i}]" for i in range(num)]
    return Arguments(tuple(names), len(CACHE_INPUTS))


class Layout(NamedTuple):
    """What the rules look at of one array."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in elements; None is packed (jax has no strides)
    dtype: str
    device: str | None  # None while jax traces


class Strides(NamedTuple):
    """Every stride that a kernel needs, in elements and in the kernel's argument order.

    Those of k and v are those of k_out and v_out, or in a cache of the layer, the token in its page
    and the head.
    """

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


class CacheStrides(NamedTuple):
    """The others that writing into a cache needs."""

    slots_row: int  # of a window, or of a layer where each has its own map, else 0
    slots_t: int
    lens_b: int
    k_scale_l: int
    v_scale_l: int
    k_page: int
    v_page: int


@dataclass(frozen=True)
class CacheSpec:
    """Where write_cache writes. A flat cache has pages of one token."""

    dtype: str
    layout: str
    is_flat: bool
    is_sequence: bool  # an array a layer
    num_pages: int
    page_size: int
    window: int  # columns of slot_mapping where commit_lens counts them, else 0
    is_mapped_by_layer: bool
    is_scaled: tuple[bool, bool]  # k_scale is given, v_scale is
    strides: CacheStrides

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size


@dataclass(frozen=True, eq=False)
class Spec:
    """One problem, checked: what a backend needs to know besides the arrays.

    Compared and hashed by identity, as the front-end keeps one for each combination of layouts:
    what a backend has for it is one look-up away.
    """

    framework: str  # whose arrays: torch's outputs are written in place
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
    arguments: Arguments
    layouts: tuple[Layout | None, ...]  # of its names; None for what is not given
    extents: tuple[int, ...]  # bytes from the first to past the last element, of the same
    cache: CacheSpec | None = None  # of write_cache

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


def check_layout(layout: Any) -> None:
    if not isinstance(layout, str):
        got = f"{type(layout).__name__} {layout!r}"
        raise TypeError(sentence("layout", '"NHD" or "HND"', got))
    if layout not in LAYOUTS:
        raise ValueError(sentence("layout", '"NHD" or "HND"', repr(layout)))


class _Sizes(NamedTuple):
    """Of a Spec."""

    total_ctx: int
    n_layers: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    table_rows: int
    dtype: str


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
    *inputs, k_out, v_out = layouts
    sizes = _check_inputs(framework, inputs, num_kv_heads, head_dim, rotary_dim)
    out_dtype = {sizes.dtype: FLOATS[sizes.dtype]}
    out_shape = dict(
        n_layers=sizes.n_layers,
        total_ctx=sizes.total_ctx,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
    )
    for name, out in (("k_out", k_out), ("v_out", v_out)):
        if out is not None:
            _check_shape(name, out, **out_shape)
            _check_written(name, out, out_dtype, "the dtype of kv")
    dense = _packed(tuple(out_shape.values()))
    k_strides = k_out.strides or dense if k_out else dense
    v_strides = v_out.strides or dense if v_out else dense
    return _spec(framework, sizes, MATERIALIZE, layouts, (*k_strides[:3], *v_strides[:3]))


def make_cache_spec(
    framework: str,
    arguments: Arguments,
    layouts: Sequence[Layout | None],
    layout: str,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary_dim: int | None = None,
) -> Spec:
    """Check the layouts of cache_arguments together, as make_spec does."""
    inputs = layouts[: len(INPUTS)]
    slots, lens, *scales = layouts[len(INPUTS) : arguments.num_inputs]
    sizes = _check_inputs(framework, inputs, num_kv_heads, head_dim, rotary_dim)
    is_sequence = arguments.names[-2:] != CACHES
    caches = list(zip(arguments.names, layouts, strict=True))[arguments.num_inputs :]
    is_flat, num_pages, page_size = _check_caches(sizes, caches, is_sequence, layout)
    k, v = caches[0][1], caches[-1][1]
    assert slots and k and v  # the front-end refuses None

    window, by_layer = _check_slots(sizes, slots, lens)
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if scale is not None:
            if k.dtype not in FLOAT8:
                expected = f"None with caches of {k.dtype}"
                raise ValueError(sentence(name, expected, "one", "only float8 is scaled"))
            _check_shape(name, scale, "one scale a layer", n_layers=sizes.n_layers)
            _check_dtype(name, scale, {"float32": 4})

    k_strides, v_strides = (_cache_strides(array, is_sequence, is_flat, layout) for array in (k, v))
    slots_row, slots_t = _strides(slots) if len(slots.shape) == 2 else (0, *_strides(slots))
    others = (0 if array is None else _strides(array)[0] for array in (lens, *scales))
    lens_b, k_scale_l, v_scale_l = others
    cache = CacheSpec(
        dtype=k.dtype,
        layout=layout,
        is_flat=is_flat,
        is_sequence=is_sequence,
        num_pages=num_pages,
        page_size=page_size,
        window=window,
        is_mapped_by_layer=by_layer,
        is_scaled=(scales[0] is not None, scales[1] is not None),
        strides=CacheStrides(
            slots_row=slots_row,
            slots_t=slots_t,
            lens_b=lens_b,
            k_scale_l=k_scale_l,
            v_scale_l=v_scale_l,
            k_page=k_strides[1],
            v_page=v_strides[1],
        ),
    )
    out_strides = (k_strides[0], *k_strides[2:], v_strides[0], *v_strides[2:])
    return _spec(framework, sizes, arguments, layouts, out_strides, cache)


def _check_caches(
    sizes: _Sizes, caches: Sequence[tuple[str, Layout | None]], is_sequence: bool, layout: str
) -> tuple[bool, int, int]:
    """Is it flat; the pages and the tokens of each."""
    if is_sequence:
        for name in CACHES:
            num = sum(each.startswith(name) for each, _ in caches)
            if num != sizes.n_layers:
                expected = f"an array a layer, n_layers={sizes.n_layers} of them, or one of all"
                raise ValueError(sentence(name, expected, f"{num} arrays"))
    (k_name, k), stacked = caches[0], 0 if is_sequence else 1
    assert k is not None
    paged = "page_size, num_kv_heads" if layout == "NHD" else "num_kv_heads, page_size"
    layers = "" if is_sequence else "n_layers, "
    if len(k.shape) not in (3 + stacked, 4 + stacked):
        flat = f"[{layers}num_slots, num_kv_heads, head_dim]"
        expected = f"shape {flat} or [{layers}num_pages, {paged}, head_dim]"
        raise ValueError(sentence(k_name, expected, str(list(k.shape))))
    is_flat = len(k.shape) == 3 + stacked
    if is_flat and layout != "NHD":
        got = f'"{layout}" with `{k_name}` of shape {list(k.shape)}'
        raise ValueError(sentence("layout", '"NHD" for a flat cache', got, "it has no pages"))
    num_pages = k.shape[stacked]
    page_size = 1 if is_flat else k.shape[stacked + (1 if layout == "NHD" else 2)]
    if page_size < 1:
        expected, got = "a page_size of at least 1", f"shape {list(k.shape)}"
        raise ValueError(sentence(k_name, expected, got, f'layout="{layout}"'))
    heads = dict(num_kv_heads=sizes.num_kv_heads)
    pages = dict(page_size=page_size)
    shape = dict(
        **({} if is_sequence else dict(n_layers=sizes.n_layers)),
        **(dict(num_slots=num_pages) if is_flat else dict(num_pages=num_pages)),
        **({} if is_flat else pages if layout == "NHD" else heads),
        **(heads if is_flat or layout == "NHD" else pages),
        head_dim=sizes.head_dim,
    )
    for name, array in caches:
        assert array is not None
        hint = "" if name == k_name else f"as `{k_name}`"
        _check_shape(name, array, hint, **shape)
        if name == k_name:
            cure = "view bytes of float8 as float8_e4m3fn or float8_e5m2"
            _check_written(name, array, FLOATS | FLOAT8, cure if array.dtype == "uint8" else "")
        else:
            _check_written(name, array, {k.dtype: _itemsize(k)}, f"the dtype of {k_name}")
        first = caches[0 if name.startswith("k") else len(caches) // 2]
        if first[1] is not None and _steps(array) != _steps(first[1]):
            expected = f"strides {list(_strides(first[1]))} as `{first[0]}`"
            cure = "one kernel writes all layers"
            raise ValueError(sentence(name, expected, str(list(_strides(array))), cure))
    return is_flat, num_pages, page_size


def _check_slots(sizes: _Sizes, slots: Layout, lens: Layout | None) -> tuple[int, bool]:
    """The window, 0 for none, and whether each layer has a map of its own."""
    total_ctx, n_layers = sizes.total_ctx, sizes.n_layers
    if lens is not None:
        if len(slots.shape) != 2 or slots.shape[0] * slots.shape[1] != total_ctx:
            expected = f"shape [batch, window] of total_ctx={total_ctx} slots"
            hint = "as commit_lens counts the columns to write of each row"
            raise ValueError(sentence("slot_mapping", expected, str(list(slots.shape)), hint))
    elif slots.shape not in ((total_ctx,), (n_layers, total_ctx)):
        expected = f"shape [total_ctx={total_ctx}] or [n_layers={n_layers}, total_ctx={total_ctx}]"
        is_window = len(slots.shape) == 2 and slots.shape[0] * slots.shape[1] == total_ctx
        hint = "a window of slots comes with commit_lens" if is_window else ""
        raise ValueError(sentence("slot_mapping", expected, str(list(slots.shape)), hint))
    _check_dtype("slot_mapping", slots, INTEGERS)
    if lens is None:
        return 0, len(slots.shape) == 2
    _check_shape("commit_lens", lens, "one count a row of slot_mapping", batch=slots.shape[0])
    _check_dtype("commit_lens", lens, INTEGERS)
    return slots.shape[1], False


def _cache_strides(
    array: Layout, is_sequence: bool, is_flat: bool, layout: str
) -> tuple[int, int, int, int]:
    """Of a layer, a page, a token in its page and a head."""
    layer, *rest = (0, *_strides(array)) if is_sequence else _strides(array)
    if is_flat:
        page, head, _ = rest
        return layer, page, 0, head
    page, first, second, _ = rest
    return (layer, page, first, second) if layout == "NHD" else (layer, page, second, first)


def _spec(
    framework: str,
    sizes: _Sizes,
    arguments: Arguments,
    layouts: Sequence[Layout | None],
    out_strides: tuple[int, ...],
    cache: CacheSpec | None = None,
) -> Spec:
    inputs = layouts[: len(INPUTS)]
    kv, weight, eps, table, positions = inputs
    assert kv and weight and eps and table and positions
    return Spec(
        framework=framework,
        **sizes._asdict(),
        table_dtype=table.dtype,
        positions_dtype=positions.dtype,
        device=_one_device(arguments.names, layouts),
        strides=Strides(
            *_strides(kv)[:2],
            *_strides(weight),
            *_strides(eps),
            *_strides(table),
            *_strides(positions),
            *out_strides,
        ),
        arguments=arguments,
        layouts=tuple(layouts),
        extents=tuple(_extent(array) for array in layouts),
        cache=cache,
    )


def _check_inputs(
    framework: str,
    layouts: Sequence[Layout | None],
    num_kv_heads: int | None,
    head_dim: int | None,
    rotary_dim: int | None,
) -> _Sizes:
    """The rules of INPUTS."""
    kv, weight, eps, table, positions = layouts
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
    return _Sizes(total_ctx, n_layers, num_kv_heads, head_dim, rotary_dim, table_rows, kv.dtype)


def _check_written(name: str, array: Layout, allowed: dict[str, int], hint: str = "") -> None:
    """The rules of an array that is written to."""
    _check_dtype(name, array, allowed, hint)
    _check_last_stride(name, array)
    _check_disjoint(name, array)


@functools.lru_cache(maxsize=4096)
def check_overlap(spec: Spec, pointers: tuple[int | None, ...]) -> None:
    """Refuse what has no memory, and outputs that share it with each other or with an input.

    `pointers` are the addresses of its arguments, None for what is not given.
    """
    names, num_inputs = spec.arguments
    for name, pointer, size in zip(names, pointers, spec.extents, strict=True):
        if pointer == 0 and size:
            expected, got = "an array with its values in memory", "one without memory"
            raise ValueError(sentence(name, expected, got, "a meta tensor, or freed storage"))
    for mine in range(num_inputs, len(pointers)):
        start, size = pointers[mine], spec.extents[mine]
        if start is None:
            continue
        for other in range(mine):
            its = pointers[other]
            if its is None or its >= start + size or start >= its + spec.extents[other]:
                continue
            # The ranges meet; the K and V halves of one packed buffer are disjoint all the same.
            if _share_memory(spec, pointers, mine, other):
                name, user = names[mine], names[other]
                raise ValueError(
                    sentence(
                        name,
                        "memory of its own",
                        f"memory that overlaps `{user}`",
                        f"{name} is written while {user} is in use",
                    )
                )


def check_values(spec: Spec, eps: np.ndarray | None, positions: np.ndarray | None) -> None:
    """Look at the values that sit on the host; None is on a GPU, or traced, and not looked at."""
    if positions is not None:
        check_positions(positions, spec.table_rows)
    if eps is not None:
        check_eps(eps)


def check_positions(
    positions: np.ndarray, table_rows: int, looked_at: np.ndarray | None = None
) -> None:
    """Refuse what is no row of the table."""
    hint = "the rows of cos_sin_cache"
    _check_range("positions", positions, table_rows, hint, looked_at=looked_at)


def check_eps(eps: np.ndarray) -> None:
    """Refuse what is no epsilon."""
    if not (np.isfinite(eps) & (eps >= 0)).all():
        layer = int(np.flatnonzero(~(np.isfinite(eps) & (eps >= 0)))[0])
        raise ValueError(sentence("eps", "finite values >= 0", f"{eps[layer]} at layer {layer}"))


def check_cache_values(
    spec: Spec,
    eps: np.ndarray | None,
    positions: np.ndarray | None,
    slots: np.ndarray | None,
    lens: np.ndarray | None,
    *scales: np.ndarray | None,
) -> None:
    """The same for write_cache, where a token that is skipped may have any position."""
    cache = spec.cache
    assert cache is not None
    written = np.ones(spec.total_ctx, bool)
    if lens is not None:
        _check_range("commit_lens", lens, cache.window + 1, "the columns of slot_mapping", "count")
        written = (np.arange(cache.window) < lens[:, None]).ravel()
    # While jax traces one of the two, nobody knows what is skipped.
    known = slots is not None and (lens is not None or not cache.window)
    if slots is not None and known:
        maps = spec.n_layers if cache.is_mapped_by_layer else 1
        # -1, a slot that skips, for the tokens that have no map where there are no layers.
        slots = slots.reshape(maps, spec.total_ctx).max(0, initial=-1)
        hint = "the capacity of the caches; a negative slot skips its token"
        _check_range("slot_mapping", slots, cache.num_slots, hint, "slot", written, None)
        written &= slots >= 0
    if positions is not None and known:
        check_positions(positions, spec.table_rows, written)
    if eps is not None:
        check_eps(eps)
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if scale is not None and not (np.isfinite(scale) & (scale > 0)).all():
            layer = int(np.flatnonzero(~(np.isfinite(scale) & (scale > 0)))[0])
            got = f"{scale[layer]} at layer {layer}"
            raise ValueError(sentence(name, "finite values > 0", got))


def _check_range(
    name: str,
    values: np.ndarray,
    stop: int,
    hint: str,
    what: str = "position",
    looked_at: np.ndarray | None = None,
    start: int | None = 0,
) -> None:
    """start <= value < stop, of the tokens that are looked at."""
    outside = values >= stop
    if start is not None:
        outside |= values < start
    if looked_at is not None:
        outside &= looked_at
    if outside.any():
        low = values[outside].min()
        worst = low if start is not None and low < start else values[outside].max()
        least = "" if start is None else f"{start} <= "
        unit = "row" if what == "count" else "token"
        where = f"{worst} at {unit} {int(np.flatnonzero(outside & (values == worst))[0])}"
        raise ValueError(sentence(name, f"{least}{what} < {stop}", where, hint))


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


def _one_device(names: Sequence[str], layouts: Sequence[Layout | None]) -> str | None:
    """The device of all arrays."""
    device, first = None, ""
    for name, array in zip(names, layouts, strict=True):
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


def _steps(array: Layout) -> list[int]:
    """The strides that are ever taken."""
    return [s for n, s in zip(array.shape, _strides(array), strict=True) if n > 1]


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
    return (FLOATS | FLOAT8 | INTEGERS)[array.dtype]


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
