"""What is installed here, and what each backend does with it."""

from __future__ import annotations

import importlib
import platform
import re
from importlib import metadata
from typing import NamedTuple

import fkv
from fkv._backends import Backend, load

PACKAGES = ("numpy", "torch", "triton", "jax", "jaxlib", "absl-py")


class Package(NamedTuple):
    name: str
    version: str | None  # None is not installed
    minimum: str = ""
    extra: str = ""  # of fkv, which asks for it

    @property
    def state(self) -> str:
        if self.version is None:
            return "not installed"
        old = _numbers(self.version) < _numbers(self.minimum)
        return "too old" if old else "installed"


class Diagnosis(NamedTuple):
    backend: Backend
    gpus: list[str] | None  # that its framework sees; None where it can't be imported
    kernel: str  # compiled, interpreted or not available
    why: str
    cure: str  # a command, or nothing

    @property
    def usable(self) -> bool:
        return self.kernel != "not available"


def packages() -> list[Package]:
    """Their versions beside the minimum of fkv's own metadata, nothing of them imported."""
    needs: dict[str, tuple[str, str]] = {}
    python = ""
    if _version("fkv"):  # it may also run from its source, which has no metadata
        python = (metadata.metadata("fkv")["Requires-Python"] or "").removeprefix(">=")
        pattern = r'([\w.-]+)(?:>=([\d.]+))?(?:;.*extra == "(\w+)")?'
        for line in metadata.requires("fkv") or []:
            name, minimum, extra = re.findall(pattern, line)[0]
            needs[name] = (minimum, extra)
    ours = [
        Package("fkv", fkv.__version__),
        Package("Python", platform.python_version(), python),
    ]
    return ours + [Package(name, _version(name), *needs.get(name, ())) for name in PACKAGES]


def diagnose(backend: Backend, installed: list[Package]) -> Diagnosis:
    """Ask the backend itself, after the versions."""
    command = f"pip install '{backend.extra}'"
    for package in installed:
        if package.extra == backend.name and package.state == "too old":
            why = f"{package.name} {package.version} is older than {package.minimum}"
            return Diagnosis(backend, None, "not available", why, command)
    seen = None
    try:
        seen = gpus(backend.framework)
        load(backend)
        launch = importlib.import_module(f"{backend.module}._launch")
        interpreted = launch.is_interpreted("cuda:0" if seen else "cpu")
    except Exception as error:  # a broken installation raises whatever it likes
        cause = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
        cure = command if isinstance(cause, ModuleNotFoundError) else ""
        return Diagnosis(backend, seen, "not available", described(cause), cure)
    why = f"{backend.framework} sees {'a' if seen else 'no'} GPU"
    return Diagnosis(backend, seen, "interpreted" if interpreted else "compiled", why, "")


def cures(found: list[Diagnosis]) -> list[tuple[str, str]]:
    """(command, why): what is missing, and what makes both frameworks see the same GPU."""
    commands = [(one.cure, one.why) for one in found if one.cure]
    seen = {one.backend.framework: one.gpus for one in found}
    if seen["torch"] and seen["jax"] == []:
        import torch

        # torch.version.cuda is None for ROCm
        if torch.version.cuda:
            cuda = torch.version.cuda.partition(".")[0]
            commands.append((f"pip install 'jax[cuda{cuda}]'", "torch sees a GPU, jax does not"))
    if seen["jax"] and seen["torch"] == []:
        commands.append(
            ("a CUDA build of torch: pytorch.org/get-started", "jax sees a GPU, torch does not")
        )
    return commands


def gpus(framework: str) -> list[str]:
    """The names of the GPUs that a framework sees."""
    if framework == "torch":
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [torch.cuda.get_device_name(i) for i in range(count)]
    import jax

    return [device.device_kind for device in jax.local_devices() if device.platform == "gpu"]


def described(error: BaseException) -> str:
    """One line: fkv's own sentences speak for themselves, other errors want their type."""
    line = next(iter(str(error).splitlines()), "")
    own = line.startswith("`") or isinstance(error, ModuleNotFoundError)
    return line if own else f"{type(error).__name__}: {line}".removesuffix(": ")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """2.11.0+cu130 -> (2, 11, 0)"""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))
