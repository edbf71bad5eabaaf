"""from_checkpoint against an oracle that nobody here wrote: a Qwen3 of `transformers`.

Its forward pass leaves K and V in its cache; hooks see what each layer's projection was given.
"""

import functools
import json
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

import fkv
from cases import DTYPES, to_framework, to_numpy
from fkv._rope import frequencies, rope_table
from test_transformers import their_bound

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
L, H, D, HIDDEN, TOKENS, ROWS = 2, 2, 16, 32, 9, 512
U32 = 2.0**-24

ROPES = {
    "default": {"rope_theta": 1e4},
    "linear": {"rope_theta": 1e4, "factor": 2.5},
    "llama3": {
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128},
}
# How many times 2**-24 their frequencies and ours may differ by. Both compute in float32, step by
# step the same, from powers of theta that are off by 2 and 1; each step adds 1 on each side.
#   default: 1/x. linear: one division more. yarn: a product, 1/x, a product and a sum of positives;
#   its ramp has the same bits on both sides.
#   llama3: s = (length/turn - low)/(high - low) is off by 10*high/(high - low), as length/turn is
#   at most high, and the frequency by that times the factor, which divides it where s is 0.
APART = {"default": 5, "linear": 7, "yarn": 12, "llama3": 10 * 4 / 3 * 8 + 12}


def config_of(kind):
    return Qwen3Config(
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_hidden_layers=L,
        num_attention_heads=2 * H,
        num_key_value_heads=H,
        head_dim=D,
        max_position_embeddings=ROWS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": kind, **ROPES[kind]},
        attn_implementation="eager",
        attention_bias=kind == "linear",  # one of them has biases
    )


def make_model(kind, dtype):
    """Seeded; norms that are not 1, projections large enough that rounding shows."""
    model = Qwen3ForCausalLM(config_of(kind)).eval()
    random = torch.Generator().manual_seed(len(kind))
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.2, generator=random)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5, generator=random)
        # Not by model.to(dtype), which rounds the frequencies of its RoPE too.
        parameter.data = parameter.data.to(getattr(torch, dtype))
    return model.to(DEVICE)


@functools.cache
def checkpoint():
    """A folder for the checkpoints of this module."""
    return tempfile.TemporaryDirectory(prefix="fkv-")


def save(kind, dtype="float32", prefix=True, **options):
    folder = Path(checkpoint().name) / f"{kind}-{dtype}-{prefix}-{len(options)}"
    if not folder.exists():
        model = make_model(kind, dtype)
        (model if prefix else model.model).save_pretrained(folder, **options)
    return folder


@functools.cache
def forward(kind, dtype):
    """Positions, and of each layer what its projections saw and gave, and what the cache has."""
    model = make_model(kind, dtype)
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(32, [1, TOKENS], generator=random).to(DEVICE)
    positions = torch.randint(ROWS, [TOKENS], generator=random).to(DEVICE)
    seen, kv, cache = [], [], DynamicCache()
    for layer in model.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.register_forward_hook(lambda _, args, out: kv.append(out[0]))
        layer.self_attn.k_proj.register_forward_hook(lambda _, args, out: seen.append(args[0][0]))
    with torch.no_grad():
        # By place, as the cache's name has changed between versions.
        model.model(tokens, None, positions[None], cache)
    caches = [
        [getattr(layer, name)[0].transpose(0, 1) for name in ("keys", "values")]
        for layer in cache.layers
    ]
    pairs = [torch.cat(kv[2 * layer : 2 * layer + 2], dim=-1) for layer in range(L)]
    return positions, seen, pairs, caches


def rotated_sizes(a, cos, sin):
    """|a*cos| + |b*sin| and |b*cos| + |a*sin| of [T, H, D]."""
    a, b = np.split(np.abs(a), 2, axis=-1)
    return np.concatenate([a * cos + b * sin, b * cos + a * sin], axis=-1)


def bound_of(kind, problem, sizes, dtype):
    """The largest |ours - theirs| of one layer's K and V that both roundings explain.

    - Projection: HIDDEN products, their sum and a bias in float32, one rounding to the dtype for
      the product and one for the sum with the bias: off = ((HIDDEN + 2)*u + 2*U) * sizes a side,
      where `sizes` is |x| @ |W|.T + |bias|. V is as far apart as that, twice.
    - The root mean square r of a head moves by at most the root mean square m of what its elements
      move by: |k'/r' - k/r| <= (|k' - k| + |k/r|*m) / (r - m).
    - The tables: `APART`, one rounding of the angle a side, cosines and sines to 2 units in the
      last place and ours to half a one, and the product with the attention factor: see `apart`.
    - Then each side's own arithmetic: fkv.reference.error_bound and test_transformers.their_bound,
      with a fourth rounding for cos and sin, which they round to the dtype.
    """
    unit = float(torch.finfo(getattr(torch, dtype)).eps) / 2
    kv, table, positions = (problem[n] for n in ("kv", "cos_sin_cache", "positions"))
    off = 2 * ((HIDDEN + 2) * U32 + 2 * unit) * sizes
    k, _ = np.split(kv[:, 0].astype("f8").reshape(TOKENS, 2, H, D), 2, axis=1)
    k, off_k = k[:, 0], off[:, : H * D].reshape(TOKENS, H, D)
    root = np.sqrt(np.mean(k**2, axis=-1, keepdims=True) + problem["eps"][0])
    moved = np.sqrt(np.mean(off_k**2, axis=-1, keepdims=True))
    weight = np.abs(problem["k_norm_weight"][0].astype("f8"))
    normed = np.abs(k) / root * weight
    apart_k = (off_k + np.abs(k) / root * moved) / (root - moved) * weight
    cos, sin = np.split(np.abs(table[positions].astype("f8"))[:, None], 2, axis=-1)
    apart_table = apart(kind, positions)[:, None]
    projected = rotated_sizes(apart_k, cos, sin)
    turned = rotated_sizes(normed + apart_k, apart_table, apart_table)
    own = fkv.reference.error_bound(**problem, dtype=dtype)[0]
    theirs = their_bound(**problem, roundings=4)[0]
    # The last two are of kv as it is here; on the other side it may be larger by `moved`.
    larger = 1 + np.max(moved / (root - moved))
    return projected + turned + (own + theirs) * larger, off[:, H * D :]


def apart(kind, positions):
    """How far their tables and ours may be apart, [T, R/2]."""
    inv_freq, factor = frequencies(config_of(kind).to_dict())
    angles = positions[:, None] * inv_freq.astype("f8")
    return factor * ((APART[kind] + 2) * U32 * angles + 6 * U32)


def assert_is_theirs(m, kind, dtype, framework):
    """K and V of each layer from what its projection saw, against the model's cache."""
    positions, seen, pairs, caches = forward(kind, dtype)
    at = to_framework(to_numpy(positions).astype("int32"), framework)
    weights = m._weights
    for layer, (hidden, kv, (k, v)) in enumerate(zip(seen, pairs, caches, strict=True)):
        ours_k, ours_v = (
            to_numpy(x)[layer] for x in m(to_framework(to_numpy(hidden), framework), at)
        )
        problem = {
            "kv": to_numpy(kv)[:, None],
            "k_norm_weight": to_numpy(weights.k_norm_weight)[layer, None],
            "eps": np.float32([1e-5]),
            "cos_sin_cache": to_numpy(weights.cos_sin_cache),
            "positions": to_numpy(positions),
        }
        sizes = np.abs(to_numpy(hidden).astype("f8"))
        sizes = sizes @ np.abs(to_numpy(weights.kv_weight)[layer].astype("f8")).T
        if weights.bias is not None:
            sizes = sizes + np.abs(to_numpy(weights.bias)[layer].astype("f8"))
        bound_k, bound_v = bound_of(kind, problem, sizes, dtype)
        assert ours_k.dtype == DTYPES[dtype]
        for name, ours, theirs, bound in (
            ("K", ours_k, k, bound_k),
            ("V", ours_v, v, bound_v.reshape(ours_v.shape)),
        ):
            worst = fkv.reference.worst_error(ours, to_numpy(theirs), bound)
            assert worst <= 1, f"{name} is not that of transformers: {worst:.4g} times the bound"


@pytest.fixture(autouse=True)
def _float32_sums(monkeypatch):
    """cuBLAS may otherwise add up partial sums in bfloat16."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    yield
    matmul.allow_bf16_reduced_precision_reduction = before


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_k_and_v_are_those_of_the_models_forward_pass(kind, dtype, framework):
    m = fkv.KVMaterializer.from_checkpoint(save(kind, dtype), framework=framework)
    assert_is_theirs(m, kind, dtype, framework)


@pytest.mark.parametrize("kind", ROPES)
def test_from_the_models_own_layers(kind):
    """transformers' layers and rotary embedding, which has frequencies and no table."""
    model = make_model(kind, "float32").model
    m = fkv.KVMaterializer(model.layers, model.rotary_emb, H, D, DEVICE, max_position_hint=ROWS)
    assert len(m._weights.cos_sin_cache) == ROWS
    assert_is_theirs(m, kind, "float32", "torch")


@pytest.mark.parametrize(("asked", "made"), [("default", "yarn"), ("yarn", "llama3")])
def test_the_wrong_rope_is_rejected(asked, made):
    m = fkv.KVMaterializer.from_checkpoint(save(asked))
    table = fkv.KVMaterializer.from_checkpoint(save(made))._weights.cos_sin_cache
    m._weights = m._weights._replace(cos_sin_cache=table)
    with pytest.raises(AssertionError, match="K is not that of transformers"):
        assert_is_theirs(m, asked, "float32", "torch")


@pytest.mark.parametrize("spoilt", ["kv_weight", "k_norm_weight", "eps"])
def test_wrong_weights_are_rejected(spoilt):
    m = fkv.KVMaterializer.from_checkpoint(save("default"))
    wrong = getattr(m._weights, spoilt)
    wrong = wrong * 50 if spoilt == "eps" else wrong.flip(0)
    m._weights = m._weights._replace(**{spoilt: wrong})
    with pytest.raises(AssertionError, match="is not that of transformers"):
        assert_is_theirs(m, "default", "float32", "torch")


@pytest.mark.parametrize("kind", ROPES)
def test_table_is_that_of_transformers(kind):
    config = config_of(kind)
    rotary = make_model(kind, "float32").model.rotary_emb
    cos, sin = rotary(torch.zeros(1, device=DEVICE), torch.arange(ROWS, device=DEVICE)[None])
    theirs = torch.cat([cos[0, :, : D // 2], sin[0, :, : D // 2]], dim=-1).cpu().numpy()
    ours = rope_table(config.to_dict(), ROWS)
    bound = np.tile(apart(kind, np.arange(ROWS)), 2)
    assert ours.dtype == np.float32
    assert fkv.reference.worst_error(ours, theirs, bound) <= 1
    old = config.to_dict()
    rope = old.pop("rope_parameters")
    old["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else rope
    np.testing.assert_array_equal(rope_table(old, ROWS), ours)  # the keys of transformers 4


def test_yarn_has_its_attention_factor_in_the_table():
    rope = {"rope_type": "yarn", **ROPES["yarn"]}
    config = {"head_dim": D, "rope_parameters": rope, "max_position_embeddings": ROWS}
    factor = np.float32(0.1 * np.log(4.0) + 1)
    assert (rope_table(config, 1)[0, : D // 2] == factor).all()
    rope["attention_factor"] = 1.5
    assert (rope_table(config, 1)[0, : D // 2] == 1.5).all()
    del rope["attention_factor"]
    rope |= {"mscale": 0.707, "mscale_all_dim": 1.0}
    mscale = (0.1 * 0.707 * np.log(4.0) + 1) / (0.1 * np.log(4.0) + 1)
    assert (rope_table(config, 1)[0, : D // 2] == np.float32(mscale)).all()


def test_partial_rotary_and_head_dim_from_the_sizes():
    config = {"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 1e4}
    assert rope_table(config, 3).shape == (3, 16)
    half = rope_table(config | {"partial_rotary_factor": 0.5}, 3)
    np.testing.assert_array_equal(half, rope_table(config | {"head_dim": 8}, 3))


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_prefix_and_shards(prefix, sharded, framework):
    options = {"max_shard_size": "8KB"} if sharded else {}
    folder = save("default", "float32", prefix, **options)
    assert (folder / "model.safetensors.index.json").exists() == sharded
    m = fkv.KVMaterializer.from_checkpoint(folder, framework=framework)
    whole = fkv.KVMaterializer.from_checkpoint(save("default"), framework=framework)
    for ours, its in zip(m._weights, whole._weights, strict=True):
        assert (ours is None) == (its is None)
        if ours is not None:
            np.testing.assert_array_equal(to_numpy(ours), to_numpy(its))


def test_dtype_device_and_rows(framework):
    options = {"framework": framework, "device": DEVICE if framework == "torch" else None}
    m = fkv.KVMaterializer.from_checkpoint(
        save("default"), dtype="bfloat16", max_position=1000, **options
    )
    weights = m._weights
    assert "bfloat16" in str(weights.kv_weight.dtype)
    assert "bfloat16" in str(weights.k_norm_weight.dtype)
    assert weights.cos_sin_cache.shape == (1000, D)
    assert "float32" in str(weights.cos_sin_cache.dtype)
    assert m.max_position_hint == 1000
    exact = fkv.KVMaterializer.from_checkpoint(save("default"), **options)
    assert exact.max_position_hint is None
    assert len(exact._weights.cos_sin_cache) == ROWS
    rounded = to_numpy(exact._weights.kv_weight).astype(DTYPES["bfloat16"])
    np.testing.assert_array_equal(to_numpy(weights.kv_weight), rounded)


# A checkpoint that is changed: (message, change of config, change of tensors)


def draft(tmp_path, config=None, tensors=None, drop=(), features=0):
    """A copy of the default checkpoint with other entries; as a DFlash draft with features."""
    source = save("default", prefix=False)
    made = json.loads((source / "config.json").read_text()) | (config or {})
    (tmp_path / "config.json").write_text(json.dumps(made))
    every = load_file(source / "model.safetensors")
    every = {name: x for name, x in every.items() if not name.startswith(tuple(drop) or "-")}
    random = torch.Generator().manual_seed(3)
    if features:
        every["fc.weight"] = torch.randn(HIDDEN, features * HIDDEN, generator=random) * 0.2
        every["hidden_norm.weight"] = torch.rand(HIDDEN, generator=random) + 0.5
    save_file(every | (tensors or {}), tmp_path / "model.safetensors")
    return tmp_path


def test_a_dflash_draft_projects_the_targets_features(tmp_path, framework):
    folder = draft(tmp_path, features=3)
    m = fkv.KVMaterializer.from_checkpoint(folder, framework=framework)
    tensors = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(4)
    target = torch.randn(5, 3 * HIDDEN, generator=random)
    hidden = to_numpy(m.project_target_hidden(to_framework(target.numpy(), framework)))
    x = target.double() @ tensors["fc.weight"].double().T
    root = x.square().mean(-1, keepdim=True).add(1e-5).sqrt()
    exact = (x / root * tensors["hidden_norm.weight"].double()).numpy()
    sizes = (target.abs().double() @ tensors["fc.weight"].abs().double().T).numpy()
    off = (3 * HIDDEN + 1) * U32 * sizes
    moved = np.sqrt(np.mean(off**2, axis=-1, keepdims=True)) / root.numpy()
    weight = tensors["hidden_norm.weight"].double().numpy()
    noise = (off / root.numpy() * weight + np.abs(exact) * moved) / (1 - moved)
    bound = noise + ((HIDDEN + 3) / 2 + 7) * U32 * (np.abs(exact) + noise)
    assert fkv.reference.worst_error(hidden, exact, bound) <= 1
    with pytest.raises(
        ValueError, match=r"^`target_hidden`: expected shape \[total_ctx, hidden=96\]"
    ):
        m.project_target_hidden(to_framework(target.numpy()[:, :64], framework))


@pytest.mark.parametrize("other", ["fc.bias", "aux_hidden_norms.0.weight"])
def test_a_draft_whose_features_are_projected_in_another_way(tmp_path, other):
    folder = draft(tmp_path, features=3, tensors={other: torch.zeros(HIDDEN)})
    m = fkv.KVMaterializer.from_checkpoint(folder)
    with pytest.raises(ValueError, match=r"^`target_hidden`: expected a draft with fc.weight and "):
        m.project_target_hidden(torch.zeros(1, 3 * HIDDEN))


def test_a_quantized_draft_with_a_projection_of_its_own(tmp_path, framework):
    quantized = {
        f"layers.{layer}.self_attn.{name}_proj.weight_scale": torch.ones(1)
        for layer in range(L)
        for name in "kv"
    }
    config = {"quantization_config": {"quant_method": "fp8"}}
    folder = draft(tmp_path, config, quantized)
    kv = np.ones((4, L, 2 * H * D), "f4")
    m = fkv.KVMaterializer.from_checkpoint(
        folder, framework=framework, project=lambda x: to_framework(kv, framework)
    )
    hidden = to_framework(np.ones((4, 7), "f4"), framework)
    k, v = m(hidden, to_framework(np.arange(4, dtype="int32"), framework))
    assert (to_numpy(v) == 1).all()
    assert k.shape == (L, 4, H, D)


K_PROJ = "layers.1.self_attn.k_proj"
KINDS = "default or linear or llama3 or yarn"
BAD = {
    "longrope": (
        NotImplementedError,
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        {},
        (),
        f"`config.json`: expected rope_type {KINDS}, got 'longrope'",
    ),
    "dynamic_old": (
        NotImplementedError,
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic"}},
        {},
        (),
        f"`config.json`: expected rope_type {KINDS}, got 'dynamic'",
    ),
    "one_rope_a_layer_type": (
        NotImplementedError,
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {},
        (),
        "`config.json`: expected one RoPE for all layers, got one each for full_attention",
    ),
    "no_theta": (
        ValueError,
        {"rope_parameters": {"rope_type": "default"}},
        {},
        (),
        "`config.json`: expected rope_theta, got none",
    ),
    "no_factor": (
        ValueError,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
        {},
        (),
        "`config.json`: expected factor for rope_type 'linear', got "
        "{'rope_type': 'linear', 'rope_theta': 10000.0}",
    ),
    "theta": (
        ValueError,
        {"rope_parameters": {"rope_type": "default", "rope_theta": -1}},
        {},
        (),
        "`config.json`: expected a finite number above 0 as rope_theta, got -1",
    ),
    "theta_is_no_number": (
        ValueError,
        {"rope_parameters": {"rope_type": "default", "rope_theta": "4"}},
        {},
        (),
        "`config.json`: expected a finite number above 0 as rope_theta, got '4'",
    ),
    "factor": (
        ValueError,
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": float("nan")}},
        {},
        (),
        "`config.json`: expected a finite number above 0 as factor, got nan",
    ),
    "llama3_factors": (
        ValueError,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                **dict(rope_theta=1e4, factor=8, low_freq_factor=4, high_freq_factor=4),
            }
        },
        {},
        (),
        "`config.json`: expected low_freq_factor below high_freq_factor, got 4 and 4",
    ),
    "yarn_betas": (
        ValueError,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                **dict(rope_theta=1e4, factor=8, beta_slow=9, beta_fast=8),
            }
        },
        {},
        (),
        "`config.json`: expected beta_slow up to beta_fast, got 9 and 8",
    ),
    "rope_in_words": (
        ValueError,
        {"rope_parameters": "yarn"},
        {},
        (),
        "`config.json`: expected an object as rope_scaling, got 'yarn'",
    ),
    "many_layers": (
        ValueError,
        {"num_hidden_layers": 10**9},
        {},
        (),
        "`folder`: expected tensor layers.999999999.self_attn.k_norm.weight, got none "
        "(the names are those of Qwen3, with or without the prefix model.)",
    ),
    "no_number": (
        ValueError,
        {"hidden_size": float("nan")},
        {},
        (),
        "`config.json`: expected a number of at least 1 as hidden_size, got nan",
    ),
    "negative_eps": (
        ValueError,
        {"rms_norm_eps": -1.0},
        {},
        (),
        "`config.json`: expected a number of 0 or more as rms_norm_eps, got -1.0",
    ),
    "rows": (
        ValueError,
        {"max_position_embeddings": True},
        {},
        (),
        "`config.json`: expected a number of at least 1 as max_position_embeddings, got True",
    ),
    "d_17_kv_scale": (
        ValueError,
        {},
        {"layers.1.self_attn.attn.k_scale": torch.tensor(2.0)},
        (),
        "`folder`: expected k_scale 1 at layer 1, got layers.1.self_attn.attn.k_scale "
        "(K and V are not scaled)",
    ),
    "adapter": (
        ValueError,
        {},
        {f"{K_PROJ}.lora_A.weight": torch.zeros(2, HIDDEN)},
        (),
        f"`folder`: expected merged weights at layer 1, got {K_PROJ}.lora_A.weight "
        "(project=callable takes the place of the projection)",
    ),
    "gemma": (
        NotImplementedError,
        {"model_type": "gemma3_text"},
        {},
        (),
        "`config.json`: expected a model whose k_norm multiplies by its weight, got gemma3_text "
        "(by 1 + weight)",
    ),
    "no_size": (
        ValueError,
        {"num_hidden_layers": None},
        {},
        (),
        "`config.json`: expected a number of at least 1 as num_hidden_layers, got None",
    ),
    "missing_tensor": (
        ValueError,
        {},
        {},
        (f"{K_PROJ}.weight",),
        f"`folder`: expected tensor {K_PROJ}.weight, got none "
        "(the names are those of Qwen3, with or without the prefix model.)",
    ),
    "d_16_norm_over_all_heads": (
        ValueError,
        {},
        {"layers.0.self_attn.k_norm.weight": torch.ones(H * D)},
        (),
        "`folder`: expected layers.0.self_attn.k_norm.weight of float32 and shape [16], got "
        "float32 [32] (the dtype of the first layer's, the sizes of config.json)",
    ),
    "d_02_float8": (
        ValueError,
        {},
        {f"{K_PROJ}.weight": torch.zeros(H * D, HIDDEN).to(torch.float8_e4m3fn)},
        (),
        f"`folder`: expected {K_PROJ}.weight of dtype bfloat16 or float16 or float32, got F8_E4M3 "
        "(quantized? project=callable takes the place of the projection)",
    ),
    "d_02_scale": (
        ValueError,
        {},
        {f"{K_PROJ}.weight_scale_inv": torch.ones(1)},
        (),
        "`folder`: expected a projection that is not quantized at layer 1, got "
        f"{K_PROJ}.weight_scale_inv (project=callable takes the place of the projection)",
    ),
    "d_02_config": (
        ValueError,
        {"quantization_config": {"quant_method": "awq"}},
        {},
        (),
        "`config.json`: expected weights that are not quantized, got quantization_config awq "
        "(project=callable takes the place of the projection)",
    ),
    "another_dtype": (
        ValueError,
        {},
        {f"{K_PROJ}.weight": torch.zeros(H * D, HIDDEN).bfloat16()},
        (),
        f"`folder`: expected {K_PROJ}.weight of float32 and shape [32, 32], got bfloat16 [32, 32] "
        "(the dtype of the first layer's, the sizes of config.json)",
    ),
    "another_size": (
        ValueError,
        {"num_key_value_heads": 1},
        {},
        (),
        "`folder`: expected layers.0.self_attn.k_proj.weight of float32 and shape [16, 32], got "
        "float32 [32, 32] (the dtype of the first layer's, the sizes of config.json)",
    ),
    "d_17_v_norm": (
        ValueError,
        {},
        {"layers.1.self_attn.v_norm.weight": torch.ones(D)},
        (),
        "`folder`: expected no v_norm at layer 1, got one (V is copied as it was projected)",
    ),
    "some_biases": (
        ValueError,
        {},
        {f"{K_PROJ}.bias": torch.ones(H * D)},
        (),
        "`folder`: expected a bias in each k_proj and v_proj or in none, got some",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_checkpoints_that_are_refused(tmp_path, name):
    kind, config, tensors, drop, message = BAD[name]
    folder = draft(tmp_path, config, tensors, drop)
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        fkv.KVMaterializer.from_checkpoint(folder)


def test_files_that_are_not_there_or_broken(tmp_path):
    load = fkv.KVMaterializer.from_checkpoint

    def refused(kind, message, **options):
        with pytest.raises(kind, match=f"^{re.escape(message)}"):
            load(tmp_path, **options)

    refused(FileNotFoundError, f"`folder`: expected a folder with config.json, got {tmp_path}")
    (tmp_path / "config.json").write_text("{")
    refused(ValueError, "`folder`: expected a config.json that is JSON, got Expecting property")
    (tmp_path / "config.json").write_text("[]")
    refused(ValueError, "`folder`: expected a config.json that is an object, got a JSON list")
    (tmp_path / "config.json").write_text(json.dumps(config_of("default").to_dict()))
    refused(
        FileNotFoundError,
        "`folder`: expected model.safetensors or model.safetensors.index.json, got neither in ",
    )
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors")
    refused(ValueError, "`folder`: expected a safetensors file, got model.safetensors (")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    names = f"`folder`: expected a weight_map of names of files in {index.name}, got"
    refused(ValueError, f"{names} none")
    index.write_text(json.dumps({"weight_map": {"a": 3}}))
    refused(ValueError, f"{names} another")
    index.write_text("{")
    refused(ValueError, f"`folder`: expected a file of JSON as {index.name}, got another (Expect")
    index.write_text(json.dumps({"weight_map": {"a": "other.safetensors"}}))
    refused(
        FileNotFoundError,
        f"`folder`: expected other.safetensors, got none ({index.name} names it)",
    )
    refused(
        ValueError, """`framework`: expected "torch" or "jax", got 'numpy'""", framework="numpy"
    )
    refused(ValueError, "`dtype`: expected bfloat16 or float16 or float32, got int8", dtype="int8")
    refused(ValueError, "`max_position`: expected at least 1, got 0", max_position=0)
    message = "`device`: expected a device of torch, got 'banana' ("
    refused(ValueError, message, device="banana")
    message = f"`max_position`: expected at most {2**24}, got {2**40} (float32 tells"
    refused(ValueError, message, max_position=2**40)
    with pytest.raises(TypeError, match=r"^`folder`: expected a path, got NoneType$"):
        fkv.KVMaterializer.from_checkpoint(None)


def test_scales_of_1_change_nothing(tmp_path):
    tensors = {"layers.1.self_attn.attn.k_scale": torch.tensor(1.0)}
    assert fkv.KVMaterializer.from_checkpoint(draft(tmp_path, {}, tensors, ())).n_layers == L


@pytest.mark.needs("jax")
def test_devices_of_jax(tmp_path):
    message = "^`device`: expected a jax.Device or None, got 'cpu' "
    with pytest.raises(TypeError, match=message):
        fkv.KVMaterializer.from_checkpoint(
            draft(tmp_path, {}, {}, ()), framework="jax", device="cpu"
        )
