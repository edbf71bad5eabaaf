"""Whole messages of what write_cache refuses beside what materialize does.

The caches are then as they were.
"""

import re

import numpy as np
import pytest

import fkv
from cases import CACHE_DTYPES, CacheCase, lay, to_framework, to_numpy

CACHES = ("k_cache", "v_cache")
CASE = CacheCase(T=4, L=2, H=2, D=16, P=8, page_size=4)  # 4 pages
SHAPE = (2, 4, 4, 2, 16)
DTYPES = "bfloat16 or float16 or float32 or float8_e4m3fn or float8_e5m2"
KINDS = {"torch": "torch.Tensor", "jax": "jax.Array"}


@pytest.fixture
def arrays(framework):
    return lay(CASE.make(), framework)


@pytest.fixture
def tensors():
    return lay(CASE.make(), "torch")


def of(framework, shape, dtype="bfloat16"):
    """An array of sevens."""
    return to_framework(np.full(shape, 7, CACHE_DTYPES.get(dtype, dtype)), framework)


def filled(*shape):
    return of("torch", shape)


def layers(cache):
    return list(cache) if isinstance(cache, list | tuple) else [cache]


def refused(kind, message, arrays, **changes):
    """The call is refused with exactly this message, and the caches given stay as they were."""
    arguments = arrays | changes
    caches = [x for name in CACHES for x in layers(arguments[name]) if hasattr(x, "dtype")]
    before = [to_numpy(cache).tobytes() for cache in caches]
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        fkv.write_cache(**arguments)
    assert [to_numpy(cache).tobytes() for cache in caches] == before


# argument -> (shape, dtype) that takes its place, message
LAYOUTS = [
    (
        {"k_cache": ((16, 2, 16), "bfloat16")},
        "`k_cache`: expected shape [n_layers, num_slots, num_kv_heads, head_dim] or "
        "[n_layers, num_pages, page_size, num_kv_heads, head_dim], got [16, 2, 16]",
    ),
    (
        {"k_cache": ((2, 4, 4, 2, 1, 16), "bfloat16")},
        "`k_cache`: expected shape [n_layers, num_slots, num_kv_heads, head_dim] or "
        "[n_layers, num_pages, page_size, num_kv_heads, head_dim], got [2, 4, 4, 2, 1, 16]",
    ),
    (
        {"k_cache": ((3, 4, 4, 2, 16), "bfloat16")},
        "`k_cache`: expected shape "
        "[n_layers=2, num_pages=4, page_size=4, num_kv_heads=2, head_dim=16], "
        "got [3, 4, 4, 2, 16]",
    ),
    (
        {"k_cache": ((2, 4, 4, 3, 16), "bfloat16")},
        "`k_cache`: expected shape "
        "[n_layers=2, num_pages=4, page_size=4, num_kv_heads=2, head_dim=16], "
        "got [2, 4, 4, 3, 16]",
    ),
    (
        {"k_cache": ((2, 16, 2, 8), "bfloat16")},
        "`k_cache`: expected shape [n_layers=2, num_slots=16, num_kv_heads=2, head_dim=16], "
        "got [2, 16, 2, 8]",
    ),
    ({"k_cache": (SHAPE, "int32")}, f"`k_cache`: expected dtype {DTYPES}, got int32"),
    (
        {"k_cache": (SHAPE, "uint8")},
        f"`k_cache`: expected dtype {DTYPES}, got uint8 "
        "(view bytes of float8 as float8_e4m3fn or float8_e5m2)",
    ),
    (
        {"k_cache": ((2, 4, 0, 2, 16), "bfloat16"), "v_cache": ((2, 4, 0, 2, 16), "bfloat16")},
        '`k_cache`: expected a page_size of at least 1, got shape [2, 4, 0, 2, 16] (layout="NHD")',
    ),
    (
        {"v_cache": ((2, 5, 4, 2, 16), "bfloat16")},
        "`v_cache`: expected shape "
        "[n_layers=2, num_pages=4, page_size=4, num_kv_heads=2, head_dim=16], "
        "got [2, 5, 4, 2, 16] (as `k_cache`)",
    ),
    (
        {"v_cache": ((2, 16, 2, 16), "bfloat16")},
        "`v_cache`: expected shape "
        "[n_layers=2, num_pages=4, page_size=4, num_kv_heads=2, head_dim=16], "
        "got [2, 16, 2, 16] (as `k_cache`)",
    ),
    (
        {"v_cache": (SHAPE, "float16")},
        "`v_cache`: expected dtype bfloat16, got float16 (the dtype of k_cache)",
    ),
    (
        {"v_cache": (SHAPE, "float8_e5m2")},
        "`v_cache`: expected dtype bfloat16, got float8_e5m2 (the dtype of k_cache)",
    ),
    (
        {"slot_mapping": ((5,), "int32")},
        "`slot_mapping`: expected shape [total_ctx=4] or [n_layers=2, total_ctx=4], got [5]",
    ),
    (
        {"slot_mapping": ((3, 4), "int32")},
        "`slot_mapping`: expected shape [total_ctx=4] or [n_layers=2, total_ctx=4], got [3, 4]",
    ),
    (
        {"slot_mapping": ((2, 2), "int32")},
        "`slot_mapping`: expected shape [total_ctx=4] or [n_layers=2, total_ctx=4], got [2, 2] "
        "(a window of slots comes with commit_lens)",
    ),
    (
        {"slot_mapping": ((1, 2, 4), "int32")},
        "`slot_mapping`: expected shape [total_ctx=4] or [n_layers=2, total_ctx=4], got [1, 2, 4]",
    ),
    (
        {"slot_mapping": ((), "int32")},
        "`slot_mapping`: expected shape [total_ctx=4] or [n_layers=2, total_ctx=4], got []",
    ),
    (
        {"slot_mapping": ((4,), "float32")},
        "`slot_mapping`: expected dtype int32 or int64, got float32",
    ),
    ({"slot_mapping": ((4,), "bool")}, "`slot_mapping`: expected dtype int32 or int64, got bool"),
    (
        {"commit_lens": ((2,), "int32")},
        "`slot_mapping`: expected shape [batch, window] of total_ctx=4 slots, got [4] "
        "(as commit_lens counts the columns to write of each row)",
    ),
    (
        {"commit_lens": ((2,), "int32"), "slot_mapping": ((2, 4), "int32")},
        "`slot_mapping`: expected shape [batch, window] of total_ctx=4 slots, got [2, 4] "
        "(as commit_lens counts the columns to write of each row)",
    ),
    (
        {"commit_lens": ((3,), "int32"), "slot_mapping": ((2, 2), "int32")},
        "`commit_lens`: expected shape [batch=2], got [3] (one count a row of slot_mapping)",
    ),
    (
        {"commit_lens": ((2, 1), "int32"), "slot_mapping": ((2, 2), "int32")},
        "`commit_lens`: expected shape [batch=2], got [2, 1] (one count a row of slot_mapping)",
    ),
    (
        {"commit_lens": ((2,), "float32"), "slot_mapping": ((2, 2), "int32")},
        "`commit_lens`: expected dtype int32 or int64, got float32",
    ),
    (
        {"k_scale": ((2,), "float32")},
        "`k_scale`: expected None with caches of bfloat16, got one (only float8 is scaled)",
    ),
    (
        {"v_scale": ((2,), "float32")},
        "`v_scale`: expected None with caches of bfloat16, got one (only float8 is scaled)",
    ),
]


@pytest.mark.parametrize(("changes", "message"), LAYOUTS)
def test_layouts(framework, arrays, changes, message):
    changes = {name: of(framework, *one) for name, one in changes.items()}
    refused(ValueError, message, arrays, **changes)


def test_layouts_of_heads_first(framework, arrays):
    for shape, message in (
        (
            (16, 2, 16),
            "`k_cache`: expected shape [n_layers, num_slots, num_kv_heads, head_dim] or "
            "[n_layers, num_pages, num_kv_heads, page_size, head_dim], got [16, 2, 16]",
        ),
        (
            (2, 4, 4, 2, 16),
            "`k_cache`: expected shape "
            "[n_layers=2, num_pages=4, num_kv_heads=2, page_size=2, head_dim=16], "
            "got [2, 4, 4, 2, 16]",
        ),
        (
            (2, 16, 2, 16),
            '`layout`: expected "NHD" for a flat cache, got "HND" with `k_cache` of shape '
            "[2, 16, 2, 16] (it has no pages)",
        ),
    ):
        caches = {name: of(framework, shape) for name in CACHES}
        refused(ValueError, message, arrays, layout="HND", **caches)


def test_scales_of_float8_caches(framework, arrays):
    arrays |= {name: of(framework, SHAPE, "float8_e4m3fn") for name in CACHES}
    for name in ("k_scale", "v_scale"):
        for shape in ((3,), (), (2, 1)):
            message = (
                f"`{name}`: expected shape [n_layers=2], got {list(shape)} (one scale a layer)"
            )
            refused(ValueError, message, arrays, **{name: of(framework, shape, "float32")})
        message = f"`{name}`: expected dtype float32, got float16"
        refused(ValueError, message, arrays, **{name: of(framework, (2,), "float16")})


def test_names_of_layouts(arrays):
    for layout, kind, got in (
        ("nhd", ValueError, "'nhd'"),
        ("DHN", ValueError, "'DHN'"),
        (None, TypeError, "NoneType None"),
        (0, TypeError, "int 0"),
    ):
        message = f'`layout`: expected "NHD" or "HND", got {got}'
        refused(kind, message, arrays, layout=layout)


def test_kinds(framework, arrays):
    kind = KINDS[framework]
    for name, bad, got in (
        ("k_cache", None, "NoneType"),
        ("v_cache", to_numpy(arrays["v_cache"]), "numpy.ndarray"),
        ("slot_mapping", None, "NoneType"),
        ("slot_mapping", [0, 1, 2, 3], "list"),
        ("commit_lens", 2, "int"),
        ("v_scale", np.ones(2, "float32"), "numpy.ndarray"),
    ):
        message = f"`{name}`: expected a {kind} as `kv` is, got {got}"
        refused(TypeError, message, arrays, **{name: bad})
    full = {"torch": "torch.full", "jax": "jnp.full"}[framework]
    message = (
        f"`k_scale`: expected a {kind} of shape [n_layers=2], got float 0.5 "
        f"(one scale a layer: {full}((2,), 0.5))"
    )
    refused(TypeError, message, arrays, k_scale=0.5)


@pytest.mark.needs("torch", "jax")
def test_mixed_frameworks(arrays, framework):
    other = "jax" if framework == "torch" else "torch"
    for name, bad in (("v_cache", of(other, SHAPE)), ("slot_mapping", of(other, (4,), "int32"))):
        message = (
            f"`{name}`: expected a {KINDS[framework]} as `kv` is, got a {KINDS[other]} "
            "(all arrays of one framework)"
        )
        refused(TypeError, message, arrays, **{name: bad})


# k_cache and v_cache as lists of layers of these shapes and dtypes, message
LAYER = ((4, 4, 2, 16), "bfloat16")
LISTS = [
    ([LAYER] * 2, [], "`v_cache`: expected an array a layer, or one of all, got none"),
    ([], [LAYER] * 2, "`k_cache`: expected an array a layer, or one of all, got none"),
    (
        [LAYER] * 3,
        [LAYER] * 3,
        "`k_cache`: expected an array a layer, n_layers=2 of them, or one of all, got 3 arrays",
    ),
    (
        [LAYER] * 2,
        [LAYER] * 3,
        "`v_cache`: expected an array a layer, n_layers=2 of them, or one of all, got 3 arrays",
    ),
    (
        [((2, 16), "bfloat16")] * 2,
        [LAYER] * 2,
        "`k_cache[0]`: expected shape [num_slots, num_kv_heads, head_dim] or "
        "[num_pages, page_size, num_kv_heads, head_dim], got [2, 16]",
    ),
    (
        [LAYER, ((5, 4, 2, 16), "bfloat16")],
        [LAYER] * 2,
        "`k_cache[1]`: expected shape [num_pages=4, page_size=4, num_kv_heads=2, head_dim=16], "
        "got [5, 4, 2, 16] (as `k_cache[0]`)",
    ),
    (
        [((16, 2, 16), "bfloat16")] * 2,
        [((16, 2, 16), "bfloat16"), LAYER],
        "`v_cache[1]`: expected shape [num_slots=16, num_kv_heads=2, head_dim=16], "
        "got [4, 4, 2, 16] (as `k_cache[0]`)",
    ),
    (
        [LAYER, ((4, 4, 2, 16), "float32")],
        [LAYER] * 2,
        "`k_cache[1]`: expected dtype bfloat16, got float32 (the dtype of k_cache[0])",
    ),
    (
        [LAYER] * 2,
        [((4, 4, 2, 16), "float16")] * 2,
        "`v_cache[0]`: expected dtype bfloat16, got float16 (the dtype of k_cache[0])",
    ),
]


@pytest.mark.parametrize(("k", "v", "message"), LISTS)
def test_lists(framework, arrays, k, v, message):
    k, v = ([of(framework, *layer) for layer in cache] for cache in (k, v))
    refused(ValueError, message, arrays, k_cache=k, v_cache=v)


def test_flat_lists_have_no_pages(framework, arrays):
    flat = [of(framework, (16, 2, 16)) for _ in range(4)]
    message = (
        '`layout`: expected "NHD" for a flat cache, got "HND" with `k_cache[0]` of shape '
        "[16, 2, 16] (it has no pages)"
    )
    refused(ValueError, message, arrays, k_cache=flat[:2], v_cache=flat[2:], layout="HND")


def test_kinds_of_lists(framework, arrays):
    k, v = ([*arrays[name]] for name in CACHES)
    message = "`v_cache`: expected one array of all layers as `k_cache` is, got {}"
    refused(TypeError, message.format("list"), arrays, v_cache=v)
    refused(TypeError, message.format("tuple"), arrays, v_cache=tuple(v))
    one = f"`v_cache`: expected a sequence of arrays as `k_cache` is, got a {KINDS[framework]}"
    refused(TypeError, one, arrays, k_cache=k)
    none = "`k_cache`: expected a sequence of arrays as `v_cache` is, got NoneType"
    refused(TypeError, none, arrays, k_cache=None, v_cache=v)
    for bad, got in ((to_numpy(v[1]), "numpy.ndarray"), (None, "NoneType"), ([v[1]], "list")):
        message = f"`v_cache[1]`: expected a {KINDS[framework]} as `kv` is, got {got}"
        refused(TypeError, message, arrays, k_cache=k, v_cache=[v[0], bad])
    message = f"`k_cache`: expected a {KINDS[framework]} as `kv` is, got dict"
    refused(TypeError, message, arrays, k_cache=dict(enumerate(k)))


def on_the_host(arrays):
    if "cpu" not in str(arrays["kv"].device).lower():
        pytest.skip("values on a GPU are not read back")


def test_slots_on_the_host(framework, arrays):
    on_the_host(arrays)
    for slots, got in (
        ([0, 16, -1, 3], "16 at token 1"),
        ([99, 16, -1, 3], "99 at token 0"),
        ([0, 1, 2, 2**31 - 1], "2147483647 at token 3"),
        ([[0, 1, 2, 3], [0, 1, 16, 3]], "16 at token 2"),
    ):
        refused(
            ValueError,
            f"`slot_mapping`: expected slot < 16, got {got} "
            "(the capacity of the caches; a negative slot skips its token)",
            arrays,
            slot_mapping=to_framework(np.int32(slots), framework),
        )
    refused(
        ValueError,
        "`slot_mapping`: expected slot < 0, got 3 at token 3 "
        "(the capacity of the caches; a negative slot skips its token)",
        arrays,
        **{name: of(framework, (2, 0, 4, 2, 16)) for name in CACHES},
        slot_mapping=to_framework(np.int32([-1, 0, -1, 3]), framework),
    )


@pytest.mark.needs("torch")
def test_slots_of_64_bits_on_the_host(tensors):
    on_the_host(tensors)
    refused(
        ValueError,
        "`slot_mapping`: expected slot < 16, got 4294967299 at token 2 "
        "(the capacity of the caches; a negative slot skips its token)",
        tensors,
        slot_mapping=to_framework(np.int64([0, 1, 2**32 + 3, -(2**63)]), "torch"),
    )


def test_counts_on_the_host(framework, arrays):
    on_the_host(arrays)
    slots = to_framework(np.int32([[0, 1], [2, 99]]), framework)
    for lens, got in (([0, 3], "3 at row 1"), ([-1, 9], "-1 at row 0")):
        refused(
            ValueError,
            f"`commit_lens`: expected 0 <= count < 3, got {got} (the columns of slot_mapping)",
            arrays,
            slot_mapping=slots,
            commit_lens=to_framework(np.int32(lens), framework),
        )
    refused(  # only where it counts
        ValueError,
        "`slot_mapping`: expected slot < 16, got 99 at token 3 "
        "(the capacity of the caches; a negative slot skips its token)",
        arrays,
        slot_mapping=slots,
        commit_lens=to_framework(np.int32([0, 2]), framework),
    )


def test_positions_of_written_tokens_on_the_host(framework, arrays):
    """Nobody looks at those of the others."""
    on_the_host(arrays)
    refused(
        ValueError,
        "`positions`: expected 0 <= position < 8, got 8 at token 2 (the rows of cos_sin_cache)",
        arrays,
        positions=to_framework(np.int32([-1, 99, 8, 99]), framework),
        slot_mapping=to_framework(np.int32([[-1, -1, -1, -1], [-1, -1, 0, -1]]), framework),
    )
    refused(
        ValueError,
        "`positions`: expected 0 <= position < 8, got -5 at token 2 (the rows of cos_sin_cache)",
        arrays,
        positions=to_framework(np.int32([0, 99, -5, 99]), framework),
        slot_mapping=to_framework(np.int32([[0, 1], [2, 3]]), framework),
        commit_lens=to_framework(np.int32([1, 1]), framework),
    )


def test_scales_on_the_host(framework, arrays):
    on_the_host(arrays)
    arrays |= {name: of(framework, SHAPE, "float8_e5m2") for name in CACHES}
    for name in ("k_scale", "v_scale"):
        for scale, got in ((0, "0.0"), (-1, "-1.0"), (np.nan, "nan"), (np.inf, "inf")):
            refused(
                ValueError,
                f"`{name}`: expected finite values > 0, got {got} at layer 1",
                arrays,
                **{name: to_framework(np.float32([1, scale]), framework)},
            )


@pytest.mark.needs("jax")
def test_jax_arrays_that_are_gone():
    """A cache that was donated to an earlier call."""
    arrays = lay(CASE.make(), "jax")
    message = (
        "`{}`: expected an array with its values in memory, got a deleted array "
        "(donated to an earlier call, or deleted)"
    )
    lists = {name: list(arrays[name]) for name in CACHES}
    lists["v_cache"][1].delete()
    with pytest.raises(ValueError, match=f"^{re.escape(message.format('v_cache[1]'))}$"):
        fkv.write_cache(**arrays | lists)
    arrays["k_cache"].delete()
    with pytest.raises(ValueError, match=f"^{re.escape(message.format('k_cache'))}$"):
        fkv.write_cache(**arrays)


@pytest.mark.needs("torch")
def test_strides(tensors):
    for bad, message in (
        (
            filled(2, 4, 4, 2, 32)[..., ::2],
            "a contiguous last dim, got stride 2 there, from strides [1024, 256, 64, 32, 2] "
            "(tokens, layers and heads may be strided, a row may not)",
        ),
        (
            filled(1, 4, 4, 2, 16).expand(SHAPE),
            "one address for each element, got strides [0, 128, 32, 16, 1] for shape "
            "[2, 4, 4, 2, 16] (an expanded or overlapping view cannot hold a result)",
        ),
        (
            filled(1000).as_strided(SHAPE, (256, 64, 16, 16, 1)),
            "one address for each element, got strides [256, 64, 16, 16, 1] for shape "
            "[2, 4, 4, 2, 16] (an expanded or overlapping view cannot hold a result)",
        ),
    ):
        for name in CACHES:
            refused(ValueError, f"`{name}`: expected {message}", tensors, **{name: bad})


@pytest.mark.needs("torch")
def test_strides_of_layers_that_differ(tensors):
    """K and V may; and one of each is as good as one of all."""
    bad = [filled(4, 4, 2, 16), filled(4, 4, 2, 32)[..., :16]]
    good = [filled(4, 4, 2, 16), filled(4, 4, 2, 16)]
    for name, other in (CACHES, CACHES[::-1]):
        refused(
            ValueError,
            f"`{name}[1]`: expected strides [128, 32, 16, 1] as `{name}[0]`, "
            "got [256, 64, 32, 1] (one kernel writes all layers)",
            tensors,
            **{name: bad, other: good},
        )


@pytest.mark.needs("torch")
def test_overlap(tensors):
    message = (
        "`{0}`: expected memory of its own, got memory that overlaps `{1}` "
        "({0} is written while {1} is in use)"
    )
    cache, layer, others = filled(*SHAPE), filled(*SHAPE[1:]), [*filled(*SHAPE)]
    buffer, slots = filled(2032), of("torch", (512,), "int32")
    first, last = buffer[:1024].view(SHAPE), buffer[1008:].view(SHAPE)  # one row in common
    for wrong, user, changes in (
        ("v_cache", "k_cache", dict(k_cache=cache, v_cache=cache)),
        ("v_cache", "k_cache", dict(k_cache=first, v_cache=last)),
        ("k_cache", "kv", dict(kv=buffer[1000:1512].view(4, 2, 64), k_cache=first)),
        (
            "v_cache",
            "slot_mapping",
            dict(slot_mapping=slots[:4], v_cache=slots.view(cache.dtype).view(SHAPE)),
        ),
        ("k_cache[1]", "k_cache[0]", dict(k_cache=[layer, layer], v_cache=others)),
        ("v_cache[0]", "k_cache[1]", dict(k_cache=others, v_cache=[others[1], layer])),
    ):
        refused(ValueError, message.format(wrong, user), tensors, **changes)


@pytest.mark.needs("torch")
def test_gradients_and_lazy_views(tensors):
    import torch

    k, v = ([*filled(*SHAPE)] for _ in CACHES)
    refused(
        ValueError,
        "`v_cache`: expected a tensor that needs no gradient, got requires_grad=True "
        "(no gradient is computed: v_cache.detach(), or call under torch.no_grad())",
        tensors,
        v_cache=filled(*SHAPE).requires_grad_(),
    )
    refused(
        ValueError,
        "`v_cache[1]`: expected a tensor that needs no gradient, got requires_grad=True "
        "(no gradient is computed: v_cache[1].detach(), or call under torch.no_grad())",
        tensors,
        k_cache=k,
        v_cache=[v[0], filled(4, 4, 2, 16).requires_grad_()],
    )
    message = (
        "`k_cache[1]`: expected a tensor with its values in memory, got a view whose sign is "
        "flipped lazily (k_cache[1].resolve_neg())"
    )
    lazy = torch._neg_view(k[1])
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fkv.write_cache(**tensors | dict(k_cache=[k[0], lazy], v_cache=v))
    assert (k[1] == 7).all()


@pytest.mark.needs("torch")
def test_devices(tensors):
    for name, bad in (
        ("v_cache", filled(*SHAPE)),
        ("slot_mapping", tensors["slot_mapping"]),
        ("commit_lens", of("torch", (2,), "int32")),
    ):
        changes = {"slot_mapping": of("torch", (2, 2), "int32")} if name == "commit_lens" else {}
        message = f"`{name}`: expected device {tensors['kv'].device}, got meta (where `kv` is)"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            fkv.write_cache(**tensors | changes | {name: bad.to("meta")})


@pytest.mark.needs("jax")
def test_pallas_wants_128_bytes_a_token(framework):
    for case, got in (
        (CacheCase(T=4, D=16), "3 of head_dim=16 in bfloat16"),
        (CacheCase(T=4, H=3, cache_dtype="float8_e5m2"), "3 of head_dim=64 in float8_e5m2"),
        (
            CacheCase(T=4, H=11, D=32, cache_dtype="float8_e4m3fn", scaled="kv", page_size=4),
            "11 of head_dim=32 in float8_e4m3fn",
        ),
    ):
        refused(
            NotImplementedError,
            "`k_cache`: expected a multiple of 16 bytes a head and of 128 a token for "
            f'backend="pallas", got num_kv_heads={got} '
            '(backend="triton" takes any)',
            lay(case.make(), framework),
            backend="pallas",
        )


@pytest.mark.needs("jax")
def test_pallas_wants_16_bytes_a_head(framework):
    case = CacheCase(T=4, H=16, D=72, R=16, cache_dtype="float8_e4m3fn", scaled="kv")
    message = (
        "`k_cache`: expected a multiple of 16 bytes a head and of 128 a token for "
        'backend="pallas", got num_kv_heads=16 of head_dim=72 in float8_e4m3fn '
        '(backend="triton" takes any)'
    )
    refused(NotImplementedError, message, lay(case.make(), framework), backend="pallas")


@pytest.mark.needs("jax")
def test_pallas_wants_one_array_of_all_layers(framework, arrays):
    stack = {"torch": "torch", "jax": "jnp"}[framework]
    refused(
        NotImplementedError,
        f'`k_cache`: expected one {KINDS[framework]} of all layers for backend="pallas", '
        f'got an array a layer ({stack}.stack, or backend="triton")',
        arrays,
        **{name: [*arrays[name]] for name in CACHES},
        backend="pallas",
    )


@pytest.mark.needs("torch", "jax")
def test_pallas_wants_contiguous_tensors():
    import torch

    tensors = lay(CacheCase(T=4, H=2, page_size=4, window=2).make(), "torch")
    shape = tuple(tensors["k_cache"].shape)
    for name in CACHES:
        refused(
            ValueError,
            f'`{name}`: expected a contiguous tensor for backend="pallas", got strides '
            f"[4096, 1024, 256, 128, 1] for shape {list(shape)} "
            '(backend="triton" takes it)',
            tensors,
            **{name: filled(*shape[:-1], 128)[..., :64]},
            backend="pallas",
        )
        with torch.inference_mode():
            cache = filled(*shape)
        refused(
            ValueError,
            f'`{name}`: expected no inference tensor for backend="pallas" outside of '
            'torch.inference_mode(), got one (backend="triton" takes it)',
            tensors,
            **{name: cache},
            backend="pallas",
        )
    for name in ("slot_mapping", "commit_lens"):
        strided = torch.stack([tensors[name]] * 2, -1)[..., 0]
        refused(
            ValueError,
            f'`{name}`: expected a contiguous tensor for backend="pallas", got strides '
            f"{list(strided.stride())} for shape {list(strided.shape)} "
            f'({name}.contiguous(), or backend="triton")',
            tensors,
            **{name: strided},
            backend="pallas",
        )
