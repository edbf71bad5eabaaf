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

from cases import CASES  # noqa: E402
from fkv._spec import Layout, Strides, make_spec  # noqa: E402
from fkv.triton import _launch  # noqa: E402
from fkv.triton._kernel import materialize_kernel  # noqa: E402

TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compile_case(name, dtype, ones=()):
    """`ones` are the arguments that equal 1 and so become constants."""
    problem = CASES[name].make(dtype)
    layouts = [Layout(a.shape, None, str(a.dtype), "cuda:0") for a in problem.values()]
    spec = make_spec("torch", [*layouts, None, None])
    constants = _launch.constants(spec, _launch.choose_tiles(spec, False), False)
    pointers = [layout.dtype for layout in spec.layouts[:5]] + [spec.dtype] * 2
    integers = {"total_ctx": None, "table_rows": None} | spec.strides._asdict()
    arguments = list(materialize_kernel.arg_names)
    signature, attributes = {}, {}
    for index, argument in enumerate(arguments):
        if index < len(pointers):
            signature[argument] = f"*{TYPES[pointers[index]]}"
            attributes[index,] = [["tt.divisibility", 16]]
        elif argument in constants:
            signature[argument] = "constexpr"
        else:
            value = list(integers.values())[index - len(pointers)]
            if value == 1 or argument in ones:
                signature[argument], constants[argument] = "constexpr", 1
            else:
                signature[argument] = "i32"
                if value is not None and value % 16 == 0:
                    attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(materialize_kernel, signature, constants, attributes)
    options = {"num_warps": _launch.choose_tiles(spec, False).num_warps}
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
    assert Strides._fields == tuple(
        name.removeprefix("stride_")
        for name in materialize_kernel.arg_names
        if name.startswith("stride_")
    )
    print(json.dumps([report(*job) for job in json.load(sys.stdin)]))
