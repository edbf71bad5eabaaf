"""The Pallas backend: jax arrays, Mosaic GPU on Hopper and newer, interpreted where is no GPU."""

from fkv.pallas._launch import run, write

__all__ = ["run", "write"]
