"""What the tests on a GPU measure with."""

import contextlib
import gc
import warnings

import torch

MiB = 2**20


@contextlib.contextmanager
def without_waiting():
    """Inside, anything that waits for the device is an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def peak_bytes(function):
    """The most memory that was allocated beyond what is allocated now, while the function ran."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
