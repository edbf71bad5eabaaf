"""Whole messages of what only torch has: strides, outputs, gradients, lazy views."""

import functools

import pytest
import torch

import fkv
from cases import Case, assert_right, to_framework
from test_errors import CASE, refused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OUT = (2, 4, 2, 16)


@pytest.fixture
def arrays():
    return {name: to_framework(array, "torch") for name, array in CASE.make().items()}


def filled(*shape, dtype=torch.float32):
    return torch.full(shape, 7.0, dtype=dtype, device=DEVICE)


def test_outputs(arrays, backend):
    good = filled(*OUT)
    for bad, message in (
        (
            filled(2, 5, 2, 16),
            "`k_out`: expected shape [n_layers=2, total_ctx=4, num_kv_heads=2, head_dim=16], "
            "got [2, 5, 2, 16]",
        ),
        (
            filled(*OUT, dtype=torch.bfloat16),
            "`k_out`: expected dtype float32, got bfloat16 (the dtype of kv)",
        ),
        (
            filled(2, 4, 16, 2).transpose(2, 3),
            "`k_out`: expected a contiguous last dim, got stride 2 there, from strides "
            "[128, 32, 1, 2] (tokens, layers and heads may be strided, a row may not)",
        ),
        (
            filled(1, 4, 2, 16).expand(OUT),
            "`k_out`: expected one address for each element, got strides [0, 32, 16, 1] for shape "
            "[2, 4, 2, 16] (an expanded or overlapping view cannot hold a result)",
        ),
    ):
        refused(ValueError, message, arrays, k_out=bad, v_out=good, backend=backend)
        message = message.replace("`k_out`", "`v_out`")
        refused(ValueError, message, arrays, k_out=good, v_out=bad, backend=backend)
    refused(
        TypeError,
        "`k_out`: expected a torch.Tensor as `kv` is, got numpy.ndarray",
        arrays,
        k_out=good.cpu().numpy(),
        backend=backend,
    )


def test_overlap(arrays, backend):
    out = filled(*OUT)
    refused(
        ValueError,
        "`v_out`: expected memory of its own, got memory that overlaps `k_out` "
        "(v_out is written while k_out is in use)",
        arrays,
        k_out=out,
        v_out=out,
        backend=backend,
    )
    refused(
        ValueError,
        "`k_out`: expected memory of its own, got memory that overlaps `kv` "
        "(k_out is written while kv is in use)",
        arrays,
        k_out=arrays["kv"].view(-1)[100:356].view(OUT),
        backend=backend,
    )


def test_strides(arrays):
    wide = filled(4, 2, 128)
    refused(
        ValueError,
        "`kv`: expected a contiguous last dim, got stride 2 there, from strides [256, 128, 2] "
        "(tokens, layers and heads may be strided, a row may not)",
        arrays,
        kv=wide[..., ::2],
    )
    for name in ("kv", "k_norm_weight", "eps", "cos_sin_cache", "positions"):
        array = arrays[name]
        strided = torch.stack([array, array], dim=1)[:, 0]
        refused(
            ValueError,
            f'`{name}`: expected a contiguous tensor for backend="pallas", got strides '
            f"{list(strided.stride())} for shape {list(strided.shape)} "
            f'({name}.contiguous(), or backend="triton")',
            arrays,
            backend="pallas",
            **{name: strided},
        )


def test_gradients(arrays):
    message = (
        "`{}`: expected a tensor that needs no gradient, got requires_grad=True "
        "(no gradient is computed: {}.detach(), or call under torch.no_grad())"
    )
    kv = arrays["kv"].clone().requires_grad_()
    refused(ValueError, message.format("kv", "kv"), arrays, kv=kv)
    out = filled(*OUT).requires_grad_()
    refused(ValueError, message.format("k_out", "k_out"), arrays, k_out=out)


def test_tensors_without_plain_memory(arrays):
    refused(
        ValueError,
        "`kv`: expected a tensor with its values in memory, got a view whose sign is flipped "
        "lazily (kv.resolve_neg())",
        arrays,
        kv=torch._neg_view(arrays["kv"]),
    )
    refused(
        TypeError,
        "`k_norm_weight`: expected a strided tensor, got layout torch.sparse_coo",
        arrays,
        k_norm_weight=arrays["k_norm_weight"].to_sparse(),
    )


def test_devices(arrays):
    refused(
        ValueError,
        f"`eps`: expected device {arrays['kv'].device}, got meta (where `kv` is)",
        arrays,
        eps=arrays["eps"].to("meta"),
    )


def test_jax_outputs_and_mixed_frameworks(arrays):
    import jax.numpy as jnp

    jax_arrays = {name: to_framework(array, "jax") for name, array in CASE.make().items()}
    refused(
        TypeError,
        "`k_out`: expected None with jax arrays, got a jax.Array "
        "(jax arrays are immutable: leave it out and take the arrays returned)",
        jax_arrays,
        k_out=jnp.zeros(OUT),
    )
    refused(
        TypeError,
        "`k_out`: expected None with jax arrays, got a torch.Tensor "
        "(jax arrays are immutable: leave it out and take the arrays returned)",
        jax_arrays,
        k_out=filled(*OUT),
    )
    refused(
        TypeError,
        "`positions`: expected a torch.Tensor as `kv` is, got a jax.Array "
        "(all arrays of one framework)",
        arrays,
        positions=jax_arrays["positions"],
    )


def test_geometry_that_pallas_cannot_take_leaves_outputs_alone():
    problem = Case(T=4, L=2, H=2, D=20, R=10).make()
    arrays = {name: to_framework(array, "torch") for name, array in problem.items()}
    refused(
        NotImplementedError,
        "`rotary_dim`: expected rotary_dim/2 and head_dim - rotary_dim to be multiples of 8 "
        'for backend="pallas", got rotary_dim=10 of head_dim=20 '
        '(backend="triton" takes any even rotary_dim)',
        arrays,
        k_out=filled(2, 4, 2, 20),
        v_out=filled(2, 4, 2, 20),
        backend="pallas",
    )


def test_tensors_without_memory(arrays):
    """A meta tensor, a storage that was freed, a transform of torch."""
    message = r"^`kv`: expected an array with its values in memory, got one without memory "
    meta = {name: tensor.to("meta") for name, tensor in arrays.items()}
    freed = torch.empty_like(arrays["kv"])
    freed.untyped_storage().resize_(0)
    for backend in ("triton", "pallas"):
        for bad in (meta, arrays | {"kv": freed}):
            with pytest.raises(ValueError, match=message):
                fkv.materialize(**bad, backend=backend)
        call = functools.partial(fkv.materialize, **arrays | {"kv": None}, backend=backend)
        with pytest.raises((TypeError, ValueError), match=r"^`kv`: expected "):
            torch.func.vmap(lambda kv, call=call: call(kv=kv))(arrays["kv"][None])


def test_inference_tensors_as_outputs(arrays):
    """Written where torch lets them be, and before anything is written refused elsewhere."""
    k, v = fkv.materialize(**arrays)
    with torch.inference_mode():
        out = torch.full_like(v, torch.nan)
        fkv.materialize(**arrays, v_out=out, backend="pallas")
    assert torch.equal(out, v)
    k_out = torch.full_like(k, torch.nan)
    with pytest.raises(ValueError, match=r"^`v_out`: expected no inference tensor for "):
        fkv.materialize(**arrays, k_out=k_out, v_out=out, backend="pallas")
    assert torch.isnan(k_out).all()


@pytest.mark.needs("jax")
def test_jax_array_in_another_layout():
    """Its strides are not those of its shape."""
    import jax.numpy as jnp

    problem = Case(T=4, L=2, D=16).make()
    arrays = {name: to_framework(array, "jax") for name, array in problem.items()}
    kv = torch.empty(
        2, 4, problem["kv"].shape[2], device=DEVICE
    )  # aligned, so jax keeps its layout
    kv.copy_(torch.from_numpy(problem["kv"]).transpose(0, 1))
    arrays["kv"] = jnp.from_dlpack(kv.transpose(0, 1))
    assert_right(problem, *fkv.materialize(**arrays))
    with pytest.raises(ValueError, match=r"^`kv`: expected an array in row-major layout for "):
        fkv.materialize(**arrays, backend="triton")
