"""Whose array is this; its layout, address and values; how it crosses to the other framework.

Nothing here imports torch or jax before it holds an array of that framework, or must make one.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from threading import get_ident
from typing import Any

import numpy as np

from fkv._errors import sentence
from fkv._spec import INPUTS, OUTPUTS, Layout, Spec, make_spec

NAMES = INPUTS + OUTPUTS
CONSTANTS = ("k_norm_weight", "eps", "cos_sin_cache")  # of a model, the same in every call
ALIGNMENT = 256  # bytes, that Mosaic GPU wants of every buffer, and XLA gives its own


class Torch:
    name = "torch"
    kind = "torch.Tensor"

    @staticmethod
    def owns(array: Any) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(array, torch.Tensor)

    @staticmethod
    def signature(tensors: Sequence[Any]) -> tuple:
        """All that a Spec follows from, as fast as it can be had."""
        kv, _, _, _, _, k_out, v_out = tensors
        if (
            kv.requires_grad
            or (k_out is not None and k_out.requires_grad)
            or (v_out is not None and v_out.requires_grad)
        ):
            _refuse_gradient(tensors)
        try:
            return tuple(
                [
                    x if x is None else (x.shape, x.stride(), x.dtype, x.device, x.is_neg())
                    for x in tensors
                ]
            )
        except RuntimeError:  # a layout without strides
            _refuse_sparse(tensors)
            raise

    @staticmethod
    def layouts(signature: tuple) -> tuple[Layout | None, ...]:
        """What the rules look at; values that are not in memory are refused."""
        layouts = []
        for name, one in zip(NAMES, signature, strict=True):
            if one is None:
                layouts.append(None)
                continue
            shape, strides, dtype, device, negated = one
            if negated:
                got, cure = "a view whose sign is flipped lazily", f"{name}.resolve_neg()"
                raise ValueError(sentence(name, "a tensor with its values in memory", got, cure))
            dtype = str(dtype).removeprefix("torch.")
            layouts.append(Layout(tuple(shape), strides, dtype, str(device)))
        return tuple(layouts)

    @staticmethod
    def pointers(tensors: Sequence[Any]) -> tuple[int | None, ...]:
        """The address of each."""
        try:
            return tuple([None if x is None else x.data_ptr() for x in tensors])
        except RuntimeError as error:
            _refuse_sparse(tensors)
            expected, got = "tensors with their values in memory", "one inside a torch transform"
            cure = "call outside of torch.vmap and torch.func"
            raise TypeError(sentence("kv", expected, got, cure)) from error

    @staticmethod
    def values(spec: Spec, *tensors: Any) -> list[np.ndarray | None]:
        """The values of each where they are on the host, without a copy."""
        return [x.detach().numpy() if spec.device == "cpu" else None for x in tensors]

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """On the device of `like`."""
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype), device=like.device)

    @staticmethod
    def wait(tensors: Sequence[Any]) -> None:
        import torch

        for tensor in tensors:
            if tensor.is_cuda:
                torch.cuda.synchronize(tensor.device)


class Jax:
    name = "jax"
    kind = "jax.Array"

    @staticmethod
    def owns(array: Any) -> bool:
        jax = sys.modules.get("jax")
        return jax is not None and isinstance(array, jax.Array)

    @staticmethod
    def signature(arrays: Sequence[Any]) -> tuple:
        """All that a Spec follows from, as fast as it can be had."""
        import jax.core

        tracer, signature = jax.core.Tracer, []
        for name, x in zip(NAMES, arrays, strict=True):
            if x is None:
                signature.append(None)
            elif isinstance(x, tracer):
                signature.append((x.aval, None))
            elif x.is_deleted():
                expected = "an array with its values in memory"
                why = "donated to an earlier call, or deleted"
                raise ValueError(sentence(name, expected, "a deleted array", why))
            else:
                signature.append((x.aval, x.sharding))
        return tuple(signature)

    @staticmethod
    def layouts(signature: tuple) -> tuple[Layout | None, ...]:
        """What the rules look at; what is not on one device is refused."""
        layouts = []
        for name, one in zip(NAMES, signature, strict=True):
            if one is None:
                layouts.append(None)
                continue
            aval, sharding = one
            device = None if sharding is None else _only_device(sharding)
            if device is None and sharding is not None:
                got = f"one sharded over {sharding.num_devices} devices"
                cure = "jax.shard_map over the KV heads, or jax.device_put to one device"
                raise ValueError(sentence(name, "an array on one device", got, cure))
            layouts.append(Layout(aval.shape, None, str(aval.dtype), device))
        return tuple(layouts)

    @staticmethod
    def pointers(arrays: Sequence[Any]) -> tuple[None, ...]:
        """None, as jax arrays are immutable: no output can overlap them."""
        return (None,) * len(arrays)

    @staticmethod
    def values(spec: Spec, *arrays: Any) -> list[np.ndarray | None]:
        """The values of each where they are on the host, no copy; traced ones are nowhere."""
        if spec.device and not spec.device.startswith("cpu"):
            return [None] * len(arrays)
        return [np.asarray(x) if is_on_host(x) else None for x in arrays]

    @staticmethod
    def zeros(shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """On the device of `like`."""
        import jax.numpy as jnp

        return jnp.zeros(shape, dtype, device=like.sharding)

    @staticmethod
    def wait(arrays: Sequence[Any]) -> None:
        import jax

        jax.block_until_ready(arrays)


Framework = Torch | Jax
FRAMEWORKS: tuple[Framework, ...] = (Torch(), Jax())

_homes: dict[tuple[type, ...], Framework] = {}  # of types that have been seen together


def framework_of(arrays: Sequence[Any]) -> Framework:
    """The one framework of all arrays, which come in the order of NAMES."""
    types = tuple(map(type, arrays))
    home = _homes.get(types)
    if home is None:
        home = _framework_of(arrays)
        if not any(map(is_traced, arrays)):  # whose type does not say it all
            _homes[types] = home
    return home


def _framework_of(arrays: Sequence[Any]) -> Framework:
    home = next((framework for framework in FRAMEWORKS if framework.owns(arrays[0])), None)
    if home is None:
        got = type_name(arrays[0])
        cure = "torch.from_numpy(kv) or jax.numpy.asarray(kv)" if "numpy" in got else ""
        raise TypeError(sentence("kv", "a torch.Tensor or a jax.Array", got, cure))
    for name, array in zip(NAMES, arrays, strict=True):
        if home.owns(array):
            if name in OUTPUTS and home.name == "jax":
                raise TypeError(_output_with_jax(name, array))
        elif name in OUTPUTS and home.name == "jax" and array is not None:
            raise TypeError(_output_with_jax(name, array))
        elif not (array is None and name in OUTPUTS):
            raise TypeError(_wrong_kind(name, array, home, arrays[0]))
    return home


@functools.lru_cache(maxsize=4096)
def spec_of(home: Framework, signature: tuple, *sizes: int | None) -> Spec:
    """The one Spec of arrays with this signature: after the first call a look-up."""
    return make_spec(home.name, home.layouts(signature), *sizes)


def carry_in(arrays: Sequence[Any], spec: Spec, home: Framework, framework: str) -> Sequence[Any]:
    """The arrays as `framework` sees them: themselves, or the same memory through DLPack.

    An output that cannot be lent becomes None; carry_back copies its result instead.
    """
    if home.name == framework:
        return arrays
    return _torch_to_jax(arrays, spec) if home.name == "torch" else _jax_to_torch(arrays, spec)


def carry_back(results: Sequence[Any], arrays: Sequence[Any], home: Framework) -> tuple[Any, Any]:
    """The results as arrays of the caller's framework, in the outputs that were given."""
    k, v = results
    if home.owns(k):
        return k, v
    if home.name == "jax":
        return _to_jax(k, arrays[0]), _to_jax(v, arrays[0])
    k_out, v_out = arrays[len(INPUTS) :]
    return _to_torch(k, k_out), _to_torch(v, v_out)


def _torch_to_jax(arrays: Sequence[Any], spec: Spec) -> Sequence[Any]:
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
    for name, out in zip(OUTPUTS, arrays[len(INPUTS) :], strict=True):
        if out is not None and out.is_inference() and not _in_inference_mode():
            expected = 'no inference tensor for backend="pallas" outside of torch.inference_mode()'
            raise ValueError(sentence(name, expected, "one", 'backend="triton" takes it'))
    import jax

    kv, *constants, positions = arrays[: len(INPUTS)]
    if spec.positions_dtype == "int64":
        # jax would keep the low 32 bits. Clamped, a position outside the table stays outside.
        positions = positions.clamp(-1, spec.table_rows).int()
    if spec.device == "cpu":  # jax would write into copies of the outputs
        inputs = (kv, *constants, positions)
        return [jax.dlpack.from_dlpack(x.detach()) for x in inputs] + [None, None]
    if jax.default_backend() != "gpu":
        expected, got = f"jax with CUDA, as `kv` is on {spec.device}", "jax without it"
        raise ImportError(sentence("backend", expected, got, "pip install 'jax[cuda13]'"))
    import torch

    ready = torch.cuda.current_stream(kv.device).record_event(_event(get_ident(), kv.device))
    return [
        jax.dlpack.from_dlpack(_Lent(kv, ready)),
        *[_lent_constant(x, ready) for x in constants],
        jax.dlpack.from_dlpack(_Lent(positions, ready)),
        *[
            jax.dlpack.from_dlpack(_Lent(x, ready)) if x is not None and _is_lendable(x) else None
            for x in arrays[len(INPUTS) :]
        ],
    ]


class _Lent:
    """A tensor on a GPU that jax borrows, after the work that torch has queued for it so far.

    torch's own export does the same with a third of the speed, as each records an event.
    """

    def __init__(self, tensor: Any, ready: Any) -> None:
        self.tensor, self.ready = tensor, ready

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        if stream is not None:
            _stream(stream, self.tensor.device).wait_event(self.ready)
        import torch

        return torch.to_dlpack(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()


@functools.lru_cache
def _event(thread: int, device: Any) -> Any:
    """Of one thread, so that no other records it before it is waited for."""
    import torch

    return torch.cuda.Event()


@functools.lru_cache
def _stream(pointer: int, device: Any) -> Any:
    import torch

    return torch.cuda.ExternalStream(pointer, device)


_constants: dict[int, tuple[Any, Any, Any]] = {}  # id(tensor): a weak reference, memory, jax array


def _lent_constant(tensor: Any, ready: Any) -> Any:
    """Borrowed once, while the tensor lives: jax sees its memory, and so what changes in place.

    The arrays that are borrowed for each call make jax wait for such a change.
    """
    import jax

    memory = (tensor.data_ptr(), tensor.shape, tensor.dtype)
    reference, known, array = _constants.get(id(tensor), (None, None, None))
    if reference is not None and reference() is tensor and known == memory:
        return array
    # Of another tensor on the same memory, as jax keeps alive what it has borrowed.
    array = jax.dlpack.from_dlpack(_Lent(tensor.detach(), ready))
    forget = functools.partial(_forget, id(tensor))
    _constants[id(tensor)] = (weakref.ref(tensor, forget), memory, array)
    return array


def _forget(key: int, reference: Any) -> None:
    if key in _constants and _constants[key][0] is reference:
        del _constants[key]


def _in_inference_mode() -> bool:
    import torch

    return torch.is_inference_mode_enabled()


def _is_aligned(tensor: Any) -> bool:
    return not tensor.is_cuda or tensor.data_ptr() % ALIGNMENT == 0


def _is_lendable(out: Any) -> bool:
    return out.is_contiguous() and _is_aligned(out)


def _to_torch(result: Any, given: Any) -> Any:
    import torch

    tensor = torch.from_dlpack(result)  # torch's stream waits for jax's
    if given is None:
        return tensor
    if tensor.data_ptr() != given.data_ptr():  # not lent, or jax did not write where it was lent
        given.copy_(tensor)
    return given


def _jax_to_torch(arrays: Sequence[Any], spec: Spec) -> Sequence[Any]:
    import torch

    for name, array in zip(NAMES, arrays, strict=True):
        if is_traced(array):
            cure = 'inside jax.jit use backend="pallas", or call outside of it'
            expected = 'an array with values for backend="triton"'
            raise TypeError(sentence(name, expected, "a traced jax.Array", cure))
    if not (spec.device or "").startswith("cpu") and not torch.cuda.is_available():
        expected, got = f"torch with CUDA, as `kv` is on {spec.device}", "torch without it"
        raise ImportError(sentence("backend", expected, got, "pip install torch, its CUDA build"))
    tensors = [None if array is None else torch.from_dlpack(array) for array in arrays]
    for name, tensor in zip(INPUTS, tensors, strict=False):
        if tensor is not None and not tensor.is_contiguous():  # whose strides the Spec has not seen
            expected = 'an array in row-major layout for backend="triton"'
            got = f"strides {list(tensor.stride())} for shape {list(tensor.shape)}"
            raise ValueError(sentence(name, expected, got, 'backend="pallas" takes any layout'))
    return tensors


def _to_jax(result: Any, kv: Any) -> Any:
    import jax
    import torch

    if result.is_cuda:
        # jax frees what it lent as soon as torch lets go of it, so torch must be done with it.
        torch.cuda.current_stream(result.device).synchronize()
    return jax.dlpack.from_dlpack(result, device=kv.device)


def _refuse_gradient(tensors: Sequence[Any]) -> None:
    import torch

    for name, tensor in zip(NAMES, tensors, strict=True):
        if torch.is_grad_enabled() and name not in CONSTANTS and tensor.requires_grad:
            cure = f"no gradient is computed: {name}.detach(), or call under torch.no_grad()"
            raise ValueError(
                sentence(name, "a tensor that needs no gradient", "requires_grad=True", cure)
            )


def _refuse_sparse(tensors: Sequence[Any]) -> None:
    for name, tensor in zip(NAMES, tensors, strict=True):
        if tensor is not None and "strided" not in str(tensor.layout):
            expected, got = "a strided tensor", f"layout {tensor.layout}"
            raise TypeError(sentence(name, expected, got)) from None


def is_traced(array: Any) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.core.Tracer)


@functools.lru_cache
def _only_device(sharding: Any) -> str | None:
    """Named as torch does; None for several."""
    if sharding.num_devices != 1:
        return None
    (device,) = sharding.device_set
    if device.platform == "cpu":
        return f"cpu:{device.id}" if device.id else "cpu"
    return f"{'cuda' if device.platform == 'gpu' else device.platform}:{device.local_hardware_id}"


def is_on_host(array: Any) -> bool:
    return not is_traced(array) and (_only_device(array.sharding) or "").startswith("cpu")


def type_name(array: Any) -> str:
    kind = type(array)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _output_with_jax(name: str, array: Any) -> str:
    kind = next((f"a {framework.kind}" for framework in FRAMEWORKS if framework.owns(array)), None)
    why = "jax arrays are immutable: leave it out and take the arrays returned"
    return sentence(name, "None with jax arrays", kind or type_name(array), why)


def _wrong_kind(name: str, array: Any, home: Framework, kv: Any) -> str:
    other = next((framework for framework in FRAMEWORKS if framework.owns(array)), None)
    got = f"a {other.kind}" if other else type_name(array)
    if name == "eps" and other is None:
        layers = kv.shape[1] if len(kv.shape) == 3 else "n_layers"
        full = "torch.full" if home.name == "torch" else "jnp.full"
        got = f"{got} {array!r}" if isinstance(array, float) else got
        cure = f"one epsilon a layer: {full}(({layers},), 1e-06)"
        return sentence(name, f"a {home.kind} of shape [n_layers={layers}]", got, cure)
    cure = "all arrays of one framework" if other else ""
    return sentence(name, f"a {home.kind} as `kv` is", got, cure)
