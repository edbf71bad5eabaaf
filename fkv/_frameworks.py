"""Whose array is this; its layout, address and values; how it crosses to the other framework.

Nothing here imports torch or jax before it holds an array of that framework, or must make one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from fkv._errors import sentence
from fkv._spec import INPUTS, OUTPUTS, Spec

NAMES = INPUTS + OUTPUTS
ALIGNMENT = 256  # bytes, that Mosaic GPU wants of every buffer, and XLA gives its own


class Torch:
    name = "torch"
    kind = "torch.Tensor"

    @staticmethod
    def owns(array: Any) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(array, torch.Tensor)

    @staticmethod
    def layout(name: str, tensor: Any) -> tuple:
        """(shape, strides, dtype, device); what has no plain memory is refused."""
        import torch

        if tensor.layout is not torch.strided:
            raise TypeError(sentence(name, "a strided tensor", f"layout {tensor.layout}"))
        if tensor.is_neg() or tensor.is_conj():
            got = "a view whose sign is flipped lazily"
            cure = f"{name}.resolve_conj().resolve_neg()"
            raise ValueError(sentence(name, "a tensor with its values in memory", got, cure))
        if tensor.requires_grad and name in ("kv", *OUTPUTS) and torch.is_grad_enabled():
            cure = f"no gradient is computed: {name}.detach(), or call under torch.no_grad()"
            raise ValueError(
                sentence(name, "a tensor that needs no gradient", "requires_grad=True", cure)
            )
        return tensor.shape, tensor.stride(), tensor.dtype, _torch_device(tensor.device)

    @staticmethod
    def pointer(tensor: Any) -> int:
        return tensor.data_ptr()

    @staticmethod
    def values(tensor: Any) -> np.ndarray | None:
        """The values where they are on the host, without a copy."""
        return tensor.detach().numpy() if tensor.device.type == "cpu" else None


class Jax:
    name = "jax"
    kind = "jax.Array"

    @staticmethod
    def owns(array: Any) -> bool:
        jax = sys.modules.get("jax")
        return jax is not None and isinstance(array, jax.Array)

    @staticmethod
    def layout(name: str, array: Any) -> tuple:
        """(shape, strides, dtype, device); what has no memory on one device is refused."""
        if _is_traced(array):
            return array.shape, None, array.dtype, None
        if array.is_deleted():
            why = "donated to an earlier call, or deleted"
            raise ValueError(
                sentence(name, "an array with its values in memory", "a deleted array", why)
            )
        device = _jax_device(array.sharding)
        if device is None:
            got = f"one sharded over {array.sharding.num_devices} devices"
            cure = "jax.shard_map over the KV heads, or jax.device_put to one device"
            raise ValueError(sentence(name, "an array on one device", got, cure))
        return array.shape, None, array.dtype, device

    @staticmethod
    def pointer(array: Any) -> int | None:
        return None  # jax arrays are immutable: no output can overlap them

    @staticmethod
    def values(array: Any) -> np.ndarray | None:
        """The values where they are on the host, without a copy; traced ones are nowhere."""
        if _is_traced(array) or not (_jax_device(array.sharding) or "").startswith("cpu"):
            return None
        return np.asarray(array)


Framework = Torch | Jax
FRAMEWORKS: tuple[Framework, ...] = (Torch(), Jax())


def framework_of(arrays: Sequence[Any]) -> Framework:
    """The one framework of all arrays, which come in the order of NAMES."""
    home = next((framework for framework in FRAMEWORKS if framework.owns(arrays[0])), None)
    if home is None:
        got = _type_name(arrays[0])
        cure = "torch.from_numpy(kv) or jax.numpy.asarray(kv)" if "numpy" in got else ""
        raise TypeError(sentence("kv", "a torch.Tensor or a jax.Array", got, cure))
    for name, array in zip(NAMES, arrays, strict=True):
        if home.owns(array):
            if name in OUTPUTS and home.name == "jax":
                why = "jax arrays are immutable: leave it out and take the arrays returned"
                raise TypeError(sentence(name, "None with jax arrays", "a jax.Array", why))
        elif not (array is None and name in OUTPUTS):
            raise TypeError(_wrong_kind(name, array, home, arrays[0]))
    return home


def layouts_of(arrays: Sequence[Any], home: Framework) -> tuple[tuple | None, ...]:
    """The layout of each array, hashable; None for an output that is not given."""
    return tuple(
        None if array is None else home.layout(name, array)
        for name, array in zip(NAMES, arrays, strict=True)
    )


def pointers_of(arrays: Sequence[Any], home: Framework) -> list[int | None]:
    """The address of each array; None where no output can overlap it."""
    return [None if array is None else home.pointer(array) for array in arrays]


def carry_in(arrays: Sequence[Any], spec: Spec, home: Framework, framework: str) -> list[Any]:
    """The arrays as `framework` sees them: themselves, or the same memory through DLPack.

    An output that cannot be lent becomes None; carry_back copies its result instead.
    """
    if home.name == framework:
        return list(arrays)
    return _torch_to_jax(arrays, spec) if home.name == "torch" else _jax_to_torch(arrays, spec)


def carry_back(results: Sequence[Any], arrays: Sequence[Any], home: Framework) -> tuple[Any, Any]:
    """The results as arrays of the caller's framework, in the outputs that were given."""
    k, v = (
        _to_home(result, given, arrays[0], home)
        for result, given in zip(results, arrays[len(INPUTS) :], strict=True)
    )
    return k, v


def _torch_to_jax(arrays: Sequence[Any], spec: Spec) -> list[Any]:
    # jax has no strides: what is not contiguous would have to be copied.
    for name, tensor in zip(INPUTS, arrays, strict=False):
        if not tensor.is_contiguous():
            got = f"strides {list(tensor.stride())} for shape {list(tensor.shape)}"
            cure = f'{name}.contiguous(), or backend="triton"'
            raise ValueError(sentence(name, 'a contiguous tensor for backend="pallas"', got, cure))
        converted = name == "positions" and spec.positions_dtype == "int64"
        if not (_is_aligned(tensor) or converted):
            expected = f'memory aligned to {ALIGNMENT} bytes for backend="pallas" on a GPU'
            got = f"a view {tensor.data_ptr() % ALIGNMENT} bytes past that"
            raise ValueError(sentence(name, expected, got, f'{name}.clone(), or backend="triton"'))
    import jax

    if spec.device != "cpu" and jax.default_backend() != "gpu":
        expected, got = f"jax with CUDA, as `kv` is on {spec.device}", "jax without it"
        raise ImportError(sentence("backend", expected, got, "pip install 'jax[cuda13]'"))
    inputs = [tensor.detach() for tensor in arrays[: len(INPUTS)]]
    if spec.positions_dtype == "int64":
        # jax would keep the low 32 bits. Clamped, a position outside the table stays outside.
        inputs[-1] = inputs[-1].clamp(-1, spec.table_rows).int()
    # On a GPU jax can write into the memory that torch lends; on the CPU it would write a copy.
    outputs = [
        out.detach() if out is not None and _is_lendable(out) else None
        for out in arrays[len(INPUTS) :]
    ]
    return [
        None if tensor is None else jax.dlpack.from_dlpack(tensor) for tensor in inputs + outputs
    ]


def _is_aligned(tensor: Any) -> bool:
    return not tensor.is_cuda or tensor.data_ptr() % ALIGNMENT == 0


def _is_lendable(out: Any) -> bool:
    return out.is_cuda and out.is_contiguous() and _is_aligned(out)


def _jax_to_torch(arrays: Sequence[Any], spec: Spec) -> list[Any]:
    import torch

    for name, array in zip(NAMES, arrays, strict=True):
        if _is_traced(array):
            cure = 'inside jax.jit use backend="pallas", or call outside of it'
            expected = 'an array with values for backend="triton"'
            raise TypeError(sentence(name, expected, "a traced jax.Array", cure))
    if not (spec.device or "").startswith("cpu") and not torch.cuda.is_available():
        expected, got = f"torch with CUDA, as `kv` is on {spec.device}", "torch without it"
        raise ImportError(sentence("backend", expected, got, "pip install torch, its CUDA build"))
    return [None if array is None else torch.from_dlpack(array) for array in arrays]


def _to_home(result: Any, given: Any, kv: Any, home: Framework) -> Any:
    if home.owns(result):
        return result
    import torch

    if home.name == "jax":
        import jax

        if result.is_cuda:
            # jax frees what it lent as soon as torch lets go of it, so torch must be done with it.
            torch.cuda.current_stream(result.device).synchronize()
        return jax.dlpack.from_dlpack(result, device=kv.device)
    tensor = torch.from_dlpack(result)
    if given is None:
        return tensor
    if tensor.data_ptr() != given.data_ptr():  # not lent, or jax did not write where it was lent
        given.copy_(tensor)
    return given


def _is_traced(array: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.core.Tracer)


@functools.cache
def _torch_device(device: Any) -> str:
    return "cpu" if device.type == "cpu" else str(device)


@functools.lru_cache
def _jax_device(sharding: Any) -> str | None:
    """Named as torch does; None for more than one."""
    if sharding.num_devices != 1:
        return None
    (device,) = sharding.device_set
    if device.platform == "cpu":
        return f"cpu:{device.id}" if device.id else "cpu"
    return f"{'cuda' if device.platform == 'gpu' else device.platform}:{device.local_hardware_id}"


def _type_name(array: Any) -> str:
    kind = type(array)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _wrong_kind(name: str, array: Any, home: Framework, kv: Any) -> str:
    other = next((framework for framework in FRAMEWORKS if framework.owns(array)), None)
    got = f"a {other.kind}" if other else _type_name(array)
    if name == "eps" and other is None:
        layers = kv.shape[1] if len(kv.shape) == 3 else "n_layers"
        full = "torch.full" if home.name == "torch" else "jnp.full"
        got = f"{got} {array!r}" if isinstance(array, float) else got
        cure = f"one epsilon a layer: {full}(({layers},), 1e-06)"
        return sentence(name, f"a {home.kind} of shape [n_layers={layers}]", got, cure)
    cure = "all arrays of one framework" if other else ""
    return sentence(name, f"a {home.kind} as `kv` is", got, cure)
