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
from fkv._spec import (
    CACHES,
    MATERIALIZE,
    OPTIONAL,
    OUTPUTS,
    Arguments,
    Layout,
    Spec,
    make_cache_spec,
    make_spec,
)

# Of a model, the same in every call.
CONSTANTS = ("k_norm_weight", "eps", "cos_sin_cache", "k_scale", "v_scale")
ALIGNMENT = 256  # bytes, that Mosaic GPU wants of every buffer, and XLA gives its own


class Torch:
    name = "torch"
    kind = "torch.Tensor"

    @staticmethod
    def owns(array: Any) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(array, torch.Tensor)

    @staticmethod
    def signature(tensors: Sequence[Any], arguments: Arguments) -> tuple:
        """All that a Spec follows from, as fast as it can be had."""
        if tensors[0].requires_grad:
            _refuse_gradient(tensors, arguments)
        for x in tensors[arguments.num_inputs :]:
            if x is not None and x.requires_grad:
                _refuse_gradient(tensors, arguments)
        try:
            return tuple(
                [
                    x if x is None else (x.shape, x.stride(), x.dtype, x.device, x.is_neg())
                    for x in tensors
                ]
            )
        except RuntimeError:  # a layout without strides
            _refuse_sparse(tensors, arguments)
            raise

    @staticmethod
    def layouts(signature: tuple, arguments: Arguments) -> tuple[Layout | None, ...]:
        """What the rules look at; values that are not in memory are refused."""
        layouts = []
        for name, one in zip(arguments.names, signature, strict=True):
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
    def pointers(tensors: Sequence[Any], arguments: Arguments) -> tuple[int | None, ...]:
        """The address of each."""
        try:
            return tuple([None if x is None else x.data_ptr() for x in tensors])
        except RuntimeError as error:
            _refuse_sparse(tensors, arguments)
            expected, got = "tensors with their values in memory", "one inside a torch transform"
            cure = "call outside of torch.vmap and torch.func"
            raise TypeError(sentence("kv", expected, got, cure)) from error

    @staticmethod
    def values(spec: Spec, *tensors: Any) -> list[np.ndarray | None]:
        """The values of each where they are on the host, without a copy."""
        if spec.device != "cpu":
            return [None] * len(tensors)
        return [None if x is None else x.detach().numpy() for x in tensors]

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
    def signature(arrays: Sequence[Any], arguments: Arguments) -> tuple:
        """All that a Spec follows from, as fast as it can be had."""
        import jax.core

        tracer, signature = jax.core.Tracer, []
        for name, x in zip(arguments.names, arrays, strict=True):
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
    def layouts(signature: tuple, arguments: Arguments) -> tuple[Layout | None, ...]:
        """What the rules look at; what is not on one device is refused."""
        layouts = []
        for name, one in zip(arguments.names, signature, strict=True):
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
    def pointers(arrays: Sequence[Any], arguments: Arguments) -> tuple[None, ...]:
        """None, as jax arrays are immutable: no output can overlap them."""
        return (None,) * len(arrays)

    @staticmethod
    def values(spec: Spec, *arrays: Any) -> list[np.ndarray | None]:
        """The values of each where they are on the host, no copy; traced ones are nowhere."""
        if spec.device and not spec.device.startswith("cpu"):
            return [None] * len(arrays)
        return [np.asarray(x) if x is not None and is_on_host(x) else None for x in arrays]

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

# Of types that have been seen together. The same number of them is always the same arguments.
_homes: dict[tuple[type, ...], Framework] = {}


def framework_of(arrays: Sequence[Any], arguments: Arguments) -> Framework:
    """The one framework of all arrays."""
    types = tuple(map(type, arrays))
    home = _homes.get(types)
    if home is None:
        home = _framework_of(arrays, arguments)
        if not any(map(is_traced, arrays)):  # whose type does not say it all
            _homes[types] = home
    return home


def _framework_of(arrays: Sequence[Any], arguments: Arguments) -> Framework:
    home = next((framework for framework in FRAMEWORKS if framework.owns(arrays[0])), None)
    if home is None:
        got = type_name(arrays[0])
        cure = "torch.from_numpy(kv) or jax.numpy.asarray(kv)" if "numpy" in got else ""
        raise TypeError(sentence("kv", "a torch.Tensor or a jax.Array", got, cure))
    for name, array in zip(arguments.names, arrays, strict=True):
        if name in OUTPUTS and home.name == "jax" and array is not None:
            raise TypeError(_output_with_jax(name, array))
        if not home.owns(array) and not (array is None and name in OPTIONAL):
            raise TypeError(_wrong_kind(name, array, home, arrays[0]))
    return home


@functools.lru_cache(maxsize=4096)
def spec_of(home: Framework, signature: tuple, *sizes: int | None) -> Spec:
    """The one Spec of arrays with this signature: after the first call a look-up."""
    return make_spec(home.name, home.layouts(signature, MATERIALIZE), *sizes)


@functools.lru_cache(maxsize=4096)
def cache_spec_of(
    home: Framework, arguments: Arguments, signature: tuple, layout: str, *sizes: int | None
) -> Spec:
    """The same of write_cache."""
    layouts = home.layouts(signature, arguments)
    return make_cache_spec(home.name, arguments, layouts, layout, *sizes)


def split_caches(k_cache: Any, v_cache: Any) -> tuple[list[Any], tuple[int | None, int | None]]:
    """All arrays, and how many of each are in a sequence; None for one of all layers."""
    arrays, counts = [], []
    for name, cache in zip(CACHES, (k_cache, v_cache), strict=True):
        is_sequence = isinstance(cache, list | tuple)
        if is_sequence and not cache:
            raise ValueError(sentence(name, "an array a layer, or one of all", "none"))
        arrays += cache if is_sequence else [cache]
        counts.append(len(cache) if is_sequence else None)
    if (counts[0] is None) != (counts[1] is None):
        name, cache, other, count = ("v_cache", v_cache, "k_cache", counts[0])
        if k_cache is None:
            name, cache, other, count = ("k_cache", k_cache, "v_cache", counts[1])
        expected = "one array of all layers" if count is None else "a sequence of arrays"
        raise TypeError(sentence(name, f"{expected} as `{other}` is", _kind(cache)))
    return arrays, (counts[0], counts[1])


def join_caches(results: Sequence[Any], counts: tuple[int | None, int | None]) -> tuple[Any, Any]:
    """As they were given: one of all layers each, or a list each."""
    if counts[0] is None:
        return results[0], results[1]
    return list(results[: counts[0]]), list(results[counts[0] :])


def carry_in(arrays: Sequence[Any], spec: Spec, home: Framework, framework: str) -> Sequence[Any]:
    """The arrays as `framework` sees them: themselves, or the same memory through DLPack.

    k_out or v_out that cannot be lent becomes None; carry_back copies its result instead.
    """
    if home.name == framework:
        return arrays
    return _torch_to_jax(arrays, spec) if home.name == "torch" else _jax_to_torch(arrays, spec)


def carry_back(
    results: Sequence[Any], arrays: Sequence[Any], spec: Spec, home: Framework
) -> Sequence[Any]:
    """The results as arrays of the caller's framework, in the outputs that were given."""
    if home.owns(results[0]):
        return results
    if home.name == "jax":
        return _to_jax(results, arrays[0])
    given = arrays[spec.arguments.num_inputs :]
    return tuple(map(_to_torch, results, given))


def _torch_to_jax(arrays: Sequence[Any], spec: Spec) -> Sequence[Any]:
    names, num_inputs = spec.arguments
    inputs, outputs = list(arrays[:num_inputs]), arrays[num_inputs:]
    # jax has no strides: what is not contiguous would have to be copied.
    for name, tensor in zip(names, inputs, strict=False):
        if tensor is None:
            continue
        if not tensor.is_contiguous():
            got = f"strides {list(tensor.stride())} for shape {list(tensor.shape)}"
            cure = f'{name}.contiguous(), or backend="triton"'
            raise ValueError(sentence(name, 'a contiguous tensor for backend="pallas"', got, cure))
        if not (_is_aligned(tensor) or _is_int64(tensor)):  # which is converted
            _refuse_unaligned(name, tensor, f"{name}.clone(), or ")
    for name, out in zip(names[num_inputs:], outputs, strict=True):
        if out is not None and out.is_inference() and not _in_inference_mode():
            expected = 'no inference tensor for backend="pallas" outside of torch.inference_mode()'
            raise ValueError(sentence(name, expected, "one", 'backend="triton" takes it'))
        if out is None or spec.cache is None:
            continue
        if not out.is_contiguous():  # a copy would be of the whole cache
            got = f"strides {list(out.stride())} for shape {list(out.shape)}"
            expected = 'a contiguous tensor for backend="pallas"'
            raise ValueError(sentence(name, expected, got, 'backend="triton" takes it'))
        if not _is_aligned(out):
            _refuse_unaligned(name, out)
    import jax

    # jax would keep the low 32 bits. Clamped, what is outside of its range stays outside.
    ranges = {"positions": (-1, spec.table_rows)}
    if spec.cache is not None:
        ranges["slot_mapping"] = (-1, spec.cache.num_slots)
        ranges["commit_lens"] = (0, spec.cache.window)
    for i, name in enumerate(names[:num_inputs]):
        if name in ranges and _is_int64(inputs[i]):
            inputs[i] = inputs[i].clamp(*ranges[name]).int()
    if spec.device == "cpu":  # jax would write into copies of the outputs
        lent = [None if x is None else jax.dlpack.from_dlpack(x.detach()) for x in inputs]
        if spec.cache is None:
            return [*lent, None, None]
        return [*lent, *(jax.dlpack.from_dlpack(x.detach()) for x in outputs)]
    if jax.default_backend() != "gpu":
        expected, got = f"jax with CUDA, as `kv` is on {spec.device}", "jax without it"
        raise ImportError(sentence("backend", expected, got, "pip install 'jax[cuda13]'"))
    import torch

    device = arrays[0].device
    ready = torch.cuda.current_stream(device).record_event(_event(get_ident(), device))
    lent = []
    for name, x in zip(names, (*inputs, *outputs), strict=True):
        if x is None or (name in OUTPUTS and not _is_lendable(x)):
            lent.append(None)
        elif name in CONSTANTS:
            lent.append(_lent_constant(x, ready))
        else:
            lent.append(jax.dlpack.from_dlpack(_Lent(x, ready)))
    return lent


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


def _is_int64(tensor: Any) -> bool:
    return tensor is not None and str(tensor.dtype) == "torch.int64"


def _refuse_unaligned(name: str, tensor: Any, cure: str = "") -> None:
    expected = f'memory aligned to {ALIGNMENT} bytes for backend="pallas" on a GPU'
    got = f"a view {tensor.data_ptr() % ALIGNMENT} bytes past that"
    raise ValueError(sentence(name, expected, got, f'{cure}backend="triton"'))


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

    names, num_inputs = spec.arguments
    for name, array in zip(names, arrays, strict=True):
        if is_traced(array):
            cure = 'inside jax.jit use backend="pallas", or call outside of it'
            expected = 'an array with values for backend="triton"'
            raise TypeError(sentence(name, expected, "a traced jax.Array", cure))
    if not (spec.device or "").startswith("cpu") and not torch.cuda.is_available():
        expected, got = f"torch with CUDA, as `kv` is on {spec.device}", "torch without it"
        raise ImportError(sentence("backend", expected, got, "pip install torch, its CUDA build"))
    tensors = [None if array is None else torch.from_dlpack(array) for array in arrays]
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None and not tensor.is_contiguous():  # whose strides the Spec has not seen
            expected = 'an array in row-major layout for backend="triton"'
            got = f"strides {list(tensor.stride())} for shape {list(tensor.shape)}"
            raise ValueError(sentence(name, expected, got, 'backend="pallas" takes any layout'))
    # jax arrays are immutable: the caches are copied, and the copies written to.
    copies = [None if x is None else x.clone() for x in tensors[num_inputs:]]
    return [*tensors[:num_inputs], *copies]


def _to_jax(results: Sequence[Any], kv: Any) -> Sequence[Any]:
    import jax
    import torch

    if results[0].is_cuda:
        # jax frees what it lent as soon as torch lets go of it, so torch must be done with it.
        torch.cuda.current_stream(results[0].device).synchronize()
    return tuple(jax.dlpack.from_dlpack(result, device=kv.device) for result in results)


def _refuse_gradient(tensors: Sequence[Any], arguments: Arguments) -> None:
    import torch

    for name, tensor in zip(arguments.names, tensors, strict=True):
        needs_gradient = tensor is not None and tensor.requires_grad
        if torch.is_grad_enabled() and name not in CONSTANTS and needs_gradient:
            cure = f"no gradient is computed: {name}.detach(), or call under torch.no_grad()"
            raise ValueError(
                sentence(name, "a tensor that needs no gradient", "requires_grad=True", cure)
            )


def _refuse_sparse(tensors: Sequence[Any], arguments: Arguments) -> None:
    for name, tensor in zip(arguments.names, tensors, strict=True):
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
    why = "jax arrays are immutable: leave it out and take the arrays returned"
    return sentence(name, "None with jax arrays", _kind(array), why)


def _wrong_kind(name: str, array: Any, home: Framework, kv: Any) -> str:
    got, is_array = _kind(array), any(framework.owns(array) for framework in FRAMEWORKS)
    is_scale = name in ("k_scale", "v_scale") and isinstance(array, int | float)
    if is_scale or (name == "eps" and not is_array):
        layers = kv.shape[1] if len(kv.shape) == 3 else "n_layers"
        full = "torch.full" if home.name == "torch" else "jnp.full"
        got = f"{got} {array!r}" if isinstance(array, float) else got
        what, value = ("scale", array) if is_scale else ("epsilon", 1e-6)
        cure = f"one {what} a layer: {full}(({layers},), {value})"
        return sentence(name, f"a {home.kind} of shape [n_layers={layers}]", got, cure)
    cure = "all arrays of one framework" if is_array else ""
    return sentence(name, f"a {home.kind} as `kv` is", got, cure)


def _kind(array: Any) -> str:
    """Of an array or of something else, in words."""
    kind = next((framework.kind for framework in FRAMEWORKS if framework.owns(array)), None)
    return f"a {kind}" if kind else type_name(array)
