"""python -m fkv: the main job on files (run), are the kernels right here (demo), how fast are they
(bench), what runs them (doctor)."""

from __future__ import annotations

import os
from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from fkv import _bench, _bench_cache
from fkv._backends import BACKENDS, BackendName
from fkv._demo import CALLS, ROUTES, Result, host_bytes, make_problem, run_route
from fkv._doctor import cures, described, diagnose, gpus, packages

try:
    import typer

    from fkv import _run
    from fkv._report import (
        check_all,
        check_writable,
        console,
        duration,
        new_progress,
        new_table,
        show,
        styled,
        time_all,
        time_caches,
        verdict,
        write_json,
    )
except ModuleNotFoundError as error:
    raise SystemExit(
        f"fkv: expected typer and rich for the command line, got no module named {error.name!r}"
        " (pip install 'fkv[cli]')"
    ) from None

Sizes = tuple[int, int, int, int, int]  # T, L, H, D, R
MEMORY = 8  # GiB of the host, at most, for the demo

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class BackendOption(StrEnum):
    triton = "triton"
    pallas = "pallas"


class Function(StrEnum):
    materialize = "materialize"
    write_cache = "write_cache"


def main() -> None:
    app()


@app.callback()
def prepare() -> None:
    """The context KV cache of a speculative-decoding draft model, in one kernel."""
    # jax takes three quarters of a GPU's memory when it starts, and torch shares the GPU with it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@app.command()
def demo(
    total_ctx: Annotated[int, typer.Option(min=1, help="Tokens, T.")] = 32,
    n_layers: Annotated[int, typer.Option(min=1, help="Draft layers, L.")] = 5,
    num_kv_heads: Annotated[int, typer.Option(min=1, help="KV heads, H.")] = 8,
    head_dim: Annotated[int, typer.Option(min=2, help="Head size, D.")] = 128,
    rotary_dim: Annotated[
        int | None, typer.Option(help="Rotary size, R: even, from 2 to D.", show_default="head_dim")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the projection, K and V.")] = Dtype.bfloat16,
    backend: Annotated[
        BackendOption | None, typer.Option(help="Its two routes alone.", show_default="both")
    ] = None,
) -> None:
    """Run fkv.materialize on its four routes, against the float64 reference.

    The default sizes are the DFlash draft of Qwen3-8B. The exit status is 1 if a route is wrong.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    sizes: Sizes = (total_ctx, n_layers, num_kv_heads, head_dim, rotary_dim)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        even = f"an even number from 2 to head_dim = {head_dim}"
        option = "--head-dim" if rotary_dim == head_dim else "--rotary-dim"
        raise typer.BadParameter(
            f"expected rotary_dim to be {even}, got {rotary_dim}", param_hint=f"'{option}'"
        )
    memory = -(-host_bytes(*sizes) // 2**30)
    if memory > MEMORY:
        raise typer.BadParameter(
            f"expected a float64 reference within {MEMORY} GiB of host memory, got about {memory}"
            " GiB for these sizes",
            param_hint="'--total-ctx'",
        )
    results = run_routes([(home, to) for home, to in ROUTES if backend in (None, to)], sizes, dtype)
    console.print(
        f"materialize: n_layers {n_layers}, num_kv_heads {num_kv_heads}, head_dim {head_dim}, "
        f"rotary_dim {rotary_dim}, {dtype}",
        style="bold",
    )
    console.print()
    show_results(results, total_ctx)
    if any(result.wrong for result in results) or not any(result.right for result in results):
        raise typer.Exit(1)


def run_routes(routes: list[tuple[str, BackendName]], sizes: Sizes, dtype: str) -> list[Result]:
    with new_progress() as progress:
        task = progress.add_task("float64 reference", total=1 + len(routes))
        problem = make_problem(*sizes, dtype)
        results = []
        for done, (home, backend) in enumerate(routes, start=1):
            progress.update(task, completed=done, description=f"{home} -> {backend}")
            results.append(
                run_route(home, backend, problem, lambda part: progress.advance(task, part))
            )
    return results


def show_results(results: list[Result], total_ctx: int) -> None:
    table = new_table("route", "device", "kernel")
    for name in ("tokens", "K error\n/ bound", "V bit\nfor bit", "time"):
        table.add_column(name, justify="right")
    for result in results:
        k_error = same_v = "-"
        if result.worst is not None:
            k_error = verdict(f"{result.worst:.4f}", result.worst <= 1)
            same_v = verdict("yes" if result.same_v else "no", result.same_v)
        row = (str(total_ctx), k_error, same_v, duration(result.seconds))
        table.add_row(result.route, result.device, styled(result.kernel), *row)
    show(table)
    for note in dict.fromkeys(result.note for result in results if result.note):
        routes = ", ".join(result.route for result in results if result.note == note)
        console.print(f"{routes}: {note}")
    if any(result.worst is not None for result in results):
        legend = "K error: the worst |kernel - float64 reference| as a multiple of its bound"
        console.print(legend, style="dim")
    for kernel in sorted({result.kernel for result in results if result.seconds}):
        legend = f"time: median of {CALLS[kernel]} {kernel} calls by the wall clock"
        remark = ", no measure of a GPU" if kernel == "interpreted" else ""
        console.print(legend + remark, style="dim")
    wrong = [result.route for result in results if result.wrong]
    right = sum(result.right for result in results)
    if wrong:
        console.print(f"Wrong or failed: {', '.join(wrong)}", style="bold red")
    elif right:
        console.print(f"{right} of {len(results)} routes ran, and all are right.", style="green")
    else:
        console.print("No route ran.", style="bold red")


@app.command()
def doctor() -> None:
    """Say what is installed, what each backend does here and why, and what to install.

    The exit status is 1 if no backend can be used.
    """
    installed = packages()
    table = new_table("package", "version", "minimum", "for", "state")
    for package in installed:
        extra = f"fkv[{package.extra}]" if package.extra else ""
        table.add_row(
            package.name, package.version or "-", package.minimum, extra, styled(package.state)
        )
    show(table)
    with console.status("asking the frameworks"):
        found = [diagnose(backend, installed) for backend in BACKENDS.values()]
        commands = cures(found)
    table = new_table("backend", "arrays", "GPUs", "kernel", "why")
    for one in found:
        names = Counter(one.gpus or [])
        seen = "\n".join(f"{n} x {name}" if n > 1 else name for name, n in names.items())
        seen = seen or ("-" if one.gpus is None else "none")
        table.add_row(one.backend.name, one.backend.framework, seen, styled(one.kernel), one.why)
    show(table)
    if commands:
        table = new_table("to install", "why")
        for command, why in commands:
            table.add_row(command, why)
        show(table)
    else:
        console.print("Nothing to install.", style="green")
    if not any(one.usable for one in found):
        raise typer.Exit(1)


@app.command()
def bench(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="Write all numbers there.")
    ] = None,
    sglang: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Folder of the package sglang, whose kernel is timed too."
        ),
    ] = None,
    backend: Annotated[
        BackendOption | None, typer.Option(help="This one alone.", show_default="both")
    ] = None,
    geometry: Annotated[
        list[str] | None,
        typer.Option(metavar="L,H,D,R", help="Instead of the six of the grid; repeatable."),
    ] = None,
    total_ctx: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Instead of the ten of the grid; repeatable."),
    ] = None,
    peers: Annotated[
        bool, typer.Option(help="Also torch eager, torch.compile and jax.jit.")
    ] = True,
    function: Annotated[
        Function | None, typer.Option(help="This one alone.", show_default="both")
    ] = None,
) -> None:
    """Time the kernels on a GPU, beside what else does their job.

    Every result is checked first, and a wrong one gets no time. The exit status is 1 if one of
    fkv's own is wrong. Without a GPU there are the checks only.
    """
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        console.print(
            "fkv: expected torch, whose profiler is the timer, got no module named 'torch'"
            " (pip install 'fkv[triton]')"
        )
        raise typer.Exit(1) from None
    geometries = [parse_geometry(text) for text in geometry or []] or _bench.GEOMETRIES
    if sglang and not _bench.sglang_file(sglang).is_file():
        raise typer.BadParameter(
            f"expected a folder with {_bench.sglang_file(Path())}, got {sglang}",
            param_hint="'--sglang'",
        )
    if json_file and not json_file.parent.is_dir():
        raise typer.BadParameter(
            f"expected a file in a folder that exists, got {json_file}", param_hint="'--json'"
        )
    if json_file:
        try:
            check_writable(json_file)
        except OSError as error:
            raise typer.BadParameter(
                f"expected a file that can be written, got {json_file} ({error.strerror})",
                param_hint="'--json'",
            ) from None
    backends = [name for name in BACKENDS if backend in (None, name)]
    with console.status("asking the frameworks"):
        timer = bool(gpus("torch"))
        found = [diagnose(BACKENDS[name], packages()) for name in backends]
    able = [one.backend.name for one in found if one.kernel == "compiled"]
    if able and timer:
        for one in found:
            if one.backend.name not in able:
                console.print(f"{one.backend.name} is left out: {one.why}", style="yellow")
        # The grid asks the peers at some sizes only; whoever names sizes wants them there.
        peers_at = (total_ctx or _bench.PEER_CTX) if peers else ()
        report = _bench.about() | {"rows": []}
        if function != "write_cache":
            report = time_all(geometries, total_ctx or _bench.TOTAL_CTX, able, peers_at, sglang)
        if function == "write_cache" or (function is None and not geometry):
            tokens = total_ctx or [*_bench_cache.TOTAL_CTX]
            report["caches"] = time_caches(able, tokens, sglang)
    else:
        why = "No GPU: interpreted times mean nothing"
        if able:
            why = "jax sees a GPU, torch does not, and the timer is torch's"
        console.print(f"{why}, so these are the checks alone.")
        console.print()
        report = check_all(geometries, total_ctx or [1, 16], backends)
    if json_file:
        write_json(report, json_file)
        console.print(f"Wrote {json_file}")
    rows = report["rows"] + report.get("caches", [])
    wrong = Counter(row["who"] for row in rows if row.get("right", True) is False)
    for who, count in wrong.items():
        console.print(f"{who}: {count} wrong results, which were not timed.", style="bold red")
    if wrong.keys() & BACKENDS.keys():
        raise typer.Exit(1)


@app.command()
def run(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder of a draft model: config.json and safetensors.")
    ],
    hidden: Annotated[Path, typer.Argument(help="File of safetensors, see above.")],
    out: Annotated[Path, typer.Option(metavar="KV", help="File of safetensors to write.")],
    backend: Annotated[
        BackendOption | None, typer.Option(show_default="triton if torch is installed")
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of the weights.", show_default="the checkpoint's")
    ] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens in memory at a time.")] = 8192,
    max_position: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of the RoPE table.", show_default="max_position_embeddings"),
    ] = None,
) -> None:
    """From a draft model's checkpoint and hidden states to its context K and V.

    HIDDEN has `hidden` [T, hidden], or `target_hidden` [T, n_features*hidden] for a DFlash draft,
    in the dtype of the weights, and may have `positions` [T], int32 or int64 (by default 0, 1, 2,
    ...). KV gets `k` and `v` [L, T, H, D] in that dtype. Tokens are read and written in chunks,
    and KV is written whole or not at all.
    """
    try:
        with console.status("reading the checkpoint"):
            name = None if backend is None else backend.value
            job = _run.prepare(checkpoint, hidden, out, chunk, name, dtype, max_position)
            device = str(job.materializer.device)
            compiled = bool(gpus(job.framework))
        with _run.interruptible(), new_progress() as progress:
            total = len(job.positions)
            task = progress.add_task(f"{total} tokens", total=total)
            seconds = _run.run(job, lambda tokens: progress.advance(task, tokens))
    except (OSError, ValueError, TypeError, NotImplementedError, ImportError) as error:
        console.print(f"fkv: {described(error)}", style="bold red", soft_wrap=True)
        raise typer.Exit(1) from None
    m = job.materializer
    console.print(
        f"run: n_layers {m.n_layers}, num_kv_heads {m.num_kv_heads}, head_dim {m.head_dim}, "
        f"rotary_dim {m.rotary_dim}, {job.dtype}",
        style="bold",
    )
    rate = f", {total / seconds:.0f} tokens/s" if total else ""
    kernel = "compiled" if compiled else "interpreted"
    console.print(
        f"{job.backend} ({kernel}) on {device}: {total} tokens in {duration(seconds)}{rate}"
    )
    console.print(
        f"Wrote {out}: k and v {list(job.out_shape)}, {_run.described_size(job)}",
        style="green",
        soft_wrap=True,
    )


def parse_geometry(text: str) -> _bench.Geometry:
    try:
        sizes = _bench.Geometry(*map(int, text.split(",")))
    except (TypeError, ValueError):
        sizes = None
    if sizes is None or min(sizes) < 1 or sizes.rotary_dim % 2 or sizes[3] > sizes[2]:
        expected = "n_layers,num_kv_heads,head_dim,rotary_dim with an even rotary_dim <= head_dim"
        raise typer.BadParameter(f"expected {expected}, got {text}", param_hint="'--geometry'")
    return sizes


if __name__ == "__main__":
    main()
