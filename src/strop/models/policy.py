"""`Policy`: log-probs of tokens, hidden states with the LM head, a frozen reference.

Batches are right-padded: what stands behind a row changes nothing before it in a causal model, so a model that knows no
attention mask is right too.

Shapes: B rows, T tokens, H hidden, V vocabulary, N tokens that count.
"""

import copy
import inspect
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.nn.functional import linear, pad

from strop.data.collate import SequenceBatch
from strop.models import trial
from strop.models.kinds import (
    adapter_off,
    as_module,
    base_model,
    evaluating,
    has_adapter,
    is_hugging_face,
    is_moe,
    is_peft,
    listed_ids,
    of_config,
    unwrapped,
)
from strop.models.loading import check_moe_device, chosen_device, load_model
from strop.ops import linear_logp, logp

# config keys of models whose logits are not hidden @ weightᵀ + bias (Gemma 2, Cohere, Granite, Falcon-H1 …)
LOGITS_CHANGED_BY = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "logit_soft_cap")

Head = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def as_policy(model: Any, tokenizer: Any = None) -> "Policy":
    """A Policy over the model; a Policy comes back as it is, with the tokenizer if it had none."""
    if isinstance(model, Policy):
        if model.tokenizer is None:
            model.tokenizer = tokenizer
        return model
    return Policy(model, tokenizer)


class Policy:
    """A causal LM as algorithms see it. The model itself stays reachable as `model` and is changed in place by training.

    `kind` is "moe" (strop's engine), "hf" (Hugging Face, with or without peft) or "plain".
    """

    def __init__(self, model: Any, tokenizer: Any = None):
        self.model = as_module(model)
        self.tokenizer = tokenizer
        inner = unwrapped(self.model)
        self.kind = "moe" if is_moe(inner) else "hf" if is_hugging_face(inner) else "plain"
        self._arguments = _forward_arguments(base_model(inner) if self.kind == "hf" else inner)
        self._head: tuple[nn.Module, nn.Linear] | None = None
        self._head_checked = False
        self._known_ids: int | Literal["untried"] | None = "untried"
        self._causality_checked = self.kind != "plain"
        self.no_hidden_because: str | None = None
        """Why `hidden` is None, once it was asked for."""
        self.rollout_engine: tuple[Any, Any] | None = None
        """For `strop.rollout`: what it keeps between rollouts, and for which state of the model."""

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, whose weights are elsewhere: without what belongs to these."""
        return {**self.__dict__, "rollout_engine": None}

    # ---- what the model says of itself ----

    @property
    def device(self) -> torch.device:
        first = next(self.model.parameters(), None)
        return torch.device("cpu") if first is None else first.device

    def to(self, device: torch.device | str) -> None:
        """Move the model. strop's MoE computes on the CPU."""
        if self.kind == "moe":
            check_moe_device(device)
        else:
            self.model.to(chosen_device(device))

    @property
    def config(self) -> Any:
        return getattr(unwrapped(self.model), "config", None)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a completion: those of generation_config (else of the config), and the tokenizer's."""
        inner = unwrapped(self.model)
        told = getattr(getattr(inner, "generation_config", None), "eos_token_id", None)
        if told is None:
            told = of_config(self.config, "eos_token_id")
        return tuple(dict.fromkeys(self._in_vocabulary(told, getattr(self.tokenizer, "eos_token_id", None))))

    @property
    def pad_id(self) -> int:
        """An id for padding. It may be an EOS or a real token: masks say what is padding, ids never do."""
        told = getattr(self.tokenizer, "pad_token_id", None), of_config(self.config, "pad_token_id"), *self.eos_ids
        return next(iter(self._in_vocabulary(*told)), 0)

    @property
    def vocab_size(self) -> int | None:
        """Ids are below this; None where the model does not say."""
        return of_config(self.config, "vocab_size")

    def check_ids(self, ids: torch.Tensor, where: str) -> None:
        """Raise where the model has no such token: in a GPU's embedding that would end the process."""
        if not len(ids):
            return
        size, low, high = self._num_known_ids(), int(ids.min()), int(ids.max())
        if low < 0 or (size is not None and high >= size):
            wanted = "of at least 0" if size is None else f"from 0 to {size - 1}"
            raise ValueError(f"{where} must hold ids {wanted}, found {low if low < 0 else high}")

    def _num_known_ids(self) -> int | None:
        """The vocabulary's size; of a plain module that does not tell it, that of its embedding, found on a trial."""
        if self.kind != "plain" or self.vocab_size is not None:
            return self.vocab_size
        if self._known_ids == "untried":
            inner = unwrapped(self.model)
            self._known_ids = trial.known_ids(inner, lambda batch: self._call(inner, batch), self.device)
        return self._known_ids

    def _in_vocabulary(self, *told: Any) -> list[int]:
        """Ids that the model can read: some configs keep those of a larger vocabulary, or −1 for none."""
        size = self.vocab_size
        return [i for one in told for i in listed_ids(one) if i >= 0 and (size is None or i < size)]

    @property
    def max_length(self) -> int | None:
        """The most tokens of a row; None where the model does not say."""
        if self.kind == "moe":
            return unwrapped(self.model).moe.config.max_seq_len
        length = of_config(self.config, "max_position_embeddings")
        return length if isinstance(length, int) and length > 0 else None

    # ---- scoring ----

    def logits(self, batch: SequenceBatch) -> torch.Tensor:
        """[B, T, V], at t those of the token after t."""
        if not self._causality_checked:
            self._check_causality(batch)
        return self._logits_by(self.model, batch)

    def _logits_by(self, module: nn.Module, batch: SequenceBatch) -> torch.Tensor:
        output = self._call(module, batch)
        logits = getattr(output, "logits", None)
        if logits is None:
            logits = output["logits"] if isinstance(output, dict) else output
            logits = logits[0] if isinstance(logits, (tuple, list)) else logits
        if not isinstance(logits, torch.Tensor) or logits.ndim != 3 or logits.shape[:2] != batch.input_ids_BT.shape:
            found = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
            rows, columns = batch.input_ids_BT.shape
            raise ValueError(
                f"model must return logits of shape [{rows}, {columns}, V] (a tensor, a tuple with it first, or an "
                f"object with .logits), found {found}"
            )
        return logits

    def _check_causality(self, batch: SequenceBatch) -> None:
        """Once, of a plain module, on the first batch that can tell."""
        inner = unwrapped(self.model)
        ahead = trial.looks_ahead(inner, lambda one: self._logits_by(inner, one), batch)
        if ahead:
            raise ValueError(
                f"model must be causal, found that the logits {type(inner).__name__} gives for a token change with that "
                f"token and those after it: does its attention lack a causal mask?"
            )
        self._causality_checked = ahead is not None

    def hidden(self, batch: SequenceBatch) -> Head | None:
        """(hidden_BTH, weight_VH, bias_V or None), or None where the logits are not exactly hidden @ weightᵀ + bias.

        hidden_BTH[:, t] is the state that predicts ids[:, t], as `logps` is aligned; column 0 is 0 and predicts nothing.
        """
        if not self._head_checked:
            self._head = self._find_head(batch)
            self._head_checked = True
        if self._head is None:
            return None
        decoder, head = self._head
        states_BTH = _last_hidden_state(self._call(decoder, batch))
        return pad(states_BTH[:, :-1], (0, 0, 1, 0)), head.weight, head.bias

    @overload
    def logps(self, batch: SequenceBatch, *, temperature: float = 1.0) -> torch.Tensor: ...

    @overload
    def logps(
        self, batch: SequenceBatch, *, temperature: float = 1.0, entropy: Literal[True]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def logps(
        self, batch: SequenceBatch, *, temperature: float = 1.0, entropy: bool
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...

    def logps(
        self, batch: SequenceBatch, *, temperature: float = 1.0, entropy: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[:, t] is log π(ids[t] | ids[<t]) under softmax(logits / temperature), 0 where completion_mask is 0.

        entropy   also return the entropy at each token, aligned alike
        """
        if self.kind == "moe":  # from its engine, as its sampler has them: a rollout's log-probs are these, bit for bit
            self._refuse_packed(batch)
            masks = batch.attention_mask_BT, batch.completion_mask_BT
            both = unwrapped(self.model).logps(batch.input_ids_BT, *masks, temperature=temperature)
            return both if entropy else both[0]
        options: dict[str, Any] = {"temperature": temperature, "entropy": entropy}
        if (head := self.hidden(batch)) is not None:
            hidden_BTH, weight, bias = head
            if batch.places_N is not None and not entropy and not torch.is_grad_enabled():
                return _scored_at(batch.places_N, hidden_BTH, weight, bias, batch.input_ids_BT, temperature)
            mask_BT = counted(batch)
            return linear_logp(hidden_BTH, weight, batch.input_ids_BT, bias=bias, completion_mask=mask_BT, **options)
        logits_BTV = self.logits(batch)[:, :-1]
        ids_BT, mask_BT = batch.input_ids_BT[:, 1:], counted(batch)[:, 1:]
        if logits_BTV.device.type == "cpu":  # where looking at the mask is free, only what counts is computed
            found = self._logps_of_counted(logits_BTV, ids_BT, mask_BT, options)
        else:
            found = logp(logits_BTV, ids_BT, completion_mask=mask_BT, **options)
        return tuple(pad(one, (1, 0)) for one in found) if entropy else pad(found, (1, 0))  # type: ignore[return-value]

    def _logps_of_counted(
        self, logits_BTV: torch.Tensor, ids_BT: torch.Tensor, mask_BT: torch.Tensor, options: dict[str, Any]
    ) -> Any:
        found = logp(logits_BTV[mask_BT], ids_BT[mask_BT], **options)

        def spread(values_N: torch.Tensor) -> torch.Tensor:
            values_N = values_N.to(torch.float64 if logits_BTV.dtype == torch.float64 else torch.float32)
            return values_N.new_zeros(mask_BT.shape).masked_scatter(mask_BT, values_N)

        return tuple(map(spread, found)) if options["entropy"] else spread(found)

    def _call(self, module: nn.Module, batch: SequenceBatch) -> Any:
        """The module on a batch, with those of the arguments it takes."""
        if self.kind != "hf":
            self._refuse_packed(batch)
        if self.kind == "moe":
            return module(batch.input_ids_BT, attention_mask=batch.attention_mask_BT)
        if self.kind == "plain":
            known: dict[str, Any] = {"attention_mask": batch.attention_mask_BT}
            try:
                return module(batch.input_ids_BT, **{k: v for k, v in known.items() if k in self._arguments})
            except IndexError as error:
                low, high, num = (
                    int(batch.input_ids_BT.min()),
                    int(batch.input_ids_BT.max()),
                    len(batch.input_ids_BT[0]),
                )
                raise ValueError(
                    f"{type(unwrapped(self.model)).__name__} raised IndexError: {error}; it was given ids from {low} to "
                    f"{high}, rows of {num} tokens: does it know so many of both?"
                ) from error
        # no attention mask: rows are right-padded, so nothing that counts sees padding, attention stays on its causal
        # fast path, and of a packed row the positions tell transformers where sequences begin
        known = {"position_ids": batch.position_ids_BT, "use_cache": False}
        if batch.position_ids_BT is not None and "position_ids" not in self._arguments:
            raise ValueError(f"batch must not be packed: {type(module).__name__} takes no position_ids")
        return module(input_ids=batch.input_ids_BT, **{k: v for k, v in known.items() if k in self._arguments})

    def _refuse_packed(self, batch: SequenceBatch) -> None:
        if batch.position_ids_BT is not None:
            raise ValueError(
                f"batch must not be packed for a {self.kind!r} model, found position_ids: pad its rows instead"
            )

    # ---- hidden states ----

    def _find_head(self, batch: SequenceBatch) -> tuple[nn.Module, nn.Linear] | None:
        found = _decoder_and_head(unwrapped(self.model)) if self.kind == "hf" else f"it is a {self.kind!r} model"
        if not isinstance(found, str) and not self._head_gives_logits(*found, batch):
            found = "its logits are not its hidden states times the head's weight"
        if isinstance(found, str):
            self.no_hidden_because = found
            return None
        decoder, head = found
        if self.model is not unwrapped(self.model):  # compiled: the part that is called must be, and likewise
            decoder = self.model.dynamo_ctx(decoder)  # type: ignore[operator]
        return decoder, head

    @torch.no_grad()
    def _head_gives_logits(self, decoder: nn.Module, head: nn.Linear, batch: SequenceBatch) -> bool:
        """On a few tokens: the only way to know what a model's forward does behind its head."""
        few = SequenceBatch(
            *(t[:1, :8] for t in (batch.input_ids_BT, batch.attention_mask_BT, batch.completion_mask_BT))
        )
        inner = unwrapped(self.model)
        with evaluating(inner):
            states_BTH = _last_hidden_state(self._call(decoder, few))
            if states_BTH.shape[-1] != head.in_features:
                return False
            wanted = self._call(inner, few).logits
            found = linear(states_BTH, head.weight, head.bias)
        if wanted.shape != found.shape:
            return False
        eps = max(torch.finfo(wanted.dtype).eps, torch.finfo(found.dtype).eps)
        return bool((wanted.float() - found.float()).abs().max() <= 8 * eps * wanted.float().abs().max())

    # ---- the reference ----

    def reference(self, ref_model: Any = None) -> "Reference":
        """A frozen model to compare with: the given one or its name; of a peft model the base, its adapter off; else a copy."""
        inner = unwrapped(self.model)
        if isinstance(ref_model, (str, Path)):  # in our dtype, so that the same weights are the same function
            dtypes = [param.dtype for param in inner.parameters() if param.is_floating_point()]
            ref_model, _ = load_model(ref_model, dtype=dtypes[0] if dtypes else None, device=self.device)
        if ref_model is not None:
            try:
                ref = as_policy(ref_model, self.tokenizer)
            except TypeError as error:
                raise TypeError(f"ref_{error}") from None
            ours = {id(p) for p in inner.parameters()}
            if any(id(p) in ours for p in ref.model.parameters()):
                raise ValueError(
                    "ref_model must not share parameters with model, which training changes; leave it out for a copy"
                )
            if None not in (sizes := (self.vocab_size, ref.vocab_size)) and sizes[1] < sizes[0]:  # type: ignore[operator]
                raise ValueError(f"ref_model must know the model's {sizes[0]} tokens, found {sizes[1]}")
            kind = "given"
        elif has_adapter(inner):
            return Reference(self, "adapter off")
        else:
            ref, kind = Policy(copy.deepcopy(inner), self.tokenizer), "copy"
        ref.model.requires_grad_(False).eval()
        for param in ref.model.parameters():
            param.grad = None
        return Reference(ref, kind)

    def __repr__(self) -> str:
        return f"Policy({type(unwrapped(self.model)).__name__}, kind={self.kind!r}, device={self.device})"


class Reference:
    """Log-probs of a frozen model, without gradient and in eval mode.

    kind   "given", "copy", or "adapter off": then `policy` is the trained one and there are no weights to keep
    """

    def __init__(self, policy: Policy, kind: str):
        self.policy, self.kind = policy, kind

    @property
    def model(self) -> nn.Module | None:
        """The frozen model; None where it is the trained one without its adapter."""
        return None if self.kind == "adapter off" else self.policy.model

    @torch.no_grad()
    def logps(self, batch: SequenceBatch, *, temperature: float = 1.0) -> torch.Tensor:
        if self.kind != "adapter off":  # it may live on another device
            logps_BT = self.policy.logps(batch.to(self.policy.device), temperature=temperature)
            return logps_BT.to(batch.input_ids_BT.device)
        inner = unwrapped(self.policy.model)
        with evaluating(inner), adapter_off(inner):
            return self.policy.logps(batch, temperature=temperature)


def _scored_at(
    places_N: torch.Tensor,
    hidden_BTH: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ids_BT: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Log-probs at these places, 0 elsewhere, without a wait: of a mask the device would first be asked what it leaves."""
    hidden_NH, ids_N = hidden_BTH.flatten(0, 1).index_select(0, places_N), ids_BT.flatten().index_select(0, places_N)
    logps_N = linear_logp(hidden_NH, weight, ids_N, bias=bias, temperature=temperature)
    return logps_N.new_zeros(ids_BT.numel()).index_copy(0, places_N, logps_N).view(ids_BT.shape)


def counted(batch: SequenceBatch) -> torch.Tensor:
    """The completion mask as booleans; never column 0, which nothing predicts."""
    mask_BT = batch.completion_mask_BT.bool().clone()
    mask_BT[:, :1] = False
    return mask_BT


def _forward_arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _last_hidden_state(output: Any) -> torch.Tensor:
    return output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]


def _decoder_and_head(model: Any) -> tuple[nn.Module, nn.Linear] | str:
    """The two parts of a Hugging Face model that give its logits, or why there are none to use."""
    if is_peft(model):
        if any(config.is_prompt_learning for config in model.peft_config.values()):
            return "its adapter adds tokens to the prompt"
        model = base_model(model)
    for key in LOGITS_CHANGED_BY:
        if of_config(model.config, key) not in (None, 1, 1.0, False):
            return f"its config has {key}"
    head, decoder = model.get_output_embeddings(), model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model:
        return "it has no decoder apart from its head"
    if type(head) is not nn.Linear:  # a subclass (LoRA on the head, quantised) does more than a product
        return f"its head is a {type(head).__name__}, not a torch.nn.Linear"
    if head._forward_hooks or head._forward_pre_hooks:
        return "its head has hooks"
    return decoder, head
