"""Kernels that are launched quickly.

Triton specialises a kernel on its arguments' values (divisible by 16, equal to 1) and therefore looks at every argument of
every launch, which takes longer than the launch. These kernels state their integers' types and their own alignment and
gain nothing from it: each is compiled once for a set of dtypes and constants, and what was compiled is launched directly.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton


class Launcher:
    """`kernel(programs, *arguments, num_warps=…, **constants)`; constants are the parameters annotated constexpr."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters
        names = list(parameters)
        pointers = [name for name in names if name.endswith("_ptr")]
        self.constants = [name for name in names if "constexpr" in str(parameters[name].annotation)]
        self.jitted = triton.jit(
            do_not_specialize=[name for name in names if name not in pointers and name not in self.constants],
            do_not_specialize_on_alignment=pointers,
        )(function)
        self.interpreted = not isinstance(self.jitted, triton.JITFunction)
        self._compiled: dict[Any, Any] = {}

    def __call__(self, programs: int, *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
        device = arguments[0].device
        if not self.interpreted and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):  # Triton launches on the current device, wherever the tensors are
                return self(programs, *arguments, num_warps=num_warps, **constants)
        dtypes = [argument.dtype for argument in arguments if isinstance(argument, torch.Tensor)]
        key = (device, num_warps, *dtypes, *constants.items())
        compiled = self._compiled.get(key)
        if compiled is None or self.interpreted:
            assert list(constants) == self.constants, "in the kernel's order, for they are passed on by position"
            # fused multiply-add is asked for: Triton 3.9 warns where it is not, 3.10 would leave it out
            options = {} if self.interpreted else {"enable_fp_fusion": True}
            self._compiled[key] = self.jitted[(programs,)](*arguments, num_warps=num_warps, **options, **constants)
        else:
            compiled[(programs, 1, 1)](*arguments, *constants.values())
        return None
