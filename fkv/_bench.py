"""What the kernels cost on a GPU, beside what else does their job; first, every result is checked.

Times of kernels are CUPTI's, through torch.profiler, which sees the kernels of jax as well. Cold
is after a buffer larger than the L2 cache has been cleared; hot is one call after the other.
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fkv
from fkv.reference import error_bound, materialize, worst_error

Call = Callable[[], Any]


class Geometry(NamedTuple):
    n_layers: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int


GEOMETRIES = [
    Geometry(5, 8, 128, 128),
    Geometry(5, 4, 128, 64),
    Geometry(8, 2, 256, 64),
    Geometry(5, 8, 80, 80),
    Geometry(5, 8, 64, 64),
    Geometry(28, 4, 128, 128),
]
TOTAL_CTX = [1, 16, 64, 256, 1024, 2048, 4096, 16384, 65536, 131072]
SCALED = [  # one size of the first geometry changed at a time
    *(GEOMETRIES[0]._replace(n_layers=n) for n in (1, 2, 10, 28)),
    *(GEOMETRIES[0]._replace(num_kv_heads=n) for n in (1, 2, 4, 16)),
    *(GEOMETRIES[0]._replace(head_dim=n, rotary_dim=n) for n in (64, 256)),
]
SCALED_CTX = 4096
PEER_CTX = {1, 16, 2048, 16384, 131072}  # of the grid: the peers compile for seconds
HOST_CTX = (16, 1)  # in this order, as torch.compile makes a function of its own for 1
REPLAYED_CTX = 2048  # at most: above, a launch costs nothing beside the kernel
TABLE_ROWS, THETA, EPS = 40960, 1e6, 1e-6
KV_BYTES, TABLE_BYTES = 2, 4  # bfloat16, float32
SAMPLE = 256  # tokens that the float64 reference looks at
CLEARED = 256 * 2**20  # bytes; the L2 cache of an H200 holds 50 MiB
COPIED = 2**30  # bytes, whose copy is the memory's speed


def moved_bytes(geometry: Geometry, total_ctx: int, table_rows: int) -> int:
    """kv read once, K and V written once, each row of the table that is used read once."""
    n_layers, num_kv_heads, head_dim, rotary_dim = geometry
    kv = total_ctx * n_layers * 2 * num_kv_heads * head_dim * KV_BYTES
    return 2 * kv + table_rows * rotary_dim * TABLE_BYTES


def sampled_tokens(total_ctx: int, seed: int = 0) -> np.ndarray:
    """The first, the last, and some between."""
    if total_ctx <= SAMPLE:
        return np.arange(total_ctx)
    ends = SAMPLE // 8
    between = np.random.default_rng(seed).choice(
        np.arange(ends, total_ctx - ends), SAMPLE - 2 * ends, replace=False
    )
    return np.concatenate(
        [np.arange(ends), np.sort(between), np.arange(total_ctx - ends, total_ctx)]
    )


def runs_for(moved: int) -> int:
    """About 30 ms of a kernel that moves 4 TB/s, within reason."""
    return int(np.clip(30e-3 * 4e12 / moved, 10, 50))


def per_call(kernels: list[float], calls: int) -> list[float]:
    """What each of the calls took; their mean where they are not of equally many kernels."""
    launches, left = divmod(len(kernels), calls)
    if left or not launches:
        return [sum(kernels) / calls]
    return [sum(kernels[i : i + launches]) for i in range(0, len(kernels), launches)]


def spread(times: Iterable[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    low, middle, high = np.percentile(list(times), [10, 50, 90])
    return {"median": float(middle), "p10": float(low), "p90": float(high)}


def fit(sizes: Iterable[float], times: Iterable[float]) -> dict[str, float] | None:
    """time = fixed + bytes / rate, with the least relative error; None if it does not grow."""
    x, y = np.asarray(list(sizes), float), np.asarray(list(times), float)
    terms = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    (fixed, slope), *_ = np.linalg.lstsq(terms, np.ones_like(y), rcond=None)
    if slope * np.ptp(x) < 1e-3 * y.min():  # what rounding leaves of a slope has no rate
        return None
    error = np.abs(fixed + slope * x - y) / y
    return {
        "fixed_us": float(fixed),
        "rate_gb_s": float(1e-3 / slope),
        "half_fixed_bytes": float(max(fixed, 0.0) / slope),
        "worst_relative_error": float(error.max()),
    }


def fits(report: dict[str, Any], backends: list[str]) -> dict[str, dict[str, float]]:
    """The line through all sizes of the first geometry and those changed from it, for each who."""
    first, found = GEOMETRIES[0]._asdict(), {}
    for who in backends:
        rows = report["scaling"] + [row for row in report["rows"] if row | first == row]
        rows = [row for row in rows if row["who"] == who and "cold_us" in row]
        if len(rows) < 3:
            continue
        line = fit([row["bytes"] for row in rows], [row["cold_us"]["median"] for row in rows])
        if line is None:
            continue
        copy_gb_s = statistics.median(row["memory_gb_s"] for row in rows)
        line["share_of_copy"] = line["rate_gb_s"] / copy_gb_s
        line["half_fixed_tokens"] = line["half_fixed_bytes"] / moved_bytes(GEOMETRIES[0], 1, 1)
        found[who] = line
    return found


# ---- one problem on the GPU, and who solves it


def make_inputs(geometry: Geometry, total_ctx: int) -> dict[str, Any]:
    """The arguments of fkv.materialize as torch tensors on the GPU."""
    import torch

    n_layers, num_kv_heads, head_dim, rotary_dim = geometry
    random = torch.Generator("cuda").manual_seed(0)
    kv = torch.empty(total_ctx, n_layers, 2 * num_kv_heads * head_dim, device="cuda")
    kv = kv.bfloat16().normal_(generator=random)
    weight = torch.rand(n_layers, head_dim, device="cuda", generator=random) + 0.5
    steps = torch.arange(0, rotary_dim, 2, device="cuda") / rotary_dim
    angles = torch.arange(TABLE_ROWS, device="cuda")[:, None] / THETA**steps
    return {
        "kv": kv,
        "k_norm_weight": weight.bfloat16(),
        "eps": torch.full((n_layers,), EPS, device="cuda"),
        "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=1),
        "positions": torch.randint(
            TABLE_ROWS, (total_ctx,), device="cuda", generator=random, dtype=torch.int64
        ),
    }


def to_jax(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same in jax's own memory."""
    import jax
    import jax.numpy as jnp
    import torch

    tensors = inputs | {"positions": inputs["positions"].to(torch.int32)}
    arrays = {name: jax.dlpack.from_dlpack(tensor) for name, tensor in tensors.items()}
    return jax.block_until_ready({n: jnp.array(a, copy=True) for n, a in arrays.items()})


def torch_eager(kv: Any, k_norm_weight: Any, eps: Any, cos_sin_cache: Any, positions: Any) -> Any:
    """As one writes it in torch."""
    import torch

    n_layers, head_dim = k_norm_weight.shape
    half = cos_sin_cache.shape[1] // 2
    k, v = kv.view(len(kv), n_layers, 2, -1, head_dim).permute(2, 1, 0, 3, 4)
    k = k.float()
    k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + eps[:, None, None, None])
    k = k * k_norm_weight.float()[:, None, None, :]
    cos, sin = cos_sin_cache[positions][:, None, :].chunk(2, dim=-1)
    a, b, tail = k[..., :half], k[..., half : 2 * half], k[..., 2 * half :]
    k = torch.cat([a * cos - b * sin, b * cos + a * sin, tail], dim=-1)
    return k.to(kv.dtype), v.contiguous()


def jax_plain(kv: Any, k_norm_weight: Any, eps: Any, cos_sin_cache: Any, positions: Any) -> Any:
    """As one writes it in jax.numpy."""
    import jax
    import jax.numpy as jnp

    n_layers, head_dim = k_norm_weight.shape
    half = cos_sin_cache.shape[1] // 2
    k, v = kv.reshape(len(kv), n_layers, 2, -1, head_dim).transpose(2, 1, 0, 3, 4)
    k = k.astype(jnp.float32)
    mean = jnp.mean(jnp.square(k), axis=-1, keepdims=True)
    k = k * jax.lax.rsqrt(mean + eps[:, None, None, None])
    k = k * k_norm_weight.astype(jnp.float32)[:, None, None, :]
    cos, sin = jnp.split(cos_sin_cache[positions][:, None, :], 2, axis=-1)
    a, b, tail = k[..., :half], k[..., half : 2 * half], k[..., 2 * half :]
    k = jnp.concatenate([a * cos - b * sin, b * cos + a * sin, tail], axis=-1)
    return k.astype(kv.dtype), v


def sglang_file(folder: Path, name: str = "fused_kv_materialize.py") -> Path:
    return folder / "sglang/kernels/ops/speculative" / name


def load_sglang(file: Path, function: str) -> Any:
    """A function of SGLang out of its one file, which needs torch and triton alone."""
    spec = importlib.util.spec_from_file_location("sglang_kernel", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)


class Bench:
    """Who is asked, and what they share."""

    def __init__(self, backends: list[str], peers_at: Collection[int], sglang: Path | None) -> None:
        import torch

        self.backends, self.peers_at = backends, peers_at
        self.sglang = self.sglang_writer = None
        if sglang:
            self.sglang = load_sglang(sglang_file(sglang), "_fused_norm_rope_stacked")
            writer = sglang_file(sglang, "dspark/fused_kv_write.py")
            if writer.is_file():
                self.sglang_writer = load_sglang(writer, "fused_kv_norm_rope_write")
        self.compiled: tuple[Geometry | None, Any] = (None, None)
        self.to_clear = torch.empty(CLEARED, dtype=torch.int8, device="cuda")
        self.clears = {name for name, _ in kernels_of(self.clear)}

    def alone(self) -> Bench:
        """Without the others."""
        return Bench(self.backends, peers_at=(), sglang=None)

    def clear(self) -> None:
        self.to_clear.zero_()

    def compiled_for(self, geometry: Geometry) -> Any:
        """Anew for each geometry: torch compiles a function only so many times."""
        import torch

        if self.compiled[0] != geometry:
            torch.compiler.reset()
            self.compiled = (geometry, torch.compile(torch_eager, dynamic=True))
        return self.compiled[1]

    def calls(self, geometry: Geometry, inputs: dict[str, Any], peers: bool) -> dict[str, Call]:
        """Each solves the problem; those that take outputs write into the same ones."""
        import torch

        n_layers, num_kv_heads, head_dim, rotary_dim = geometry
        shape = (n_layers, len(inputs["kv"]), num_kv_heads, head_dim)
        outputs = {name: inputs["kv"].new_full(shape, torch.nan) for name in ("k_out", "v_out")}
        self.outputs, calls = outputs, {}
        if "triton" in self.backends:
            calls["triton"] = lambda: fkv.materialize(**inputs, **outputs)
        if "pallas" in self.backends:
            import jax

            arrays = to_jax(inputs)
            calls["pallas"] = lambda: fkv.materialize(**arrays)
            if peers:
                jitted = jax.jit(jax_plain)
                calls["jax.jit"] = lambda: jitted(**arrays)
        if peers:
            calls["torch eager"] = lambda: torch_eager(**inputs)
            compiled = self.compiled_for(geometry)
            calls["torch.compile"] = lambda: compiled(**inputs)
        if self.sglang is not None:
            sizes, sglang = (num_kv_heads, head_dim, rotary_dim), self.sglang
            calls["sglang"] = lambda: sglang(*inputs.values(), *sizes, **outputs)
        return calls

    def measure(self, geometry: Geometry, total_ctx: int) -> Iterator[dict]:
        """The rows of one problem."""
        import torch

        inputs = make_inputs(geometry, total_ctx)
        rows_used = len(torch.unique(inputs["positions"]))

        def checked(who: str, call: Call) -> dict[str, Any]:
            for out in self.outputs.values():  # or it passes with what another one wrote
                out.fill_(torch.nan)
            return check(call, geometry, inputs)

        calls = self.calls(geometry, inputs, total_ctx in self.peers_at)
        common = {
            **geometry._asdict(),
            "total_ctx": total_ctx,
            "bytes": moved_bytes(geometry, total_ctx, rows_used),
        }
        return self.rows(calls, checked, common)

    def rows(
        self, calls: dict[str, Call], checked: Callable[[str, Call], dict], common: dict[str, Any]
    ) -> Iterator[dict]:
        """A row for each who, wrong ones without a time; then the copy of as many bytes.

        The speed of memory is measured beside it, as it moves with temperature.
        """
        import torch

        calls, rows, moved, total_ctx = dict(calls), [], common["bytes"], common["total_ctx"]
        for who, call in list(calls.items()):
            row = {"who": who, **common}
            try:
                row |= checked(who, call)
            except NotImplementedError as refusal:  # not wrong, but nothing to time
                row |= {"right": None, "note": str(refusal)}
            rows.append(row)
            if not row["right"]:
                del calls[who]
        source = torch.randint(0, 99, (moved // 2,), dtype=torch.int8, device="cuda")
        target = torch.empty_like(source)
        calls["copy"] = lambda: target.copy_(source)
        rows.append({"who": "copy", **common})
        memory = torch.randint(0, 99, (2, COPIED), dtype=torch.int8, device="cuda")
        calls["memory"] = lambda: memory[0].copy_(memory[1])
        times = self.times(calls, runs=runs_for(moved))
        copy_gb_s = 2 * COPIED / times["memory"]["cold_us"]["median"] / 1e3
        for row in rows:
            if row["who"] not in times:
                yield row
                continue
            row |= times[row["who"]]
            row["gb_s"] = moved / row["cold_us"]["median"] / 1e3
            row["memory_gb_s"] = copy_gb_s
            row["share_of_copy"] = row["gb_s"] / copy_gb_s
            of_torch = not row["who"].startswith(("pallas", "jax.jit"))
            if of_torch and total_ctx <= REPLAYED_CTX:
                row["replay_us"] = replay_us(calls[row["who"]])
            yield row

    def times(self, calls: dict[str, Call], runs: int) -> dict[str, dict]:
        """Kernel times of one call, cold and hot, and how many kernels that is."""

        def all_calls() -> None:
            for call in calls.values():
                for _ in range(runs):
                    self.clear()
                    _wait(None)
                    _wait(call())
            for call in calls.values():
                self.clear()
                _wait(None)
                result = None
                for _ in range(runs):
                    result = call()
                _wait(result)

        for call in calls.values():
            _wait(call())
        groups = split_at(kernels_of(all_calls), self.clears)
        assert len(groups) == len(calls) * (runs + 1), "a kernel was not seen"
        found = {}
        for index, who in enumerate(calls):
            cold = groups[index * runs : (index + 1) * runs]
            hot = groups[len(calls) * runs + index]
            found[who] = {
                "launches": len(hot) // runs,
                "cold_us": spread(sum(group) for group in cold),
                "hot_us": spread(per_call(hot, runs)),
            }
        return found


def check(call: Call, geometry: Geometry, inputs: dict[str, Any]) -> dict[str, Any]:
    """K of a sample of tokens within the bound and nowhere NaN; V bit for bit, of all tokens."""
    import torch

    n_layers, num_kv_heads, head_dim, _ = geometry
    results = call()
    _wait(results)
    k, v = (x if isinstance(x, torch.Tensor) else torch.from_dlpack(x) for x in results)
    tokens = torch.from_numpy(sampled_tokens(len(inputs["kv"]))).cuda()
    sample = inputs | {name: inputs[name][tokens] for name in ("kv", "positions")}
    numbers = {name: to_numpy(tensor) for name, tensor in sample.items()}
    exact, _ = materialize(**numbers)
    worst = worst_error(to_numpy(k[:, tokens]), exact, error_bound(**numbers, dtype="bfloat16"))
    expected = inputs["kv"].view(len(inputs["kv"]), n_layers, 2, num_kv_heads, head_dim)
    bits = expected[:, :, 1].permute(1, 0, 2, 3).view(torch.int16)
    same_v = torch.equal(v.view(torch.int16), bits)
    whole = not any(bool(torch.isnan(layer).any()) for layer in k)
    right = worst <= 1 and same_v and whole
    return {"worst": worst if np.isfinite(worst) else None, "same_v": same_v, "right": right}


# ---- clocks


def kernels_of(call: Call) -> list[tuple[str, float]]:
    """(name, microseconds) of what ran on the GPU, in order; the call waits for it to end."""
    import torch
    from torch._C._autograd import DeviceType

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        call()
        torch.cuda.synchronize()
    events = [e for e in profile.events() or [] if e.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    return [(event.name, event.time_range.elapsed_us()) for event in events]


def split_at(kernels: list[tuple[str, float]], separators: set[str]) -> list[list[float]]:
    """The times between the separators, which begin each group."""
    groups: list[list[float]] = []
    for name, duration in kernels:
        if name in separators:
            groups.append([])
        else:
            groups[-1].append(duration)
    return groups


def replay_us(call: Call, calls: int = 100) -> float:
    """One call's share of a CUDA graph of many, hot."""
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def empty_kernel_us() -> float:
    """The least that a launch costs."""
    import torch
    import triton

    @triton.jit
    def empty(pointer):
        pass

    tensor = torch.empty(1, device="cuda")
    return replay_us(lambda: empty[(1,)](tensor))


def host_us(call: Call, calls: int = 400) -> dict[str, float]:
    """What the caller's thread spends on a call; the GPU is waited for outside of the clock."""
    times = []
    gc.collect()
    gc.disable()  # or one call in some hundreds pays for all
    try:
        for index in range(calls + 40):
            start = time.perf_counter()
            result = call()
            times.append((time.perf_counter() - start) * 1e6)
            if index % 20 == 0:
                _wait(result)
            del result
    finally:
        gc.enable()
    return spread(times[40:])


def host_times(bench: Bench) -> Iterator[dict[str, Any]]:
    """At few tokens of the first geometry, and what to compare with."""
    for total_ctx in HOST_CTX:
        for who, call in host_calls(bench, total_ctx).items():
            yield {"who": who, "total_ctx": total_ctx, "us": host_us(call)}


def host_calls(bench: Bench, total_ctx: int) -> dict[str, Call]:
    inputs = make_inputs(GEOMETRIES[0], total_ctx)
    calls = bench.calls(GEOMETRIES[0], inputs, peers=bool(bench.peers_at))
    if "pallas" in bench.backends:
        import jax
        import torch

        arrays = to_jax(inputs)
        bare = jax.jit(lambda kv, weight, eps, table, positions: (kv[:1] + eps[0], positions + 1))
        calls["bare jax.jit"] = lambda: bare(*arrays.values())
        kernel = jax.jit(lambda *given: fkv.materialize(*given))
        calls["fkv in jax.jit"] = lambda: kernel(*arrays.values())
        tensors = inputs | {"positions": inputs["positions"].to(torch.int32)}
        calls["torch -> pallas"] = lambda: fkv.materialize(**tensors, backend="pallas")
        given = tensors | bench.outputs
        calls["torch -> pallas, outputs given"] = lambda: fkv.materialize(**given, backend="pallas")
        results = fkv.materialize(**arrays)

        def plain() -> Any:
            borrowed = [jax.dlpack.from_dlpack(tensor) for tensor in tensors.values()]
            return borrowed, [torch.from_dlpack(result) for result in results]

        calls["seven plain crossings"] = plain
    return calls


def about() -> dict[str, Any]:
    """What was measured, on what, with what."""
    import torch

    names = ("torch", "triton", "jax", "jaxlib", "numpy")
    versions = {name: _version(name) for name in names} | {"python": platform.python_version()}
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "fkv": fkv.__version__,
        "revision": _printed("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "versions": versions,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "driver": _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def warm_up(seconds: float = 1.0) -> None:
    """Until the clocks of an idle GPU are up."""
    import torch

    x = torch.ones(2**28, device="cuda")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        x.add_(1)
        torch.cuda.synchronize()


def forget() -> None:
    """Give the memory of the last problem back, for the next one may be larger."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def _wait(result: Any) -> None:
    import sys

    import torch

    if "jax" in sys.modules and result is not None:
        import jax

        jax.block_until_ready(result)
    torch.cuda.synchronize()


def to_numpy(tensor: Any) -> np.ndarray:
    return (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _printed(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
