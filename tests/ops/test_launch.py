"""Launches of compiled kernels, without a GPU: what is compiled again, and what a second launch is given."""

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel

from strop.ops.rows import launch
from strop.ops.rows.launch import Launcher


def kernel(x_ptr, y_ptr, n: tl.int32, ODD: tl.constexpr, BLOCK: tl.constexpr):
    pass


class Compiled:
    """As Triton's: what a launch needs is there once `run` was asked for."""

    function, packed_metadata = None, "metadata"

    def __init__(self):
        self.launches = []

    @property
    def run(self):
        self.function = "function"
        return lambda *given: self.launches.append(given)


class Jitted:
    """What was compiled, for which arguments and options."""

    def __init__(self):
        self.compiled = []

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, **options):
            found = Compiled()
            self.compiled.append((grid, arguments, options, found))
            return found

        return compile_and_launch


@pytest.fixture
def launcher(monkeypatch):
    found = Launcher(kernel)
    found.interpreted, found.jitted = False, Jitted()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the index of the CPU's tensors
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    return found


def test_the_second_launch_gets_the_arguments_of_tritons(launcher):
    x, y = torch.zeros(3), torch.zeros(3)
    launcher(5, x, y, 3, ODD=True, BLOCK=8)
    launcher(7, y, x, 9, ODD=True, BLOCK=8)
    ((grid, arguments, options, compiled),) = launcher.jitted.compiled
    assert (grid, arguments) == ((5,), (x, y, 3))
    assert options == {"num_warps": 4, "enable_fp_fusion": True, "ODD": True, "BLOCK": 8}
    hooks = None, None, None
    pointers = y.data_ptr(), x.data_ptr()
    assert compiled.launches == [(7, 1, 1, "stream", "function", "metadata", *hooks, *pointers, 9, True, 8)]


def test_compiled_anew_for_other_dtypes_constants_and_warps(launcher):
    x = torch.zeros(3)
    launcher(1, x, x, 3, ODD=True, BLOCK=8)
    for others in ((x.half(), x), (x, x.long())):
        launcher(1, *others, 3, ODD=True, BLOCK=8)
    launcher(1, x, x, 3, ODD=False, BLOCK=8)
    launcher(1, x, x, 3, ODD=True, BLOCK=16)
    launcher(1, x, x, 3, ODD=True, BLOCK=8, num_warps=8)
    assert len(launcher.jitted.compiled) == 6
    launcher(1, x, x, 4, ODD=True, BLOCK=8)  # a number is no reason
    assert len(launcher.jitted.compiled) == 6


def test_unaligned_pointers_get_another_kernel(launcher):
    """Triton may move 16 bytes at a time in the one, and must not in the other."""
    launcher.aligned = Jitted()
    x = torch.zeros(9)
    launcher(1, x, x[4:], 3, ODD=True, BLOCK=8)
    launcher(1, x[4:], x, 3, ODD=True, BLOCK=8)
    assert (len(launcher.aligned.compiled), len(launcher.jitted.compiled)) == (1, 0)
    for unaligned in ((x, x[1:]), (x[3:], x), (x[1:], x[2:])):
        launcher(1, *unaligned, 3, ODD=True, BLOCK=8)
    assert (len(launcher.aligned.compiled), len(launcher.jitted.compiled)) == (1, 1)
    assert launch.aligned(kernel).aligned is not None


def test_kernels_of_another_form_are_refused(launcher):
    def pointer_last(n: tl.int32, x_ptr):
        pass

    with pytest.raises(AssertionError, match="their dtypes"):
        Launcher(pointer_last)
    with pytest.raises(AssertionError, match="in the kernel's order"):
        launcher(1, torch.zeros(3), torch.zeros(3), 3, BLOCK=8, ODD=True)


def test_an_unknown_triton_is_launched_by_its_public_interface(launcher, monkeypatch):
    """Another Triton may launch in another way: then every launch is Triton's own, and that is said once."""

    def run(self, *args, grid, **kwargs):
        kernel.run(grid, *args)

    monkeypatch.setattr(triton.JITFunction, "run", run)
    launch.launch_is_known.cache_clear()
    x = torch.zeros(3)
    try:
        with pytest.warns(
            RuntimeWarning, match=r"Triton \d.* launches kernels in a way that strop does not know"
        ) as said:
            [launcher(programs, x, x, 3, ODD=True, BLOCK=8) for programs in (5, 7, 9)]
    finally:
        launch.launch_is_known.cache_clear()
    assert len(said) == 1
    assert [grid for grid, *_ in launcher.jitted.compiled] == [(5,), (7,), (9,)]
    assert not any(compiled.launches for *_, compiled in launcher.jitted.compiled)


def test_the_launcher_fits_tritons_compiled_kernel():
    """A property that loads the kernel where that has not been done, called as Triton itself calls it."""
    assert launch.launch_is_known()
    assert isinstance(CompiledKernel.run, property)
    assert isinstance(triton.jit(kernel), triton.JITFunction) != Launcher(kernel).interpreted
