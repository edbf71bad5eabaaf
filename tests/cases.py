"""Problems with names, made in NumPy; arrays of a framework from them; the one assertion."""

import dataclasses

import ml_dtypes
import numpy as np

import fkv.reference

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes and dtypes of one problem; make() draws its values."""

    T: int = 21
    L: int = 2
    H: int = 3
    D: int = 64
    R: int | None = None  # D
    P: int = 40
    scale: float = 1.0  # of kv
    eps: tuple[float, ...] = (1e-6,)  # repeated over the layers
    weight_dtype: str = "float32"
    table_dtype: str = "float32"
    positions_dtype: str = "int32"
    pallas: bool = True  # takes this geometry

    def make(self, dtype="float32", seed=0):
        """The arguments of materialize as NumPy arrays, by name."""
        rng = np.random.default_rng(seed)
        R = self.D if self.R is None else self.R
        kv = rng.normal(size=(self.T, self.L, 2 * self.H * self.D)) * self.scale
        weight = rng.uniform(0.5, 1.5, size=(self.L, self.D))
        # Every entry of the table differs from every other: a mix-up of rows or columns shows.
        angles = rng.uniform(0, 2 * np.pi, size=(self.P, R // 2))
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        return dict(
            kv=kv.astype(DTYPES[dtype]),
            k_norm_weight=weight.astype(DTYPES[self.weight_dtype]),
            eps=np.resize(np.float32(self.eps), self.L),
            cos_sin_cache=table.astype(DTYPES[self.table_dtype]),
            positions=rng.integers(0, self.P, size=self.T).astype(self.positions_dtype),
        )


CASES = {
    "dflash_qwen3_8b": Case(T=19, L=5, H=8, D=128, P=64),
    "one_token": Case(T=1),
    "empty": Case(T=0),
    "no_layers": Case(L=0),
    "one_of_each": Case(T=1, L=1, H=1, D=16, P=1),
    "ragged_tiles": Case(T=67, L=3),
    "one_head": Case(L=3, H=1, D=128),
    "one_head_few_tokens": Case(T=9, L=4, H=1, D=48, R=32),
    "eleven_heads": Case(H=11, T=5, L=1),
    "sixteen_heads": Case(H=16, T=5, L=1),
    "partial_rotary": Case(H=4, D=128, R=64, T=37),
    "narrow_rotary": Case(D=96, R=32),
    "narrow_rotary_wide_tail": Case(D=80, R=48, L=1),
    "head_dim_72": Case(D=72, pallas=False),
    "head_dim_72_partial": Case(D=72, R=16),
    "head_dim_80": Case(D=80),
    "head_dim_96": Case(D=96),
    "head_dim_112": Case(D=112),
    "head_dim_192": Case(D=192, R=128, H=2, L=1),
    "head_dim_256": Case(D=256, R=64, H=2),
    "head_dim_512": Case(D=512, R=128, H=2, L=1),
    "head_dim_512_full": Case(D=512, H=1, L=1),
    "head_dim_16": Case(D=16),
    "head_dim_20": Case(D=20, R=10, pallas=False),
    "head_dim_6": Case(D=6, pallas=False),
    "head_dim_2": Case(D=2, H=1, L=1, pallas=False),
    "rotary_dim_2": Case(D=96, R=2, pallas=False),
    "small_rows": Case(scale=1e-3, eps=(1e-6, 0.5)),
    "large_rows": Case(scale=300.0),
    "eps_zero": Case(eps=(0.0,)),
    "half_precision_sides": Case(weight_dtype="float16", table_dtype="bfloat16", D=128),
    "bfloat16_sides": Case(weight_dtype="bfloat16", table_dtype="float16"),
    "positions_int64": Case(positions_dtype="int64"),
    "one_table_row": Case(P=1),
}


def to_framework(array, framework):
    """A NumPy array as one of `framework`, with the same bits, where its kernels run."""
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(array)
    import torch

    bits = array.view(np.int16) if array.dtype == DTYPES["bfloat16"] else array
    tensor = torch.from_numpy(bits.copy())
    tensor = tensor.view(torch.bfloat16) if bits is not array else tensor
    return tensor.cuda() if torch.cuda.is_available() else tensor


def to_numpy(array):
    """An array of either framework as NumPy, with the same bits."""
    if type(array).__module__.partition(".")[0] != "torch":
        return np.asarray(array)
    import torch

    array = array.detach().cpu()
    if array.dtype == torch.bfloat16:
        return array.view(torch.int16).numpy().view(DTYPES["bfloat16"])
    return array.numpy()


def nan_outputs(problem, framework):
    """k_out and v_out full of NaN, which shows what is not written; nothing for jax."""
    if framework == "jax":
        return {}
    kv, dim = problem["kv"], problem["k_norm_weight"].shape[1]
    shape = (kv.shape[1], kv.shape[0], kv.shape[2] // (2 * dim), dim)
    return {
        name: to_framework(np.full(shape, np.nan, kv.dtype), framework)
        for name in ("k_out", "v_out")
    }


def assert_right(problem, k, v):
    """K within the bound of the float64 reference, V bit for bit; returns K's worst error."""
    dtype = problem["kv"].dtype
    exact, exact_v = fkv.reference.materialize(**problem)
    bound = fkv.reference.error_bound(**problem, dtype=dtype.name)
    k, v = to_numpy(k), to_numpy(v)
    assert k.dtype == v.dtype == dtype
    assert k.shape == v.shape == exact.shape
    worst = fkv.reference.worst_error(k, exact, bound)
    assert worst <= 1, f"K is wrong: its worst error is {worst:.4g} times the bound"
    same = v.view(f"u{dtype.itemsize}") == exact_v.view(f"u{dtype.itemsize}")
    assert same.all(), f"V is wrong: {np.count_nonzero(~same)} of {same.size} elements differ"
    return worst
