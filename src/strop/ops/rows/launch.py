"""Kernels that are launched quickly.

Triton specialises a kernel on its arguments' values (divisible by 16, equal to 1) and therefore looks at every argument of
every launch, which takes longer than the launch. These kernels state their integers' types and their own alignment and
gain nothing from it: each is compiled once for a set of dtypes and constants, and what was compiled is launched directly,
past the hooks that Triton calls before and after a launch. Pointers go to it as numbers: of a tensor it would ask the driver
whether a kernel can reach it. Small operators take two thirds of the time that way.

Kernels on rows that begin on multiples of 16 bytes are `@aligned`: Triton then moves 16 bytes at a time. `tl.multiple_of` of a
pointer that is an argument says nothing to it, that of a sum does.

That launch is Triton's private one. Triton 3.6 to 3.9 make it with the same line; where the line is another one, kernels are
launched the public way, and a warning says so.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import triton

_NO_HOOKS = (None, None, None)  # a launch's metadata, what to call before it, what after
_TRITONS_OWN = """kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata,
    knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values())"""


@functools.cache
def launch_is_known() -> bool:
    """Whether Triton launches what it compiled as `Launcher` does."""
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
    """`kernel(programs, *arguments, num_warps=…, **constants)`: pointers first, then numbers; constants are the parameters
    annotated constexpr.

    aligned   pointers are taken to lie on multiples of 16 bytes where they do; where one does not, it is another kernel
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
            with torch.cuda.device(device):  # Triton launches on the current device, wherever the tensors are
                return self(programs, *arguments, num_warps=num_warps, **constants)
        pointers, numbers = arguments[: self.num_pointers], arguments[self.num_pointers :]
        dtypes, addresses = [pointer.dtype for pointer in pointers], [pointer.data_ptr() for pointer in pointers]
        aligned = self.aligned is not None and not any(address % 16 for address in addresses)
        key = (device, num_warps, aligned, *dtypes, *constants.values())
        compiled = self._compiled.get(key)
        if compiled is None or self.interpreted or not launch_is_known():
            assert list(constants) == self.constants, "in the kernel's order, for they are passed on by position"
            # fused multiply-add is asked for: Triton 3.9 warns where it is not, 3.10 would leave it out
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
