"""`MoEForCausalLM`: a `MoETransformer` as a torch module with the interface of a Hugging Face causal LM.

The parameters share the engine's memory, under Mixtral's names. The engine uses what a torch optimiser writes, without
a copy or synchronisation. The backward is the engine's hand-written one.

    model = MoEForCausalLM(MoETransformer(config))
    model(input_ids, attention_mask, labels=labels).loss.backward()
    optimizer.step()
    model.generate(input_ids, attention_mask, max_new_tokens=32)

Intended differences from transformers' Mixtral: logits at padding are 0 and predict nothing, so the first real token
of a left-padded row is no target, and padding does not change a row's loss. A batch without targets has a loss of 0,
not NaN. Router logits, hidden states and attentions are not returned.

Shapes: B rows, T columns, V vocabulary.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from strop._checks import as_count
from strop._types import Json
from strop.moe import _hugging_face, _inputs, weights
from strop.moe.config import MoEConfig
from strop.moe.engine import Arrays, MoEEngine, SavedForward, SavedLogps
from strop.moe.model import MoETransformer
from strop.moe.sampling import check_temperature

FROM_CONFIG: Any = object()  # the argument was omitted; None means "no such token", as in transformers
NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


class EnginePass(torch.autograd.Function):
    """The results of an engine, differentiable in every parameter.

    run         returns the results and the data for the backward
    outputs     converts the results of `run` to tensors
    gradients   returns the gradients by name, given the results of `run` and the outputs' gradients
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Any], outputs: Any, gradients: Any, *params: torch.Tensor):
        ctx.set_materialize_grads(False)
        # saving the weights makes torch reject a backward after an in-place change: the engine's backward reads them
        ctx.save_for_backward(*params)
        ctx.run, ctx.gradients, ctx.saved = run, gradients, run()
        return outputs(ctx.saved)

    @staticmethod
    def backward(ctx: Any, *doutputs: torch.Tensor | None):
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph must be False: the engine has first derivatives only")
        _ = ctx.saved_tensors  # reading them makes torch check their versions
        saved, ctx.saved = ctx.saved, None
        if saved is None:  # second backward of a retained graph: run again, since activations serve one backward
            saved = ctx.run()
        grads = ctx.gradients(saved, *doutputs)
        wanted = zip(grads.values(), ctx.needs_input_grad[3:], strict=True)  # in the parameters' order
        return None, None, None, *(torch.from_numpy(grad) if needed else None for grad, needed in wanted)


def uncompiled(function: Callable[..., object]) -> Callable[..., Any]:
    """Exclude a function from compiled graphs (decorator): torch.compile would trace its NumPy calls."""

    @functools.wraps(function)
    def call(*args: object, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # only here, because it imports the whole compiler
        return function(*args, **kwargs)

    return call


class Sealed(nn.Module):
    """A module that only holds parameters. Replacing a submodule raises an error: the engine would not call it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, (nn.Module, nn.Parameter)):
            raise TypeError(
                f"{name} must not be set to a {type(value).__name__}: the engine computes with the parameters the model "
                f"was made with (change parameters in place)"
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        found = self._parameters.items()
        return ", ".join(f"{name} {tuple(param.shape)}" for name, param in found if param is not None)

    def forward(self, *args: object, **kwargs: Any) -> Any:
        raise TypeError("this part of the model only holds parameters: call the whole model")


class SealedList(Sealed, nn.ModuleList):
    """The module list `model.layers`."""


class MoEForCausalLM(Sealed):
    """A causal LM on a `MoETransformer`, whose arrays become the parameters without a copy.

    `model.moe` is the `MoETransformer`; its `generate` also returns log-probs. `config` is Mixtral's. Its token ids and
    settings of the auxiliary loss may be changed; changing sizes has no effect.
    """

    accepts_loss_kwargs = True  # for transformers' Trainer: forward accepts num_items_in_batch
    is_gradient_checkpointing = False

    def __init__(self, moe: MoETransformer):
        super().__init__()
        if not isinstance(moe, MoETransformer):
            raise TypeError(f"moe must be a MoETransformer, found {type(moe).__name__}")
        for name, array in moe.params.items():
            if not array.flags.writeable:
                raise ValueError(f"moe.params[{name!r}] must be writable, found a read-only array")
            owner: nn.Module = self
            *parts, leaf = name.split(".")
            for part in parts:
                if part not in owner._modules:
                    owner.add_module(part, SealedList() if part == "layers" else Sealed())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, nn.Parameter(torch.from_numpy(array)))
        self.config = _hugging_face.Config(**weights.to_mixtral(moe.config, moe.dtype))
        self._use(moe)

    @uncompiled
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        *,
        labels: torch.Tensor | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_items_in_batch: int | torch.Tensor | None = None,
        return_dict: bool | None = None,
        **absent: object,
    ) -> Any:
        """Return logits (B, T, V), with labels also the loss, and with output_router_logits the auxiliary loss.

        attention_mask        (B, T), 0 at padding, which may be anywhere
        position_ids          only checked: they must rise by one in each row. RoPE does not depend on the first one
        labels                (B, T), shifted inside: logits at t are for the label at t + 1; −100 is no target
        output_router_logits  add router_aux_loss_coef·aux_loss to the loss and return aux_loss; None uses the config.
                              Without labels and gradients, aux_loss is computed only if this is True.
        logits_to_keep        return the last n columns of the logits, or a tensor of columns; 0 is all
        num_items_in_batch    divides the summed loss instead of the number of targets (for gradient accumulation)
        """
        _hugging_face.refuse(absent)
        tokens_BT, mask_BT = _inputs.as_batch(input_ids, attention_mask, self.moe.config, "input_ids")
        if position_ids is not None:
            _hugging_face.check_positions(position_ids, tokens_BT, mask_BT)
        targets_BT = None if labels is None else _hugging_face.targets_of(labels, tokens_BT, mask_BT, self.moe.config)
        with_aux = self.config.output_router_logits if output_router_logits is None else output_router_logits
        need_aux = with_aux and (labels is not None or bool(output_router_logits))
        logits_BTV, aux = self._logits_and_aux(tokens_BT, mask_BT, need_aux)
        aux = aux if with_aux else None
        loss = None
        if targets_BT is not None:
            loss = _cross_entropy(logits_BTV, targets_BT, num_items_in_batch)
            if aux is not None:
                loss = loss + self.config.router_aux_loss_coef * aux
        output = _hugging_face.Output(loss=loss, aux_loss=aux, logits=_kept(logits_BTV, logits_to_keep))
        return output.to_tuple() if return_dict is False else output

    @uncompiled
    def logps(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        completion_mask: torch.Tensor | None = None,
        *,
        temperature: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log π(token | the tokens before it) under softmax(logits / temperature), and the entropies: (B, T) each.

        Logits are computed for a few tokens at a time, and only where completion_mask is 1. Elsewhere, at padding and at the
        first token of a row both results are 0. A token that `generate` drew has the log-prob it was drawn with.
        """
        check_temperature(temperature)
        tokens_BT, mask_BT = _inputs.as_batch(input_ids, attention_mask, self.moe.config, "input_ids")
        counts_BT = _inputs.as_counts(completion_mask, tokens_BT, mask_BT, "completion_mask")
        params, engine = self._check_sharing(), self.moe.engine
        if torch.is_grad_enabled() and any(param.requires_grad for param in params):
            batch = tokens_BT.copy(), counts_BT, mask_BT  # the caller may reuse its ids before the backward
            run = functools.partial(engine.logps_saved, *batch, temperature=float(temperature))
            return EnginePass.apply(run, self._logps_tensors, functools.partial(_logps_gradients, engine), *params)
        return self._logps_tensors(
            SavedLogps(*engine.logps(tokens_BT, counts_BT, mask_BT, temperature=float(temperature)), None)
        )

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int = 20,
        do_sample: bool = False,
        temperature: float | None = 1.0,
        top_k: int | None = 50,
        top_p: float | None = 1.0,
        num_return_sequences: int = 1,
        eos_token_id: int | Sequence[int] | None = FROM_CONFIG,
        pad_token_id: int | None = FROM_CONFIG,
        generator: torch.Generator | None = None,
        use_cache: bool = True,
    ) -> torch.Tensor:
        """Return prompts with their completions, (B·num_return_sequences, T + new), the pad id after a row's EOS.

        Arguments and defaults are those of transformers (also top_k=50; 0 or None is the whole vocabulary). Prompts are
        padded on the left. Without attention_mask, pad ids in the prompts are padding unless the pad id is also an EOS.
        generator   draws the seed for sampling; None is torch's global generator, so torch.manual_seed reproduces it
        use_cache   has no effect: a cache is always used
        """
        self._check_sharing()
        sampling = _sampling(do_sample, temperature, top_k, top_p, generator)
        num_samples = as_count(num_return_sequences, "num_return_sequences", 1)
        eos = _hugging_face.token_ids(self.config.eos_token_id if eos_token_id is FROM_CONFIG else eos_token_id)
        pad = self.config.pad_token_id if pad_token_id is FROM_CONFIG else pad_token_id
        prompts_BT = torch.from_numpy(_inputs.as_token_ids(input_ids, "input_ids"))
        if attention_mask is None and pad is not None and pad not in eos and (prompts_BT == pad).any():
            attention_mask = prompts_BT != pad
        tokens_BT, mask_BT = _inputs.as_batch(prompts_BT, attention_mask, self.moe.config, "input_ids")
        made = self.moe.generate(
            tokens_BT, attention_mask=mask_BT, max_new_tokens=max_new_tokens, num_samples=num_samples, eos_token_id=eos,
            pad_token_id=eos[0] if pad is None and eos else pad, **sampling,
        )  # fmt: skip
        prompts_BT = prompts_BT.repeat_interleave(num_samples, 0)
        return torch.cat([prompts_BT, torch.from_numpy(made.tokens_BT)], 1)

    # ---- saving and loading ----

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the files of `MoETransformer.save`, which `AutoModelForCausalLM` and `from_pretrained` can load."""
        now = self.config
        ids = {name: getattr(now, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        coef = now.router_aux_loss_coef if now.output_router_logits else 0.0
        self._check_sharing()
        weights.save(folder, replace(self.moe.config, aux_loss_coef=coef, **ids), self.moe.params)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, engine: str = "native", dtype: torch.dtype | None = None
    ) -> "MoEForCausalLM":
        """Return the model in a folder written by `save_pretrained`, of this class or of transformers' Mixtral.

        dtype   torch.float32 or torch.float64; None keeps float64 and converts every other dtype to float32
        """
        if dtype is not None and dtype not in NUMPY_DTYPES:
            raise TypeError(f"dtype must be torch.float32 or torch.float64, found {dtype}")
        return cls(MoETransformer.load(folder, engine, dtype=None if dtype is None else NUMPY_DTYPES[dtype]))

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load the weights in place, into the engine's memory. Tied embeddings may include `lm_head.weight`."""
        if assign:
            raise ValueError("assign must be False: the parameters' memory is the engine's and cannot be exchanged")
        if self.moe.config.tie_embeddings and "lm_head.weight" in state_dict:
            state_dict = dict(state_dict)
            head, embedding = state_dict.pop("lm_head.weight"), state_dict.get("model.embed_tokens.weight")
            if embedding is not None and not torch.equal(head, embedding):
                raise ValueError(
                    "lm_head.weight in state_dict must equal model.embed_tokens.weight (tie_embeddings=True), found others"
                )
        return super().load_state_dict(state_dict, strict)

    def __getstate__(self) -> Json:
        """Return the state for deepcopy and pickle, without the engine, which `__setstate__` recreates."""
        state = dict(vars(self))
        del state["_shared"]
        state["moe"] = self.moe.config, self.moe.engine.name
        return state

    def __setstate__(self, state: Json) -> None:
        super().__setstate__(state)
        self._make_engine(*state["moe"])

    # ---- parameters, and their memory shared with the engine ----

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return self.get_parameter("model.norm.weight").dtype

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        return sum(
            param.numel()
            for name, param in self.named_parameters()
            if (param.requires_grad or not only_trainable)
            and not (exclude_embeddings and name == "model.embed_tokens.weight")
        )

    def get_input_embeddings(self) -> nn.Module:
        """Return the module with the embedding's `.weight`, (V, D)."""
        return self.get_submodule("model.embed_tokens")

    def get_output_embeddings(self) -> nn.Module:
        """Return the module with the head's `.weight`, (V, D); with tied embeddings, the embedding."""
        return self.get_input_embeddings() if self.moe.config.tie_embeddings else self.get_submodule("lm_head")

    def gradient_checkpointing_enable(self, *args: object, **kwargs: object) -> None:
        warnings.warn(
            "gradient checkpointing has no effect here: the engine keeps the activations of a forward", stacklevel=2
        )

    def gradient_checkpointing_disable(self) -> None:
        """Do nothing: gradient checkpointing is never enabled."""

    def extra_repr(self) -> str:
        return f"{self.num_parameters():,} parameters, engine={self.moe.engine.name!r}, {self.moe.dtype}"

    def _use(self, moe: MoETransformer) -> None:
        """Set `moe`, whose arrays are the parameters' memory, and `_shared`, with the address of each array."""
        self.moe = moe
        self._shared = []
        for name, array in moe.params.items():
            owner, _, leaf = name.rpartition(".")
            self._shared.append((name, self.get_submodule(owner)._parameters, leaf, array.ctypes.data))

    def _make_engine(self, config: MoEConfig, engine: str) -> None:
        arrays = {name: param.detach().numpy() for name, param in self.named_parameters()}
        self._use(MoETransformer(config, engine, params=arrays))

    def _check_sharing(self) -> list[nn.Parameter]:
        """Return the parameters in the engine's order; raise if one no longer shares the engine's memory."""
        params = []
        for name, owner, leaf, address in self._shared:
            param = owner.get(leaf)
            if param is None or param.data_ptr() != address:
                raise RuntimeError(
                    f"{name} must share its memory with the engine, found its data exchanged (by an assignment to "
                    f".data, or a wrapper); write into it in place, with copy_"
                )
            params.append(param)
        return params

    def _logits_and_aux(
        self, tokens_BT: np.ndarray, mask_BT: np.ndarray | None, need_aux: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits, and the auxiliary loss, or None if neither gradients nor need_aux ask for it."""
        params, engine = self._check_sharing(), self.moe.engine
        if torch.is_grad_enabled() and any(param.requires_grad for param in params):
            run = functools.partial(engine.forward_saved, tokens_BT.copy(), mask_BT)  # copied as in `logps`
            return EnginePass.apply(run, self._logits_tensors, functools.partial(_logits_gradients, engine), *params)
        if not need_aux:
            return torch.from_numpy(engine.forward(tokens_BT, mask_BT)), None
        return self._logits_tensors(engine.forward_saved(tokens_BT, mask_BT))

    def _logits_tensors(self, saved: SavedForward) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(saved.logits_BTV), torch.tensor(saved.aux_loss, dtype=self.dtype)

    def _logps_tensors(self, saved: SavedLogps) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(saved.logps_BT).to(self.dtype), torch.from_numpy(saved.entropy_BT).to(self.dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "MoEForCausalLM":
        """Apply `to`, `float`, `double`, `share_memory` …; if the memory changes, create a new engine on it."""
        probe = torch.zeros(1, dtype=self.dtype)  # shows the effect of fn before any parameter is changed
        address = probe.data_ptr()
        moved = fn(probe)
        dtypes = [dtype for dtype, numpy_dtype in NUMPY_DTYPES.items() if numpy_dtype in self.moe.engine.dtypes]
        if moved.device.type != "cpu" or moved.dtype not in dtypes:
            raise TypeError(
                f"the model must stay on the CPU in {' or '.join(map(str, dtypes))} (engine={self.moe.engine.name!r}), "
                f"found a move to {moved.dtype} on {moved.device}"
            )
        if moved.dtype == self.dtype and moved.data_ptr() == address:
            return self
        for param in self.parameters():
            grad, param.grad = param.grad, None
            param.data = fn(param.detach()).contiguous()
            param.grad = None if grad is None else fn(grad)
        self._make_engine(self.moe.config, self.moe.engine.name)
        return self


# ---- engine gradients from torch's output gradients ----


def _logits_gradients(
    engine: MoEEngine, saved: SavedForward, dlogits: torch.Tensor | None, daux: torch.Tensor | None
) -> Arrays:
    dlogits_BTV = np.zeros_like(saved.logits_BTV) if dlogits is None else dlogits.contiguous().numpy()
    return engine.backward(saved, dlogits_BTV, 0.0 if daux is None else daux.item())


def _logps_gradients(
    engine: MoEEngine, saved: SavedLogps, dlogps: torch.Tensor | None, dentropy: torch.Tensor | None
) -> Arrays:
    dlogps_BT = np.zeros_like(saved.logps_BT) if dlogps is None else dlogps.double().numpy()
    return engine.logps_backward(saved, dlogps_BT, None if dentropy is None else dentropy.double().numpy())


# ---- from transformers' arguments ----


def _cross_entropy(
    logits_BTV: torch.Tensor, targets_BT: np.ndarray, num_items_in_batch: int | torch.Tensor | None
) -> torch.Tensor:
    targets_N = torch.from_numpy(targets_BT).flatten()
    total = nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1), targets_N, ignore_index=_hugging_face.IGNORE, reduction="sum"
    )
    count = int((targets_BT != _hugging_face.IGNORE).sum())
    return total / (max(1, count) if num_items_in_batch is None else num_items_in_batch)


def _kept(logits_BTV: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    if isinstance(logits_to_keep, torch.Tensor):
        return logits_BTV[:, logits_to_keep]
    return logits_BTV[:, -count:] if (count := as_count(logits_to_keep, "logits_to_keep", 0)) else logits_BTV


def _sampling(
    do_sample: bool,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Json:
    """Return transformers' arguments as those of `MoETransformer.generate`. Only sampling uses the generator."""
    if do_sample:
        if temperature == 0:
            raise ValueError("temperature must be above 0 with do_sample=True, found 0 (do_sample=False is greedy)")
        return {
            "temperature": 1.0 if temperature is None else temperature,
            "top_k": top_k or 0,
            "top_p": 1.0 if top_p is None else top_p,
            "seed": int(torch.randint(2**63 - 1, (), generator=generator)),
        }
    harmless = {
        "temperature": (temperature, (None, 0, 1)),
        "top_k": (top_k, (None, 0, 50)),
        "top_p": (top_p, (None, 1)),
    }
    ignored = [name for name, (value, values) in harmless.items() if value not in values]
    if ignored:
        warnings.warn(f"{', '.join(ignored)} without effect: do_sample=False is greedy", stacklevel=3)
    return {"temperature": 0.0, "seed": 0}
