"""On the same data as SGLang's own kernels, where its package lies unpacked beside the project.

    pip download --no-deps sglang && unzip -d .. sglang*.whl     # or pytest --sglang FOLDER

Only files are read that need torch and triton alone. Skipped where they or a GPU are absent.
"""

import numpy as np
import pytest
import torch

import fkv
import fkv.reference
from cases import CacheCase, Case, assert_right, lay, to_numpy
from fkv._bench import load_sglang, sglang_file
from test_materializer import GrowingRope, Rope, inputs, make_layers

KERNEL, WRITER = "fused_kv_materialize.py", "dspark/fused_kv_write.py"
INPUTS = ("kv", "k_norm_weight", "eps", "cos_sin_cache", "positions")
DFLASH = dict(T=300, L=5, H=8, D=128, P=512, positions_dtype="int64")


@pytest.fixture
def sglang(request):
    """sglang(file, name) of what SGLang has there."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    folder = request.config.getoption("--sglang")
    for name in (KERNEL, WRITER):
        if not sglang_file(folder, name).exists():
            pytest.skip(f"no {sglang_file(folder, name)}")
    return lambda file, name: load_sglang(sglang_file(folder, file), name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("R", [128, 64])
def test_its_kernel(sglang, dtype, R):
    """It keeps to the same bound."""
    kernel = sglang(KERNEL, "_fused_norm_rope_stacked")
    problem = Case(**DFLASH, R=R).make(dtype)
    arrays = lay(problem, "torch")
    k, v = kernel(*arrays.values(), 8, 128, R)
    assert_right(problem, k, v)
    assert_right(problem, *fkv.materialize(**arrays))


@pytest.mark.parametrize("window", [0, 6])
def test_its_dspark_writer(sglang, window):
    """V and what is left alone bit for bit; K within both roundings, of which it has two."""
    write = sglang(WRITER, "fused_kv_norm_rope_write")
    case = CacheCase(**DFLASH, eps=(1e-6,), window=window)
    problem = case.make()
    arrays = lay(problem, "torch")
    fkv.write_cache(**arrays)
    theirs = lay(problem, "torch")
    rows = [
        [k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0)]
        for k, v in zip(theirs["k_cache"], theirs["v_cache"], strict=True)
    ]
    write(
        theirs["kv"],
        torch.tensor(rows, device="cuda"),
        *(theirs[name] for name in ("k_norm_weight", "cos_sin_cache", "positions")),
        theirs["slot_mapping"].flatten(),
        *(case.L, case.H * case.D, case.D, 1e-6),
        commit_lens=theirs.get("commit_lens"),
        locs_row_width=window or None,
    )
    assert torch.equal(arrays["v_cache"].view(torch.int16), theirs["v_cache"].view(torch.int16))
    inputs_of_k = {name: problem[name] for name in INPUTS}
    where = {name: problem.get(name) for name in ("slot_mapping", "commit_lens", "layout")}
    exact, _ = fkv.reference.materialize(**inputs_of_k)
    bound = 2 * fkv.reference.error_bound(**inputs_of_k, dtype="bfloat16")
    pairs = np.hypot(*np.split(exact, 2, axis=-1))  # bfloat16 before RoPE: 2**-9 of their length
    bound += 2.0**-9 * np.concatenate([pairs, pairs], axis=-1)
    nowhere = np.zeros(problem["k_cache"].shape)
    bound = fkv.reference.place(bound, nowhere, **where)
    mine, its = (to_numpy(x["k_cache"]).astype("f8") for x in (arrays, theirs))
    assert (np.abs(mine - its) <= bound).all()


@pytest.mark.parametrize("hint", [None, 32])
@pytest.mark.parametrize("kind", [Rope, GrowingRope])
def test_its_helper_and_a_write_for_each_layer(sglang, kind, hint):
    """The layers, the call and the attributes are the same; with its projection so are the bits."""
    helper = sglang(KERNEL, "FusedKVMaterializeHelper")
    rope = kind(32)
    layers = make_layers(dtype=torch.bfloat16, rope=rope)
    hidden, positions = inputs(19, torch.bfloat16)
    arguments = (layers, rope, 2, 16, torch.device("cuda:0"), hint)
    its = helper(*arguments)
    mine = fkv.KVMaterializer(
        *arguments, project=lambda x: torch.mm(x, its.flat_kv_weight_t).view(len(x), 2, -1)
    )
    names = ("n_layers", "num_kv_heads", "head_dim", "rotary_dim", "kv_size", "device")
    assert [getattr(its, name) for name in names] == [getattr(mine, name) for name in names]
    assert mine.rotary_emb is its.rotary_emb

    slots = torch.randperm(64, device="cuda")[:19]
    pools = [torch.zeros(4, 64, 2, 16, dtype=torch.bfloat16, device="cuda") for _ in range(3)]

    def writer(pool):
        def write(layer, k, v):
            pool[layer][slots], pool[2 + layer][slots] = k, v

        return write

    its.materialize(hidden, positions, writer(pools[0]))
    mine.materialize(hidden, positions, writer(pools[1]))
    mine.write_cache(hidden, positions, list(pools[2][:2]), list(pools[2][2:]), slots)
    assert torch.equal(pools[1], pools[2])
    assert torch.equal(pools[0][2:], pools[1][2:])
    side = (mine.k_norm_weight, mine.eps, rope.cos_sin_cache, positions)
    numbers = dict(zip(INPUTS, map(to_numpy, (mine.project(hidden), *side)), strict=True))
    for pool in pools:
        assert_right(numbers, pool[:2, slots], pool[2:, slots])
