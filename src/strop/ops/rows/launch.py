"""Triton kernels with a fast launch.

Triton specialises a kernel on the values of its arguments (divisible by 16, equal to 1). It therefore inspects every
argument of every launch, which takes longer than the launch itself. These kernels declare their integer types and their
alignment themselves, so they gain nothing from this. Each is compiled once per set of dtypes and constants, and the
compiled kernel is launched directly, without Triton's launch hooks. Pointers are passed as integers: for a tensor,
Triton would ask the driver whether the kernel can access it. Small operators then take two thirds of the time.

Kernels on rows that begin on multiples of 16 bytes are `@aligned`: Triton then moves 16 bytes at a time.
`tl.multiple_of` has no effect on a pointer argument, only on a sum of a pointer and an offset.

The direct launch uses Triton's private interface. Triton 3.6 to 3.9 make it with the same line of code. If that line is
different, kernels are launched through the public interface, with a warning.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import triton

_NO_HOOKS = (None, None, None)  # launch metadata, enter hook, exit hook
_TRITONS_OWN = """kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,
    knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())"""


@functools.cache
def launch_is_known() -> bool:
    """Return whether this version of Triton launches compiled kernels as `Launcher` does."""
    try:
        source = inspect.getsource(triton.JITFunction.run)
    except OSError:  # installed without its sources
        source = ""
    if " ".join(_TRITONS_OWN.split()) in " ".join(source.split()):
        return True
    warnings.warn(f"Triton {triton.__version__} launches kernels in a way that strop does not know: "
                  f"small operators take half as long again", RuntimeWarning, stacklevel=3)  # fmt: skip
    return False


class Launcher:
    """A kernel, called as `kernel(programs, *arguments, num_warps=…, **constants)`.

    Pointers come first, then numbers. Constants are the parameters annotated constexpr.

    aligned   compile a second kernel for the case that all pointers are multiples of 16 bytes
    """

    def __init__(self, function: Callable[..., None], aligned: bool = False) -> None:
        parameters = inspect.signature(function).parameters
        names = list(parameters)
        pointers = [name for name in names if name.endswith("_ptr")]
        assert names[: len(pointers)] == pointers, "their dtypes are looked at, and only theirs"
        self.num_pointers = len(pointers)
        self.constants = [name for name in names if "constexpr" in str(parameters[name].annotation)]
        numbers = [name for name in names if name not in pointers and name not in self.constants]
        self.jitted = triton.jit(do_not_specialize=numbers, do_not_specialize_on_alignment=pointers)(function)
        self.aligned: Any = triton.jit(do_not_specialize=numbers)(function) if aligned else None
        self.interpreted = not isinstance(self.jitted, triton.JITFunction)
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __call__(self, programs: int, *arguments: Any, num_warps: int = 4, **constants: object) -> None:
        device = arguments[0].device.index
        if not self.interpreted and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):  # Triton launches on the current device, not on that of the tensors
                return self(programs, *arguments, num_warps=num_warps, **constants)
        pointers, numbers = arguments[: self.num_pointers], arguments[self.num_pointers :]
        dtypes, addresses = [pointer.dtype for pointer in pointers], [pointer.data_ptr() for pointer in pointers]
        aligned = self.aligned is not None and not any(address % 16 for address in addresses)
        key = (device, num_warps, aligned, *dtypes, *constants.values())
        compiled = self._compiled.get(key)
        if compiled is None or self.interpreted or not launch_is_known():
            assert list(constants) == self.constants, "in the kernel's order, for they are passed on by position"
            # ask for fused multiply-add explicitly: Triton 3.9 warns otherwise, 3.10 would turn it off
            options = {} if self.interpreted else {"enable_fp_fusion": True}
            jitted = self.aligned if aligned else self.jitted
            self._compiled[key] = jitted[(programs,)](*arguments, num_warps=num_warps, **options, **constants)
        else:
            stream = torch._C._cuda_getCurrentRawStream(device)
            compiled.run(
                programs, 1, 1, stream, compiled.function, compiled.packed_metadata, *_NO_HOOKS,
                *addresses, *numbers, *constants.values(),
            )  # fmt: skip
        return None


aligned = functools.partial(Launcher, aligned=True)
