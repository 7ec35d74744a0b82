"""Compiles the adapters' kernels for a Hopper GPU with none at hand; run as a module, in a process of its own.

The interpreter lets pass what the compiler refuses, such as a name whose shape changes in a loop.
"""

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda *_: (9, 0)

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from model.kernels import lora, lora_expand, lora_shrink  # noqa: E402
from model.lora_adapter import ModuleSizes  # noqa: E402
from model.lora_stacks import LoraLayer  # noqa: E402

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32"}
OPTIONS = ("num_warps", "num_stages", "launch_pdl")
MAX_LORAS = 5


class Compiler:
    """Stands for a kernel: a launch compiles it for the arguments and notes how often it waits for the one before."""

    def __init__(self, kernel: Any, waits: dict[str, list[int]]) -> None:
        self._kernel, self._waits = kernel, waits.setdefault(kernel.__name__, [])

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            names = self._kernel.arg_names
            values = dict(zip(names, arguments, strict=False))
            signature = dict.fromkeys(names, "constexpr")
            signature |= {name: TYPES[v.dtype] if torch.is_tensor(v) else "i32" for name, v in values.items()}
            source = ASTSource(
                self._kernel,
                signature,
                {(names.index(name),): value for name, value in named.items() if name in names},
                {(names.index(name),): [["tt.divisibility", 16]] for name, v in values.items() if torch.is_tensor(v)},
            )
            options = {name: named[name] for name in OPTIONS if name in named}
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            self._waits.append(compiled.asm["ptx"].count("griddepcontrol.wait"))

        return launch


def compile_all(max_rank: int, num_tokens: int, dtype: torch.dtype) -> None:
    """One layer's four launches, on tensors without memory."""
    sizes = ModuleSizes(hidden=4096, q=4096, kv=1024, inner=14336)

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    layer = LoraLayer(
        empty(MAX_LORAS, 5 * max_rank, sizes.hidden),
        empty(MAX_LORAS, sum(sizes.inputs), max_rank),
        empty(MAX_LORAS, max_rank, sum(sizes.outputs)),
        empty(MAX_LORAS, sizes.hidden, 2 * max_rank),
    )
    ints = empty(MAX_LORAS, 7, dtype=torch.int32)
    stacks = SimpleNamespace(max_rank=max_rank, max_loras=MAX_LORAS, sizes=sizes, ranks=ints, layers=[layer])
    data: Any = SimpleNamespace(token_slots=ints, token_order=ints, segment_starts=ints, stacks=stacks)
    lora.add_lora_input(empty(num_tokens, sizes.hidden), empty(num_tokens, sum(sizes.inputs)), data, 0)
    lora.add_lora_output(empty(num_tokens, sum(sizes.outputs)), empty(num_tokens, sizes.hidden), data, 0)


def main() -> None:
    """Prints, as JSON, by kernel how often each variant waits."""
    waits: dict[str, list[int]] = {}
    for module in (lora_shrink, lora_expand):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, Compiler(getattr(module, name), waits))
    for max_rank, num_tokens, dtype in ((16, 1, torch.bfloat16), (24, 64, torch.bfloat16), (16, 600, torch.bfloat16)):
        compile_all(max_rank, num_tokens, dtype)
    compile_all(24, 1, torch.float32)
    sys.stdout.write(json.dumps(waits))


if __name__ == "__main__":
    main()
