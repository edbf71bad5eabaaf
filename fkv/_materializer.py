"""KVMaterializer: from a draft model's weights and hidden states to its context K and V."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fkv import _checkpoint
from fkv._api import materialize, write_cache
from fkv._backends import BackendName
from fkv._errors import sentence
from fkv._frameworks import Framework, is_on_host, is_traced, type_name
from fkv._layers import check_same, copy_layers, grown_table, read_layers, read_table
from fkv._spec import FLOATS, check_eps, check_positions
from fkv._weights import (
    Weights,
    check_hidden,
    check_position_layout,
    check_size,
    check_target,
    check_weights,
    dtype_name,
    framework_of,
)

Project = Callable[[Any], Any]


@dataclass(frozen=True)
class Static:
    """What a jitted function is compiled for, besides the shapes of the weights."""

    home: Framework
    n_layers: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    hidden_size: int | None  # None where `project` alone knows it
    hidden_norm_eps: Any  # a number, or None without fc_weight
    max_position_hint: int | None
    project: Project | None
    backend: BackendName | None


class KVMaterializer:
    """The context K and V of all layers of a draft model, from its hidden states.

    For token t and layer l, with the K and V rows W and the bias b of that layer's projection::

        kv[t, l] = ctx_hidden[t] @ W[l].T + b[l]
        k, v     = fkv.materialize(kv, k_norm_weight, eps, cos_sin_cache, positions)

    One matrix product serves all layers. Its framework is that of the weights, torch or jax; on
    jax it is a pytree, which passes through jax.jit as an argument, and every call is pure.

    Args:
        layers: the draft model's. Of each, `self_attn` is read: `num_kv_heads`, `head_dim`,
            `rotary_emb`, `k_norm.weight` and `k_norm.variance_epsilon`, and `qkv_proj.weight` with
            `q_size` and `kv_size` as in SGLang, or `k_proj` and `v_proj` as in transformers. A
            bias of the projection is added.
        rotary_emb: whose `cos_sin_cache` [P, R] rotates all layers, of width `rotary_dim` (by
            default head_dim). transformers' has none: the table is computed from its `inv_freq`.
        num_kv_heads: H.
        head_dim: D.
        device: where the copies of the weights lie and the calls run. The table is the rotary
            embedding's own if it lies there.
        max_position_hint: a number of positions that the table must have, and a promise: with it a
            GPU's positions are not read back, and one past the table makes NaN rows. Without it,
            a call on torch tensors waits for their extremes.
        project: a function of ctx_hidden that gives kv, [T, L, 2*H*D] or [T, L*2*H*D], in place of
            the projection, whose weights are not looked at then: for quantized drafts.
        backend: as in :func:`fkv.materialize`.

    Raises:
        TypeError: a layer lacks what is read, or its projection is quantized.
        ValueError: layers that differ in num_kv_heads, head_dim, RoPE table, hidden size or dtype;
            sizes that disagree; a k_norm over all heads together; a v_norm; k_scale or v_scale
            other than 1; no layers; a hint past the table.
        NotImplementedError: RoPE that is not neox, Gemma's norm, which multiplies by 1 + weight.

    Source: SGLang, FusedKVMaterializeHelper in
    python/sglang/kernels/ops/speculative/fused_kv_materialize.py.
    """

    rotary_emb: Any = None  # None where the table was given
    _is_lending = False  # what `materialize` has not handed out yet
    _weights: Weights
    _static: Static
    _workspace: dict[str, Buffer]  # on torch: kv, and k and v of `materialize`

    def __init__(
        self,
        layers: Iterable[Any],
        rotary_emb: Any,
        num_kv_heads: int,
        head_dim: int,
        device: Any,
        max_position_hint: int | None = None,
        *,
        project: Project | None = None,
        backend: BackendName | None = None,
    ) -> None:
        import torch

        num_kv_heads = check_size("num_kv_heads", num_kv_heads)
        head_dim = check_size("head_dim", head_dim)
        if max_position_hint is not None:
            max_position_hint = check_size("max_position_hint", max_position_hint)
        device = _torch_device(device)
        table = read_table(rotary_emb, head_dim, max_position_hint)
        sizes = (table.shape[1], num_kv_heads, head_dim)
        read = read_layers(layers, table, *sizes, projected=project is not None)
        with torch.inference_mode(False), torch.no_grad():
            norm, n_layers = read[0].k_norm_weight, len(read)
            arrays = {
                "k_norm_weight": norm.new_empty((n_layers, head_dim), device=device),
                "eps": torch.empty(n_layers, dtype=torch.float32, device=device),
            }
            if read[0].weights is not None:
                weight, _ = read[0].weights
                shape = (n_layers, 2 * num_kv_heads * head_dim, weight.shape[1])
                arrays["kv_weight"] = weight.new_empty(shape, device=device)
                if any(layer.biases is not None for layer in read):
                    arrays["bias"] = weight.new_empty(shape[:2], device=device)
            copy_layers(read, **arrays)
            arrays["cos_sin_cache"] = table.to(device)
        self.rotary_emb = rotary_emb
        self._set(
            arrays,
            num_kv_heads,
            max_position_hint=max_position_hint,
            project=project,
            backend=backend,
        )

    @classmethod
    def from_weights(
        cls,
        kv_weight: Any,
        k_norm_weight: Any,
        eps: Any,
        cos_sin_cache: Any,
        *,
        bias: Any = None,
        num_kv_heads: int | None = None,
        max_position_hint: int | None = None,
        fc_weight: Any = None,
        hidden_norm_weight: Any = None,
        hidden_norm_eps: float | None = None,
        project: Project | None = None,
        backend: BackendName | None = None,
    ) -> KVMaterializer:
        """From arrays, which are not copied: torch tensors or jax arrays, all on one device.

        Args:
            kv_weight: [L, 2*H*D, hidden]: of each layer all rows of K, then all rows of V, as
                linear layers hold them. None with `project`.
            k_norm_weight, eps, cos_sin_cache: [L, D], [L] and [P, R] as in fkv.materialize.
            bias: [L, 2*H*D], of the projection.
            num_kv_heads: H; by default from kv_weight.
            max_position_hint, project, backend: as in the constructor.
            fc_weight, hidden_norm_weight, hidden_norm_eps: [hidden, n_features*hidden], [hidden]
                and a number, for :meth:`project_target_hidden`.

        Raises:
            TypeError, ValueError: arrays that don't belong together, as in fkv.materialize.
        """
        self = cls.__new__(cls)
        arrays = dict(
            kv_weight=kv_weight,
            bias=bias,
            k_norm_weight=k_norm_weight,
            eps=eps,
            cos_sin_cache=cos_sin_cache,
            fc_weight=fc_weight,
            hidden_norm_weight=hidden_norm_weight,
        )
        self._set(
            arrays,
            num_kv_heads,
            hidden_norm_eps=hidden_norm_eps,
            max_position_hint=max_position_hint,
            project=project,
            backend=backend,
        )
        return self

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | Path,
        *,
        framework: Literal["torch", "jax"] = "torch",
        device: Any = None,
        dtype: Any = None,
        max_position: int | None = None,
        project: Project | None = None,
        backend: BackendName | None = None,
    ) -> KVMaterializer:
        """From a Hugging Face checkpoint: config.json and safetensors, one file or with an index.

        Of the safetensors, `layers.N.self_attn.{k_proj,v_proj,k_norm}` are read, and `fc` and
        `hidden_norm` of a DFlash draft, all with or without the prefix `model.`. The float32 RoPE
        table follows from the config as in transformers: default, linear, llama3 or yarn, whose
        attention factor it contains.

        Args:
            folder: of the checkpoint.
            framework: "torch" or "jax".
            device: torch.device or its name, or a jax.Device; by default the GPU if there is one.
            dtype: of the weights, as a name or the framework's own; by default the checkpoint's.
            max_position: rows of the RoPE table, and then also the `max_position_hint`; by default
                max_position_embeddings of the config, and no hint.
            project, backend: as in the constructor.

        Raises:
            FileNotFoundError: a file that is not there.
            ValueError: a config or a tensor that is missing or not what it should be.
            NotImplementedError: another kind of RoPE; the message names it.
            ImportError: the package safetensors is not installed.
        """
        if framework not in ("torch", "jax"):
            raise ValueError(sentence("framework", '"torch" or "jax"', repr(framework)))
        if max_position is not None:
            max_position = check_size("max_position", max_position)
        if not isinstance(folder, str | os.PathLike):
            raise TypeError(sentence("folder", "a path", type_name(folder)))
        folder, projected = Path(folder), project is not None
        config = _checkpoint.read_config(folder)
        sizes = _checkpoint.sizes_of(config)
        table = _checkpoint.read_table(config, max_position)
        dtype = None if dtype is None else _float_name(dtype)
        if framework == "torch":
            maker = _checkpoint.TorchMaker(_torch_device(device), dtype)
        else:
            maker = _checkpoint.JaxMaker(_jax_device(device), dtype)
        with _checkpoint.open_tensors(folder, maker.name) as tensors:
            _checkpoint.check_layers(tensors, config, sizes.n_layers, projected)
            arrays = _checkpoint.read_arrays(tensors, sizes, maker.empty, maker.put, projected)
        eps = np.full(sizes.n_layers, sizes.eps, np.float32)
        arrays |= {"eps": eps, "cos_sin_cache": table}
        return cls.from_weights(
            **{"kv_weight": None} | {name: maker.finish(array) for name, array in arrays.items()},
            num_kv_heads=sizes.num_kv_heads,
            max_position_hint=max_position,
            hidden_norm_eps=sizes.eps if "fc_weight" in arrays else None,
            project=project,
            backend=backend,
        )

    def _set(
        self,
        arrays: dict[str, Any],
        num_kv_heads: int | None,
        *,
        max_position_hint: int | None,
        project: Project | None,
        backend: BackendName | None,
        hidden_norm_eps: float | None = None,
    ) -> None:
        """Check all arrays together, and keep them."""
        if project is not None and not callable(project):
            got = type(project).__name__
            raise TypeError(sentence("project", "a function of ctx_hidden or None", got))
        if num_kv_heads is not None:
            num_kv_heads = check_size("num_kv_heads", num_kv_heads)
        weights = Weights(**dict.fromkeys(Weights._fields) | arrays)
        home = framework_of(weights, project is not None)
        if home.name == "torch":
            weights = Weights(*[None if x is None else x.detach() for x in weights])
        num_kv_heads = check_weights(weights, num_kv_heads)
        check_target(weights, hidden_norm_eps)
        if not any(map(is_traced, weights)):
            _check_call(home, weights, num_kv_heads, backend)
        n_layers, head_dim = weights.k_norm_weight.shape
        rows, rotary_dim = weights.cos_sin_cache.shape
        if max_position_hint is not None:
            max_position_hint = check_size("max_position_hint", max_position_hint)
            if max_position_hint > rows:
                expected, got = f"at most {rows}", str(max_position_hint)
                why = "the rows of cos_sin_cache"
                raise ValueError(sentence("max_position_hint", expected, got, why))
        self._weights = weights
        self._static = Static(
            home=home,
            n_layers=n_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            hidden_size=None if weights.kv_weight is None else weights.kv_weight.shape[2],
            hidden_norm_eps=hidden_norm_eps,
            max_position_hint=max_position_hint,
            project=project,
            backend=backend,
        )
        if home.name == "torch":
            self._workspace = {name: Buffer() for name in ("kv", "k", "v")}
        else:
            _register_pytree()

    @property
    def n_layers(self) -> int:
        return self._static.n_layers

    @property
    def num_kv_heads(self) -> int:
        return self._static.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self._static.head_dim

    @property
    def rotary_dim(self) -> int:
        return self._static.rotary_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def hidden_size(self) -> int | None:
        """The width of ctx_hidden; None where `project` alone knows it."""
        return self._static.hidden_size

    @property
    def k_norm_weight(self) -> Any:
        """[L, D], as :func:`fkv.materialize` takes it beside what :meth:`project` gives."""
        return self._weights.k_norm_weight

    @property
    def eps(self) -> Any:
        """[L], float32."""
        return self._weights.eps

    @property
    def cos_sin_cache(self) -> Any:
        """[P, R]; on torch another tensor after it has grown."""
        return self._weights.cos_sin_cache

    @property
    def max_position_hint(self) -> int | None:
        return self._static.max_position_hint

    @property
    def device(self) -> Any:
        return self._weights.k_norm_weight.device

    @property
    def dtype(self) -> Any:
        """Of the weights, and so of ctx_hidden; with `project`, of the K norm."""
        return self._like.dtype

    def __repr__(self) -> str:
        s = self._static
        names = ("n_layers", "num_kv_heads", "head_dim", "rotary_dim", "hidden_size")
        sizes = ", ".join(f"{name}={getattr(s, name)}" for name in names)
        return f"KVMaterializer({sizes}, {s.home.name})"

    def __call__(self, ctx_hidden: Any, positions: Any) -> tuple[Any, Any]:
        """K and V, each [L, T, H, D] in the dtype of the projection: arrays of the caller's own.

        Args:
            ctx_hidden: [T, hidden], the dtype of the weights.
            positions: [T], int32 or int64.

        Raises:
            TypeError, ValueError: an argument of another kind, shape, dtype or device; on the host
                a position outside the table.
        """
        self._check(ctx_hidden, positions)
        if self._on_jax and self._static.backend != "triton":
            return _jitted(_materialize)(self, ctx_hidden, positions)
        kv = self.project(ctx_hidden)
        return _call(self, kv, positions)

    def project(self, ctx_hidden: Any) -> Any:
        """kv, [T, L, 2*H*D]: the first argument of :func:`fkv.materialize`, of the caller's own."""
        check_hidden(
            self._static.home, "ctx_hidden", ctx_hidden, self._like, self._static.hidden_size
        )
        return _jitted(_project)(self, ctx_hidden) if self._on_jax else _project(self, ctx_hidden)

    def project_target_hidden(self, target_hidden: Any) -> Any:
        """ctx_hidden [T, hidden] from the target model's features, as DFlash drafts have it.

        A linear layer in the dtype of the weights, and an RMSNorm in float32, rounded once::

            x          = target_hidden @ fc_weight.T
            ctx_hidden = x * rsqrt(mean(x**2) + hidden_norm_eps) * hidden_norm_weight

        Args:
            target_hidden: [T, n_features*hidden], the concatenated features, fc_weight's dtype.

        Raises:
            ValueError: the draft has no fc_weight; another shape or dtype.
        """
        fc_weight = self._weights.fc_weight
        if fc_weight is None:
            expected = "a draft with fc.weight and hidden_norm.weight alone"
            cure = "its own model projects its target's features"
            raise ValueError(sentence("target_hidden", expected, "one without", cure))
        home, width = self._static.home, fc_weight.shape[1]
        check_hidden(home, "target_hidden", target_hidden, fc_weight, width)
        project = _jitted(_project_target) if self._on_jax else _project_target
        return project(self, target_hidden)

    def materialize(
        self,
        ctx_hidden: Any,
        positions: Any,
        write_layer_kv: Callable[[int, Any, Any], None],
    ) -> None:
        """Call write_layer_kv(layer, k, v) for each layer in order, with k and v of [T, H, D].

        k and v are borrowed: the next call of this method writes over them, on whatever stream it
        runs, so what is kept is to be copied, or taken from calling the materializer itself. The
        memory behind them grows to twice its tokens or more and never shrinks; what a CUDA graph
        has captured stays where it is. One thread and one stream at a time. Without tokens
        write_layer_kv is not called.

        Args:
            ctx_hidden: [T, hidden], a torch tensor in the dtype of the weights.
            positions: [T], int32 or int64.
            write_layer_kv: what it raises ends the call, and leaves the materializer usable.

        Raises:
            TypeError, ValueError: as calling it does; nothing has been written then.
        """
        if self._on_jax:
            expected, cure = "a materializer of torch tensors", "k, v = m(ctx_hidden, positions)"
            raise TypeError(sentence("write_layer_kv", expected, "one of jax arrays", cure))
        if not callable(write_layer_kv):
            got = type_name(write_layer_kv)
            raise TypeError(sentence("write_layer_kv", "a function of (layer, k, v)", got))
        if self._is_lending:
            expected, cure = "no call within itself", "m(ctx_hidden, positions) has its own arrays"
            raise ValueError(sentence("write_layer_kv", expected, "one", cure))
        self._check(ctx_hidden, positions)
        s, total_ctx = self._static, ctx_hidden.shape[0]
        if total_ctx == 0:
            return
        kv = self._project_borrowed(ctx_hidden)
        shape = (s.n_layers, total_ctx, s.num_kv_heads, s.head_dim)
        k_out, v_out = (self._workspace[name].take(kv, shape, 1) for name in ("k", "v"))
        k, v = _call(self, kv, positions, k_out, v_out)
        self._is_lending = True
        try:
            for layer in range(s.n_layers):
                write_layer_kv(layer, k[layer], v[layer])
        finally:
            self._is_lending = False

    def write_cache(
        self,
        ctx_hidden: Any,
        positions: Any,
        k_cache: Any,
        v_cache: Any,
        slot_mapping: Any,
        *,
        commit_lens: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        layout: Literal["NHD", "HND"] = "NHD",
    ) -> tuple[Any, Any]:
        """Write K and V straight into the slots of a cache: :func:`fkv.write_cache`.

        On torch into the caches that are given, and the projection into memory that is used again;
        on jax the result is new caches, in the memory of the old ones under a jax.jit that they
        are donated to.

        Args:
            ctx_hidden, positions: [T, hidden] and [T], as in a call. Those of a token that is
                skipped may be anything.
            k_cache, v_cache, slot_mapping, commit_lens, k_scale, v_scale, layout: those of
                :func:`fkv.write_cache`.

        Returns:
            (k_cache, v_cache), as :func:`fkv.write_cache`.

        Raises:
            TypeError, ValueError, NotImplementedError: as a call does, and fkv.write_cache.
        """
        weights, s = self._weights, self._static
        check_hidden(s.home, "ctx_hidden", ctx_hidden, self._like, s.hidden_size)
        check_position_layout(s.home, positions, ctx_hidden.shape[0], self._like)
        if self._on_jax:
            kv = self.project(ctx_hidden)
        else:
            self._check_extremes(positions, slot_mapping, commit_lens)
            weights = self._weights  # whose table may have grown
            kv = self._project_borrowed(ctx_hidden)
        return write_cache(
            kv,
            *(weights.k_norm_weight, weights.eps, weights.cos_sin_cache, positions),
            *(k_cache, v_cache, slot_mapping, s.num_kv_heads, s.head_dim, s.rotary_dim),
            commit_lens=commit_lens,
            k_scale=k_scale,
            v_scale=v_scale,
            layout=layout,
            backend=s.backend,
        )

    def refresh(self, layers: Iterable[Any]) -> None:
        """Copy the layers' K and V projections, K norms and epsilons again, after they changed.

        All guards of the constructor apply, and nothing is copied unless all pass. No address
        changes, so captured CUDA graphs see the new values.

        Raises:
            TypeError, ValueError, NotImplementedError: as the constructor; other sizes or dtypes
                than the layers had then.
        """
        weights, s = self._weights, self._static
        if self._on_jax:
            cure = "jax arrays are immutable: KVMaterializer.from_weights with the new ones"
            expected = "a materializer of torch tensors"
            raise TypeError(sentence("layers", expected, "one of jax arrays", cure))
        sizes = (s.rotary_dim, s.num_kv_heads, s.head_dim)
        projected = s.project is not None
        read = read_layers(layers, weights.cos_sin_cache, *sizes, projected=projected)
        check_same(read, weights.k_norm_weight, weights.kv_weight, weights.bias)
        import torch

        with torch.inference_mode(False), torch.no_grad():
            copy_layers(read, weights.k_norm_weight, weights.eps, weights.kv_weight, weights.bias)

    def _project_borrowed(self, ctx_hidden: Any) -> Any:
        """kv, on torch, where the next call writes its own."""
        s, total_ctx = self._static, ctx_hidden.shape[0]
        if s.project is not None:
            return _project(self, ctx_hidden)
        shape = (total_ctx, s.n_layers, 2 * self.kv_size)
        out = self._workspace["kv"].take(ctx_hidden, shape, 0)
        _matrix_product(self._weights, ctx_hidden, out.flatten(1))
        return out

    @property
    def _on_jax(self) -> bool:
        return self._static.home.name == "jax"

    @property
    def _like(self) -> Any:
        """The array whose dtype and device ctx_hidden has."""
        weights = self._weights
        return weights.k_norm_weight if weights.kv_weight is None else weights.kv_weight

    def _check(self, ctx_hidden: Any, positions: Any) -> None:
        s, like = self._static, self._like
        check_hidden(s.home, "ctx_hidden", ctx_hidden, like, s.hidden_size)
        check_position_layout(s.home, positions, ctx_hidden.shape[0], like)
        if self._on_jax:
            if is_on_host(positions):
                check_positions(np.asarray(positions), len(self._weights.cos_sin_cache))
        else:
            self._check_extremes(positions)

    def _check_extremes(self, positions: Any, slots: Any = None, lens: Any = None) -> None:
        """On the host always; on a GPU, which must be waited for, if there is no hint."""
        import torch

        hint, rows = self.max_position_hint, len(self._weights.cos_sin_cache)
        if positions.is_cuda and hint is not None:
            return
        if slots is not None:
            positions = _of_written(self._static.home, positions, slots, lens)
        if not len(positions):
            return
        if positions.is_cuda and torch.cuda.is_current_stream_capturing():
            expected, why = "a number in a CUDA graph", "positions can't be read back there"
            raise ValueError(sentence("max_position_hint", expected, "None", why))
        low, high = torch.stack(positions.aminmax()).tolist()
        if high >= rows and hint is None and self.rotary_emb is not None:
            self._grow(high + 1)
            rows = len(self._weights.cos_sin_cache)
        if low < 0 or high >= rows:
            check_positions(positions.cpu().numpy(), rows)

    def _grow(self, rows: int) -> None:
        """Take a longer table from a rotary embedding that can make one, as SGLang's."""
        table = grown_table(self.rotary_emb, rows)
        if table is not None:  # transformers' has none
            table = table.detach().to(self.device)
            self._weights = self._weights._replace(cos_sin_cache=table)


class Buffer:
    """Memory for up to `capacity` tokens, in the dtype that it was made for."""

    def __init__(self) -> None:
        self.capacity = 0
        self.made: Any = None
        self.captured: list[Any] = []  # by CUDA graphs, which write there when they are replayed
        self.in_graph = False

    def take(self, like: Any, shape: tuple[int, ...], axis: int) -> Any:
        """A tensor of `shape`, with the tokens along `axis`, and the dtype of `like`."""
        import torch

        total_ctx = shape[axis]
        if self.made is None or self.capacity < total_ctx or self.made.dtype != like.dtype:
            if self.in_graph:
                self.captured.append(self.made)
                self.in_graph = False
            grown = max(total_ctx, 2 * self.capacity)
            capacity = grown if self.capacity < total_ctx else self.capacity
            self.made, self.capacity = None, 0  # free it before more is taken
            whole = (*shape[:axis], capacity, *shape[axis + 1 :])
            with torch.inference_mode(False):  # to be written outside of it too
                self.made = torch.empty(whole, dtype=like.dtype, device=like.device)
            self.capacity = capacity
        if like.is_cuda and torch.cuda.is_current_stream_capturing():
            self.in_graph = True
        return self.made.narrow(axis, 0, total_ctx)


def _materialize(m: KVMaterializer, ctx_hidden: Any, positions: Any) -> tuple[Any, Any]:
    return _call(m, _project(m, ctx_hidden), positions)


def _call(
    m: KVMaterializer, kv: Any, positions: Any, k_out: Any = None, v_out: Any = None
) -> tuple[Any, Any]:
    weights, s = m._weights, m._static
    side = (weights.k_norm_weight, weights.eps, weights.cos_sin_cache, positions)
    sizes = (s.num_kv_heads, s.head_dim, s.rotary_dim)
    return materialize(kv, *side, *sizes, k_out, v_out, backend=s.backend)


def _project(m: KVMaterializer, ctx_hidden: Any) -> Any:
    """kv [T, L, 2*H*D]."""
    s, width = m._static, 2 * m.kv_size
    shape = (ctx_hidden.shape[0], s.n_layers, width)
    if s.project is not None:
        kv = s.project(ctx_hidden)
        if not s.home.owns(kv):
            expected = f"a function whose result is a {s.home.kind}"
            raise TypeError(sentence("project", expected, type_name(kv)))
        if tuple(kv.shape) not in (shape, (shape[0], s.n_layers * width)):
            expected = f"a result of shape {list(shape)} or {[shape[0], s.n_layers * width]}"
            raise ValueError(sentence("project", expected, str(list(kv.shape))))
        return kv.reshape(shape)
    if s.home.name == "torch":
        return _matrix_product(m._weights, ctx_hidden).view(shape)
    import jax.numpy as jnp

    kv_weight, bias = m._weights.kv_weight, m._weights.bias
    kv = jnp.einsum("th,lnh->tln", ctx_hidden, kv_weight, precision=_precision(kv_weight))
    return kv if bias is None else kv + bias


def _matrix_product(weights: Weights, ctx_hidden: Any, out: Any = None) -> Any:
    """One for all layers, [T, L*2*H*D]."""
    import torch

    columns = weights.kv_weight.flatten(0, 1).t()
    if weights.bias is None:
        return torch.mm(ctx_hidden, columns, out=out)
    return torch.addmm(weights.bias.flatten(), ctx_hidden, columns, out=out)


def _project_target(m: KVMaterializer, target_hidden: Any) -> Any:
    weights, eps = m._weights, m._static.hidden_norm_eps
    if m._static.home.name == "torch":
        import torch

        with torch.no_grad():
            x = torch.mm(target_hidden, weights.fc_weight.t()).float()
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
            return (x * scale * weights.hidden_norm_weight.float()).to(target_hidden.dtype)
    import jax
    import jax.numpy as jnp

    precision = _precision(weights.fc_weight)
    x = jnp.matmul(target_hidden, weights.fc_weight.T, precision=precision).astype("float32")
    scale = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)
    return (x * scale * weights.hidden_norm_weight.astype("float32")).astype(target_hidden.dtype)


def _precision(weight: Any) -> Any:
    """float32 is float32: by default jax multiplies it in TF32 on a GPU."""
    return "highest" if weight.dtype == "float32" else None


def _of_written(home: Framework, positions: Any, slots: Any, lens: Any) -> Any:
    """The positions, with 0 for tokens that are skipped; none where the slots are malformed."""
    import torch

    given = (slots,) if lens is None else (slots, lens)
    if not all(home.owns(x) and x.device == positions.device for x in given):
        return positions[:0]  # as write_cache will say
    if lens is None:
        if slots.ndim not in (1, 2) or slots.shape[-1:] != positions.shape:
            return positions[:0]
        written = slots >= 0 if slots.ndim == 1 else (slots >= 0).any(0)
    else:
        if slots.ndim != 2 or slots.numel() != len(positions) or lens.shape != slots.shape[:1]:
            return positions[:0]
        column = torch.arange(slots.shape[1], device=slots.device)
        written = ((slots >= 0) & (column < lens[:, None])).flatten()
    return positions.where(written, 0)


@functools.cache
def _jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """One of a function, which compiles for each structure and each shape."""
    import jax

    return jax.jit(function)


@functools.cache
def _register_pytree() -> None:
    import jax

    def unflatten(static: Static, children: Sequence[Any]) -> KVMaterializer:
        m = KVMaterializer.__new__(KVMaterializer)
        m._static, (m._weights,) = static, children
        return m

    jax.tree_util.register_pytree_node(
        KVMaterializer, lambda m: ((m._weights,), m._static), unflatten
    )


def _check_call(
    home: Framework, weights: Weights, num_kv_heads: int, backend: BackendName | None
) -> None:
    """All that fkv.materialize would refuse about the weights, by a call without tokens."""
    norm = weights.k_norm_weight
    like = norm if weights.kv_weight is None else weights.kv_weight
    name = dtype_name(like.dtype)
    shape = (0, norm.shape[0], 2 * num_kv_heads * norm.shape[1])
    kv = home.zeros(shape, name if name in FLOATS else "float32", norm)
    positions = home.zeros((0,), "int32", norm)
    side = (norm, weights.eps, weights.cos_sin_cache, positions)
    materialize(kv, *side, num_kv_heads, backend=backend)
    check_eps(np.asarray(weights.eps.cpu() if home.name == "torch" else weights.eps))


def _torch_device(device: Any) -> Any:
    """As tensors name theirs: with an index on a GPU, without one on the CPU."""
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
        if device.type == "cpu":
            return torch.device("cpu")
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError) as error:
        line = next(iter(str(error).splitlines()), "")
        raise ValueError(sentence("device", "a device of torch", repr(device), line)) from error


def _jax_device(device: Any) -> Any:
    import jax

    if device is None or isinstance(device, jax.Device | jax.sharding.Sharding):
        return device
    raise TypeError(sentence("device", "a jax.Device or None", repr(device), "jax.devices()[0]"))


def _float_name(dtype: Any) -> str:
    name = dtype_name(dtype)
    if name not in FLOATS:
        raise ValueError(sentence("dtype", " or ".join(FLOATS), name))
    return name
