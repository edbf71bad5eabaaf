"""The main job on files: hidden states in, K and V out, a chunk of tokens at a time."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from rich.filesize import decimal

import fkv
from fkv._backends import BACKENDS, BackendName
from fkv._checkpoint import DTYPES, import_safetensors
from fkv._errors import sentence
from fkv._weights import dtype_name

NAMES = {dtype: name for name, dtype in DTYPES.items()}  # bfloat16 -> BF16
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
READERS = {"torch": "pt", "jax": "np"}  # what safetensors calls them


@dataclass(frozen=True)
class Job:
    """What is to be done, once everything about it has been checked."""

    materializer: fkv.KVMaterializer
    framework: Literal["torch", "jax"]
    backend: str
    hidden: Path
    name: str  # hidden or target_hidden
    positions: np.ndarray  # [T]
    out: Path
    chunk: int  # tokens

    @property
    def dtype(self) -> str:
        return dtype_name(self.materializer.dtype)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        m = self.materializer
        return m.n_layers, len(self.positions), m.num_kv_heads, m.head_dim

    @property
    def array_bytes(self) -> int:
        """Of K, and of V."""
        return int(np.prod(self.out_shape, dtype=object)) * ITEMSIZE[self.dtype]


def prepare(
    checkpoint: Path,
    hidden: Path,
    out: Path,
    chunk: int,
    backend: BackendName | None = None,
    dtype: str | None = None,
    max_position: int | None = None,
) -> Job:
    """Load the checkpoint and look at all that can be wrong before anything is written."""
    if not hidden.is_file():
        raise FileNotFoundError(sentence("HIDDEN", "a file", f"{hidden}, which is none"))
    out = Path(os.path.realpath(out))  # a link stays one
    _check_out(out, hidden, checkpoint)
    backend = backend or ("triton" if importlib.util.find_spec("torch") else "pallas")
    framework: Literal["torch", "jax"] = "torch" if backend == "triton" else "jax"
    assert BACKENDS[backend].framework == framework
    with _open(hidden, "np") as file:
        names = set(file.keys())
        known = sorted(names & {"hidden", "target_hidden"})
        if len(known) != 1:
            expected = "either hidden [T, hidden] or target_hidden [T, n_features*hidden]"
            got = " and ".join(known) or ", ".join(sorted(names)) or "nothing"
            raise ValueError(sentence("HIDDEN", expected, got))
        (name,) = known
        header = file.get_slice(name)
        shape, stored = tuple(header.get_shape()), header.get_dtype()
        positions = file.get_tensor("positions") if "positions" in names else None
    materializer = fkv.KVMaterializer.from_checkpoint(
        checkpoint, framework=framework, dtype=dtype, max_position=max_position, backend=backend
    )
    width = _width(materializer, name)
    if len(shape) != 2 or shape[1] != width:
        expected = f"{name} of shape [T, {width}]"
        raise ValueError(sentence("HIDDEN", expected, str(list(shape)), "from the checkpoint"))
    wanted = dtype_name(materializer.dtype)
    if stored != NAMES[wanted]:
        got = DTYPES.get(stored) or stored
        cure = f"the dtype of the checkpoint, or --dtype {got}" if stored in DTYPES else ""
        raise ValueError(sentence("HIDDEN", f"{name} of dtype {wanted}", got, cure))
    positions = _checked(positions, shape[0], len(materializer._weights.cos_sin_cache))
    job = Job(materializer, framework, backend, hidden, name, positions, out, chunk)
    need, free = 2 * job.array_bytes, shutil.disk_usage(out.parent).free
    if need > free:
        raise OSError(sentence("--out", f"{decimal(need)} of free space", decimal(free), str(out)))
    return job


def run(job: Job, advance: Callable[[int], None]) -> float:
    """Write the file, whole or not at all; `advance` is told the tokens done. Seconds it took."""
    start = time.perf_counter()
    with _whole(job.out) as file:
        begin = _write_header(file, job)
        for first in range(0, len(job.positions), job.chunk):
            part = slice(first, min(first + job.chunk, len(job.positions)))
            for index, array in enumerate(_materialize(job, part)):
                _write(file, begin + index * job.array_bytes, job, part, array)
            advance(part.stop - part.start)
        file.truncate(begin + 2 * job.array_bytes)  # without tokens nothing was written
    return time.perf_counter() - start


def described_size(job: Job) -> str:
    return decimal(job.out.stat().st_size)


def _materialize(job: Job, part: slice) -> Iterator[np.ndarray]:
    """K and V of some tokens as bytes, [L, T, H*D*itemsize]."""
    m = job.materializer
    # Opened each time: the pages of a mapped file stay in memory as long as it is open.
    with _open(job.hidden, READERS[job.framework]) as file:
        hidden = file.get_slice(job.name)[part]
    if job.framework == "torch":
        import torch

        hidden = hidden.to(m.device)
        positions = torch.from_numpy(job.positions[part]).to(m.device)
    else:
        import jax

        hidden, positions = jax.device_put((hidden, job.positions[part].astype(np.int32)))
    if job.name == "target_hidden":
        hidden = m.project_target_hidden(hidden)
    for array in m(hidden, positions):
        yield _bytes(array, job.framework).reshape(*array.shape[:2], -1)


def _bytes(array: Any, framework: str) -> np.ndarray:
    if framework == "torch":
        import torch

        return array.view(torch.uint8).cpu().numpy()
    return np.asarray(array).view(np.uint8)


def _write_header(file: BinaryIO, job: Job) -> int:
    """That of safetensors, which has no writer for a part of a tensor. Where the arrays begin."""
    size = job.array_bytes
    entries = {
        name: {
            "dtype": NAMES[job.dtype],
            "shape": list(job.out_shape),
            "data_offsets": [index * size, (index + 1) * size],
        }
        for index, name in enumerate("kv")
    }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    return 8 + len(text)


def _write(file: BinaryIO, begin: int, job: Job, part: slice, array: np.ndarray) -> None:
    """The tokens of `part` into each layer of an array [L, T, H, D]."""
    row = array.shape[2]
    for layer, tokens in enumerate(array):
        try:
            file.seek(begin + (layer * len(job.positions) + part.start) * row)
            file.write(np.ascontiguousarray(tokens).data)
        except OSError as error:
            raise _unwritable(job.out, error) from error


@contextlib.contextmanager
def _whole(out: Path) -> Iterator[BinaryIO]:
    """A file beside `out` that takes its place at the end, or leaves no trace."""
    with tempfile.NamedTemporaryFile(dir=out.parent, prefix=f".{out.name}.", delete=False) as file:
        try:
            yield file  # type: ignore[misc]
            file.flush()
            os.chmod(file.name, _mode(out))
            os.replace(file.name, out)
        except BaseException:  # Ctrl-C too, and what `interruptible` makes of other signals
            os.unlink(file.name)
            raise


def _mode(out: Path) -> int:
    """Of the file that is replaced, or what a new one gets."""
    if out.exists():
        return out.stat().st_mode & 0o7777
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """What ends a process is an exception within, so that nothing is left behind."""

    def stop(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _open(path: Path, reader: str) -> Iterator[Any]:
    try:
        file = import_safetensors()(path, reader)
    except ImportError:
        raise
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        raise ValueError(sentence("HIDDEN", "a safetensors file", str(path), line)) from error
    with file:
        yield file


def _check_out(out: Path, hidden: Path, checkpoint: Path) -> None:
    if not out.parent.is_dir():
        raise FileNotFoundError(sentence("--out", "a file in a folder that exists", str(out)))
    if out.is_dir() or (out.exists() and out.samefile(hidden)):
        got = f"the folder {out}" if out.is_dir() else "HIDDEN itself"
        raise ValueError(sentence("--out", "a file of its own", got))
    if out.exists() and not out.is_file():
        raise ValueError(sentence("--out", "a file", f"{out}, a device or a pipe"))
    others = checkpoint.iterdir() if out.exists() and checkpoint.is_dir() else ()
    if any(out.samefile(other) for other in others if other.is_file()):
        raise ValueError(sentence("--out", "a file of its own", f"{out} of the checkpoint"))
    try:
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise _unwritable(out, error) from error


def _unwritable(out: Path, error: OSError) -> OSError:
    return OSError(sentence("--out", "a file that can be written", str(out), error.strerror or ""))


def _width(m: fkv.KVMaterializer, name: str) -> int:
    """Of one token's hidden states."""
    fc_weight = m._weights.fc_weight
    if name == "hidden":
        return m._weights.kv_weight.shape[2]
    if fc_weight is None:
        why = "target_hidden needs fc.weight and hidden_norm.weight in the checkpoint"
        raise ValueError(sentence("HIDDEN", "hidden [T, hidden]", "target_hidden", why))
    return fc_weight.shape[1]


def _checked(positions: np.ndarray | None, total_ctx: int, rows: int) -> np.ndarray:
    """Those of the file, or 0, 1, 2, ..."""
    if positions is None:
        positions = np.arange(total_ctx)
    if positions.shape != (total_ctx,) or positions.dtype not in (np.int32, np.int64):
        expected = f"positions of shape [{total_ctx}], int32 or int64"
        got = f"{list(positions.shape)} {positions.dtype}"
        raise ValueError(sentence("HIDDEN", expected, got))
    outside = np.flatnonzero((positions < 0) | (positions >= rows))
    if outside.size:
        token = int(outside[np.argmax(positions[outside])])
        got = f"{positions[token]} at token {token}"
        cure = "the rows of the RoPE table: --max-position makes more"
        raise ValueError(sentence("HIDDEN", f"0 <= position < {rows}", got, cure))
    return positions
