"""The Triton backend: torch tensors, compiled on a CUDA device, interpreted where there is none."""

from fkv.triton._launch import run, write

__all__ = ["run", "write"]
