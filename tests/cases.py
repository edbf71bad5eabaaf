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
CACHE_DTYPES = DTYPES | {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
# torch and NumPy have these in common only by their bits.
BITS = {"bfloat16": np.int16, "float8_e4m3fn": np.int8, "float8_e5m2": np.int8}


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


@dataclasses.dataclass(frozen=True)
class CacheCase(Case):
    """One problem of write_cache: also a cache, and a place in it for two tokens of three."""

    dtype: str = "bfloat16"  # of kv
    cache_dtype: str = "bfloat16"
    page_size: int | None = None  # flat
    layout: str = "NHD"
    by_layer: bool = False  # a map of its own for each layer
    window: int = 0  # columns of slot_mapping where commit_lens counts them
    slots_dtype: str = "int64"
    lens_dtype: str = "int32"
    scaled: str = ""  # "k", "v" or "kv"

    def make(self, dtype=None, seed=0):
        """The arguments of write_cache as NumPy arrays, the caches stacked, by name.

        A token that no layer writes has NaN for kv and no row of the table.
        """
        problem = super().make(dtype or self.dtype, seed)
        rng = np.random.default_rng(seed + 1000)
        page_size = self.page_size or 1
        num_pages = 2 * self.T // page_size + 2
        pages = dict(NHD=(page_size, self.H), HND=(self.H, page_size))[self.layout]
        pages = (self.H,) if self.page_size is None else pages
        shape = (self.L, num_pages, *pages, self.D)
        cache_dtype = CACHE_DTYPES[self.cache_dtype]
        for name in ("k_cache", "v_cache"):
            problem[name] = rng.normal(size=shape).astype(cache_dtype)

        num_slots, maps = num_pages * page_size, self.L if self.by_layer else 1
        others = range(2, num_slots - 1)
        slots = np.array([rng.permutation(others)[: self.T] for _ in range(maps)])
        slots = slots.reshape(maps, self.T).astype(self.slots_dtype)
        slots[:, 1:2], slots[:, 2:3] = 0, num_slots - 1
        slots[:, 3::3] = rng.choice([-1, -7, -(2**31)], size=slots[:, 3::3].shape)
        slots[1:, 3:4] = 1  # skipped in the first layer only
        written = (slots >= 0).any(0)
        problem["slot_mapping"] = slots if self.by_layer else slots[0]
        if self.window:
            lens = np.arange(self.T // self.window)[::-1] % (self.window + 1)
            problem["commit_lens"] = lens.astype(self.lens_dtype)
            problem["slot_mapping"] = slots = slots.reshape(-1, self.window)
            counted = np.arange(self.window) < lens[:, None]
            slots[~counted & (slots % 5 == 4)] = 2**30  # the others would be good slots
            written &= counted.ravel()
        problem["kv"][~written] = np.nan
        problem["positions"][~written] = rng.choice([-7, 2**31 - 1], size=(~written).sum())
        for name in self.scaled:  # so that some of K saturates, and K's are not V's
            low = dict(k=0.002, v=0.1)[name]
            problem[f"{name}_scale"] = rng.uniform(low, 4 * low, size=self.L).astype(np.float32)
        return problem | dict(layout=self.layout)


CACHE_CASES = {
    "flat": CacheCase(T=37, L=3, H=4),
    "dflash_qwen3_8b": CacheCase(T=19, L=5, H=8, D=128, P=64),
    "one_token": CacheCase(T=1, H=2),
    "empty": CacheCase(T=0, H=2),
    "no_layers": CacheCase(L=0, H=2),
    "no_layers_by_layer": CacheCase(L=0, H=2, by_layer=True),
    "pages": CacheCase(
        dtype="float16", cache_dtype="float16", H=2, page_size=4, slots_dtype="int32"
    ),
    "pages_of_one": CacheCase(D=128, page_size=1),
    "one_page": CacheCase(T=5, D=128, page_size=64, layout="HND"),
    "heads_first": CacheCase(H=2, page_size=3, layout="HND", by_layer=True),
    "windows": CacheCase(H=2, window=7, slots_dtype="int32", lens_dtype="int64"),
    "one_window": CacheCase(
        dtype="float32", cache_dtype="float16", T=70, D=128, page_size=16, window=70
    ),
    "e4m3": CacheCase(cache_dtype="float8_e4m3fn", scaled="kv", H=2, page_size=4, window=3),
    "e4m3_heads_first": CacheCase(
        dtype="float16",
        cache_dtype="float8_e4m3fn",
        scaled="k",
        T=67,
        D=128,
        R=64,
        page_size=5,
        layout="HND",
        by_layer=True,
        slots_dtype="int32",
    ),
    "e5m2": CacheCase(cache_dtype="float8_e5m2", scaled="v", H=2, by_layer=True),
    "e5m2_without_scales": CacheCase(
        dtype="float32", cache_dtype="float8_e5m2", H=2, page_size=2, positions_dtype="int64"
    ),
    "float32_pages": CacheCase(cache_dtype="float32", H=2, D=80, page_size=7),
    "partial_rotary": CacheCase(dtype="float32", H=4, D=96, R=32, page_size=6, layout="HND"),
    "eps_zero": CacheCase(cache_dtype="float8_e4m3fn", H=2, eps=(0.0,)),
    "head_dim_6": CacheCase(cache_dtype="float8_e4m3fn", scaled="kv", D=6, pallas=False),
    "head_dim_20": CacheCase(D=20, R=10, page_size=6, layout="HND", pallas=False),
    "three_float8_heads_of_64": CacheCase(cache_dtype="float8_e5m2", pallas=False),
}


def to_framework(array, framework):
    """A NumPy array as one of `framework`, with the same bits, where its kernels run."""
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(array)
    import torch

    dtype = array.dtype.name
    tensor = torch.from_numpy(array.view(BITS.get(dtype, array.dtype)).copy())
    tensor = tensor.view(getattr(torch, dtype)) if dtype in BITS else tensor
    return tensor.cuda() if torch.cuda.is_available() else tensor


def to_numpy(array):
    """An array of either framework as NumPy, with the same bits."""
    if type(array).__module__.partition(".")[0] != "torch":
        return np.asarray(array)
    import torch

    array = array.detach().cpu()
    dtype = str(array.dtype).removeprefix("torch.")
    if dtype in BITS:
        bits = getattr(torch, np.dtype(BITS[dtype]).name)
        return array.view(bits).numpy().view(CACHE_DTYPES[dtype])
    return array.numpy()


def lay(problem, framework):
    """All of its arrays as those of `framework`."""
    return {
        name: to_framework(value, framework) if isinstance(value, np.ndarray) else value
        for name, value in problem.items()
    }


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


def to_stack(cache):
    """A cache as one NumPy array, also where it is a sequence of one array a layer."""
    if isinstance(cache, list | tuple):
        return np.stack([to_numpy(layer) for layer in cache])
    return to_numpy(cache)


def assert_cache_right(problem, k_cache, v_cache):
    """K within the bound of the reference, V bit for bit, and nothing else has changed.

    `problem` has the caches as they were, stacked; k_cache and v_cache may be one array a layer.
    Returns K's worst error.
    """
    k, v = map(to_stack, (k_cache, v_cache))
    before, dtype = problem["k_cache"], problem["k_cache"].dtype
    assert k.dtype == v.dtype == dtype
    assert k.shape == v.shape == before.shape
    exact, exact_v = fkv.reference.write_cache(**problem)
    inputs = ("kv", "k_norm_weight", "eps", "cos_sin_cache", "positions")
    bound = fkv.reference.error_bound(
        **{name: problem[name] for name in inputs}, dtype=dtype.name, k_scale=problem.get("k_scale")
    )
    where = {name: problem.get(name) for name in ("slot_mapping", "commit_lens", "layout")}
    nowhere = np.zeros(k.shape)
    written = fkv.reference.place(np.ones(bound.shape), nowhere, **where) > 0
    bound = fkv.reference.place(bound, nowhere, **where)
    worst = fkv.reference.worst_error(k[written], exact[written], bound[written])
    assert worst <= 1, f"K is wrong: its worst error is {worst:.4g} times the bound"
    bits = f"u{dtype.itemsize}"
    same = v.view(bits) == exact_v.view(bits)
    assert same[written].all(), f"V is wrong: {np.count_nonzero(~same[written])} elements differ"
    for name, after in (("k_cache", k), ("v_cache", v)):
        same = (after.view(bits) == problem[name].view(bits)) | written
        assert same.all(), f"{name} is wrong: {np.count_nonzero(~same)} elements beside the slots"
    return worst
