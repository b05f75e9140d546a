"""Training in several processes, started by torchrun: rank, collective operations and sharded weights.

    torchrun --nproc-per-node 8 -m strop train grpo --config run.yaml --shard full

Every process is given the same batch and takes its share of the rows: whole prompts, whole pairs. Counts of tokens and
sequences are those of the whole batch, so each process computes its share of one loss. Gradients are summed once per
update. Values on the host are exchanged by `gathered` and `concat`. Without torchrun there is one process, and
torch.distributed is not imported. No other file of strop uses it.
"""

import contextlib
import functools
import os
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from strop import process_failures
from strop.process_failures import PeerError

Item = TypeVar("Item")
TOGETHER = 2**27  # number of sharded weights gathered in one call; a larger layer is gathered by itself
BUCKET = 2**26  # bytes of gradients summed in one call


@dataclass(frozen=True)
class World:
    """The rank of this process among `size` processes; `local_rank` is its number on this machine and of its GPU.

    is_first   True for the process that writes logs, progress and the files that only one process writes
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launched: bool = False
    is_first: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_first", self.rank == 0)

    @property
    def device(self) -> torch.device | None:
        """The GPU of this process; None without torchrun, or without GPUs."""
        return torch.device("cuda", self.local_rank) if self.launched and torch.cuda.is_available() else None

    # ---- rows and numbers of the host ----

    def share(self, num_rows: int) -> range:
        """Return the indices of this process's rows: contiguous, so the shares by rank are the rows in order."""
        return range(num_rows * self.rank // self.size, num_rows * (self.rank + 1) // self.size)

    def gathered(self, value: Item) -> list[Item]:
        """Return the values of all processes, by rank."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found = [value] * self.size
        dist.all_gather_object(found, value)
        return found

    def concat(self, items: list[Item]) -> list[Item]:
        """Return the items of all processes in one list, by rank."""
        return [item for items_ in self.gathered(items) for item in items_]

    def total(self, value: float) -> float:
        return sum(self.gathered(value))

    def any(self, value: bool) -> bool:
        return any(self.gathered(bool(value)))

    def wait(self) -> None:
        """Wait until all processes have called this: a barrier."""
        self.gathered(None)

    def together(self, call: Callable[[], Item], raises: type[Exception] | None = None) -> Item:
        """Return the result of `call` once it has returned in every process. If it fails in one process, raise in all.

        raises   the type of error to raise where it did not fail; None is PeerError
        """
        if self.size == 1:
            return call()
        try:
            found, error = call(), None
        except Exception as failure:
            error = failure
        told = [text for text in self.gathered(error and str(error)) if text is not None]
        if error is not None:
            raise error
        if told:
            raise (raises or PeerError)(told[0])
        return found

    def from_first(self, call: Callable[[], Item]) -> Item:
        """Call `call` in the first process only, and return its result in all processes."""
        if self.size == 1:
            return call()
        found = self.together(lambda: [call()] if self.is_first else [])
        return self.gathered(found)[0][0]

    def check_same(self, values: Mapping[str, object]) -> None:
        """Raise in every process if any of these named values differs between processes."""
        if self.size == 1:
            return
        first, *others = self.gathered(dict(values))
        for rank, own in enumerate(others, 1):
            if apart := sorted(name for name in first.keys() | own.keys() if first.get(name) != own.get(name)):
                name = apart[0]
                found = f"{first.get(name)!s:.60} in process 0 and {own.get(name)!s:.60} in process {rank}"
                wanted = "the same in every process, which takes its share by itself"
                raise ValueError(f"{name} must be {wanted}, found {found}")

    # ---- tensors ----

    def summed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum the tensor over the processes in place, and return it."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor)
        return tensor

    def make_same(self, module: nn.Module) -> None:
        """Copy the first process's weights to all processes. Randomly initialised ones would differ otherwise."""
        if self.size == 1:
            return
        import torch.distributed as dist

        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                dist.broadcast(tensor.detach(), 0)

    def sum_gradients(self, params: Sequence[nn.Parameter]) -> None:
        """Sum every gradient over the processes. A missing gradient counts as 0 if another process has one."""
        if self.size == 1:
            return
        import torch.distributed as dist

        has_P = torch.tensor([param.grad is not None for param in params], dtype=torch.uint8)
        dist.all_reduce(has_P, dist.ReduceOp.MAX)
        some = [param for param, has in zip(params, has_P.tolist(), strict=True) if has]
        for param in some:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        for bucket in _buckets([param.grad for param in some if param.grad is not None]):
            flat = torch.cat([grad.flatten() for grad in bucket])
            dist.all_reduce(flat)
            for grad, part in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(part.view_as(grad))


def _buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield groups of consecutive tensors of one dtype, of about BUCKET bytes each."""
    bucket: list[torch.Tensor] = []
    for tensor in tensors:
        if bucket and (bucket[0].dtype != tensor.dtype or sum(one.nbytes for one in bucket) >= BUCKET):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


ALONE = World()


@functools.cache
def world() -> World:
    """Return the World of the processes that torchrun started, after connecting them; ALONE without torchrun."""
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK"
    if "TORCHELASTIC_RUN_ID" not in os.environ and os.environ.get("WORLD_SIZE", "1") == "1":
        return ALONE
    if missing := [name for name in names if not os.environ.get(name, "").isdecimal()]:
        raise ValueError(f"{missing[0]} must be set as torchrun sets it where WORLD_SIZE is, found none; use torchrun")
    import torch.distributed as dist

    rank, size, local_rank = (int(os.environ[name]) for name in names)
    found = World(rank, size, local_rank, launched=True)
    if found.device is not None:
        torch.cuda.set_device(found.device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if found.device is not None else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=process_failures.timeout()))
    if size > 1:
        where: list[tuple[str | None, int]] = found.gathered((os.environ.get("GROUP_RANK"), os.getpid()))
        store = cast(process_failures.Store, dist.distributed_c10d._get_default_store())
        process_failures.watch_others(rank, where, store)
    return found


# ---- checkpoints ----


def save_tensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write tensors, whole or sharded, to one folder. Each process writes its shards and a part of the whole tensors.

    A process may have tensors that others do not have. If one process fails, all raise an OSError.
    """
    import torch.distributed.checkpoint as dcp

    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _as_oserror(folder, "written"):
        dcp.save(dict(tensors), storage_writer=writer)


def load_tensors(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Fill these tensors from the folder's safetensors files, in each process independently. No pickle is read."""
    import torch.distributed.checkpoint as dcp

    with _as_oserror(folder, "read"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns about no_dist=True
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)


Shard = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # offsets, shape and dtype


def shards_in(folder: Path) -> dict[str, list[Shard]]:
    """Return the shards of every tensor in the folder, sorted by offset, as its files state them, without checks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    about = dcp.HuggingFaceStorageReader(str(folder)).read_metadata()
    found: dict[str, list[Shard]] = {}
    for name, tensor in cast(dict[str, TensorStorageMetadata], about.state_dict_metadata).items():
        dtypes = [about.storage_data[MetadataIndex(name, part.offsets)].dtype for part in tensor.chunks]
        places = [(tuple(part.offsets), tuple(part.sizes)) for part in tensor.chunks]
        found[name] = sorted(
            ((*place, dtype) for place, dtype in zip(places, dtypes, strict=True)), key=lambda s: s[:2]
        )
    return found


@contextlib.contextmanager
def _as_oserror(folder: Path, what: str) -> Iterator[None]:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:  # a BaseException in torch, with the errors by rank
        rank, (cause, *_) = next(iter(error.failures.items()))
        raise OSError(f"{folder} could not be {what}: process {rank}: {type(cause).__name__}: {cause}") from None


def put(target: torch.Tensor, full: torch.Tensor) -> None:
    """Copy a whole tensor into `target`. If that is sharded, each process copies its own shard."""
    if hasattr(target, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        full = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)  # type: ignore[attr-defined]
    with torch.no_grad():
        target.copy_(full)


# ---- weights in shards ----


class Shards:
    """A model whose parameters are sharded over the processes (FSDP2). They are whole only while a layer computes.

    dtype   of layers' computations and of gathered weights; gradients are then summed in float32. None keeps all dtypes
    """

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module], dtype: torch.dtype | None = None):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        # FSDP warns of in-place changes of views, which do not occur here
        warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
        self.module = module
        self.twin = _without_weights(module)
        self.dtype = dtype
        self.are_whole = False  # True during `read`
        self._copied: dict[int, Any] = {}  # part → the twin's weights, and the gathered weights to copy from
        self._places = _places(self.twin)
        reduced = None if dtype is None else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=False)
        self._parts = _apart(module, [*_together(layers), [module]])
        for modules, _ in self._parts:
            fully_shard(modules, mp_policy=policy)
            part: Any = modules[0]
            part.set_gradient_divide_factor(1.0)  # sum, not mean: each process has its share of one loss
            part.set_force_sum_reduction_for_comms(True)
        # registered as a forward method of FSDP, so that embedding and head are whole inside it too
        module.strop_read = types.MethodType(lambda _, call: call(), module)  # type: ignore[assignment]
        register_fsdp_forward_method(module, "strop_read")
        # FSDP takes the dtype of gradients from the parameters that are trainable in its first forward. That could be
        # the reference's: the same model with its adapter off, in which nothing is trainable. So do an empty one now
        with torch.no_grad():
            self.read(lambda: None)
        module.reshard()  # type: ignore[operator]

    def clip(self, params: Sequence[nn.Parameter], limit: float, world: World) -> torch.Tensor:
        """Clip the norm of the sharded gradients, as `clip_grad_norm_` does for whole ones; return the norm."""
        grads = [param.grad.to_local() for param in params if param.grad is not None]  # type: ignore[attr-defined]
        if not grads:  # then no process has one, as when every completion is masked
            return torch.zeros((), device=params[0].device)
        norm = world.summed(torch.nn.utils.get_total_norm(grads).square()).sqrt()
        torch._foreach_mul_(grads, (limit / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def read(self, call: Callable[[], Item]) -> Item:
        """Return the result of `call`, a tensor or several, which uses the model with its weights whole."""
        found = []

        def within() -> object:
            found.append(call())
            return tuple(found[0]) if isinstance(found[0], tuple) else found[0]

        self.are_whole = True
        try:
            self.module.strop_read(within)  # type: ignore[operator]
        finally:
            self.are_whole = False
        return found[0]

    def sum_gradients_after(self, is_last: bool) -> None:
        """Set whether the next backward is the update's last, which sums the gradients over the processes."""
        self.module.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        self.module.set_is_last_backward(is_last)  # type: ignore[operator]

    def gather(self) -> None:
        """Fill `twin` with all weights, gathered part by part. Its memory is reused until `free`."""
        for number, (modules, names) in enumerate(self._parts):
            part: Any = modules[0]
            part.unshard()
            if number not in self._copied:  # the tensors stay the same until `free`
                theirs = [self.module.get_parameter(name).detach() for name in names]
                for name, param in zip(names, theirs, strict=True):
                    _set(self._places[name], torch.empty_like(param))
                self._copied[number] = [self.twin.get_parameter(name).detach() for name in names], theirs
            if names:
                torch._foreach_copy_(*self._copied[number])
            part.reshard()
        for ours, theirs_ in zip(self.twin.buffers(), self.module.buffers(), strict=True):
            ours.copy_(theirs_)

    def free(self) -> None:
        """Free the memory of `twin`'s weights."""
        self._copied.clear()
        for name, param in self.module.named_parameters():
            _set(self._places[name], torch.empty(param.shape, dtype=param.dtype, device="meta"))

    def on_host(self, is_wanted: bool) -> nn.Module | None:
        """Return a copy of the model in host memory, or None unless `is_wanted`. All processes must call this."""
        made = _without_weights(self.twin)
        places = _places(made)
        for name, param in self.module.named_parameters():
            full = whole(param.detach())  # a collective call
            if is_wanted:
                _set(places[name], full.cpu())
        for ours, theirs in zip(made.buffers(), self.module.buffers(), strict=True):
            ours.copy_(theirs)
        return made if is_wanted else None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor: a sharded one is gathered, any other returned unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def class_of(module: nn.Module) -> type:
    """Return the module's original class, without the one that FSDP adds."""
    kind = type(module)
    return kind.__mro__[2] if kind.__mro__[1].__name__ == "FSDPModule" else kind


def _together(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return groups of consecutive layers, of about TOGETHER weights each. Gathering small layers singly is slower."""
    groups: list[list[nn.Module]] = []
    room = 0
    for layer in layers:
        if room <= 0:
            groups, room = [*groups, []], TOGETHER
        groups[-1].append(layer)
        room -= sum(param.numel() for param in layer.parameters())
    return groups


def _apart(module: nn.Module, parts: Sequence[list[nn.Module]]) -> list[tuple[list[nn.Module], list[str]]]:
    """Return each part with the names of its parameters that are not in an earlier part."""
    names = {id(param): name for name, param in module.named_parameters()}
    owned = [[names.pop(id(p), None) for one in part for p in one.parameters()] for part in parts]
    return [(part, [name for name in own if name]) for part, own in zip(parts, owned, strict=True)]


def _without_weights(module: nn.Module) -> nn.Module:
    """Return a copy of the module with its parameters on the meta device."""
    import copy

    return copy.deepcopy(module, {id(param): _hollow(param) for param in module.parameters()})


def _hollow(param: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device="meta"), requires_grad=False)


def _set(places: Iterable[tuple[nn.Module, str]], tensor: torch.Tensor) -> None:
    """Make the tensor a parameter and set it at these places."""
    param = nn.Parameter(tensor, requires_grad=False)
    for part, leaf in places:
        part._parameters[leaf] = param


def _places(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return the modules and attribute names of each parameter, by its first name; tied ones have several."""
    first: dict[int, str] = {}
    found: dict[str, list[tuple[nn.Module, str]]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        found.setdefault(first.setdefault(id(param), name), []).append((module.get_submodule(owner), leaf))
    return found
