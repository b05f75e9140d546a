"""Optimisers by name: torch's, bitsandbytes' 8-bit AdamW, and Muon with AdamW for all but the hidden matrices."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from strop._install import missing
from strop.config import OptimConfig

FUSED_ON = ("cuda", "cpu")  # one pass over weights, gradients and moments, in place
Groups = list[dict[str, Any]]
MakeOptimizer = Callable[[Groups], torch.optim.Optimizer]


def make_optimizer(
    module: torch.nn.Module, config: OptimConfig, make: MakeOptimizer | None = None
) -> torch.optim.Optimizer:
    """Return the optimiser that the config names, or the one that `make` returns for the parameter groups.

    The schedule sets the learning rate of both. Parameters of fewer than two dimensions (norms, biases) get no weight
    decay.
    """
    params = [param for param in module.parameters() if param.requires_grad]
    if not params:
        raise ValueError("model must have parameters that require a gradient, found none")
    matrices = [param for param in params if param.ndim >= 2]
    others = [param for param in params if param.ndim < 2]
    groups = [
        {"params": group, "weight_decay": decay}
        for group, decay in ((matrices, config.weight_decay), (others, 0.0))
        if group
    ]
    if make is not None and not callable(make):
        raise TypeError(f"optimizer must make one of parameter groups, as torch.optim.SGD does, found {make!r:.60}")
    optimizer = named_optimizer(module, groups, config) if make is None else make(groups)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must return a torch.optim.Optimizer, found {type(optimizer).__name__}")
    if config.offload_optimizer and all(param.device.type == "cpu" for param in params):
        warnings.warn("offload_optimizer has no effect: the model is in the host's memory already", stacklevel=3)
    elif config.offload_optimizer:
        keep_on_host(optimizer)
    return optimizer


def named_optimizer(module: torch.nn.Module, groups: Groups, config: OptimConfig) -> torch.optim.Optimizer:
    """Return the optimiser that `config.optimizer` names, over these groups of the module's parameters."""
    name, learning_rate = config.optimizer, config.learning_rate
    adam: dict[str, Any] = {"lr": learning_rate, "betas": config.betas, "eps": config.eps}
    if name == "sgd":
        return torch.optim.SGD(groups, lr=learning_rate)
    if name == "adafactor":
        return torch.optim.Adafactor(groups, lr=learning_rate)
    if name in ("adamw8bit", "paged_adamw8bit"):
        return _adamw_of_8_bits(groups, adam, paged=name == "paged_adamw8bit")
    adam["fused"] = True if _is_fusable(groups) else None  # None, not False: torch then chooses the next best
    return Muon(module, groups, learning_rate, adam) if name == "muon" else torch.optim.AdamW(groups, **adam)


def keep_on_host(optimizer: torch.optim.Optimizer, part_bytes: int = 2**28) -> None:
    """Keep the optimiser's states in host memory.

    A step handles `part_bytes` of parameters at a time: it copies their states to the device, updates them and copies
    the states back. The result is the same as that of one step for all parameters.
    """
    step_all = optimizer.step
    homes: dict[tuple[int, str], torch.Tensor] = {}  # pinned buffers, for asynchronous copies

    def to_host(param: torch.Tensor) -> None:
        for name, value in optimizer.state.get(param, {}).items():
            if type(value) is torch.Tensor and value.is_cuda:
                home = homes.get((id(param), name))
                if home is None or home.shape != value.shape:
                    home = homes[id(param), name] = torch.empty_like(value, device="cpu", pin_memory=True)
                optimizer.state[param][name] = home.copy_(value, non_blocking=True)
            elif isinstance(value, torch.Tensor):  # a tensor subclass, such as a sharded one
                optimizer.state[param][name] = value.to("cpu")

    def to_device(param: torch.Tensor) -> None:
        for name, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                optimizer.state[param][name] = value.to(param.device, non_blocking=True)

    def step_in_parts(closure: None = None) -> None:
        groups = optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = []
            for group, params in zip(groups, whole, strict=True):
                for part in _parts(params, part_bytes):
                    group["params"] = part
                    for param in part:
                        to_device(param)
                    step_all()
                    for param in part:
                        to_host(param)
                group["params"] = []
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
        if any(param.is_cuda for params in whole for param in params):
            torch.cuda.synchronize()

    optimizer.step = step_in_parts  # type: ignore[method-assign, assignment]


def _parts(params: Sequence[torch.Tensor], part_bytes: int) -> Iterator[list[torch.Tensor]]:
    part: list[torch.Tensor] = []
    for param in params:
        if part and sum(one.nbytes for one in (*part, param)) > part_bytes:
            yield part
            part = []
        part.append(param)
    if part:
        yield part


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon for hidden matrices and torch.optim.AdamW for the rest: embeddings, head, norms, biases.

    Both have the same learning rate: Muon's updates are scaled to the RMS of AdamW's (match_rms_adamw).
    """

    def __init__(self, module: torch.nn.Module, groups: Groups, learning_rate: float, adam: dict[str, Any]) -> None:
        hidden = hidden_matrices(module)
        for_muon = _split(groups, lambda param: id(param) in hidden)
        for_adam = _split(groups, lambda param: id(param) not in hidden)
        self.parts: list[torch.optim.Optimizer] = []
        if for_muon:
            self.parts.append(torch.optim.Muon(for_muon, lr=learning_rate, adjust_lr_fn="match_rms_adamw"))
        if for_adam:
            self.parts.append(torch.optim.AdamW(for_adam, **adam))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:  # share one state dict, which checkpoints read and fill; the groups are shared already
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def hidden_matrices(module: torch.nn.Module) -> set[int]:
    """Return the ids of the matrices between embedding and head."""
    own = [getattr(module, name, lambda: None)() for name in ("get_input_embeddings", "get_output_embeddings")]
    tables = [
        part for part in module.modules() if isinstance(part, torch.nn.Embedding) or any(part is one for one in own)
    ]
    outside = {id(param) for part in tables for param in part.parameters()}
    return {id(param) for param in module.parameters() if param.ndim == 2 and id(param) not in outside}


def _split(groups: Groups, wanted: Any) -> Groups:
    parts = [{**group, "params": [param for param in group["params"] if wanted(param)]} for group in groups]
    return [part for part in parts if part["params"]]


def _is_fusable(groups: Sequence[dict[str, Any]]) -> bool:
    params = [param for group in groups for param in group["params"]]
    return all(param.is_floating_point() and param.device.type in FUSED_ON for param in params)


def _adamw_of_8_bits(groups: Groups, adam: dict[str, Any], *, paged: bool) -> torch.optim.Optimizer:
    """Return bitsandbytes' 8-bit AdamW. Parameters of fewer than 4,096 elements keep 32-bit moments."""
    name = "paged_adamw8bit" if paged else "adamw8bit"
    try:
        import bitsandbytes
    except ImportError:
        raise missing(f'optimizer="{name}"', "bitsandbytes", "quantize") from None
    if paged and not all(param.is_cuda for group in groups for param in group["params"]):
        raise ValueError('optimizer must be "adamw8bit" without CUDA, which pages memory, found "paged_adamw8bit"')
    return (bitsandbytes.optim.PagedAdamW8bit if paged else bitsandbytes.optim.AdamW8bit)(groups, **adam)
