"""Compilation of a rollout's kernels: those of a step in parallel, those of long prompts in advance."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from strop.rollout.launch import KernelDecode, compile_only, compile_together, pick
from strop.rollout.sampling import Sampling
from strop.rollout.steps import FusedLayers, heads

LONG_PROMPT = 2**20  # tokens; prompts longer than this use the same kernels


def compile_step(engine: Any, layers: FusedLayers, prompt: torch.Tensor) -> None:
    """Compile the kernels of a step, each in its own thread.

    One after the other takes seconds without a cache on disk.
    """
    round_, rows = engine.begin([prompt], 1, 1, Sampling(max_new_tokens=1), torch.zeros(1, 1), ())
    layer, device = layers.layers[0], engine.device
    logits_NV = torch.zeros(len(rows), len(layers.head.weight_EH), dtype=layers.dtype, device=device)
    attention = KernelDecode(engine.table, rows, engine.shape, engine.parts(rows, round_), engine.tiles_CN)
    qkv = _qkv(engine, rows)
    compile_together(device, [
        lambda: attention.attend_unrotated(*qkv, 0, layer.rule, layer.head_norms, layers.rounds),
        lambda: pick(logits_NV, rows, engine.eos, engine.table, 1.0, False),
        *layers.launches(),
    ])  # fmt: skip
    torch.cuda.synchronize(device)


def compile_long_prompts(engine: Any, rows: Any, round_: Any) -> None:
    """Compile the kernels of long prompts in a background thread, so that the first long prompt does not delay a step.

    The thread only compiles. All memory is allocated here: during graph capture no other thread may allocate on the
    GPU.
    """
    parts = engine.parts(rows, round_, longest=LONG_PROMPT)
    if parts.tile in engine.compiled_tiles:
        return
    engine.compiled_tiles.add(parts.tile)
    later: list[Callable[[], None]] = []

    def put_off(*launch: Any, **constants: Any) -> None:
        later.append(functools.partial(compile_only, *launch, **constants))

    attention = KernelDecode(engine.table, rows, engine.shape, parts, engine.tiles_CN, run=put_off)
    layers, qkv = engine.layers, _qkv(engine, rows)
    for rule in set(engine.rules):
        if isinstance(layers, FusedLayers):
            attention.attend_unrotated(*qkv, 0, rule, layers.layers[0].head_norms, layers.rounds)
        else:
            attention.attend(*qkv, 0, rule)
    engine.compiling = threading.Thread(target=compile_together, args=(engine.device, later))
    engine.compiling.start()


def _qkv(engine: Any, rows: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = engine.shape
    size = shape.num_heads * (shape.per_head + 2) * shape.head_dim
    states_NE = torch.zeros(len(rows), size, dtype=shape.dtype, device=engine.device)
    return heads(states_NE, shape.num_heads, shape.head_dim)
