"""Compile the Triton kernel for sm_90, GPU or not, and report on what the compiler made of it.

Run by test_offline.py in a process of its own, as this process may hold Triton's interpreter.
Reads a list of [case, dtype] as JSON on standard input, and prints a list of reports.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

torch.cuda.is_available = lambda: True  # fkv.triton asks for the interpreter where there is no GPU

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from cases import CACHE_CASES, CASES  # noqa: E402
from fkv._spec import (  # noqa: E402
    MATERIALIZE,
    Layout,
    Strides,
    cache_arguments,
    make_cache_spec,
    make_spec,
)
from fkv.triton import _launch  # noqa: E402
from fkv.triton._kernel import materialize_kernel  # noqa: E402

TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64"}
TYPES |= {"float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}
NOT_SPECIALIZED = ("total_ctx", "table_rows", "num_slots")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def spec_of(name, dtype):
    """Of a line of CASES; without a dtype, of CACHE_CASES."""
    problem = CASES[name].make(dtype) if dtype else CACHE_CASES[name].make()
    layout = problem.pop("layout", None)
    layouts = {n: Layout(a.shape, None, str(a.dtype), "cuda:0") for n, a in problem.items()}
    if layout is None:
        return make_spec("torch", [layouts.get(n) for n in MATERIALIZE.names])
    arguments = cache_arguments(None, None)
    return make_cache_spec("torch", arguments, [layouts.get(n) for n in arguments.names], layout)


def compile_case(name, dtype, ones=()):
    """`ones` are the arguments that equal 1 and so become constants."""
    spec = spec_of(name, dtype)
    tiles = _launch.choose_tiles(spec, False)
    constants = _launch.constants(spec, tiles, False)
    pointers = [layout and layout.dtype for layout in spec.layouts]
    if spec.cache is None:
        pointers = [*pointers[:5], spec.dtype, spec.dtype, *_launch.NO_CACHE]
    else:
        pointers = [*pointers[:5], *pointers[9:], *pointers[5:9]]
    values = [spec.total_ctx, spec.table_rows, *spec.strides, *_launch.cache_arguments(spec)]
    pointers, values = iter(pointers), iter(values)
    signature, attributes = {}, {}
    for index, argument in enumerate(materialize_kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_ptr"):
            pointee = next(pointers)
            if pointee is None:
                signature[argument], constants[argument] = "constexpr", None
            else:
                signature[argument] = f"*{TYPES[pointee]}"
                attributes[index,] = [["tt.divisibility", 16]]
        else:
            value = next(values)
            if argument in NOT_SPECIALIZED:
                signature[argument] = "i32"
            elif value == 1 or argument in ones:
                signature[argument], constants[argument] = "constexpr", 1
            else:
                signature[argument] = "i32"
                if value % 16 == 0:
                    attributes[index,] = [["tt.divisibility", 16]]
    assert not [*pointers, *values]
    source = ASTSource(materialize_kernel, signature, constants, attributes)
    options = {"num_warps": tiles.num_warps}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def report(name, dtype, ones=()):
    compiled = compile_case(name, dtype, ones)
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [TOOLS / "cuobjdump", "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    resources = dict(re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage))
    return {
        "loads": sorted(_widths(ptx, "ld")),
        "stores": sorted(_widths(ptx, "st")),
        "resources": {key: int(value) for key, value in resources.items()},
    }


def _widths(ptx, operation):
    """Bytes of each global access."""
    for vector, bits in re.findall(rf"{operation}\.global[\w.:]*?(?:\.v(\d))?\.[bfu](\d+)", ptx):
        yield int(vector or 1) * int(bits) // 8


if __name__ == "__main__":
    strides = [name for name in materialize_kernel.arg_names if name.startswith("stride_")]
    assert [f"stride_{name}" for name in Strides._fields] == strides[: len(Strides._fields)]
    print(json.dumps([report(*job) for job in json.load(sys.stdin)]))
