"""KVMaterializer.write_cache on torch: what it adds to fkv.write_cache."""

import re

import numpy as np
import pytest
import torch

import fkv
from cases import assert_cache_right, to_numpy
from test_materializer import DEVICE, ON_GPU, D, GrowingRope, H, L, Rope, inputs, make, make_layers
from test_materializer import problem_of as kv_problem

SLOTS = 12


def pools(n=L, dtype=torch.float32, slots=SLOTS):
    """Of K and of V, a flat pool a layer, as SGLang has them."""
    shape = (slots, H, D)
    return tuple([torch.full(shape, 7, device=DEVICE).to(dtype) for _ in range(n)] for _ in "kv")


def problem_of(m, layers, hidden, positions, caches, slots, rope=None, **options):
    """The arguments of write_cache in NumPy, with the caches as they are before the call."""
    k_cache, v_cache = (np.stack([to_numpy(x).copy() for x in cache]) for cache in caches)
    problem = kv_problem(layers, m.project(hidden), positions, rope)
    problem |= {"k_cache": k_cache, "v_cache": v_cache, "slot_mapping": to_numpy(slots)}
    layout = options.pop("layout", "NHD")
    return problem | {n: to_numpy(x) for n, x in options.items()} | {"layout": layout}


def integers(*values):
    return torch.tensor(values, device=DEVICE)


@pytest.mark.parametrize("hint", [None, 32])
@pytest.mark.parametrize("shape", ["list", "stacked"])
def test_right(shape, hint):
    layers = make_layers()
    m, caches = make(layers, hint=hint), pools()
    for tokens in (5, 2, 7):
        hidden, positions = inputs(tokens, seed=tokens)
        slots = torch.randperm(SLOTS, device=DEVICE)[:tokens]
        given = caches if shape == "list" else tuple(map(torch.stack, caches))
        problem = problem_of(m, layers, hidden, positions, given, slots)
        k, v = m.write_cache(hidden, positions, *given, slots)
        assert k is given[0]
        assert v is given[1]
        assert_cache_right(problem, k, v)
    assert m._workspace["k"].made is m._workspace["v"].made is None  # which are not needed


def test_everything_is_handed_on():
    layers = make_layers(dtype=torch.bfloat16)
    m = make(layers)
    hidden, positions = inputs(6, torch.bfloat16)
    pages = torch.zeros(2, L, 3, H, 4, D, dtype=torch.float8_e4m3fn, device=DEVICE).unbind(0)
    options = {
        "commit_lens": integers(3, 1),
        "k_scale": torch.full([L], 0.5, device=DEVICE),
        "v_scale": torch.arange(1.0, L + 1, device=DEVICE),
        "layout": "HND",
    }
    slots = integers(4, 11, 0, 5, 6, 7).view(2, 3)
    problem = problem_of(m, layers, hidden, positions, pages, slots, **options)
    assert_cache_right(problem, *m.write_cache(hidden, positions, *pages, slots, **options))


def skipping(T):
    """Each way to skip tokens 1 and 3 of six: slot_mapping, and commit_lens."""
    some = integers(4, -1, 0, -7, 5, 6)
    by_layer = torch.stack([some, torch.where(some > 4, -1, some)])
    return {
        "slots": (some, None),
        "maps_of_layers": (by_layer, None),
        "counts": (integers(4, 3, 0, 1, 5, 6).view(3, 2), integers(1, 1, 2)),
    }


@pytest.mark.parametrize("way", ["slots", "maps_of_layers", "counts"])
@pytest.mark.parametrize("kind", [Rope, GrowingRope])
def test_positions_of_skipped_tokens_may_be_anything(kind, way):
    """Without a hint the extremes are looked at, and a table may grow for them: not for these."""
    rope = kind(8)
    layers = make_layers(rope=rope)
    m, caches = make(layers, rope), pools()
    hidden, positions = inputs(6, rows=8)
    positions[1], positions[3] = -5, 2**40
    hidden[1], hidden[3] = torch.nan, torch.inf
    slots, lens = skipping(6)[way]
    options = {} if lens is None else {"commit_lens": lens}
    problem = problem_of(m, layers, hidden, positions, caches, slots, rope, **options)
    assert_cache_right(problem, *m.write_cache(hidden, positions, *caches, slots, **options))
    assert len(m.cos_sin_cache) == 8


def test_the_table_grows_for_what_is_written():
    rope = GrowingRope(8)
    layers = make_layers(rope=rope)
    m, caches = make(layers, rope), pools()
    hidden, positions = inputs(3, rows=8)
    positions[2] = 20
    slots = integers(2, 0, 1)
    k, v = m.write_cache(hidden, positions, *caches, slots)
    assert len(m.cos_sin_cache) == 21
    before = pools()
    problem = problem_of(m, layers, hidden, positions, before, slots, rope)
    assert_cache_right(problem, k, v)


def test_no_tokens():
    m, caches = make(), pools()
    hidden, positions = inputs(0)
    k, v = m.write_cache(hidden, positions, *caches, integers().long())
    assert all((x == 7).all() for x in (*k, *v))


def test_project_takes_the_place_of_the_projection():
    layers, caches = make_layers(), pools()
    hidden, positions = inputs(3)
    kv = make(layers).project(hidden)
    m = make(layers, project=lambda x: kv)
    slots = integers(3, 2, 1)
    problem = problem_of(m, layers, hidden, positions, caches, slots)
    assert_cache_right(problem, *m.write_cache(hidden, positions, *caches, slots))


def wrong_arguments():
    """What is wrong, and the start of the message."""
    past = "slot_mapping" if not ON_GPU else None  # which a GPU does not write
    cases = {
        "a position past the table": ({"positions": integers(0, 99, 1)}, "`positions`: expected 0"),
        "positions of another length": ({"positions": integers(0)}, "`positions`: expected shape"),
        "slots of another length": ({"slot_mapping": integers(0, 1)}, "`slot_mapping`: expected"),
        "no slots": ({"slot_mapping": None}, "`slot_mapping`: expected a torch.Tensor"),
        "counts of no window": ({"commit_lens": integers(1)}, "`slot_mapping`: expected shape"),
        "counts in a list": ({"commit_lens": [1]}, "`commit_lens`: expected a torch.Tensor"),
        "a list and an array": ({"v_cache": torch.zeros(1)}, "`v_cache`: expected a sequence"),
        "another layout": ({"layout": "NDH"}, "`layout`: expected"),
    }
    if past:
        cases["a slot past the capacity"] = ({past: integers(0, 1, SLOTS)}, f"`{past}`: expected")
    return cases


@pytest.mark.parametrize("name", wrong_arguments())
def test_nothing_is_written_before_everything_is_checked(name):
    """The sentences are write_cache's own, whose tests have them whole."""
    changes, message = wrong_arguments()[name]
    m, caches = make(), pools()
    hidden, positions = inputs(3)
    given = dict(
        ctx_hidden=hidden,
        positions=positions,
        k_cache=caches[0],
        v_cache=caches[1],
        slot_mapping=integers(2, 1, 0),
    )
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        m.write_cache(**given | changes)
    assert all((x == 7).all() for cache in caches for x in cache)


def test_it_is_fkv_write_cache_of_the_projection():
    """Bit for bit."""
    layers = make_layers()
    m, caches, others = make(layers), pools(), pools()
    hidden, positions = inputs(4)
    slots = integers(9, 3, 4, 1)
    m.write_cache(hidden, positions, *caches, slots)
    side = (m.k_norm_weight, m.eps, m.cos_sin_cache, positions)
    fkv.write_cache(m.project(hidden), *side, *others, slots)
    for mine, its in zip((*caches[0], *caches[1]), (*others[0], *others[1]), strict=True):
        assert torch.equal(mine, its)
