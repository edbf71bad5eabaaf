"""The two backends: a row each, and the module behind it when it is first used."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Literal, NamedTuple

from fkv._errors import sentence

BackendName = Literal["triton", "pallas"]


class Backend(NamedTuple):
    name: str
    framework: str  # whose arrays its kernel takes
    module: str  # offers run(spec, ...) and write(spec, ...)
    extra: str  # what pip installs for it


BACKENDS = {
    "triton": Backend("triton", "torch", "fkv.triton", "fkv[triton]"),
    "pallas": Backend("pallas", "jax", "fkv.pallas", "fkv[pallas]"),
}


NATIVE = {row.framework: row for row in BACKENDS.values()}


def choose(framework: str, backend: str | None) -> Backend:
    """The backend of that name, or with None the one that is native to `framework`."""
    if backend is None:
        return NATIVE[framework]
    if not isinstance(backend, str) or backend not in BACKENDS:
        names = " or ".join(f'"{name}"' for name in BACKENDS)
        error = ValueError if isinstance(backend, str) else TypeError
        raise error(sentence("backend", f"{names} or None", repr(backend)))
    return BACKENDS[backend]


@functools.cache
def load(backend: Backend) -> ModuleType:
    """Import a backend; what is not installed is an ImportError with the pip command."""
    try:
        return importlib.import_module(backend.module)
    except ModuleNotFoundError as error:
        if (error.name or "fkv").partition(".")[0] == "fkv":
            raise
        expected = f"the packages of {backend.extra} for {backend.name!r}"
        cure = f"pip install '{backend.extra}'"
        raise ImportError(
            sentence("backend", expected, f"no module named {error.name!r}", cure)
        ) from error
