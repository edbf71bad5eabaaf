"""Tables and progress on the terminal."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fkv import _bench, _bench_cache
from fkv._demo import ROUTES, Result, make_problem, run_route

# No markup: messages hold names like fkv[triton].
console = Console(markup=False, highlight=False, emoji=False)
TIMES = ("cold\nus", "10 to 90 %", "GB/s", "of\ncopy", "hot\nus", "replay\nus")  # columns


def check_all(
    geometries: list[_bench.Geometry], tokens: list[int], backends: list[str]
) -> dict[str, Any]:
    """Rows without a time, for a machine without a GPU."""
    routes = [route for route in ROUTES[:2] if route[1] in backends]  # the native ones
    rows = []
    with new_progress() as progress:
        task = progress.add_task("checks", total=len(geometries) * len(tokens) * len(routes))
        for sizes in geometries:
            table = geometry_table(sizes, "kernel", "K error\n/ bound", "V bit\nfor bit")
            for total_ctx in tokens:
                problem = make_problem(total_ctx, *sizes, "bfloat16")
                for home, to in routes:
                    result = run_route(home, to, problem)
                    progress.advance(task)
                    rows.append(checked_row(result, sizes, total_ctx))
                    good = rows[-1]["right"] is not False
                    worst = "-" if result.worst is None else f"{result.worst:.4f}"
                    same_v = "yes" if result.same_v else "-" if result.worst is None else "no"
                    cells = (
                        verdict(worst if good else f"wrong {worst}", good),
                        verdict(same_v, good),
                    )
                    table.add_row(str(total_ctx), to, styled(result.kernel), *cells)
            show(table)
            show_notes(rows, sizes)
    return _bench.about() | {"rows": rows}


def checked_row(result: Result, sizes: _bench.Geometry, total_ctx: int) -> dict[str, Any]:
    worst = result.worst
    return {
        "who": result.backend,
        **sizes._asdict(),
        "total_ctx": total_ctx,
        "right": None if result.kernel.startswith("not ") else result.right,
        "worst": worst if worst is not None and math.isfinite(worst) else None,  # as JSON has it
        "same_v": result.same_v,
        "note": result.note,
    }


def time_all(
    geometries: list[_bench.Geometry],
    tokens: list[int],
    backends: list[str],
    peers_at: Collection[int],
    sglang: Path | None,
) -> dict[str, Any]:
    """Everything there is to time of materialize on this GPU."""
    report: dict[str, Any] = _bench.about() | {"rows": []}
    scaled = _bench.SCALED if geometries == _bench.GEOMETRIES else []
    with new_progress() as progress:
        total = len(geometries) * len(tokens) + len(scaled) + 1
        task = progress.add_task("warming up", total=total)
        _bench.warm_up()
        timer = _bench.Bench(backends, peers_at, sglang)
        report["empty_kernel_us"] = _bench.empty_kernel_us()
        for sizes in geometries:
            table = geometry_table(sizes, *TIMES, "launches", "error\n/ bound")
            for total_ctx in tokens:
                progress.update(task, description=f"{','.join(map(str, sizes))} at {total_ctx}")
                for row in timer.measure(sizes, total_ctx):
                    report["rows"].append(row)
                    table.add_row(*timed_cells(row))
                table.add_section()
                _bench.forget()
                progress.advance(task)
            show(table)
            show_notes(report["rows"], sizes)
        report["scaling"], alone = [], timer.alone()
        for sizes in scaled:
            progress.update(task, description=f"scaling {','.join(map(str, sizes))}")
            timed = alone.measure(sizes, _bench.SCALED_CTX)
            report["scaling"] += [row for row in timed if row["who"] in backends]
            _bench.forget()
            progress.advance(task)
        progress.update(task, description="host")
        report["host"] = list(_bench.host_times(timer))
    report["fit"] = _bench.fits(report, backends)
    show_fits(report["fit"])
    table = new_table("one call")
    table.add_column("tokens", justify="right")
    for name in ("us on the host", "10 to 90 %"):
        table.add_column(name, justify="right")
    for row in report["host"]:
        table.add_row(row["who"], str(row["total_ctx"]), *spread_cells(row["us"]))
    show(table)
    return report


def time_caches(backends: list[str], tokens: list[int], sglang: Path | None) -> list[dict]:
    """Everything there is to time of write_cache on this GPU."""
    rows = []
    with new_progress() as progress:
        task = progress.add_task("write_cache", total=len(tokens))
        _bench.warm_up()
        timer = _bench.Bench(backends, (), sglang)
        for total_ctx in tokens:
            measured = _bench_cache.measure(timer, total_ctx)
            for cache, group in itertools.groupby(measured, lambda row: row["cache"]):
                table = geometry_table(_bench.GEOMETRIES[0], *TIMES, "launches", "error\n/ bound")
                table.title = f"write_cache: {cache}"
                for row in group:
                    rows.append(row)
                    table.add_row(*timed_cells(row))
                show(table)
            _bench.forget()
            progress.advance(task)
    return rows


def timed_cells(row: dict[str, Any]) -> list[Text | str]:
    worst = row.get("worst", 0.0)
    error = "-" if "worst" not in row else "inf" if worst is None else f"{worst:.4f}"
    if "cold_us" not in row:
        text = "-" if row["right"] is None else f"wrong {error}"
        return [str(row["total_ctx"]), row["who"], *[""] * 7, verdict(text, row["right"] is None)]
    cells = [str(row["total_ctx"]), row["who"], *spread_cells(row["cold_us"])]
    cells += [f"{row['gb_s']:.0f}", f"{row['share_of_copy']:.2f}", f"{row['hot_us']['median']:.1f}"]
    replay = f"{row['replay_us']:.1f}" if "replay_us" in row else ""
    return [*cells, replay, str(row["launches"]), error]


def spread_cells(times: dict[str, float]) -> list[str]:
    return [f"{times['median']:.1f}", f"{times['p10']:.1f} {times['p90']:.1f}"]


def show_fits(lines: dict[str, dict[str, float]]) -> None:
    """Is the time fixed + bytes / rate, whatever makes the bytes?"""
    for who, line in lines.items():
        console.print(
            f"{who}: {line['fixed_us']:.1f} us and {line['rate_gb_s']:.0f} GB/s"
            f" ({line['share_of_copy']:.2f} of copy) say how time grows with T, L, H and D,"
            f" within {line['worst_relative_error']:.0%}; half of it is fixed at"
            f" {line['half_fixed_bytes'] / 1e6:.1f} MB, which are {line['half_fixed_tokens']:.0f}"
            " tokens of the first geometry"
        )
    console.print()


def show_notes(rows: list[dict[str, Any]], sizes: _bench.Geometry) -> None:
    """Why something did not run, once."""
    own = [row for row in rows if row.get("note") and row | sizes._asdict() == row]
    notes = dict.fromkeys((row["who"], row["note"]) for row in own)
    for who, note in notes:
        console.print(f"{who}: {note}")
    if notes:
        console.print()


def write_json(report: dict[str, Any], path: Path) -> None:
    """Whole or not at all."""
    text = json.dumps(report, indent=1, allow_nan=False)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def check_writable(path: Path) -> None:
    """OSError now, and not after all was measured."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def geometry_table(sizes: _bench.Geometry, *columns: str) -> Table:
    names = (f"{name} {size}" for name, size in sizes._asdict().items())
    table = new_table()
    table.title, table.title_justify = ", ".join(names), "left"
    table.add_column("tokens", justify="right")
    table.add_column("who", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="left" if column == "kernel" else "right")
    return table


def new_progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def new_table(*columns: str) -> Table:
    """Narrow enough for 80 columns."""
    return Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))


def show(table: Table) -> None:
    console.print(table)
    console.print()


def styled(state: str) -> Text:
    styles = {"compiled": "green", "installed": "green", "failed": "bold red"}
    return Text(state, style=styles.get(state, "yellow"))


def verdict(text: str, good: bool) -> Text:
    return Text(text, style="green" if good else "bold red")


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
