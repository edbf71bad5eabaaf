"""Proof that write_cache's tests can fail: test_wrong_kernels, for what only a cache has.

No fault writes outside of the memory that it was given: where one goes astray, the problem or the
edit keeps it inside.
"""

import dataclasses
import functools
import importlib

import numpy as np
import pytest

import fkv
from cases import CacheCase, Case, assert_cache_right, lay, to_framework
from conftest import BACKENDS, _mode
from test_write_cache import CACHES, write_unchecked
from test_wrong_kernels import forget_kernels, plant

# Every result that is rounded passes these lines, interpreted or compiled.
STORE = "    if ROUND_TO is None:\n"
ROUNDED = "        if not interpret or out_dtype.itemsize > 1:\n"

# name -> backend -> (old, new), ...; each `old` stands in the source.
FAULTS = {
    "page_and_offset_swapped": {
        "triton": [
            ("(slot // PAGE_SIZE) * stride_k_page + (slot % PAGE_SIZE)", "(slot % PAGE_SIZE) * stride_k_page + (slot // PAGE_SIZE)"),
            ("(slot // PAGE_SIZE) * stride_v_page + (slot % PAGE_SIZE)", "(slot % PAGE_SIZE) * stride_v_page + (slot // PAGE_SIZE)"),
        ],
        "pallas": [("for f in (lax.div, lax.rem)", "for f in (lax.rem, lax.div)")],
    },
    "tokens_before_heads": {
        "triton": [
            ("(slot % PAGE_SIZE) * stride_k_t", "(slot % PAGE_SIZE) * stride_k_h"),
            ("(slot % PAGE_SIZE) * stride_v_t", "(slot % PAGE_SIZE) * stride_v_h"),
            ("head * stride_k_h", "head * stride_k_t"),
            ("head * stride_v_h", "head * stride_v_t"),
        ],
        "pallas": [("out_ref.at[layer, page, heads, offset, piece]", "out_ref.at[layer, page, offset, heads, piece]")],
    },
    "map_of_layer_0": {
        "triton": [("slots_row = layer\n", "slots_row = layer * 0\n")],
        "pallas": [("slots_ref[layer, t]", "slots_ref[0, t]")],
    },
    "cache_of_layer_0": {
        "triton": [("base_ptr + layer * stride_layer", "base_ptr")],
        "pallas": [("out_ref.at[layer, page,", "out_ref.at[0, page,")],
    },
    "address_of_layer_0": {"triton": [("tl.load(base_ptr + layer)", "tl.load(base_ptr)")]},
    "caches_swapped": {
        "triton": [
            ("v_layer = _cache_pointer(v_out_ptr, layer, stride_v_l", "v_layer = _cache_pointer(k_out_ptr, layer, stride_k_l"),
            ("k_layer = _cache_pointer(k_out_ptr, layer, stride_k_l", "k_layer = _cache_pointer(v_out_ptr, layer, stride_v_l"),
        ],
        "pallas": [("*cache_refs, k_out_ref, v_out_ref = others", "*cache_refs, v_out_ref, k_out_ref = others")],
    },
    "k_at_the_strides_of_v": {"triton": [("k_layer + k_token", "k_layer + v_token")]},
    "v_at_the_strides_of_k": {"triton": [("v_layer + v_token", "v_layer + k_token")]},
    "layers_of_k_at_the_stride_of_v": {"triton": [("(k_out_ptr, layer, stride_k_l", "(k_out_ptr, layer, stride_v_l")]},
    "slot_is_the_token": {
        "triton": [("stored = stored & (slot >= 0)", "slot = token\n        stored = stored & (slot >= 0)")],
        "pallas": [("slot = slots_ref[layer, t] if cache.is_mapped_by_layer else slots_ref[t]", "slot = t")],
    },
    "slot_in_32_bits": {  # jax has no others
        "triton": [("mask=token_mask, other=-1).to(tl.int64)", "mask=token_mask, other=-1).to(tl.int32).to(tl.int64)")],
    },
    "negative_slot_is_slot_0": {
        "triton": [("stored = stored & (slot >= 0)", "slot = tl.where(token_mask, tl.maximum(slot, 0), -1)\n        stored = stored & (slot >= 0)")],
        "pallas": [
            ("(slot >= 0) & ", ""),
            ("(written, slot.astype(jnp.int32))", "(written, jnp.maximum(slot, 0).astype(jnp.int32))"),
        ],
    },
    "slot_at_the_capacity_written": {  # where the next layer starts; the TMA would drop it
        "triton": [("(slot < num_slots)", "(slot <= num_slots)")],
    },
    "slot_past_the_capacity_is_the_last": {
        "triton": [("stored = stored & (slot >= 0)", "slot = tl.minimum(slot, num_slots - 1)\n        stored = stored & (slot >= 0)")],
        "pallas": [
            (" & (slot < cache.num_slots)", ""),
            ("(written, slot.astype(jnp.int32))", "(written, jnp.minimum(slot, cache.num_slots - 1).astype(jnp.int32))"),
        ],
    },
    "rows_in_reverse": {"pallas": [("tile.at[i, row], target", "tile.at[i, block_t - 1 - row], target")]},
    "commit_lens_forgotten": {
        "triton": [("slots_column < count", "count >= 0")],
        "pallas": [("lax.rem(t, cache.window) < count", "count >= 0")],
    },
    "one_token_more_than_counted": {
        "triton": [("slots_column < count", "slots_column <= count")],
        "pallas": [("lax.rem(t, cache.window) < count", "lax.rem(t, cache.window) <= count")],
    },
    "all_tokens_counted_in_row_0": {
        "triton": [("slots_column < count", "token < count")],
        "pallas": [("lax.rem(t, cache.window) < count", "t < count")],
    },
    "count_of_row_0": {
        "triton": [("slots_row * stride_lens", "slots_row * 0")],
        "pallas": [("cache_refs[1][lax.div(t, cache.window)]", "cache_refs[1][0]")],
    },
    "slots_of_row_0": {
        "triton": [("slots_row * stride_slots_row", "slots_row * 0")],
        "pallas": [("else slots_ref[t]", "else slots_ref[lax.rem(t, cache.window)]")],
    },
    "window_transposed": {
        "triton": [("slots_row = token // WINDOW\n            slots_column = token % WINDOW", "slots_row = token % WINDOW\n            slots_column = token // WINDOW")],
        "pallas": [
            ("lax.rem(t, cache.window) < count", "lax.div(t, cache.window) < count"),
            ("cache_refs[1][lax.div(t, cache.window)]", "cache_refs[1][lax.rem(t, cache.window)]"),
        ],
    },
    "k_scale_multiplied": {
        "triton": [("        weight *= reciprocal\n        partner_weight *= reciprocal", "        weight /= reciprocal\n        partner_weight /= reciprocal")],
        "pallas": [("row * inverse for row", "row / inverse for row")],
    },
    "k_scale_before_the_norm": {  # which cancels it
        "triton": [("        weight *= reciprocal\n        partner_weight *= reciprocal\n", "")],
        "pallas": [("row * inverse for row", "row for row")],
    },
    "partner_not_scaled": {"triton": [("        partner_weight *= reciprocal\n", "")]},
    "tail_not_scaled": {
        "triton": [("        weight *= reciprocal\n", "        weight = tl.where(rotary_mask, weight * reciprocal, weight)\n")],
        "pallas": [("if k_scale is not None:", "if k_scale is not None and pieces is not k3_pieces:")],
    },
    "v_scale_multiplied": {
        "triton": [("v = _divided(v, v_scale, power, reciprocal, ROUND_TO is not None)", "v *= v_scale")],
        "pallas": [("divided(v, *v_scale)", "v * v_scale[0]")],
    },
    "v_scale_forgotten": {
        "triton": [("            v = _divided(v, v_scale, power, reciprocal, ROUND_TO is not None)\n", "")],
        "pallas": [("divided(v, *v_scale)", "v")],
    },
    "scales_swapped": {
        "triton": [
            ("_, power, reciprocal = _scale_of(k_scale_ptr, layer, stride_k_scale)", "_, power, reciprocal = _scale_of(v_scale_ptr, layer, stride_v_scale)"),
            ("v_scale, power, reciprocal = _scale_of(v_scale_ptr, layer, stride_v_scale)", "v_scale, power, reciprocal = _scale_of(k_scale_ptr, layer, stride_k_scale)"),
        ],
        "pallas": [("k_scale, v_scale = (\n", "v_scale, k_scale = (\n")],
    },
    "scale_of_layer_0": {
        "triton": [("scale_ptr + layer * stride", "scale_ptr")],
        "pallas": [("scale = ref[layer]", "scale = ref[0]")],
    },
    "scale_not_looked_at": {
        "triton": [("(scale > 0.0) & (scale < float(\"inf\"))", "scale == scale")],
        "pallas": [("(scale > 0) & (scale < jnp.inf)", "scale == scale")],
    },
    "not_saturating": {  # as a conversion that does not clamp has it
        "triton": [(STORE, "    value = tl.where(tl.abs(value) > 464.0, float(\"nan\"), value)\n" + STORE)],
        "pallas": [(ROUNDED, "        x = jnp.where(jnp.abs(x) > 464.0, jnp.nan, x)\n" + ROUNDED)],
    },
    "saturating_at_240": {  # the largest of float8_e4m3fnuz
        "triton": [(STORE, "    value = tl.where(tl.abs(value) > 240.0, tl.where(value > 0.0, 240.0, -240.0), value)\n" + STORE)],
        "pallas": [(ROUNDED, "        x = jnp.clip(x, -240.0, 240.0)\n" + ROUNDED)],
    },
    "nan_is_zero": {
        "triton": [(STORE, "    value = tl.where(value == value, value, 0.0)\n" + STORE)],
        "pallas": [(ROUNDED, "        x = jnp.where(x == x, x, 0.0)\n" + ROUNDED)],
    },
    "subnormals_flushed": {
        "triton": [(STORE, "    value = tl.where(tl.abs(value) < 2.0**-6, 0.0, value)\n" + STORE)],
        "pallas": [(ROUNDED, "        x = jnp.where(jnp.abs(x) < 2.0**-6, 0.0, x)\n" + ROUNDED)],
    },
    "truncating": {
        "triton": [(STORE, "    value = (value.to(tl.uint32, bitcast=True) & 0xFFF00000).to(tl.float32, bitcast=True)\n" + STORE)],
        "pallas": [(ROUNDED, "        x = x * (1 - 2.0**-5)\n" + ROUNDED)],
    },
    "ties_away_from_zero": {
        "triton": [(STORE, "    value *= 1.0 + 2.0**-20\n" + STORE)],
        "pallas": [(ROUNDED, "        x = x * (1 + 2.0**-20)\n" + ROUNDED)],
    },
    "k_rounded_twice": {
        "triton": [("_store(k_first, rotated,", "_store(k_first, rotated.to(kv_ptr.dtype.element_ty).to(tl.float32),")],
        "pallas": [
            ("rounded(a * cos[i] - b * sin[i])", "rounded((a * cos[i] - b * sin[i]).astype(dtype).astype(jnp.float32))"),
            ("rounded(b * cos[i] + a * sin[i])", "rounded((b * cos[i] + a * sin[i]).astype(dtype).astype(jnp.float32))"),
        ],
    },
    "v_rounded_twice": {
        "triton": [("_store(v_row + v_dim, v,", "_store(v_row + v_dim, v.to(kv_ptr.dtype.element_ty).to(tl.float32),")],
        "pallas": [("rounded(v)", "rounded(v.astype(dtype).astype(jnp.float32))")],
    },
    "bits_of_v_for_its_values": {
        "triton": [("v = v.to(tl.float32)", "v = v.to(tl.uint16, bitcast=True).to(tl.float32)")],
    },
}  # fmt: skip
OF_WINDOWS = {
    *("address_of_layer_0", "commit_lens_forgotten", "one_token_more_than_counted"),
    *("all_tokens_counted_in_row_0", "count_of_row_0", "slots_of_row_0", "window_transposed"),
}

# As many pages as tokens in a page and as heads: what is taken for another stays inside.
PAGES = CacheCase(
    *(21, 3, 4, 128, 64),
    cache_dtype="float8_e4m3fn",
    page_size=4,
    layout="HND",
    by_layer=True,
    scaled="kv",
)
WINDOWS = CacheCase(T=40, H=2, window=5)


def make(case, backend):
    """WINDOWS as it is; PAGES with slots, positions and scales that the host would refuse."""
    problem = case.make()
    if case is WINDOWS:
        return problem
    problem |= Case(case.T, case.L, case.H, case.D, case.R).make(case.dtype)
    problem |= {name: problem[name][:, :4] for name in CACHES}
    rng, bad = np.random.default_rng(0), [16, -1, 21, -7, 2**31 - 1, -(2**31)]
    if backend == "triton":  # jax has no others; the low 32 bits of these are 0, 0 and -1
        bad += [2**32, -(2**32), 2**63 - 1]
    slots = np.zeros((case.L, case.T), "int64" if backend == "triton" else "int32")
    for row in slots:  # neither the first slot nor the last one, 15, is written
        row[:] = *rng.permutation(range(1, 15))[:12], *np.resize(bad, 9)
        rng.shuffle(row[1:])
    problem["slot_mapping"] = slots
    problem["positions"][0] = case.P
    problem["kv"][0, :, -2:] = 1e4, np.nan  # of V
    problem["k_scale"][2], problem["v_scale"][0] = -1, 0.25  # and with the latter there are ties
    return problem


def spacious(array, room):
    """A tensor with so much more room in each dim, amid memory that a fault may hit."""
    around, own = np.zeros(2**16, array.dtype), tuple(map(slice, array.shape))
    wide = np.zeros(np.add(array.shape, room), array.dtype)
    wide[own] = array
    whole = to_framework(np.concatenate([around, wide.ravel(), around]), "torch")
    return whole[around.size : -around.size].view(wide.shape)[own]


def write(problem, backend):
    """In torch, WINDOWS into an array a layer, PAGES where K and V have strides of their own.

    PAGES goes below the checks of values.
    """
    if backend == "triton" and "commit_lens" in problem:
        arguments = lay(problem, "torch")
        return fkv.write_cache(**arguments | {name: list(arguments[name]) for name in CACHES})
    caches = {}
    if backend == "triton":
        rooms = dict(k_cache=(0, 0, 0, 0, 0), v_cache=(0, 0, 1, 1, 16))
        caches = {name: spacious(problem[name], room) for name, room in rooms.items()}
    return write_unchecked(problem | caches, backend)


def few_rows(choose_tiles, rows, spec, interpreted):
    return dataclasses.replace(choose_tiles(spec, interpreted), block_t=rows)


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """planted(backend, edits): with them in its kernel from here on, to the end of the test."""
    used = []

    def plant_in(backend, edits):
        used.append(backend)
        plant(backend, edits, tmp_path, monkeypatch)
        if backend == "pallas" and _mode(backend) == "interpreted":  # what is unrolled takes long
            launch = importlib.import_module("fkv.pallas._launch")
            few = functools.partial(few_rows, launch.choose_tiles, launch.UNROLLED)
            monkeypatch.setattr(launch, "choose_tiles", few)

    yield plant_in
    for backend in used:
        forget_kernels(backend)


def pytest_generate_tests(metafunc):
    if "fault" in metafunc.fixturenames:
        edits = [
            (fault, on)
            for fault, kernels in FAULTS.items()
            for on in kernels
            if BACKENDS[on] in metafunc.config.installed
        ]
        metafunc.parametrize(("fault", "on"), edits)


@pytest.mark.parametrize("case", [PAGES, WINDOWS], ids=["pages", "windows"])
def test_unedited_kernel_passes(case, backend, planted):
    planted(backend, [])
    problem = make(case, backend)
    assert_cache_right(problem, *write(problem, backend))


def test_wrong_kernel_is_rejected(fault, on, planted):
    planted(on, FAULTS[fault][on])
    problem = make(WINDOWS if fault in OF_WINDOWS else PAGES, on)
    caches = write(problem, on)
    with pytest.raises(AssertionError, match=r"^([KV]|[kv]_cache) is wrong"):
        assert_cache_right(problem, *caches)


def test_faults_are_many():
    assert FAULTS.keys() >= OF_WINDOWS
    for backend in BACKENDS:
        assert sum(backend in edits for edits in FAULTS.values()) >= 8
