"""What a Hugging Face checkpoint of a draft model holds: the tensors it takes, and no others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fkv._errors import sentence
from fkv._rope import MOST_ROWS, rope_table
from fkv._spec import FLOATS

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # as safetensors names them
QUANTIZED = ("weight_scale", "weight_scale_inv", "weight_packed", "qweight")
CURE = "project=callable takes the place of the projection"


class Sizes(NamedTuple):
    n_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    eps: float


class Tensors:
    """The tensors of a folder by name, each read when it is asked for."""

    def __init__(self, folder: Path, framework: str, stack: ExitStack) -> None:
        safe_open = import_safetensors()
        self._of: dict[str, Any] = {}
        for path in _files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework))
            except Exception as error:
                expected = "a safetensors file"
                raise ValueError(sentence("folder", expected, path.name, _line(error))) from error
            self._of |= dict.fromkeys(file.keys(), file)
        self.prefix = "" if any(name.startswith("layers.") for name in self._of) else "model."

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self._of

    def names(self, start: str) -> list[str]:
        """Those that begin so, without the prefix."""
        whole = self.prefix + start
        return [name.removeprefix(self.prefix) for name in self._of if name.startswith(whole)]

    def count(self) -> int:
        return len(self._of)

    def value(self, name: str) -> Any:
        """One tensor, whatever it is."""
        return self._of[self.prefix + name].get_tensor(self.prefix + name)

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """dtype and shape."""
        if name not in self:
            cure = "the names are those of Qwen3, with or without the prefix model."
            raise ValueError(sentence("folder", f"tensor {name}", "none", cure))
        header = self._of[self.prefix + name].get_slice(self.prefix + name)
        dtype = header.get_dtype()
        if dtype not in DTYPES:
            expected = f"{name} of dtype {' or '.join(FLOATS)}"
            raise ValueError(sentence("folder", expected, dtype, f"quantized? {CURE}"))
        return DTYPES[dtype], tuple(header.get_shape())

    def read(self, name: str, dtype: str, *shape: int) -> Any:
        """One tensor, whose dtype and shape are checked before its values are read."""
        got = self.header(name)
        if got != (dtype, shape):
            expected = f"{name} of {dtype} and shape {list(shape)}"
            why = "the dtype of the first layer's, the sizes of config.json"
            raise ValueError(sentence("folder", expected, f"{got[0]} {list(got[1])}", why))
        return self.value(name)


@contextmanager
def open_tensors(folder: Path, framework: str) -> Iterator[Tensors]:
    with ExitStack() as stack:
        yield Tensors(folder, framework, stack)


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(sentence("folder", "a folder with config.json", str(folder)))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        expected = "a config.json that is JSON"
        raise ValueError(sentence("folder", expected, _line(error), str(path))) from error
    if not isinstance(config, dict):
        got = f"a JSON {type(config).__name__}"
        raise ValueError(sentence("folder", "a config.json that is an object", got, str(path)))
    return config


def sizes_of(config: dict[str, Any]) -> Sizes:
    if "gemma" in str(config.get("model_type")):
        expected, why = "a model whose k_norm multiplies by its weight", "by 1 + weight"
        raise NotImplementedError(sentence("config.json", expected, config["model_type"], why))
    heads = _number(config, "num_attention_heads")
    hidden_size = _number(config, "hidden_size")
    return Sizes(
        n_layers=_number(config, "num_hidden_layers"),
        num_kv_heads=_number(config, "num_key_value_heads", heads),
        head_dim=_number(config, "head_dim", hidden_size // heads),
        hidden_size=hidden_size,
        eps=_number(config, "rms_norm_eps", kind=float),
    )


def _number(config: dict[str, Any], name: str, default: Any = None, kind: type = int) -> Any:
    value = config.get(name)
    value = default if value is None else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_number = is_number and 0 <= value < 2**31  # neither NaN nor infinite
    if not is_number or (kind is int and (value != int(value) or value < 1)):
        expected = f"a number of {'at least 1' if kind is int else '0 or more'} as {name}"
        raise ValueError(sentence("config.json", expected, repr(value)))
    return kind(value)


def read_table(config: dict[str, Any], max_position: int | None) -> np.ndarray:
    if max_position is None:
        if config.get("max_position_embeddings") is None:
            cure = "or give max_position"
            raise ValueError(sentence("config.json", "max_position_embeddings", "none", cure))
        return rope_table(config, _number(config, "max_position_embeddings"))
    if max_position > MOST_ROWS:
        why = "float32 tells no more positions apart"
        raise ValueError(sentence("max_position", f"at most {MOST_ROWS}", str(max_position), why))
    return rope_table(config, max_position)


def check_layers(tensors: Tensors, config: dict[str, Any], n_layers: int, projected: bool) -> None:
    """Refuse what the kernel would not see: a norm of V, scales, weights that aren't all."""
    if n_layers > tensors.count():  # before going through them all
        tensors.header(f"layers.{n_layers - 1}.self_attn.k_norm.weight")
    for index in range(n_layers):
        names = tensors.names(f"layers.{index}.self_attn.")
        if any(".v_norm." in name for name in names):
            why = "V is copied as it was projected"
            raise ValueError(sentence("folder", f"no v_norm at layer {index}", "one", why))
        for name in names:
            if name.endswith(("k_scale", "v_scale")) and not (tensors.value(name) == 1).all():
                expected = f"{name.rpartition('.')[2]} 1 at layer {index}"
                raise ValueError(sentence("folder", expected, name, "K and V are not scaled"))
            if ".lora_" in name and not projected:
                expected = f"merged weights at layer {index}"
                raise ValueError(sentence("folder", expected, name, CURE))
        quantized = [n for n in names if n.endswith(QUANTIZED) and ("k_" in n or "v_" in n)]
        if quantized and not projected:
            expected = f"a projection that is not quantized at layer {index}"
            raise ValueError(sentence("folder", expected, quantized[0], CURE))
    method = config.get("quantization_config")
    if method and not projected:
        kind = method.get("quant_method") if isinstance(method, dict) else method
        got = f"quantization_config {kind}"
        raise ValueError(sentence("config.json", "weights that are not quantized", got, CURE))


def read_arrays(
    tensors: Tensors,
    sizes: Sizes,
    empty: Callable[[str, tuple[int, ...]], Any],
    put: Callable[[Any, Any], None],
    projected: bool,
) -> dict[str, Any]:
    """The weights of KVMaterializer.from_weights, made by `empty(dtype, shape)`.

    `put(to, tensor)` fills them tensor by tensor, so that no more than one is in memory twice.
    """
    n_layers, num_kv_heads, head_dim, hidden_size, _ = sizes
    kv_size = num_kv_heads * head_dim
    arrays: dict[str, Any] = {}

    def read(array: str, name: str, shape: tuple[int, ...], whole: tuple[int, ...], *at: Any):
        """One tensor into its place in an array, which the first one of it makes."""
        if array not in arrays:
            dtype, _ = tensors.header(name)
            arrays[array] = dtype, empty(dtype, whole)
        dtype, made = arrays[array]
        put(made[at], tensors.read(name, dtype, *shape))

    layers = [f"layers.{index}.self_attn" for index in range(n_layers)]
    biased = [f"{layer}.{x}_proj.bias" in tensors for layer in layers for x in "kv"]
    if any(biased) and not all(biased):
        raise ValueError(sentence("folder", "a bias in each k_proj and v_proj or in none", "some"))
    for index, layer in enumerate(layers):
        norm = f"{layer}.k_norm.weight"
        read("k_norm_weight", norm, (head_dim,), (n_layers, head_dim), index)
        for half, name in enumerate("" if projected else ("k_proj", "v_proj")):
            rows = slice(half * kv_size, (half + 1) * kv_size)
            shape, whole = (kv_size, hidden_size), (n_layers, 2 * kv_size, hidden_size)
            read("kv_weight", f"{layer}.{name}.weight", shape, whole, index, rows)
            if any(biased):
                read("bias", f"{layer}.{name}.bias", shape[:1], whole[:2], index, rows)
    # With a bias, or a norm of its own for each feature, the projection is another one.
    other = "fc.bias" in tensors or tensors.names("aux_hidden_norms.")
    if "fc.weight" in tensors and "hidden_norm.weight" in tensors and not other:
        shape = (hidden_size, tensors.header("fc.weight")[1][-1])
        read("fc_weight", "fc.weight", shape, shape, ...)
        read("hidden_norm_weight", "hidden_norm.weight", shape[:1], shape[:1], ...)
    return {name: array for name, (_, array) in arrays.items()}


class TorchMaker:
    """Makes tensors on their device at once, and copies into them."""

    name = "pt"  # as safetensors calls it

    def __init__(self, device: Any, dtype: str | None) -> None:
        self.device, self.dtype = device, dtype

    def empty(self, dtype: str, shape: tuple[int, ...]) -> Any:
        import torch

        with torch.inference_mode(False):
            return torch.empty(shape, dtype=getattr(torch, self.dtype or dtype), device=self.device)

    def put(self, to: Any, tensor: Any) -> None:
        to.copy_(tensor)

    def finish(self, array: Any) -> Any:
        import torch

        return torch.from_numpy(array).to(self.device) if isinstance(array, np.ndarray) else array


class JaxMaker:
    """Fills arrays on the host, as jax's own are immutable."""

    name = "np"

    def __init__(self, device: Any, dtype: str | None) -> None:
        self.device, self.dtype = device, dtype

    def empty(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        import jax.numpy as jnp

        return np.empty(shape, jnp.dtype(self.dtype or dtype))

    def put(self, to: np.ndarray, tensor: np.ndarray) -> None:
        to[...] = tensor

    def finish(self, array: np.ndarray) -> Any:
        import jax

        return jax.device_put(array, self.device)


def import_safetensors() -> Any:
    """Its safe_open."""
    try:
        from safetensors import safe_open
    except ModuleNotFoundError as error:
        expected, cure = "the package safetensors", "pip install 'fkv[checkpoint]'"
        got = f"no module named {error.name!r}"
        raise ImportError(sentence("folder", expected, got, cure)) from error
    return safe_open


def _files(folder: Path) -> list[Path]:
    """One file, or those that the index names."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        path = folder / "model.safetensors"
        if not path.is_file():
            expected = f"{path.name} or {index.name}"
            raise FileNotFoundError(sentence("folder", expected, f"neither in {folder}"))
        return [path]
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        expected = f"a file of JSON as {index.name}"
        raise ValueError(sentence("folder", expected, "another", _line(error))) from error
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(x, str) for x in files.values()):
        expected = f"a weight_map of names of files in {index.name}"
        raise ValueError(sentence("folder", expected, "none" if files is None else "another"))
    names = sorted(set(files.values()))
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(sentence("folder", name, "none", f"{index.name} names it"))
    return [folder / name for name in names]


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
