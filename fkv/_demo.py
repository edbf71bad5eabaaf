"""One problem on the routes between frameworks and backends: checked, then timed."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import fkv
from fkv._backends import BACKENDS, BackendName, choose
from fkv._doctor import described, gpus
from fkv.reference import error_bound, materialize, worst_error

ROUTES: list[tuple[str, BackendName]] = [
    ("torch", "triton"),
    ("jax", "pallas"),
    ("torch", "pallas"),
    ("jax", "triton"),
]
CALLS = {"compiled": 20, "interpreted": 3}  # timed, after a first one
TABLE_ROWS, THETA, EPS = 40960, 1e6, 1e-6  # of Qwen3-8B


@dataclass(frozen=True)
class Problem:
    """The arguments of fkv.materialize in NumPy, and what is right."""

    inputs: dict[str, np.ndarray]  # kv is float32 with values of `dtype`
    dtype: str
    k: np.ndarray
    v: np.ndarray
    bound: np.ndarray


@dataclass
class Result:
    """What one route did."""

    home: str  # the framework of the arrays
    backend: BackendName
    device: str = "-"
    kernel: str = "-"  # compiled, interpreted, not installed, not supported or failed
    worst: float | None = None  # K's error as a multiple of the bound; None if it did not run
    same_v: bool = False  # bit for bit
    seconds: float | None = None  # the median of one call
    note: str = ""

    @property
    def route(self) -> str:
        return f"{self.home} -> {self.backend}"

    @property
    def right(self) -> bool:
        return self.worst is not None and self.worst <= 1 and self.same_v

    @property
    def wrong(self) -> bool:
        """Neither right nor something that can't be had here."""
        return self.kernel == "failed" or (self.worst is not None and not self.right)


def host_bytes(T: int, L: int, H: int, D: int, R: int) -> int:
    """About what make_problem and a run hold: float32 inputs, float64 reference, temporaries."""
    return 80 * T * L * H * D + 32 * TABLE_ROWS * R


def make_problem(T: int, L: int, H: int, D: int, R: int, dtype: str) -> Problem:
    rng = np.random.default_rng(0)
    angles = np.outer(np.arange(TABLE_ROWS), THETA ** (-np.arange(0, R, 2) / R))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    inputs = {
        "kv": _rounded(rng.standard_normal((T, L, 2 * H * D), dtype=np.float32), dtype),
        "k_norm_weight": rng.uniform(0.5, 1.5, (L, D)).astype(np.float32),
        "eps": np.full(L, EPS, np.float32),
        "cos_sin_cache": table.astype(np.float32),
        "positions": rng.integers(0, TABLE_ROWS, T, dtype=np.int32),
    }
    return Problem(inputs, dtype, *materialize(**inputs), error_bound(**inputs, dtype=dtype))


def run_route(
    home: str,
    backend: BackendName,
    problem: Problem,
    advance: Callable[[float], None] | None = None,
) -> Result:
    """Arrays of `home` through `backend`: check the first call; if it is right, time some more.

    `advance` is told the share of the timed calls that is done; without it none is timed.
    """
    result = Result(home, backend)
    try:
        _run(result, problem, advance)
    except Exception as error:
        result.kernel, result.note = _refusal(error, home, backend)
    return result


def _run(result: Result, problem: Problem, advance: Callable[[float], None] | None) -> None:
    other = BACKENDS[result.backend].framework
    seen = {framework: gpus(framework) for framework in (result.home, other)}
    result.device = (seen[result.home] or ["cpu"])[0]
    if bool(seen[result.home]) != bool(seen[other]):
        blind, sighted = sorted(seen, key=lambda framework: bool(seen[framework]))
        result.kernel = "not supported"
        result.note = f"{sighted} sees a GPU, {blind} does not (fkv doctor says what to install)"
        return
    arrays = _to_framework(problem, result.home)

    def call() -> tuple[Any, Any]:
        results = fkv.materialize(**arrays, backend=result.backend)
        _wait_for(results)
        return results

    k, v = call()
    result.kernel = "compiled" if seen[other] else "interpreted"
    result.worst = worst_error(_values(k), problem.k, problem.bound)
    bits = _values(v).view(np.uint32), problem.v.view(np.uint32)
    result.same_v = v.dtype == arrays["kv"].dtype and np.array_equal(*bits)
    if not result.right or advance is None:
        return
    calls, seconds = CALLS[result.kernel], []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
        advance(1 / calls)
    result.seconds = statistics.median(seconds)


def _refusal(error: Exception, home: str, backend: str) -> tuple[str, str]:
    """What stands in place of the kernel, and the reason."""
    if isinstance(error, ModuleNotFoundError):
        of_home = (error.name or "").startswith(home)  # jax, jaxlib
        missing = choose(home, None) if of_home else BACKENDS[backend]
        return "not installed", f"{error} (pip install '{missing.extra}')"
    if isinstance(error, ImportError) and isinstance(error.__cause__, ModuleNotFoundError):
        return "not installed", str(error)
    # fkv's own refusal names the other backend; else something inside a framework went wrong.
    names_other = any(f'backend="{name}"' in str(error) for name in BACKENDS if name != backend)
    if isinstance(error, NotImplementedError) and names_other:
        return "not supported", str(error)
    return "failed", described(error)


def _to_framework(problem: Problem, framework: str) -> dict[str, Any]:
    """Arrays on the framework's GPU if it sees one, and outputs if it can write into them."""
    if framework == "jax":
        import jax.numpy as jnp

        arrays = {name: jnp.asarray(array) for name, array in problem.inputs.items()}
        return arrays | {"kv": arrays["kv"].astype(problem.dtype)}
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    arrays = {name: torch.from_numpy(array).to(device) for name, array in problem.inputs.items()}
    kv = arrays["kv"].to(getattr(torch, problem.dtype))
    # New memory may hold the right result of an earlier route; NaN shows what was not written.
    k_out, v_out = (kv.new_full(problem.k.shape, torch.nan) for _ in range(2))
    return arrays | {"kv": kv, "k_out": k_out, "v_out": v_out}


def _values(array: Any) -> np.ndarray:
    """As float32, which holds every value of the three dtypes."""
    is_torch = type(array).__module__.partition(".")[0] == "torch"
    return np.asarray(array.float().cpu() if is_torch else array.astype(np.float32))


def _wait_for(results: tuple[Any, Any]) -> None:
    """Until the GPU is done, whichever framework launched."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if jax:
        jax.block_until_ready(results)
    if torch and torch.cuda.is_available():
        torch.cuda.synchronize()


def _rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """Values of `dtype`, to nearest even; NumPy itself has no bfloat16."""
    if dtype != "bfloat16":
        return array.astype(dtype).astype(np.float32)
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
