"""Whole error messages: the argument first, what was expected, what came, and the cure."""

import re

import numpy as np
import pytest

import fkv
from cases import Case, to_framework, to_numpy
from conftest import BACKENDS

CASE = Case(T=4, L=2, H=2, D=16, P=8)


@pytest.fixture
def arrays(framework):
    return {name: to_framework(array, framework) for name, array in CASE.make().items()}


def zeros(framework, *shape, dtype="float32"):
    return to_framework(np.zeros(shape, dtype), framework)


def refused(kind, message, arrays, **changes):
    """The call is refused with exactly this message, and the outputs given stay as they were."""
    arguments = arrays | changes
    before = {
        name: to_numpy(arguments[name]).copy()
        for name in ("k_out", "v_out")
        if hasattr(arguments.get(name), "data_ptr")
    }
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        fkv.materialize(**arguments)
    for name, bits in before.items():
        np.testing.assert_array_equal(to_numpy(arguments[name]), bits)


# argument, (shape, dtype) that takes its place, message
LAYOUTS = [
    (
        "kv",
        (4, 64),
        "float32",
        "`kv`: expected shape [total_ctx, n_layers, 2*num_kv_heads*head_dim], got [4, 64]",
    ),
    (
        "kv",
        (4, 2, 63),
        "float32",
        "`kv`: expected trailing dim a multiple of 2*head_dim = 32, got 63 from shape [4, 2, 63] "
        "(head_dim from k_norm_weight)",
    ),
    (
        "kv",
        (4, 2, 0),
        "float32",
        "`kv`: expected trailing dim a multiple of 2*head_dim = 32, got 0 from shape [4, 2, 0] "
        "(head_dim from k_norm_weight)",
    ),
    ("kv", (4, 2, 64), "int32", "`kv`: expected dtype bfloat16 or float16 or float32, got int32"),
    (
        "k_norm_weight",
        (16,),
        "float32",
        "`k_norm_weight`: expected shape [n_layers, head_dim], got [16]",
    ),
    (
        "k_norm_weight",
        (3, 16),
        "float32",
        "`k_norm_weight`: expected shape [n_layers=2, head_dim=16], got [3, 16]",
    ),
    (
        "k_norm_weight",
        (2, 16),
        "int32",
        "`k_norm_weight`: expected dtype bfloat16 or float16 or float32, got int32",
    ),
    (
        "eps",
        (3,),
        "float32",
        "`eps`: expected shape [n_layers=2], got [3] (one epsilon a layer: {full}((2,), 1e-06))",
    ),
    (
        "eps",
        (),
        "float32",
        "`eps`: expected shape [n_layers=2], got [] (one epsilon a layer: {full}((2,), 1e-06))",
    ),
    (
        "eps",
        (2,),
        "float16",
        "`eps`: expected dtype float32, got float16 (one epsilon a layer: {full}((2,), 1e-06))",
    ),
    (
        "cos_sin_cache",
        (8,),
        "float32",
        "`cos_sin_cache`: expected shape [rows, rotary_dim], got [8]",
    ),
    (
        "cos_sin_cache",
        (8, 32),
        "float32",
        "`rotary_dim`: expected an even number from 2 to head_dim = 16, got 32 "
        "(rotary_dim from cos_sin_cache)",
    ),
    (
        "cos_sin_cache",
        (0, 16),
        "float32",
        "`cos_sin_cache`: expected shape [rows >= 1, rotary_dim=16], got [0, 16] "
        "(a row is the cosines of rotary_dim/2 angles, then their sines)",
    ),
    (
        "cos_sin_cache",
        (8, 16),
        "int32",
        "`cos_sin_cache`: expected dtype bfloat16 or float16 or float32, got int32",
    ),
    (
        "positions",
        (5,),
        "int32",
        "`positions`: expected shape [total_ctx=4], got [5] (one row of the table a token)",
    ),
    (
        "positions",
        (3, 4),
        "int32",
        "`positions`: expected shape [total_ctx=4], got [3, 4] (one row of the table a token)",
    ),
    ("positions", (4,), "float32", "`positions`: expected dtype int32 or int64, got float32"),
]


@pytest.mark.parametrize(("name", "shape", "dtype", "message"), LAYOUTS)
def test_layouts(framework, arrays, name, shape, dtype, message):
    message = message.replace("{full}", "torch.full" if framework == "torch" else "jnp.full")
    refused(ValueError, message, arrays, **{name: zeros(framework, *shape, dtype=dtype)})


SIZES = [
    (
        {"num_kv_heads": 3},
        "`kv`: expected trailing dim 2*num_kv_heads*head_dim = 96, got 64 from shape [4, 2, 64]",
    ),
    ({"num_kv_heads": 0}, "`num_kv_heads`: expected at least 1, got 0"),
    ({"head_dim": 0}, "`head_dim`: expected at least 1, got 0 (head_dim as given)"),
    (
        {"head_dim": 32},
        "`k_norm_weight`: expected shape [n_layers=2, head_dim=32], got [2, 16]",
    ),
    (
        {"rotary_dim": 8},
        "`cos_sin_cache`: expected shape [rows >= 1, rotary_dim=8], got [8, 16] "
        "(a row is the cosines of rotary_dim/2 angles, then their sines)",
    ),
    (
        {"rotary_dim": 15},
        "`rotary_dim`: expected an even number from 2 to head_dim = 16, got 15 "
        "(rotary_dim as given)",
    ),
]


@pytest.mark.parametrize(("sizes", "message"), SIZES)
def test_sizes_that_disagree(arrays, sizes, message):
    refused(ValueError, message, arrays, **sizes)


@pytest.mark.parametrize("size", [2.0, True, "2"])
@pytest.mark.parametrize("name", ["num_kv_heads", "head_dim", "rotary_dim"])
def test_sizes_that_are_no_integers(arrays, name, size):
    message = f"`{name}`: expected an integer or None, got {type(size).__name__} {size!r}"
    refused(TypeError, message, arrays, **{name: size})


def test_kinds(framework, arrays):
    kind = {"torch": "torch.Tensor", "jax": "jax.Array"}[framework]
    full = {"torch": "torch.full", "jax": "jnp.full"}[framework]
    refused(
        TypeError,
        "`kv`: expected a torch.Tensor or a jax.Array, got numpy.ndarray "
        "(torch.from_numpy(kv) or jax.numpy.asarray(kv))",
        arrays,
        kv=to_numpy(arrays["kv"]),
    )
    refused(
        TypeError, "`kv`: expected a torch.Tensor or a jax.Array, got NoneType", arrays, kv=None
    )
    refused(
        TypeError,
        f"`positions`: expected a {kind} as `kv` is, got list",
        arrays,
        positions=[0, 1, 2, 3],
    )
    refused(
        TypeError,
        f"`k_norm_weight`: expected a {kind} as `kv` is, got NoneType",
        arrays,
        k_norm_weight=None,
    )
    refused(
        TypeError,
        f"`eps`: expected a {kind} of shape [n_layers=2], got float 1e-06 "
        f"(one epsilon a layer: {full}((2,), 1e-06))",
        arrays,
        eps=1e-6,
    )


def test_backend_names(arrays):
    refused(
        ValueError,
        """`backend`: expected "triton" or "pallas" or None, got 'cuda'""",
        arrays,
        backend="cuda",
    )
    refused(
        TypeError,
        """`backend`: expected "triton" or "pallas" or None, got 3""",
        arrays,
        backend=3,
    )


def test_values_on_the_host(framework, arrays):
    if "cpu" not in str(arrays["kv"].device).lower():
        pytest.skip("values on a GPU are not read back")
    for positions, got in (([0, 8, 1, 9], "9 at token 3"), ([0, 1, -1, 9], "-1 at token 2")):
        refused(
            ValueError,
            f"`positions`: expected 0 <= position < 8, got {got} (the rows of cos_sin_cache)",
            arrays,
            positions=to_framework(np.int32(positions), framework),
        )
    for eps, got in (((1e-6, -1.0), "-1.0"), ((1e-6, np.nan), "nan"), ((1e-6, np.inf), "inf")):
        refused(
            ValueError,
            f"`eps`: expected finite values >= 0, got {got} at layer 1",
            arrays,
            eps=to_framework(np.float32(eps), framework),
        )


def test_pallas_names_triton(framework):
    problem = Case(D=20, R=10).make()
    arrays = {name: to_framework(array, framework) for name, array in problem.items()}
    if "pallas" in {b for b, f in BACKENDS.items() if f == framework}:
        refused(
            NotImplementedError,
            "`rotary_dim`: expected rotary_dim/2 and head_dim - rotary_dim to be multiples of 8 "
            'for backend="pallas", got rotary_dim=10 of head_dim=20 '
            '(backend="triton" takes any even rotary_dim)',
            arrays,
            backend="pallas",
        )


def test_warmup_wants_numbers_of_tokens(arrays):
    side = [arrays[name] for name in ("k_norm_weight", "eps", "cos_sin_cache")]
    for kind, bad, message in (
        (TypeError, 16, "expected a list of numbers of tokens, got int 16"),
        (TypeError, ["a"], "expected an integer or None, got str 'a'"),
        (ValueError, [3, -1], "expected numbers of 0 or more tokens, got -1"),
    ):
        with pytest.raises(kind, match=f"^{re.escape(f'`total_ctx`: {message}')}$"):
            fkv.warmup(*side, num_kv_heads=2, total_ctx=bad)
