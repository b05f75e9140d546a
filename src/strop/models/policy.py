"""`Policy`: log-probs of tokens, hidden states with the LM head, a frozen reference.

A Hugging Face model reads a `TokenBatch` packed, with sequences one after the other. Models that cannot, plain modules and
the MoE get right-padded rows. In a causal model padding on the right does not change earlier tokens, so a model without an
attention mask is correct too.

Shapes: N tokens of S sequences, n of them in the loss; T tokens of a padded row; H hidden, V vocabulary.
"""

import contextlib
import copy
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
from torch import nn

from strop._types import Json, Tokenizer
from strop.data.batch import PaddedRows, TokenBatch, Trajectory
from strop.distributed import Shards
from strop.losses.rules import NLL, PolicyLoss, TokenRule, nll_of, tokens_loss, tokens_of
from strop.models import trial
from strop.models.attention import Packed, Rule, also_again, reading
from strop.models.kinds import (
    adapter_off,
    as_module,
    base_model,
    evaluating,
    has_adapter,
    is_hugging_face,
    is_moe,
    layers_of,
    listed_ids,
    of_config,
    shares,
    unwrapped,
)
from strop.models.loading import check_moe_device, chosen_device, load_model
from strop.models.routing import NONE, Routers, Within, find_routers, replaying
from strop.ops import linear, linear_logp, linear_token_loss, logp
from strop.ops.head import in_dtype
from strop.ops.linear import LMHead
from strop.ops.registry import FORCED, REGISTERED_BY_USER

Result = TypeVar("Result")
TRAINING_OPERATORS = {"linear_logp", "linear_token_loss"}


def as_policy(model: object, tokenizer: Tokenizer | None = None) -> "Policy":
    """Return a Policy of the model. A Policy is returned as it is; its tokenizer is filled in if it had none."""
    if isinstance(model, Policy):
        if model.tokenizer is None:
            model.tokenizer = tokenizer
        return model
    return Policy(model, tokenizer)


class Policy:
    """A causal LM with the interface that algorithms use. Training changes `model` in place.

    `kind` is "moe" (strop's engine), "hf" (Hugging Face, with or without peft) or "plain".
    """

    def __init__(self, model: object, tokenizer: Tokenizer | None = None):
        self.model = as_module(model)
        self.tokenizer = tokenizer
        inner = unwrapped(self.model)
        self.kind = "moe" if is_moe(inner) else "hf" if is_hugging_face(inner) else "plain"
        self._arguments = forward_arguments(base_model(inner) if self.kind == "hf" else inner)
        self._head: tuple[nn.Module, nn.Linear] | None = None
        self._tried = False
        self._known_ids: int | Literal["untried"] | None = "untried"
        self._causality_checked = self.kind == "moe"
        self.no_hidden_because: str | None = None
        """Why `hidden` is None, once it was asked for."""
        self.no_packing_because: str | None = None
        """Why batches are read as padded rows, once one was read."""
        self.no_padding_because: str | None = None
        """Why only rows of one length are read together, where padded ones would have other numbers."""
        self.no_fusing_because: str | None = None
        """Why the decoder layers compute in their own way and not in that of `models.layers`, once a batch was read."""
        self.exact = False
        """See `be_exact`."""
        self.sides: trial.Sides | None = None
        """Which rows are read together, where the longest of a call changes the others' numbers."""
        self._rules: dict[int, Rule] = {}
        self._indexed = False  # whether the model is told where packed sequences end: see `read_packed`
        self._opaque: set[str] | None = None  # layers that had no gradient before the trial
        self._fused: Any = None
        self._modules: list[nn.Module] = []
        self._routers: Routers | str | None = None
        self.shards: Shards | None = None
        """The weights where they lie in shards, one a process; None where they are whole."""
        self.rollout_engine: tuple[Any, Any] | None = None
        """For `strop.rollout`: what it keeps between rollouts, and for which state of the model."""

    def __getstate__(self) -> Json:
        """Return the state for copies and pickles, without the rollout engine, which is bound to these weights."""
        return {**self.__dict__, "rollout_engine": None}

    def be_exact(self) -> None:
        """Make log-probs bitwise equal in rollouts, scoring and training, in any batch, by a fixed order of all sums.

        strop's MoE always works this way. Raise a ValueError, with the reason, if the model cannot."""
        if self.kind == "plain":
            raise ValueError(
                f"exact must be False for a {type(self.model).__name__}, whose sums are its own, found True"
            )
        if self.kind == "hf":
            self.exact, self.rollout_engine = True, None
            self._try()

    # ---- properties of the model ----

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
    def loss_dtype(self) -> torch.dtype:
        """The dtype of log-probs and losses."""
        first = next((p for p in self.model.parameters() if p.is_floating_point()), None)
        return torch.float64 if first is not None and first.dtype == torch.float64 else torch.float32

    @property
    def config(self) -> Any:
        return getattr(unwrapped(self.model), "config", None)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a completion: those of generation_config (else of the config), and the tokenizer's."""
        inner = unwrapped(self.model)
        config_ids = getattr(getattr(inner, "generation_config", None), "eos_token_id", None)
        if config_ids is None:
            config_ids = of_config(self.config, "eos_token_id")
        return tuple(dict.fromkeys(self._in_vocabulary(config_ids, getattr(self.tokenizer, "eos_token_id", None))))

    @property
    def pad_id(self) -> int:
        """The id for padding. It may be EOS or a real token, because padding is recognised by masks, not by ids."""
        config_ids = (
            getattr(self.tokenizer, "pad_token_id", None),
            of_config(self.config, "pad_token_id"),
            *self.eos_ids,
        )
        return next(iter(self._in_vocabulary(*config_ids)), 0)

    def padding(self, pad_id: int | None = None) -> tuple[int | None, tuple[int, ...]]:
        """Return the id that marks padding in a user's input, and the EOS ids.

        pad_id   None takes the tokenizer's or the model's; if neither has one, no id is padding
        """
        config_ids = (getattr(holder, "pad_token_id", None) for holder in (self.tokenizer, self.config))
        declared = next((one for one in config_ids if isinstance(one, int) and one >= 0), None)
        return declared if pad_id is None else pad_id, self.eos_ids

    @property
    def vocab_size(self) -> int | None:
        """The number of token ids; None if the model does not say."""
        return of_config(self.config, "vocab_size")

    def check_ids(self, ids: torch.Tensor, where: str) -> None:
        """Raise a ValueError if an id is out of range. On a GPU the embedding would abort the process."""
        if not len(ids):
            return
        size, low, high = self._num_known_ids(), int(ids.min()), int(ids.max())
        if low < 0 or (size is not None and high >= size):
            wanted = "of at least 0" if size is None else f"from 0 to {size - 1}"
            raise ValueError(f"{where} must hold ids {wanted}, found {low if low < 0 else high}")

    def _num_known_ids(self) -> int | None:
        """Return the vocabulary size; for a plain module without one, the size of its embedding, found by a trial."""
        if self.kind != "plain" or self.vocab_size is not None:
            return self.vocab_size
        if self._known_ids == "untried":
            inner = unwrapped(self.model)
            self._known_ids = trial.known_ids(inner, self._call_ids, self.device)
        return self._known_ids

    def _in_vocabulary(self, *config_ids: int | Sequence[int] | None) -> list[int]:
        """Return the valid ids among these. Some configs have ids of a larger vocabulary, or −1 for none."""
        size = self.vocab_size
        return [i for one in config_ids for i in listed_ids(one) if i >= 0 and (size is None or i < size)]

    @property
    def max_length(self) -> int | None:
        """The most tokens of a row; None if the model does not say."""
        if self.kind == "moe":
            return unwrapped(self.model).moe.config.max_seq_len
        length = of_config(self.config, "max_position_embeddings")
        return length if isinstance(length, int) and length > 0 else None

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Set every module to eval mode; afterwards restore each module's mode."""
        with evaluating(unwrapped(self.model)):
            yield

    # ---- scoring ----

    def logits(self, batch: TokenBatch) -> torch.Tensor:
        """Return the logits [n, V] that predict the tokens of the loss."""
        return self._at_places(self.model, batch, _logits)

    def hidden(self, batch: TokenBatch) -> LMHead | None:
        """Return the hidden states that predict the tokens of the loss, and the LM head.

        Return None if the logits are not exactly hidden @ weightᵀ + bias.
        """
        if not self._tried:
            self._try()
        if self._head is None:
            return None
        decoder, head = self._head
        return LMHead(self._at_places(decoder, batch, last_hidden_state), head.weight, head.bias)

    @property
    def hidden_size(self) -> int | None:
        """The width of the states that `hidden` returns; None if it returns None."""
        if not self._tried:
            self._try()
        return None if self._head is None else self._head[1].in_features

    def reading(self, call: Callable[[], Result]) -> Result:
        """Return `call()`. Sharded weights are gathered while it runs."""
        return call() if self.shards is None or self.shards.are_whole else self.shards.read(call)

    @overload
    def logps(self, batch: TokenBatch, *, temperature: float = 1.0) -> torch.Tensor: ...

    @overload
    def logps(
        self, batch: TokenBatch, *, temperature: float = 1.0, entropy: Literal[True]
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @overload
    def logps(
        self, batch: TokenBatch, *, temperature: float = 1.0, entropy: bool, head: LMHead | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...

    def logps(
        self, batch: TokenBatch, *, temperature: float = 1.0, entropy: bool = False, head: LMHead | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return log π(token | earlier tokens) [n] of the tokens of the loss, under softmax(logits / temperature).

        entropy   also return the entropy [n] at each of them
        head      the result of `hidden` for this batch, if it was computed already
        """
        if self.shards is not None and not self.shards.are_whole:
            return self.reading(lambda: self.logps(batch, temperature=temperature, entropy=entropy))
        if self.kind == "moe":  # computed by the engine, as in its sampler: bitwise equal to a rollout's log-probs
            both = self._logps_of_moe(batch, temperature)
            return both if entropy else both[0]
        if (head := head or self.hidden(batch)) is not None:
            if self._user_chose_backend():
                hidden_nH, weight, bias = head
                return linear_logp(
                    hidden_nH, weight, batch.targets_n, bias=bias, temperature=temperature, entropy=entropy
                )
            logps_n, entropies_n = linear.logps_and_entropies(
                head, batch.targets_n, rows=self._row_functions(head), temperature=temperature, entropy=entropy
            )
            return logps_n if entropies_n is None else (logps_n, entropies_n)
        self.check_causality(batch)
        return logp(self.logits(batch), batch.targets_n, temperature=temperature, entropy=entropy)

    def loss(
        self, batch: TokenBatch, rule: TokenRule, *, temperature: float = 1.0, head: LMHead | None = None
    ) -> PolicyLoss:
        """Return the rule's loss. The batch has the tokens' weights and the other values that the rule reads."""
        if self.shards is not None and not self.shards.are_whole:
            return self.reading(lambda: self.loss(batch, rule, temperature=temperature))
        assert batch.weights_n is not None
        if rule.row_suffices and (head := head or self.hidden(batch)) is not None:
            if self._user_chose_backend():
                hidden_nH, weight, bias = head
                return linear_token_loss(
                    hidden_nH, weight, batch.targets_n, batch.weights_n, rule=rule, old_logps=batch.old_logps_n,
                    ref_logps=batch.ref_logps_n, advantages=batch.advantages_n, bias=bias, temperature=temperature,
                )  # fmt: skip
            return linear.token_loss(
                head, batch.targets_n, batch.weights_n, rule, rows=self._row_functions(head),
                old_logps_N=batch.old_logps_n, ref_logps_N=batch.ref_logps_n, advantages_N=batch.advantages_n,
                temperature=temperature,
            )  # fmt: skip
        if isinstance(rule, NLL):
            return nll_of(self.logps(batch, temperature=temperature), batch.weights_n)
        # entropies cost another pass if they are computed from hidden states, and nothing if all logits are in memory
        entropy = bool(rule.entropy_coef) or self.no_hidden_because is not None
        scores: Any = self.logps(batch, temperature=temperature, entropy=entropy, head=head)
        logps_n, entropy_n = scores if entropy else (scores, None)
        old_n, ref_n, advantages_n, weights_n = in_dtype(
            logps_n.dtype, batch.old_logps_n, batch.ref_logps_n, batch.advantages_n, batch.weights_n
        )
        tokens = tokens_of(rule, logps_n, old_n, advantages_n, sequence_N=batch.sequence_n, num_sequences=len(batch))
        return tokens_loss(rule, tokens, weights_n, ref_n, entropy_n)

    def _row_functions(self, head: LMHead) -> str:
        return "exact" if self.exact else linear.rows_for(head.hidden_NH)

    def _user_chose_backend(self) -> bool:
        """Return whether `use_backend`, STROP_BACKEND or `register` chooses a backend. Then the public operators are called.

        An exact policy has one backend only.
        """
        return not self.exact and bool(
            FORCED.get() or REGISTERED_BY_USER & TRAINING_OPERATORS or os.environ.get("STROP_BACKEND")
        )

    def check_causality(self, batch: TokenBatch, logits: Callable[[TokenBatch], torch.Tensor] | None = None) -> None:
        """Raise a ValueError if a token's logits depend on later tokens. This is tested once: for a Hugging Face model in
        its trial, for a plain module on the first batch that can show it.

        logits   function that computes the logits; None reads them as the policy does
        """
        if self._causality_checked:
            return
        inner = unwrapped(self.model)
        ahead = trial.looks_ahead(inner, logits or (lambda one: self._at_places(inner, one, _logits)), batch)
        if ahead:
            raise ValueError(
                f"model must be causal, found that the logits {type(inner).__name__} gives for a token change with that "
                f"token and those after it: does its attention lack a causal mask?"
            )
        self._causality_checked = ahead is not None

    def _logps_of_moe(self, batch: TokenBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        rows = batch.padded(self.pad_id)
        counted_n = rows.index_N.index_select(0, batch.places_n + 1)
        counts_ST = torch.zeros_like(rows.mask_ST.view(-1)).index_fill(0, counted_n, True).view(rows.mask_ST.shape)
        both = unwrapped(self.model).logps(rows.ids_ST, rows.mask_ST, counts_ST, temperature=temperature)
        return both[0].flatten().index_select(0, counted_n), both[1].flatten().index_select(0, counted_n)

    def _at_places(self, module: nn.Module, batch: TokenBatch, part: Callable[[Any], Any]) -> torch.Tensor:
        """Return the module's output [n, ..] at the tokens that predict a token of the loss."""
        groups = self._groups(batch)
        if len(groups) < 2:
            return self._at_places_together(module, batch, part)
        read, theirs = [], []
        for sequences in groups:
            some, theirs_m = batch.only(sequences)
            read.append(self._at_places_together(module, some, part))
            theirs.append(theirs_m)
        return torch.cat(read).index_select(0, torch.cat(theirs).argsort())

    def _groups(self, batch: TokenBatch) -> list[list[int]]:
        """Return the groups of sequences that can be read together without changing each other's results.

        The list may be empty if all sequences are one group."""
        by_length = not self.packs and self.no_padding_because is not None
        if not by_length and self.sides is None:
            return []
        groups: dict[int, list[int]] = {}
        for sequence, length in enumerate(batch.lengths[: len(batch.num_loss_tokens_S)]):
            side = length if by_length or self.sides is None else self.sides.side(length)
            groups.setdefault(side, []).append(sequence)
        return list(groups.values())

    def _at_places_together(self, module: nn.Module, batch: TokenBatch, part: Callable[[Any], Any]) -> torch.Tensor:
        if self.sides is not None:
            self.sides.forget()
        if self.packs:
            within = contextlib.nullcontext if self._fused is None else self._fused.used
            with self._routed(batch.routing_NLk, within) as within:
                read_N = self._read_packed(module, batch, part, within)
            return read_N.index_select(0, batch.places_n)
        rows = batch.padded(self.pad_id)
        routing = None if batch.routing_NLk is None else rows.spread(batch.routing_NLk, NONE)
        with self._routed(routing, contextlib.nullcontext) as within, also_again(self._modules, within):
            found = part(self._call_rows(module, rows))
        if not isinstance(found, torch.Tensor) or found.ndim != 3 or found.shape[:2] != rows.ids_ST.shape:
            what = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            count, longest = rows.ids_ST.shape
            raise ValueError(
                f"model must return logits of shape [{count}, {longest}, V] (a tensor, a tuple with it first, or an "
                f"object with .logits), found {what}"
            )
        return found.flatten(0, 1).index_select(0, rows.index_N.index_select(0, batch.places_n))

    def _routed(self, chosen: torch.Tensor | None, within: Within) -> contextlib.AbstractContextManager[Within]:
        """Return a context that yields the context for one forward: `within`, with these experts chosen."""
        return contextlib.nullcontext(within) if chosen is None else replaying(self.routers, chosen, within)

    @property
    def routers(self) -> Routers | str:
        """The model's routers, or the reason why their choices cannot be recorded and replayed."""
        if self._routers is None:
            self._routers = find_routers(self)
        return self._routers

    def _call_rows(self, module: nn.Module, rows: PaddedRows) -> Any:
        """Call the module on padded rows, with the arguments that its forward takes.

        Hugging Face models get no mask: no token of a sequence sees padding on the right, and attention keeps its fast
        causal kernel.
        """
        known: Json = {"attention_mask": rows.mask_ST} if "attention_mask" in self._arguments else {}
        if self.kind == "hf":
            known = {"use_cache": False} if takes_use_cache(base_model(unwrapped(module))) else {}
        try:
            return module(rows.ids_ST, **known)
        except IndexError as error:
            if self.kind != "plain":
                raise
            low, high, num = int(rows.ids_ST.min()), int(rows.ids_ST.max()), rows.ids_ST.shape[1]
            raise ValueError(
                f"{type(unwrapped(self.model)).__name__} raised IndexError: {error}; it was given ids from {low} to "
                f"{high}, rows of {num} tokens: does it know so many of both?"
            ) from error
        except RuntimeError as error:  # the model's own error or a lack of memory: keep its type and add a note
            if self.kind == "plain" and not rows.ids_ST.is_cuda:
                low, high = int(rows.ids_ST.min()), int(rows.ids_ST.max())
                error.add_note(f"the model was given ids from {low} to {high}, rows of {rows.ids_ST.shape[1]} tokens")
            raise

    def _call_ids(self, ids_ST: torch.Tensor) -> Any:
        rows = PaddedRows(ids_ST, torch.ones_like(ids_ST, dtype=torch.bool), torch.arange(ids_ST.numel()))
        return self._call_rows(unwrapped(self.model), rows)

    # ---- how the model is read, found by one trial ----

    def check_reading(self) -> None:
        """Raise a ValueError, with the reason, if the model's results would be wrong."""
        if not self._tried:
            self._try()

    @property
    def packs(self) -> bool:
        """True if the model reads packed sequences; else it gets padded rows."""
        if not self._tried:
            self._try()
        return self.no_packing_because is None

    @property
    def pads(self) -> bool:
        """True if padding costs time and memory. The MoE's engine removes padding from its rows."""
        return self.kind != "moe" and not self.packs

    @property
    def fuses(self) -> bool:
        """True if decoder layers use `models.layers`. They then keep only an eighth of the memory for the backward."""
        return self.packs and self._fused is not None

    @property
    def scores_leanly(self) -> bool:
        """True if a forward without gradient needs little memory: no padding, and never the logits of all tokens."""
        return self.packs and self.no_hidden_because is None

    def _try(self) -> None:
        """Fill in how the model can be read, found by a trial: only the outputs show what a forward computes."""
        self._tried = True
        self.no_hidden_because = self.no_packing_because = self.no_fusing_because = f"it is a {self.kind!r} model"
        if self.kind != "hf":
            return
        try:
            if self._opaque is None:
                self._opaque = set(trial.not_differentiable(self.model))
            with trial.tried(unwrapped(self.model), self.device):
                self._try_hugging_face()
            if lost := {
                name: why for name, why in trial.not_differentiable(self.model).items() if name not in self._opaque
            }:
                name, why = next(iter(lost.items()))
                raise ValueError(
                    f"model must be differentiable after a forward without gradient, found that {name}, {why}; load it again "
                    f'with quantize="nf4" or "int8"'
                )
        except BaseException:
            self._tried = False  # so that every later call raises the same error
            raise

    def _try_hugging_face(self) -> None:
        """Fill in how rows are read, whether the logits are hidden states times the head, and whether layers are fused."""
        inner = unwrapped(self.model)
        rows = self._try_reading(inner, _logits)
        self.check_causality(rows.batch, lambda one: self._read_padded(inner, one, _logits)[one.places_n])
        found = trial.decoder_and_head(inner)
        if not isinstance(found, str):
            decoder, head = found
            try:
                states = [self._read_padded(decoder, one, last_hidden_state) for one in rows.alone]
                if self._indexed:
                    self._read_packed(decoder, rows.batch, last_hidden_state)
                if not trial.gives_logits(head, torch.cat(states), rows.wanted_NV):
                    found = "its logits are not its hidden states times the head's weight"
            except Exception as error:  # a foreign forward may raise anything; then this way of reading is not used
                found = f"its decoder fails apart from its head ({type(error).__name__}: {error})"
        self.no_hidden_because = found if isinstance(found, str) else None
        why = (
            None if self.no_packing_because is None else f"it does not read packed sequences: {self.no_packing_because}"
        )
        fused = why or trial.fusing(
            inner, self._rules, lambda: self._read_packed(inner, rows.batch, _logits), self.exact
        )
        self.no_fusing_because = fused if isinstance(fused, str) else None
        self._fused = None if isinstance(fused, str) else fused
        if self.exact and (why := self.no_fusing_because or self.no_hidden_because):
            raise ValueError(f"exact must be False for this {type(inner).__name__}, found True: {why}")
        if self.exact and self.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:  # angles are a matmul
            raise ValueError("torch.backends.cuda.matmul.allow_tf32 must be False with exact, found True")
        if not isinstance(found, str):
            decoder, head = found
            if self.model is not inner:  # compiled: compile the decoder with the same options
                decoder = self.model.dynamo_ctx(decoder)  # type: ignore[operator]
            self._head = decoder, head

    def _try_reading(self, module: nn.Module, part: Callable[[Any], torch.Tensor]) -> "TrialRows":
        """Fill in how rows can be read together with the results they have alone; return the rows of the trial.

        module   the model or its decoder; `part` selects from its output
        """
        inner = unwrapped(self.model)
        self._modules = list(inner.modules())
        with trial.rotations(inner) as calls:
            rows = self._trial_rows(module, part)
        with contextlib.suppress(Exception):  # rotary modules with unknown arguments cannot be tested
            self.sides = trial.sides(calls, self.config)
        if self.sides is not None:  # now with all rows on one side of the boundaries
            rows = self._trial_rows(module, part)
        self._indexed = False
        found = self._try_packing(module, part, rows)
        if isinstance(found, str) and self.model is inner:
            self._indexed = True
            told = self._try_packing(module, part, rows)
            self._indexed = not isinstance(told, str)
            found = f"{found}; told where they end, {told}" if isinstance(told, str) else told
        self.no_packing_because, self.no_padding_because = self._try_together(module, part, rows, found)
        rules = self._rules
        with trial.shortened(inner) as is_shorter:
            if is_shorter and (shorter := self._shorter_rows(module, part)) is not None:
                why = self._try_together(module, part, shorter, self._try_packing(module, part, shorter))
                self.no_packing_because = self.no_packing_because or why[0]
                self.no_padding_because = self.no_padding_because or why[1]
        self._rules = rules
        return rows

    def _shorter_rows(self, module: nn.Module, part: Callable[[Any], torch.Tensor]) -> "TrialRows | None":
        """Return the rows of a trial; None if the model fails with shorter windows."""
        try:
            return self._trial_rows(module, part)
        except Exception:  # whatever a foreign forward raises
            return None

    def _trial_rows(self, module: nn.Module, part: Callable[[Any], torch.Tensor]) -> "TrialRows":
        lengths = self.trial_lengths()
        ids = torch.arange(1, sum(lengths) + 1) % (self.vocab_size or 13)
        trajectories = [Trajectory.of(row[:1], row[1:]) for row in ids.split(list(lengths))]
        alone = [TokenBatch.of([one], self.device) for one in trajectories]
        wanted_NV = torch.cat([self._read_padded(module, one, part) for one in alone])
        other_ids = [(ids[: lengths[0]] + 1) % (self.vocab_size or 13), *ids[lengths[0] :].split(list(lengths[1:]))]
        return TrialRows(
            TokenBatch.of(trajectories, self.device),
            TokenBatch.of([Trajectory.of(row[:1], row[1:]) for row in other_ids], self.device),
            alone,
            TokenBatch.of([trajectories[-1], trajectories[-1]], self.device),
            wanted_NV,
        )

    def _try_packing(
        self, module: nn.Module, part: Callable[[Any], torch.Tensor], rows: "TrialRows"
    ) -> dict[int, Rule] | str:
        """Return the attention rules, or why rows cannot be packed."""
        if self.model is not unwrapped(self.model):
            return "it is compiled, for shapes that do not change"
        if "position_ids" not in self._arguments and not self._indexed:
            return "its forward takes no position_ids"

        def read(batch: TokenBatch, rules: dict[int, Rule] | None) -> tuple[torch.Tensor, dict[int, Rule]]:
            return read_packed(self._modules, module, batch, part, rules, indexed=self._indexed)

        return trial.packing(
            functools.partial(read, rows.batch),
            of_config(self.config, "num_hidden_layers"),
            rows.wanted_NV,
            functools.partial(read, rows.with_another) if self._indexed else None,
        )

    def _try_together(
        self, module: nn.Module, part: Callable[[Any], torch.Tensor], rows: "TrialRows", found: dict[int, Rule] | str
    ) -> tuple[str | None, str | None]:
        """Fill in the attention rules. Return why rows cannot be packed and why they cannot be padded, or None for each.

        found   the result of `_try_packing`
        """
        if not isinstance(found, str):
            self._rules = found
            return None, None
        no_padding = trial.attempted(lambda: self._read_padded(module, rows.batch, part), rows.wanted_NV, "padded rows")
        if no_padding is not None:
            why = trial.attempted(
                lambda: self._read_padded(module, rows.twice, part),
                rows.wanted_NV[-rows.alone[-1].num_tokens :].repeat(2, 1),
                "rows of one length",
            )
            if why is not None:
                name = type(unwrapped(self.model)).__name__
                raise ValueError(f"model must read rows beside each other, found a {name}: {why}")
        return found, no_padding

    def _read_padded(self, module: nn.Module, batch: TokenBatch, part: Callable[[Any], Any]) -> torch.Tensor:
        """Return the module's output [N, ..] for the batch as padded rows."""
        rows = batch.padded(self.pad_id)
        return part(self._call_rows(module, rows)).flatten(0, 1).index_select(0, rows.index_N)

    def _read_packed(
        self, module: nn.Module, batch: TokenBatch, part: Callable[[Any], Any], within: Within = contextlib.nullcontext
    ) -> torch.Tensor:
        """Return the module's output [N, ..] for the batch as one packed row."""
        return read_packed(self._modules, module, batch, part, self._rules, within, indexed=self._indexed)[0]

    def trial_lengths(self, room: int = 0) -> tuple[int, int, int]:
        """Return the row lengths of a trial, with room for further tokens."""
        longest = self.longest_together
        return trial.row_lengths(self.config, None if longest is None else max(1, longest - room))

    @property
    def longest_together(self) -> int | None:
        """The longest row that can be read together with every shorter one; None if there is no bound."""
        bounds = (
            [self.max_length] if self.sides is None else [self.max_length, *self.sides.boundaries, self.sides.apart]
        )
        return min((length for length in bounds if length is not None), default=None)

    # ---- several processes ----

    def shard(self, dtype: torch.dtype | None) -> None:
        """Shard the weights over the processes. Layers compute in `dtype`; None is the dtype of the weights."""
        inner = unwrapped(self.model)
        if self.kind == "moe":
            raise ValueError("shard must be 'none' for strop's MoE, whose engine reads whole weights, found 'full'")
        if self.model is not inner:
            raise ValueError("compile must be False with shard='full', found True")
        if not self._tried:
            self._try()
        self.shards = Shards(inner, layers_of(inner), dtype)
        self._twin = Policy(self.shards.twin, self.tokenizer)

    @contextlib.contextmanager
    def whole(self) -> Iterator["Policy"]:
        """Yield a policy with whole weights for rollouts: this one, or a temporary gathered copy if the weights are sharded."""
        if self.shards is None:
            yield self
            return
        try:
            self.shards.gather()
        except torch.OutOfMemoryError as error:
            self.shards.free()
            num_bytes = (
                sum(param.numel() for param in self.model.parameters())
                * (self.shards.dtype or self.loss_dtype).itemsize
            )
            raise ValueError(
                f"rollouts with shard='full' need room for a whole copy of the weights, {num_bytes / 1e9:.1f} GB, beside the "
                f"shards, found too little; rollout_server samples on other GPUs"
            ) from error
        try:
            yield self._twin
        finally:
            if self.device.type != "cuda":
                self.shards.free()
                self._twin.rollout_engine = None

    # ---- the reference ----

    def reference(self, ref_model: object = None, name: str = "ref_model") -> "Reference":
        """Return the frozen reference: the given model, else the base of a peft model (adapter off), else a copy.

        ref_model   a model, or its folder or name
        name        its name in errors
        """
        inner = unwrapped(self.model)
        if isinstance(ref_model, (str, Path)):  # load in our dtype, so that equal weights give an equal function
            dtypes = [param.dtype for param in inner.parameters() if param.is_floating_point()]
            ref_model, _ = load_model(ref_model, dtype=dtypes[0] if dtypes else None, device=self.device)
        if ref_model is not None:
            try:
                ref = as_policy(ref_model, self.tokenizer)
            except TypeError as error:
                raise TypeError(str(error).replace("model", name, 1)) from None
            if shares(inner, ref.model):
                raise ValueError(
                    f"{name} must not share parameters with model, which training changes; copy.deepcopy(model) does not"
                )
            if None not in (sizes := (self.vocab_size, ref.vocab_size)) and sizes[1] < sizes[0]:  # type: ignore[operator]
                raise ValueError(f"{name} must know the model's {sizes[0]} tokens, found {sizes[1]}")
            kind = "given"
        elif has_adapter(inner):
            return Reference(self, "adapter off")
        else:
            ref, kind = Policy(copy.deepcopy(inner), self.tokenizer), "copy"
            ref.exact = self.exact
        ref.model.requires_grad_(False).eval()
        for param in ref.model.parameters():
            param.grad = None
        return Reference(ref, kind)

    def __repr__(self) -> str:
        return f"Policy({type(unwrapped(self.model)).__name__}, kind={self.kind!r}, device={self.device})"


class TrialRows(NamedTuple):
    """The rows of a trial: all packed, the same with another first row, each alone, the longest twice; and the outputs
    of each alone."""

    batch: TokenBatch
    with_another: TokenBatch
    alone: list[TokenBatch]
    twice: TokenBatch
    wanted_NV: torch.Tensor


class Reference:
    """Log-probs of a frozen model, without gradient and in eval mode. Its routers choose their own experts.

    kind   "given", "copy", or "adapter off": then `policy` is the trained one, and there are no other weights
    """

    def __init__(self, policy: Policy, kind: str):
        self.policy, self.kind = policy, kind

    @property
    def model(self) -> nn.Module | None:
        """The frozen model; None if it is the trained one without its adapter."""
        return None if self.kind == "adapter off" else self.policy.model

    @torch.no_grad()
    def logps(self, batch: TokenBatch, *, temperature: float = 1.0) -> torch.Tensor:
        batch = replace(batch, routing_NLk=None)  # this is the policy's routing; the reference must not depend on it
        if self.kind != "adapter off":  # it may live on another device
            logps_n = self.policy.logps(batch.to(self.policy.device), temperature=temperature)
            return logps_n.to(batch.device)
        inner = unwrapped(self.policy.model)
        with evaluating(inner), adapter_off(inner):
            return self.policy.logps(batch, temperature=temperature)


def read_packed(
    modules: Sequence[nn.Module],
    module: nn.Module,
    batch: TokenBatch,
    part: Callable[[object], torch.Tensor],
    rules: dict[int, Rule] | None,
    within: Within = contextlib.nullcontext,
    indexed: bool = False,
) -> tuple[torch.Tensor, dict[int, Rule]]:
    """Return the module's output [N, ..] for the batch as one packed row, and the attention rules of its layers.

    modules   all modules of the model
    rules     attention rules of the layers; None learns them
    indexed   tell the model where sequences end, as the kernels of linear attention and Mamba want it
    """
    pass_ = Packed(batch.lengths, batch.cu_seqlens)
    indices = sequence_indices(batch) if indexed else {}
    with reading(modules, pass_, within, rules):
        output = module(input_ids=batch.ids_N[None], position_ids=batch.positions_N[None], use_cache=False, **indices)
    return part(output)[0], pass_.rules


def sequence_indices(batch: TokenBatch) -> Json:
    """Return where sequences begin and end, in the names and dtypes of transformers' data collator."""
    sequence_N = torch.arange(len(batch.lengths), dtype=torch.int32).repeat_interleave(torch.tensor(batch.lengths))
    ends, longest = batch.cu_seqlens.int(), max(batch.lengths)
    return {
        "seq_idx": sequence_N[None].to(batch.device), "cu_seq_lens_q": ends, "cu_seq_lens_k": ends,
        "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def takes_use_cache(model: nn.Module) -> bool:
    """Return whether the forward takes `use_cache`, by name or through **kwargs."""
    return _takes_use_cache(type(model).forward)


@functools.cache
def _takes_use_cache(forward: Callable[..., Any]) -> bool:
    parameters = inspect.signature(forward).parameters
    return "use_cache" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def forward_arguments(model: nn.Module) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _logits(output: object) -> Any:
    logits = getattr(output, "logits", None)
    if logits is not None:
        return logits
    logits = output["logits"] if isinstance(output, dict) else output
    return logits[0] if isinstance(logits, (tuple, list)) else logits


def last_hidden_state(output: Any) -> torch.Tensor:
    return output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
