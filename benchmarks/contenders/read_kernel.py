"""A kernel that reads memory once and does next to nothing else: the floor of every forward over logits."""

import torch
import triton
import triton.language as tl

_BLOCK = 8192  # eight 16-byte loads in flight for each of 256 threads


@triton.jit
def read_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0)
    tl.store(out_ptr + program, tl.max(x, 0))


def read_once(tensor: torch.Tensor) -> torch.Tensor:
    """The largest 32-bit word of every block: nothing of the tensor can be left unread."""
    words = tensor.detach().view(-1).view(torch.int32)
    programs = triton.cdiv(words.numel(), _BLOCK)
    out = words.new_empty(programs)
    read_kernel[(programs,)](words, out, words.numel(), BLOCK=_BLOCK, num_warps=8)
    return out
