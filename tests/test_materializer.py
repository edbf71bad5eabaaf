"""KVMaterializer on torch: SGLang's protocol, and every guard as a whole message.

The letter D is that of reports about such helpers; see test_faults.py for the others.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fkv
from cases import assert_right, to_numpy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = torch.cuda.is_available()
L, H, D, HIDDEN, Q_HEADS, ROWS = 2, 2, 16, 24, 4, 32


class Rope:
    """With the attributes of SGLang's rotary embedding."""

    is_neox_style = True

    def __init__(self, rows=ROWS, rotary_dim=D, theta=1e4):
        self.rotary_dim, self.theta = rotary_dim, theta
        self.cos_sin_cache = self.table(rows)

    def table(self, rows):
        steps = torch.arange(0, self.rotary_dim, 2) / self.rotary_dim
        angles = torch.arange(rows).float()[:, None] * self.theta**-steps
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(DEVICE)


class GrowingRope(Rope):
    def _ensure_cos_sin_cache_length(self, position):
        self.cos_sin_cache = self.table(position + 1)


def make_layers(n=L, bias=False, dtype=torch.float32, seed=0, separate=False, rope=None):
    """With the attributes of SGLang's layers, or with transformers' separate projections."""
    random = torch.Generator().manual_seed(seed)

    def linear(rows):
        made = torch.nn.Linear(HIDDEN, rows, bias=bias)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=random)
        return made.to(DEVICE, dtype)

    layers = []
    for index in range(n):
        weight = torch.rand(D, generator=random).add(0.5).to(DEVICE, dtype)
        norm = SimpleNamespace(
            weight=torch.nn.Parameter(weight), variance_epsilon=10.0 ** (index - 6)
        )
        attention = SimpleNamespace(num_kv_heads=H, head_dim=D, k_norm=norm)
        if separate:
            attention.k_proj, attention.v_proj = linear(H * D), linear(H * D)
        else:
            attention.q_size, attention.kv_size = Q_HEADS * D, H * D
            attention.qkv_proj = linear((Q_HEADS + 2 * H) * D)
            attention.rotary_emb = rope or Rope()
        layers.append(SimpleNamespace(self_attn=attention))
    return layers


def make(layers=None, rope=None, hint=None, **options):
    layers = make_layers() if layers is None else layers
    return fkv.KVMaterializer(layers, rope or Rope(), H, D, DEVICE, hint, **options)


def inputs(tokens=5, dtype=torch.float32, seed=1, rows=ROWS):
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=random).to(DEVICE, dtype)
    return hidden, torch.randint(rows, [tokens], generator=random).to(DEVICE)


def problem_of(layers, kv, positions, rope=None):
    """The arguments of materialize in NumPy, read from the layers by another way."""
    attentions = [layer.self_attn for layer in layers]
    return {
        "kv": to_numpy(kv),
        "k_norm_weight": to_numpy(torch.stack([a.k_norm.weight for a in attentions])),
        "eps": np.float32([a.k_norm.variance_epsilon for a in attentions]),
        "cos_sin_cache": to_numpy((rope or Rope()).cos_sin_cache),
        "positions": to_numpy(positions),
    }


def projected(layers, hidden):
    """kv by the layers themselves, in float64: exact but for one part in 1e16."""
    rows = []
    for layer in layers:
        attention = layer.self_attn
        if hasattr(attention, "qkv_proj"):
            parts = [(attention.qkv_proj, slice(attention.q_size, None))]
        else:
            parts = [(attention.k_proj, slice(None)), (attention.v_proj, slice(None))]
        for linear, part in parts:
            out = hidden.double() @ linear.weight.detach().double().T
            out = out if linear.bias is None else out + linear.bias.detach().double()
            rows.append(out[:, part])
    return torch.cat(rows, dim=1).view(len(hidden), len(layers), -1)


def assert_projected(layers, hidden, kv):
    """Within the rounding of HIDDEN products and sums, and of one bias, in kv's dtype."""
    u, unit = 2.0**-24, torch.finfo(kv.dtype).eps / 2
    exact = projected(layers, hidden)
    sizes = projected(absolute(layers), hidden.abs())
    bound = ((HIDDEN + 1) * u + unit) * sizes + unit * exact.abs() + 1e-30
    assert (kv.double() - exact).abs().le(bound * (1 + unit)).all()


def absolute(layers):
    """Layers with the absolute values of these weights and biases."""

    def positive(linear):
        bias = None if linear.bias is None else linear.bias.detach().abs()
        return SimpleNamespace(weight=linear.weight.detach().abs(), bias=bias)

    names = ("qkv_proj", "k_proj", "v_proj")
    return [
        SimpleNamespace(
            self_attn=SimpleNamespace(
                q_size=getattr(layer.self_attn, "q_size", 0),
                **{n: positive(x) for n, x in vars(layer.self_attn).items() if n in names},
            )
        )
        for layer in layers
    ]


def collect(m, hidden, positions):
    """K and V [L, T, H, D] as the callback got them, copied."""
    seen = []
    m.materialize(
        ctx_hidden=hidden,
        positions=positions,
        write_layer_kv=lambda layer, k, v: seen.append((layer, k.clone(), v.clone())),
    )
    assert [layer for layer, _, _ in seen] == list(range(m.n_layers))
    return torch.stack([k for _, k, _ in seen]), torch.stack([v for _, _, v in seen])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_matches_the_layers(dtype, separate, bias):
    """D-03: a bias of K and V is added."""
    layers = make_layers(dtype=dtype, separate=separate, bias=bias)
    m = make(layers)
    hidden, positions = inputs(dtype=dtype)
    kv = m.project(hidden)
    assert_projected(layers, hidden, kv)
    problem = problem_of(layers, kv, positions)
    for k, v in (m(hidden, positions), collect(m, hidden, positions)):
        assert k.shape == (L, 5, H, D)
        assert_right(problem, k, v)


def test_the_attributes_of_sglangs_helper():
    m = make(hint=8)
    assert (m.n_layers, m.num_kv_heads, m.head_dim, m.kv_size, m.rotary_dim) == (L, H, D, H * D, D)
    assert m.hidden_size == HIDDEN
    assert m.device.type == DEVICE
    assert m.max_position_hint == 8
    assert repr(m) == (
        "KVMaterializer(n_layers=2, num_kv_heads=2, head_dim=16, rotary_dim=16, hidden_size=24, "
        "torch)"
    )


def test_the_two_lines_of_the_readme():
    """They are all that SGLang's caller changes: it passes these by position, and catches these."""
    lines = "import fkv\n\nFusedKVMaterializeHelper = fkv.KVMaterializer\n"
    readme = Path(__file__).parent.parent / "README.md"
    assert f"```python\n{lines}```" in readme.read_text()
    namespace = {}
    exec(lines, namespace)
    helper = namespace["FusedKVMaterializeHelper"]
    layers, rope = make_layers(), Rope()
    m = helper(layers, rope, H, D, torch.device(DEVICE), 8)
    hidden, positions = inputs(rows=8)
    problem = problem_of(layers, m.project(hidden), positions)
    assert_right(problem, *collect(m, hidden, positions))
    layers[1].self_attn.head_dim = D + 1
    with pytest.raises(ValueError, match="layer 1"):
        helper(layers, rope, H, D, torch.device(DEVICE), 8)
    rope.is_neox_style = False
    with pytest.raises(NotImplementedError, match="neox"):
        helper(make_layers(rope=rope), rope, H, D, torch.device(DEVICE), 8)


@pytest.mark.parametrize("device", [DEVICE, torch.device(DEVICE), f"{DEVICE}:0"])
def test_d_10_names_of_one_device(device):
    """The three compare unequal in torch."""
    layers = make_layers()
    m = fkv.KVMaterializer(layers, Rope(), H, D, device=device, max_position_hint=8)
    hidden, positions = inputs(rows=8)
    k, v = collect(m, hidden, positions)
    assert_right(problem_of(layers, m.project(hidden), positions), k, v)


def test_the_workspace_grows_by_doubling_and_is_reused():
    m, layers = make(), make_layers()
    addresses, capacities = set(), []
    for tokens in (5, 3, 5, 7, 10, 1, 21, 40):
        hidden, positions = inputs(tokens, seed=tokens)
        k, v = collect(m, hidden, positions)
        assert_right(problem_of(layers, m.project(hidden), positions), k, v)
        addresses.add(m._workspace["k"].made.data_ptr())
        capacities.append(m._workspace["k"].capacity)
    assert capacities == [5, 5, 5, 10, 10, 10, 21, 42]
    assert len(addresses) <= 4


def test_d_18_what_the_callback_gets_is_borrowed_and_what_a_call_returns_is_owned():
    m = make()
    first, second = inputs(seed=1), inputs(seed=2)
    kept, copied = {}, {}

    def keep(layer, k, v):
        kept[layer], copied[layer] = (k, v), (k.clone(), v.clone())

    owned = m(*first)
    before = [array.clone() for array in owned]
    m.materialize(*first, keep)
    m.materialize(*second, lambda layer, k, v: None)
    m(*second)
    assert all(torch.equal(a, b) for a, b in zip(owned, before, strict=True))
    assert not any(torch.equal(kept[i][0], copied[i][0]) for i in range(L))
    assert not any(torch.equal(kept[i][1], copied[i][1]) for i in range(L))


def test_d_18_a_callback_that_raises_leaves_it_usable():
    m, layers = make(), make_layers()
    hidden, positions = inputs()

    def fail(layer, k, v):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        m.materialize(hidden, positions, fail)
    assert_right(problem_of(layers, m.project(hidden), positions), *collect(m, hidden, positions))


def test_d_18_no_call_within_itself():
    """It would write over what the callback has not been given yet."""
    m, layers = make(), make_layers()
    hidden, positions = inputs()
    message = (
        "`write_layer_kv`: expected no call within itself, got one "
        "(m(ctx_hidden, positions) has its own arrays)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        m.materialize(hidden, positions, lambda *_: m.materialize(hidden, positions, print))
    assert_right(problem_of(layers, m.project(hidden), positions), *collect(m, hidden, positions))


def test_no_tokens():
    """Nothing is written, as in SGLang, and the arguments are checked all the same."""
    m, calls = make(), []
    hidden, positions = inputs(0)
    m.materialize(hidden, positions, lambda *arguments: calls.append(arguments))
    assert calls == []
    k, v = m(hidden, positions)
    assert k.shape == v.shape == (L, 0, H, D)
    with pytest.raises(
        ValueError, match=r"^`positions`: expected shape \[total_ctx=0\], got \[7\]"
    ):
        m.materialize(hidden, torch.zeros(7, dtype=torch.int64), print)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (1, 5), (5, 1), (), (4,), (6,)])
def test_d_08_positions_of_another_shape(shape):
    m, (hidden, _) = make(), inputs()
    positions = torch.zeros(shape, dtype=torch.int64, device=DEVICE)
    message = (
        f"`positions`: expected shape [total_ctx=5], got {list(shape)} "
        "(one row of the table a token)"
    )
    for call in (lambda: m(hidden, positions), lambda: m.materialize(hidden, positions, print)):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            call()


@pytest.mark.parametrize("hint", [None, 8])
@pytest.mark.parametrize("bad", [8, 12, -1, 2**31, -(2**63)])
def test_d_09_d_10_positions_past_the_table(hint, bad):
    """A hint does not hide them: an error on the host, NaN rows on a GPU."""
    layers, rope = make_layers(rope=Rope(8)), Rope(8)
    m = make(layers, rope, hint)
    hidden, positions = inputs(rows=8)
    positions[:2] = torch.tensor([7, bad])
    if ON_GPU and hint:
        k, v = collect(m, hidden, positions)
        assert_right(problem_of(layers, m.project(hidden), positions, rope), k, v)
        assert k[:, 1].isnan().all()
        return
    message = rf"^`positions`: expected 0 <= position < 8, got {bad} at token 1 "
    calls = []
    with pytest.raises(ValueError, match=message):
        m.materialize(hidden, positions, lambda *arguments: calls.append(arguments))
    assert calls == []
    with pytest.raises(ValueError, match=message):
        m(hidden, positions)


def test_d_09_the_last_row_of_the_table():
    """Rows behind it are NaN here, and are not read."""
    rope = Rope(64)
    rope.cos_sin_cache[8:] = torch.nan
    rope.cos_sin_cache = rope.cos_sin_cache[:8]
    layers = make_layers(rope=rope)
    hidden, _ = inputs()
    positions = torch.tensor([0, 7, 7, 1, 0], device=DEVICE)
    m = make(layers, rope)
    k, v = m(hidden, positions)
    assert_right(problem_of(layers, m.project(hidden), positions, rope), k, v)


def test_d_10_a_table_that_grows():
    """For a hint at construction, and for positions where there is no hint."""
    rope = GrowingRope(8)
    assert len(make(make_layers(rope=rope), rope, hint=20)._weights.cos_sin_cache) == 20
    rope = GrowingRope(8)
    layers = make_layers(rope=rope)
    m = make(layers, rope)
    hidden, positions = inputs()
    positions[3] = 30
    k, v = collect(m, hidden, positions)
    assert len(m.cos_sin_cache) == 31
    assert_right(problem_of(layers, m.project(hidden), positions, rope), k, v)


def test_a_table_of_its_own_dtype():
    rope = Rope()
    rope.cos_sin_cache = rope.cos_sin_cache.bfloat16()
    layers = make_layers(rope=rope)
    m = make(layers, rope)
    hidden, positions = inputs()
    k, v = m(hidden, positions)
    assert m.cos_sin_cache.data_ptr() == rope.cos_sin_cache.data_ptr()
    assert_right(problem_of(layers, m.project(hidden), positions, rope), k, v)


def test_partial_rotary():
    rope = Rope(rotary_dim=8)
    layers = make_layers(rope=rope)
    m = make(layers, rope)
    hidden, positions = inputs()
    assert m.rotary_dim == 8
    assert_right(problem_of(layers, m.project(hidden), positions, rope), *m(hidden, positions))


def test_d_17_head_dim_512():
    rope = Rope(rotary_dim=128)
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(1, 2 * 512, HIDDEN, generator=random).to(DEVICE)
    norm, eps = torch.ones(1, 512, device=DEVICE), torch.full((1,), 1e-6, device=DEVICE)
    m = fkv.KVMaterializer.from_weights(weight, norm, eps, rope.cos_sin_cache)
    hidden, positions = inputs()
    problem = {"kv": m.project(hidden), "k_norm_weight": norm, "eps": eps}
    problem |= {"cos_sin_cache": rope.cos_sin_cache, "positions": positions}
    k, v = m(hidden, positions)
    assert_right({name: to_numpy(tensor) for name, tensor in problem.items()}, k, v)


def test_the_other_backend():
    layers = make_layers(dtype=torch.bfloat16)
    m = make(layers, backend="pallas")
    for tokens in (5, 3):
        hidden, positions = inputs(tokens, torch.bfloat16)
        problem = problem_of(layers, m.project(hidden), positions)
        assert_right(problem, *collect(m, hidden, positions))


def test_inference_mode_in_and_out():
    """The workspace and the weights are written in the mode that they were not made in."""
    layers = make_layers()
    with torch.inference_mode():
        m = make(layers)
        hidden, positions = inputs()
        inside = collect(m, hidden, positions)
    outside = collect(m, hidden, positions)
    m.refresh(layers)
    with torch.inference_mode():
        m.refresh(layers)
        again = collect(m, hidden, positions)
    for one, two, three in zip(inside, outside, again, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


@pytest.mark.parametrize("shape", ["flat", "stacked"])
def test_project_takes_the_place_of_the_projection(shape):
    """D-02: the way for a quantized draft, whose weights are not looked at then."""
    layers = make_layers()
    hidden, positions = inputs()
    kv = projected(layers, hidden).float()
    for layer in layers:
        del layer.self_attn.qkv_proj.weight
    m = make(layers, project=lambda x: kv.flatten(1) if shape == "flat" else kv)
    problem = problem_of(layers, kv, positions)
    assert torch.equal(m.project(hidden), kv)
    assert_right(problem, *m(hidden, positions))
    assert_right(problem, *collect(m, hidden, positions))
    m.refresh(layers)
    bad = make(layers, project=lambda x: kv[:, :1])
    message = "`project`: expected a result of shape [5, 2, 64] or [5, 128], got [5, 1, 64]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        bad(hidden, positions)
    with pytest.raises(TypeError, match=r"^`project`: expected a function of ctx_hidden or None, "):
        make(project=3)


@pytest.mark.parametrize("bias", [False, True])
def test_refresh_copies_all_kinds_of_weights_in_place(bias):
    """A change of a layer is seen after a refresh, not before, whichever weight it is."""
    layers = make_layers(bias=bias)
    m = make(layers)
    hidden, positions = inputs()
    before = m(hidden, positions)
    addresses = [x.data_ptr() for x in m._weights if x is not None]
    fresh = make_layers(bias=bias, seed=7)
    for layer, new in zip(layers, fresh, strict=True):
        layer.self_attn.qkv_proj.weight.data.copy_(new.self_attn.qkv_proj.weight)
        layer.self_attn.k_norm.weight.data.copy_(new.self_attn.k_norm.weight)
        new.self_attn.k_norm.variance_epsilon = layer.self_attn.k_norm.variance_epsilon = 0.1
        if bias:
            layer.self_attn.qkv_proj.bias.data.copy_(new.self_attn.qkv_proj.bias)
    assert all(torch.equal(a, b) for a, b in zip(before, m(hidden, positions), strict=True))
    m.refresh(layers)
    assert [x.data_ptr() for x in m._weights if x is not None] == addresses
    k, v = m(hidden, positions)
    assert_projected(fresh, hidden, m.project(hidden))
    assert_right(problem_of(fresh, m.project(hidden), positions), k, v)


def test_d_05_refresh_takes_weights_that_were_replaced():
    """Not mutated: the loader put other tensors into the modules."""
    layers = make_layers()
    m = make(layers)
    m.refresh(make_layers(seed=7))
    hidden, positions = inputs()
    problem = problem_of(make_layers(seed=7), m.project(hidden), positions)
    assert_right(problem, *m(hidden, positions))


def test_refresh_is_refused_whole():
    m = make()
    before = [(x, x.clone()) for x in m._weights if x is not None]
    bad = make_layers(seed=7)
    bad[1].self_attn.k_norm.weight = torch.ones(2 * D, device=DEVICE)
    for layers, message in (
        (bad, "`layers`: expected k_norm.weight of shape [head_dim=16] at layer 1, got [32] "),
        (make_layers(3), "`layers`: expected n_layers=2 as at construction, got 3"),
        (
            make_layers(dtype=torch.bfloat16),
            "`layers`: expected k_norm.weight of width 16 and float32 as at construction, got 16 "
            "and bfloat16",
        ),
        (make_layers(bias=True), "`layers`: expected no bias, as at construction, at layer 0, got"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            m.refresh(layers)
    assert all(torch.equal(now, then) for now, then in before)


def changed(index, **attributes):
    """Layers of which one has other attributes: by the path's last name."""
    layers = make_layers()
    attention = layers[index].self_attn
    for name, value in attributes.items():
        setattr(attention, name, value)
    return layers


def with_weight(index, change, **others):
    layers = make_layers()
    linear = layers[index].self_attn.qkv_proj
    weight = change(linear.weight.detach())
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    for name, value in others.items():
        setattr(linear, name, value)
    return layers


def with_norm(index, **attributes):
    layers = make_layers()
    for name, value in attributes.items():
        setattr(layers[index].self_attn.k_norm, name, value)
    return layers


def without(index, path):
    layers = make_layers()
    owner = layers[index]
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    delattr(owner, name)
    return layers


class GemmaRMSNorm(SimpleNamespace):
    pass


class Fp8LinearMethod:
    pass


SERVES = "(one kernel serves all layers)"
CURE = "(project=callable takes the place of the projection)"
CURE_DTYPE = "(quantized? project=callable takes the place of the projection)"
GUARDS = {
    "no_layers": (ValueError, list, "expected at least one layer, got none"),
    "not_layers": (
        TypeError,
        lambda: 3,
        "expected the layers of a draft model, got int (those of a model, as model.layers)",
    ),
    "eps_in_words": (
        ValueError,
        lambda: with_norm(1, variance_epsilon="a"),
        "expected a finite number of 0 or more as variance_epsilon at layer 1, got 'a'",
    ),
    "eps_past_float32": (
        ValueError,
        lambda: with_norm(1, variance_epsilon=1e50),
        "expected a finite number of 0 or more as variance_epsilon at layer 1, got 1e+50",
    ),
    "num_kv_heads": (
        ValueError,
        lambda: changed(1, num_kv_heads=3),
        f"expected num_kv_heads 2 at layer 1, got 3 {SERVES}",
    ),
    "head_dim": (
        ValueError,
        lambda: changed(0, head_dim=32),
        f"expected head_dim 16 at layer 0, got 32 {SERVES}",
    ),
    "d_02_float8": (
        TypeError,
        lambda: with_weight(1, lambda w: w.to(torch.float8_e4m3fn)),
        f"expected qkv_proj.weight of dtype bfloat16 or float16 or float32 at layer 1, got "
        f"float8_e4m3fn {CURE_DTYPE}",
    ),
    "d_02_float8_with_scale": (
        TypeError,
        lambda: with_weight(1, lambda w: w.to(torch.float8_e4m3fn), weight_scale=torch.ones(1)),
        f"expected a qkv_proj that is not quantized at layer 1, got float8_e4m3fn with "
        f"weight_scale {CURE}",
    ),
    "d_02_int8": (
        TypeError,
        lambda: with_weight(0, lambda w: (w * 100).to(torch.int8)),
        f"expected qkv_proj.weight of dtype bfloat16 or float16 or float32 at layer 0, got "
        f"int8 {CURE_DTYPE}",
    ),
    "d_02_packed": (
        TypeError,
        lambda: with_weight(0, lambda w: w[:, : HIDDEN // 2].to(torch.uint8)),
        f"expected qkv_proj.weight of dtype bfloat16 or float16 or float32 at layer 0, got "
        f"uint8 {CURE_DTYPE}",
    ),
    "d_02_a_scale_beside_a_float_weight": (
        TypeError,
        lambda: with_weight(1, lambda w: w, weight_scale_inv=torch.ones(1)),
        f"expected a qkv_proj that is not quantized at layer 1, got float32 with "
        f"weight_scale_inv {CURE}",
    ),
    "d_02_method": (
        TypeError,
        lambda: with_weight(1, lambda w: w, quant_method=Fp8LinearMethod()),
        f"expected a qkv_proj that is not quantized at layer 1, got float32 with quant_method "
        f"Fp8LinearMethod {CURE}",
    ),
    "d_02_no_weight": (
        TypeError,
        lambda: without(1, "self_attn.qkv_proj.weight"),
        f"expected a torch.Tensor as qkv_proj.weight at layer 1, got none {CURE}",
    ),
    "d_05_q_size": (
        ValueError,
        lambda: changed(1, q_size=3 * D),
        "expected qkv_proj.weight of q_size + 2*kv_size = 48 + 2*32 = 112 rows at layer 1, got "
        "shape [128, 24]",
    ),
    "d_14_q_size_too_large": (
        ValueError,
        lambda: changed(0, q_size=5 * D),
        "expected qkv_proj.weight of q_size + 2*kv_size = 80 + 2*32 = 144 rows at layer 0, got "
        "shape [128, 24]",
    ),
    "d_14_kv_size": (
        ValueError,
        lambda: changed(1, kv_size=16),
        "expected kv_size = num_kv_heads*head_dim = 32 at layer 1, got 16",
    ),
    "d_05_transposed": (
        ValueError,
        lambda: with_weight(0, lambda w: w.T.contiguous()),
        "expected qkv_proj.weight of q_size + 2*kv_size = 64 + 2*32 = 128 rows at layer 0, got "
        "shape [24, 128]",
    ),
    "d_05_hidden_size": (
        ValueError,
        lambda: with_weight(1, lambda w: w[:, :20].clone()),
        f"expected hidden size 24 at layer 1, got 20 {SERVES}",
    ),
    "d_05_dtype": (
        ValueError,
        lambda: with_weight(1, lambda w: w.bfloat16()),
        f"expected dtype of the weights float32 at layer 1, got bfloat16 {SERVES}",
    ),
    "d_05_no_k_norm": (
        TypeError,
        lambda: changed(1, k_norm=None),
        "expected self_attn.k_norm at layer 1, got none",
    ),
    "no_epsilon": (
        TypeError,
        lambda: without(1, "self_attn.k_norm.variance_epsilon"),
        "expected k_norm.variance_epsilon at layer 1, got none",
    ),
    "no_attention": (
        TypeError,
        lambda: without(0, "self_attn"),
        "expected self_attn at layer 0, got none",
    ),
    "no_projection": (
        TypeError,
        lambda: without(1, "self_attn.qkv_proj"),
        "expected self_attn.qkv_proj or self_attn.k_proj at layer 1, got none",
    ),
    "no_rope": (
        TypeError,
        lambda: without(1, "self_attn.rotary_emb"),
        "expected self_attn.rotary_emb at layer 1, got none",
    ),
    "d_16_norm_over_all_heads": (
        ValueError,
        lambda: with_norm(0, weight=torch.ones(H * D, device=DEVICE)),
        "expected k_norm.weight of shape [head_dim=16] at layer 0, got [32] "
        "(each head is normalized by itself)",
    ),
    "d_16_of_one_layer": (
        ValueError,
        lambda: with_norm(1, weight=torch.ones(H * D, device=DEVICE)),
        "expected k_norm.weight of shape [head_dim=16] at layer 1, got [32] "
        "(each head is normalized by itself)",
    ),
    "norm_dtype": (
        ValueError,
        lambda: with_norm(1, weight=torch.ones(D, device=DEVICE, dtype=torch.bfloat16)),
        f"expected dtype of k_norm.weight float32 at layer 1, got bfloat16 {SERVES}",
    ),
    "norm_with_bias": (
        ValueError,
        lambda: with_norm(1, bias=torch.zeros(D)),
        "expected a k_norm without bias at layer 1, got one with it",
    ),
    "n_07_gemma": (
        NotImplementedError,
        lambda: changed(1, k_norm=GemmaRMSNorm(weight=torch.ones(D), variance_epsilon=1e-6)),
        "expected a k_norm that multiplies by its weight at layer 1, got GemmaRMSNorm "
        "(Gemma's multiplies by 1 + weight)",
    ),
    "d_17_v_norm": (
        ValueError,
        lambda: changed(1, v_norm=torch.nn.RMSNorm(D)),
        "expected no v_norm at layer 1, got one (V is copied as it was projected)",
    ),
    "k_scale": (
        ValueError,
        lambda: changed(1, attn=SimpleNamespace(k_scale=torch.tensor(0.5), v_scale=None)),
        "expected k_scale 1 at layer 1, got 0.5 (K and V are not scaled)",
    ),
    "v_scale": (
        ValueError,
        lambda: changed(0, attn=SimpleNamespace(k_scale=1.0, v_scale=2.0)),
        "expected v_scale 1 at layer 0, got 2.0 (K and V are not scaled)",
    ),
    "other_table": (
        ValueError,
        lambda: changed(1, rotary_emb=Rope(theta=1e6)),
        "expected the cos_sin_cache of `rotary_emb` at layer 1, got other values "
        "(one kernel rotates all layers by one table)",
    ),
    "other_rotary_dim": (
        ValueError,
        lambda: changed(1, rotary_emb=Rope(rotary_dim=8)),
        f"expected rotary_dim 16 at layer 1, got 8 {SERVES}",
    ),
    "dtype_of_the_bias": (
        ValueError,
        lambda: with_weight(1, lambda w: w, bias=torch.nn.Parameter(torch.ones(128).bfloat16())),
        "expected qkv_proj.bias of float32 at layer 1, got bfloat16 (the dtype of its weight)",
    ),
    "bias": (
        ValueError,
        lambda: with_weight(1, lambda w: w, bias=torch.nn.Parameter(torch.ones(3))),
        "expected qkv_proj.bias of shape [128] at layer 1, got [3]",
    ),
    "meta": (
        ValueError,
        lambda: with_weight(1, lambda w: w.to("meta")),
        "expected qkv_proj.weight with its values in memory at layer 1, got a meta tensor "
        "(load the weights first)",
    ),
}


@pytest.mark.parametrize("name", GUARDS)
def test_guards(name):
    """D-02, D-05, D-14, D-16, D-17: at construction, and the layer is named."""
    kind, layers, message = GUARDS[name]
    with pytest.raises(kind, match=f"^{re.escape(f'`layers`: {message}')}$"):
        make(layers())


def test_a_layer_that_is_not_neox():
    rope = Rope()
    rope.is_neox_style = False
    message = f"`layers`: expected is_neox_style True at layer 1, got False {SERVES}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(changed(1, rotary_emb=rope))


def test_what_the_guards_let_pass():
    """Equal tables in other objects, scales of 1, a v_norm that is None, eps by its other name."""
    layers = make_layers()
    for layer in layers:
        layer.self_attn.attn = SimpleNamespace(k_scale=torch.ones(1), v_scale=None, _k_scale=1.0)
        layer.self_attn.v_norm = None
    norm = layers[1].self_attn.k_norm
    norm.eps = norm.variance_epsilon
    hidden, positions = inputs()
    m = make(layers)
    problem = problem_of(layers, m.project(hidden), positions)
    del norm.variance_epsilon
    assert_right(problem, *make(layers)(hidden, positions))
    del norm.eps
    layers[1].self_attn.config = SimpleNamespace(rms_norm_eps=1e-5)
    assert_right(problem, *make(layers)(hidden, positions))


def refused_rope(kind, message, rope, hint=None):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        make(make_layers(rope=rope), rope, hint)


def test_d_15_rotary_dim_and_the_width_of_the_table():
    rope = Rope(rotary_dim=8)
    del rope.rotary_dim  # head_dim is meant then, as in SGLang
    message = "`rotary_emb`: expected a cos_sin_cache of shape [rows, rotary_dim={}], got [32, {}]"
    refused_rope(ValueError, message.format(16, 8), rope)
    rope = Rope()
    rope.rotary_dim = 8
    refused_rope(ValueError, message.format(8, 16), rope)
    for bad in (7, 0, 18):
        rope.rotary_dim = bad
        even = f"`rotary_emb`: expected an even rotary_dim from 2 to head_dim = 16, got {bad}"
        refused_rope(ValueError, even, rope)


def test_rope_that_is_refused():
    rope = Rope()
    rope.is_neox_style = False
    refused_rope(
        NotImplementedError,
        "`rotary_emb`: expected neox RoPE, element i paired with i + rotary_dim/2, got "
        "is_neox_style=False",
        rope,
    )
    message = "`rotary_emb`: expected a cos_sin_cache of type torch.Tensor, got object without it"
    refused_rope(TypeError, message, object())


@pytest.mark.parametrize("rope", [Rope(8), GrowingRope(8)])
def test_d_10_a_hint_past_the_table(rope):
    if isinstance(rope, GrowingRope):
        assert make(make_layers(rope=rope), rope, hint=64).max_position_hint == 64
        return
    message = "`max_position_hint`: expected at most 8, got 64 (the rows of cos_sin_cache)"
    refused_rope(ValueError, message, rope, hint=64)
    for bad, got in ((0, "0"), (-3, "-3")):
        refused_rope(ValueError, f"`max_position_hint`: expected at least 1, got {got}", rope, bad)
    message = "`max_position_hint`: expected an integer or None, got float 8.0"
    refused_rope(TypeError, message, rope, 8.0)


def test_inputs_that_are_refused():
    m = make()
    hidden, positions = inputs()
    numbers = hidden.cpu().numpy()
    for kind, bad, message in (
        (
            TypeError,
            (numbers, positions),
            "`ctx_hidden`: expected a torch.Tensor as the weights are, got numpy.ndarray",
        ),
        (
            ValueError,
            (hidden[:, :20], positions),
            "`ctx_hidden`: expected shape [total_ctx, hidden=24], got [5, 20]",
        ),
        (
            ValueError,
            (hidden[None], positions),
            "`ctx_hidden`: expected shape [total_ctx, hidden=24], got [1, 5, 24]",
        ),
        (
            ValueError,
            (hidden.bfloat16(), positions),
            "`ctx_hidden`: expected dtype float32, got bfloat16 (the dtype of the weights)",
        ),
        (
            ValueError,
            (hidden.to("meta"), positions),
            f"`ctx_hidden`: expected device {m.device}, got meta (where the weights are)",
        ),
        (
            ValueError,
            (hidden.clone().requires_grad_(), positions),
            "`ctx_hidden`: expected a tensor that needs no gradient, got requires_grad=True "
            "(no gradient is computed: ctx_hidden.detach(), or call under torch.no_grad())",
        ),
        (
            TypeError,
            (hidden, [0, 1, 2, 3, 4]),
            "`positions`: expected a torch.Tensor as the weights are, got list",
        ),
        (
            ValueError,
            (hidden, positions.float()),
            "`positions`: expected dtype int32 or int64, got float32",
        ),
    ):
        for call in (m, lambda *x: m.materialize(*x, print)):
            with pytest.raises(kind, match=f"^{re.escape(message)}$"):
                call(*bad)
    message = "`write_layer_kv`: expected a function of (layer, k, v), got NoneType"
    for tokens in (0, 5):
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            m.materialize(hidden[:tokens], positions[:tokens], None)
    message = "`project`: expected a function whose result is a torch.Tensor, got NoneType"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        make(project=lambda x: None)(hidden, positions)
    message = "`device`: expected a device of torch, got 'banana' ("
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        fkv.KVMaterializer(make_layers(), Rope(), H, D, "banana")
    with torch.no_grad():
        m(hidden.clone().requires_grad_(), positions)
    message = "`target_hidden`: expected a draft with fc.weight and hidden_norm.weight alone, got "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        m.project_target_hidden(hidden)


def weights(**changes):
    """The arguments of from_weights."""
    random = torch.Generator().manual_seed(0)
    made = {
        "kv_weight": torch.randn(L, 2 * H * D, HIDDEN, generator=random),
        "k_norm_weight": torch.rand(L, D, generator=random) + 0.5,
        "eps": torch.full((L,), 1e-6),
        "cos_sin_cache": Rope().cos_sin_cache,
    }
    made |= changes
    return {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in made.items()}


def test_from_weights_takes_them_as_they_are():
    given = weights(bias=torch.ones(L, 2 * H * D))
    m = fkv.KVMaterializer.from_weights(**given)
    assert all(getattr(m._weights, name).data_ptr() == x.data_ptr() for name, x in given.items())
    hidden, positions = inputs()
    k, v = m(hidden, positions)
    problem = {name: to_numpy(given[name]) for name in ("k_norm_weight", "eps", "cos_sin_cache")}
    kv = to_numpy(m.project(hidden))
    assert_right({"kv": kv, **problem, "positions": to_numpy(positions)}, k, v)


FROM_WEIGHTS = [
    (
        ValueError,
        {"kv_weight": torch.zeros(L, 65, HIDDEN)},
        "`kv_weight`: expected shape [n_layers=2, a multiple of 2*head_dim = 32, hidden], "
        "got [2, 65, 24]",
    ),
    (
        ValueError,
        {"num_kv_heads": 3},
        "`kv_weight`: expected shape [n_layers=2, 2*num_kv_heads*head_dim = 96, hidden], "
        "got [2, 64, 24]",
    ),
    (
        ValueError,
        {"kv_weight": torch.zeros(L * 64, HIDDEN)},
        "`kv_weight`: expected shape [n_layers=2, a multiple of 2*head_dim = 32, hidden], "
        "got [128, 24]",
    ),
    (
        ValueError,
        {"kv_weight": torch.zeros(L, 64, HIDDEN, dtype=torch.int8)},
        "`kv_weight`: expected dtype bfloat16 or float16 or float32, got int8 "
        "(quantized? project=callable takes its place)",
    ),
    (
        ValueError,
        {"kv_weight": torch.zeros(L, HIDDEN, 64).transpose(1, 2)},
        "`kv_weight`: expected a contiguous tensor, got strides [1536, 1, 64] for shape "
        "[2, 64, 24] (kv_weight.contiguous())",
    ),
    (
        TypeError,
        {"kv_weight": None},
        "`kv_weight`: expected a torch.Tensor as `k_norm_weight` is, got NoneType",
    ),
    (
        ValueError,
        {"bias": torch.zeros(L, H * D)},
        "`bias`: expected shape [n_layers=2, 2*num_kv_heads*head_dim=64], got [2, 32]",
    ),
    (
        ValueError,
        {"bias": torch.zeros(L, 2 * H * D, dtype=torch.bfloat16)},
        "`bias`: expected dtype float32, got bfloat16 (the dtype of kv_weight)",
    ),
    (
        ValueError,
        {"k_norm_weight": torch.zeros(0, D)},
        "`k_norm_weight`: expected shape [n_layers >= 1, head_dim >= 1], got [0, 16]",
    ),
    (
        TypeError,
        {"k_norm_weight": np.zeros((L, D))},
        "`k_norm_weight`: expected a torch.Tensor or a jax.Array, got numpy.ndarray",
    ),
    (
        TypeError,
        {"eps": 1e-6},
        "`eps`: expected a torch.Tensor as `k_norm_weight` is, got float",
    ),
    (
        ValueError,
        {"eps": torch.ones(3)},
        "`eps`: expected shape [n_layers=2], got [3] "
        "(one epsilon a layer: torch.full((2,), 1e-06))",
    ),
    (
        ValueError,
        {"eps": torch.tensor([1e-6, -1.0])},
        "`eps`: expected finite values >= 0, got -1.0 at layer 1",
    ),
    (
        ValueError,
        {"cos_sin_cache": torch.zeros(8, 15)},
        "`rotary_dim`: expected an even number from 2 to head_dim = 16, got 15 "
        "(rotary_dim from cos_sin_cache)",
    ),
    (
        ValueError,
        {"kv_weight": None, "project": print},
        "`num_kv_heads`: expected a number with `project`, got None",
    ),
    (
        ValueError,
        {"fc_weight": torch.zeros(HIDDEN, 48)},
        "`hidden_norm_weight`: expected a value beside fc_weight, got None",
    ),
    (
        ValueError,
        {
            "fc_weight": torch.zeros(20, 48),
            "hidden_norm_weight": torch.ones(HIDDEN),
            "hidden_norm_eps": 1e-6,
        },
        "`fc_weight`: expected shape [hidden=24, n_features*hidden], got [20, 48]",
    ),
    (
        ValueError,
        {
            "fc_weight": torch.zeros(HIDDEN, 48),
            "hidden_norm_weight": torch.ones(20),
            "hidden_norm_eps": 1e-6,
        },
        "`hidden_norm_weight`: expected shape [hidden=24], got [20]",
    ),
    (
        ValueError,
        {"backend": "cuda"},
        """`backend`: expected "triton" or "pallas" or None, got 'cuda'""",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "message"), FROM_WEIGHTS)
def test_weights_that_are_refused(kind, changes, message):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        fkv.KVMaterializer.from_weights(**weights(**changes))


def test_from_weights_of_the_next_model_are_not_seen_by_this_one():
    """Two materializers share nothing."""
    one, two = make(), make(make_layers(seed=7))
    hidden, positions = inputs()
    before = [x.clone() for x in one(hidden, positions)]
    collect(two, hidden, positions)
    assert all(torch.equal(a, b) for a, b in zip(before, one(hidden, positions), strict=True))
