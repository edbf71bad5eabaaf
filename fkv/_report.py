"""Tables and progress on the terminal."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fkv import _bench
from fkv._demo import ROUTES, make_problem, run_route

# No markup: messages hold names like fkv[triton].
console = Console(markup=False, highlight=False, emoji=False)


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
                    right = None if result.kernel.startswith("not ") else result.right
                    rows.append(
                        {"who": to, **sizes._asdict(), "total_ctx": total_ctx, "right": right}
                        | {"worst": result.worst, "same_v": result.same_v, "note": result.note}
                    )
                    worst = "-" if result.worst is None else f"{result.worst:.4f}"
                    same_v = "yes" if result.same_v else "-" if result.worst is None else "no"
                    cells = (
                        verdict(worst, right is not False),
                        verdict(same_v, right is not False),
                    )
                    table.add_row(str(total_ctx), to, styled(result.kernel), *cells)
            show(table)
    return _bench.about() | {"rows": rows}


def time_all(
    geometries: list[_bench.Geometry],
    tokens: list[int],
    backends: list[str],
    peers: bool,
    sglang: Path | None,
) -> dict[str, Any]:
    """Everything there is to time on this GPU."""
    report: dict[str, Any] = _bench.about() | {"rows": []}
    scaled = _bench.SCALED if geometries == _bench.GEOMETRIES else []
    with new_progress() as progress:
        total = len(geometries) * len(tokens) + len(scaled) + 1
        task = progress.add_task("warming up", total=total)
        _bench.warm_up()
        timer = _bench.Bench(backends, peers, sglang)
        report["empty_kernel_us"] = _bench.empty_kernel_us()
        for sizes in geometries:
            columns = ("cold\nus", "10 to 90 %", "GB/s", "of\ncopy", "hot\nus", "replay\nus")
            table = geometry_table(sizes, *columns, "launches", "error\n/ bound")
            for total_ctx in tokens:
                progress.update(task, description=f"{','.join(map(str, sizes))} at {total_ctx}")
                for row in timer.measure(sizes, total_ctx):
                    report["rows"].append(row)
                    table.add_row(*timed_cells(row))
                table.add_section()
                _bench.forget()
                progress.advance(task)
            show(table)
        report["scaling"], alone = [], timer.alone()
        for sizes in scaled:
            progress.update(task, description=f"scaling {','.join(map(str, sizes))}")
            timed = alone.measure(sizes, _bench.SCALED_CTX)
            report["scaling"] += [row for row in timed if row["who"] in backends]
            _bench.forget()
            progress.advance(task)
        progress.update(task, description="host")
        report["host"] = list(_bench.host_times(timer))
    show_scaling(report, backends)
    table = new_table("one call at 16 tokens")
    for name in ("us on the host", "10 to 90 %"):
        table.add_column(name, justify="right")
    for row in report["host"]:
        table.add_row(row["who"], *spread_cells(row["us"]))
    show(table)
    return report


def timed_cells(row: dict[str, Any]) -> list[Text | str]:
    worst = row.get("worst", 0.0)
    error = "-" if "worst" not in row else "inf" if worst is None else f"{worst:.4f}"
    if "cold_us" not in row:
        name = "-" if row.get("right", True) is None else error
        return [str(row["total_ctx"]), row["who"], *[""] * 7, verdict(name, False)]
    cells = [str(row["total_ctx"]), row["who"], *spread_cells(row["cold_us"])]
    cells += [f"{row['gb_s']:.0f}", f"{row['share_of_copy']:.2f}", f"{row['hot_us']['median']:.1f}"]
    replay = f"{row['replay_us']:.1f}" if "replay_us" in row else ""
    return [*cells, replay, str(row["launches"]), error]


def spread_cells(times: dict[str, float]) -> list[str]:
    return [f"{times['median']:.1f}", f"{times['p10']:.1f} {times['p90']:.1f}"]


def show_scaling(report: dict[str, Any], backends: list[str]) -> None:
    """Is the time fixed + bytes / rate, whatever makes the bytes?"""
    report["fit"] = {}
    for who in backends:
        rows = [row for row in report["scaling"] if row["who"] == who and row["right"]]
        first = _bench.GEOMETRIES[0]._asdict()
        rows += [
            row
            for row in report["rows"]
            if row["who"] == who and row["right"] and {**row, **first} == row
        ]
        if len(rows) < 3:
            continue
        times = [row["cold_us"]["median"] for row in rows]
        line = _bench.fit([row["bytes"] for row in rows], times)
        report["fit"][who] = line
        console.print(
            f"{who}: {line['fixed_us']:.1f} us and {line['rate_gb_s']:.0f} GB/s say how time grows"
            f" with T, L, H and D, within {line['worst_relative_error']:.0%}; half of it is fixed"
            f" at {line['half_fixed_bytes'] / 1e6:.1f} MB"
        )
    console.print()


def write_json(report: dict[str, Any], path: Path) -> None:
    """Whole or not at all."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(report, file, indent=1, allow_nan=False)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


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
