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
from typing import Any, Literal, TypeVar, overload

import torch
from torch import nn

from strop._types import Json, Tokenizer
from strop.data.batch import PaddedRows, TokenBatch
from strop.distributed import Shards
from strop.losses.rules import NLL, PolicyLoss, TokenRule, nll_of, tokens_loss, tokens_of
from strop.models import trial
from strop.models.attention import Packed, Rule, also_again, reading
from strop.models.kinds import (
    adapter_off,
    as_module,
    base_model,
    has_adapter,
    is_hugging_face,
    is_moe,
    layers_of,
    replaced_forwards,
    shares,
    unwrapped,
)
from strop.models.loading import check_moe_device, chosen_device, load_model
from strop.models.products import faster_forwards
from strop.models.rotations import Boundaries
from strop.models.routing import NONE, Routers, Within, find_routers, replaying
from strop.models.shared_prefixes import WithPrefixes
from strop.ops import linear, linear_logp, linear_token_loss, logp
from strop.ops.head import in_dtype
from strop.ops.linear import LMHead
from strop.ops.onednn import FEWEST_WEIGHTS
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
        self.inner: Any = unwrapped(self.model)
        """The module that torch.compile wrapped, or the model itself."""
        self.tokenizer = tokenizer
        inner = self.inner
        self.kind = "moe" if is_moe(inner) else "hf" if is_hugging_face(inner) else "plain"
        self.arguments = forward_arguments(base_model(inner) if self.kind == "hf" else inner)
        self.config: Any = getattr(inner, "config", None)
        # of a multimodal config its text part
        text_config = getattr(self.config, "get_text_config", None)
        self._text_config = self.config if text_config is None else text_config()
        self.head: tuple[nn.Module, nn.Linear] | None = None
        self.was_tried = False
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
        self.share_prefixes = "auto"
        """When prefixes that sequences of a batch share are read once, as in `RunConfig`."""
        self.no_sharing_because: str | None = None
        """Why they are not, once a batch was read."""
        self.exact = False
        """See `be_exact`."""
        self.boundaries: Boundaries | None = None
        """Which rows are read together, where the longest of a call changes the others' numbers."""
        self.rules: dict[int, Rule] = {}
        self.indexed = (
            False  # whether the model is told where packed sequences end, as kernels of linear attention want it
        )
        self.opaque: set[str] | None = None  # layers that had no gradient before the trial
        self.fused: Any = None
        self._faster: Within | None = None
        self.modules: list[nn.Module] = []
        self._routers: Routers | str | None = None
        self.shards: Shards | None = None
        """The weights where they lie in shards, one a process; None where they are whole."""
        self.rollout_engine: tuple[Any, Any] | None = None
        """For `strop.rollout`: what it keeps between rollouts, and for which state of the model."""

    def __getstate__(self) -> Json:
        """Return the state for copies and pickles, without the rollout engine, which is bound to these weights."""
        return {**self.__dict__, "rollout_engine": None, "_faster": None}

    def be_exact(self) -> None:
        """Make log-probs bitwise equal in rollouts, scoring and training, in any batch, by a fixed order of all sums.

        strop's MoE always works this way. Raise a ValueError, with the reason, if the model cannot."""
        if self.kind == "plain":
            raise ValueError(
                f"exact must be False for a {type(self.model).__name__}, whose sums are its own, found True"
            )
        if self.kind == "hf":
            self.exact, self.rollout_engine = True, None
            trial.try_out(self)

    def set_sharing(self, when: str) -> None:
        """Set `share_prefixes`."""
        if when != self.share_prefixes:
            self.share_prefixes, self.was_tried = when, False  # what is off is not tried

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
    def eos_ids(self) -> tuple[int, ...]:
        """The ids that end a completion: those of generation_config (else of the config), and the tokenizer's."""
        config_ids = getattr(getattr(self.inner, "generation_config", None), "eos_token_id", None)
        if config_ids is None:
            config_ids = getattr(self._text_config, "eos_token_id", None)
        return tuple(dict.fromkeys(self._in_vocabulary(config_ids, getattr(self.tokenizer, "eos_token_id", None))))

    @property
    def pad_id(self) -> int:
        """The id for padding. It may be EOS or a real token, because padding is recognised by masks, not by ids."""
        config_ids = (
            getattr(self.tokenizer, "pad_token_id", None),
            getattr(self._text_config, "pad_token_id", None),
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
        return getattr(self._text_config, "vocab_size", None)

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
            self._known_ids = trial.known_ids(self)
        return self._known_ids

    def _in_vocabulary(self, *config_ids: int | Sequence[int] | None) -> list[int]:
        """Return the valid ids among these. Some configs have ids of a larger vocabulary, or −1 for none."""
        size = self.vocab_size
        return [i for one in config_ids for i in _listed_ids(one) if i >= 0 and (size is None or i < size)]

    @property
    def max_length(self) -> int | None:
        """The most tokens of a row; None if the model does not say."""
        if self.kind == "moe":
            return self.inner.moe.config.max_seq_len
        length = getattr(self._text_config, "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Set every module to eval mode; afterwards restore each module's mode.

        This sets the flags directly, because `eval()` of a few hundred modules takes milliseconds. Linear layers whose
        weights are not floating point are put in training mode: in eval mode bitsandbytes' CPU layers repack their
        weights for inference and have no gradient afterwards.
        """
        before = []
        for module in self.inner.modules():
            weight = module._parameters.get("weight")
            mode = weight is not None and not weight.is_floating_point() and isinstance(module, nn.Linear)
            if module.training != mode:
                before.append(vars(module))
                vars(module)["training"] = mode
        try:
            yield
        finally:
            for flags in before:
                flags["training"] = not flags["training"]

    # ---- scoring ----

    def logits(self, batch: TokenBatch) -> torch.Tensor:
        """Return the logits [n, V] that predict the tokens of the loss."""
        return self._at_places(self.model, batch, logits_of)

    def hidden(self, batch: TokenBatch) -> LMHead | None:
        """Return the hidden states that predict the tokens of the loss, and the LM head.

        Return None if the logits are not exactly hidden @ weightᵀ + bias.
        """
        if not self.was_tried:
            trial.try_out(self)
        if self.head is None:
            return None
        decoder, head = self.head
        return LMHead(self._at_places(decoder, batch, last_hidden_state), head.weight, head.bias)

    @property
    def hidden_size(self) -> int | None:
        """The width of the states that `hidden` returns; None if it returns None."""
        if not self.was_tried:
            trial.try_out(self)
        return None if self.head is None else self.head[1].in_features

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
        self, batch: TokenBatch, rule: TokenRule, *, temperature: float = 1.0, head: LMHead | None = None,
        entropy: bool = False,
    ) -> PolicyLoss:  # fmt: skip
        """Return the rule's loss. The batch has the tokens' weights and the other values that the rule reads.

        entropy   compute the metric `entropy` also where the loss does not need entropies
        """
        if self.shards is not None and not self.shards.are_whole:
            return self.reading(lambda: self.loss(batch, rule, temperature=temperature, entropy=entropy))
        assert batch.weights_n is not None
        if rule.row_suffices and not entropy and (head := head or self.hidden(batch)) is not None:
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
        entropy = entropy or bool(rule.entropy_coef) or self.no_hidden_because is not None
        scores: Any = self.logps(batch, temperature=temperature, entropy=entropy, head=head)
        logps_n, entropy_n = scores if entropy else (scores, None)
        old_n, ref_n, advantages_n, weights_n = in_dtype(
            logps_n.dtype, batch.old_logps_n, batch.ref_logps_n, batch.advantages_n, batch.weights_n
        )
        tokens = tokens_of(
            rule, logps_n, old_n, advantages_n, sequence_N=batch.sequence_n, num_sequences=len(batch),
            marked_N=None if batch.marked_n is None else batch.marked_n.bool(),
        )  # fmt: skip
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
        inner = self.inner
        ahead = trial.looks_ahead(self, logits or (lambda one: self._at_places(inner, one, logits_of)), batch)
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
        both = self.inner.logps(rows.ids_ST, rows.mask_ST, counts_ST, temperature=temperature)
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
        if not by_length and self.boundaries is None:
            return []
        groups: dict[int, list[int]] = {}
        for sequence, length in enumerate(batch.lengths[: len(batch.num_loss_tokens_S)]):
            side = length if by_length or self.boundaries is None else self.boundaries.side(length)
            groups.setdefault(side, []).append(sequence)
        return list(groups.values())

    def _at_places_together(self, module: nn.Module, batch: TokenBatch, part: Callable[[Any], Any]) -> torch.Tensor:
        if self.boundaries is not None:
            self.boundaries.forget()
        if self.packs:
            if batch.groups and self.no_sharing_because is None:
                batch = batch.with_prefixes(batch.groups)
            within = self.products() if self.fused is None else self.fused.used
            with self._routed(batch.routing_NLk, within) as within:
                read_N, _ = self.read_packed(module, batch, part, self.rules, within)
            return read_N.index_select(0, batch.places_n)
        rows = batch.padded(self.pad_id)
        routing = None if batch.routing_NLk is None else rows.spread(batch.routing_NLk, NONE)
        with self._routed(routing, self.products()) as within, also_again(self.modules, within):
            found = part(self.call_rows(module, rows))
        if not isinstance(found, torch.Tensor) or found.ndim != 3 or found.shape[:2] != rows.ids_ST.shape:
            what = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            count, longest = rows.ids_ST.shape
            raise ValueError(
                f"model must return logits of shape [{count}, {longest}, V] (a tensor, a tuple with it first, or an "
                f"object with .logits), found {what}"
            )
        return found.flatten(0, 1).index_select(0, rows.index_N.index_select(0, batch.places_n))

    def products(self) -> Within:
        """Return the context in which large linear layers use the fastest products of this CPU."""
        if self._faster is None:
            large = any(
                type(module) is nn.Linear and module.weight.numel() >= FEWEST_WEIGHTS for module in self.inner.modules()
            )
            forwards = faster_forwards(self.inner) if large and self.model is self.inner else {}  # not if compiled
            self._faster = functools.partial(replaced_forwards, forwards) if forwards else contextlib.nullcontext
        return self._faster

    def _routed(self, chosen: torch.Tensor | None, within: Within) -> contextlib.AbstractContextManager[Within]:
        """Return a context that yields the context for one forward: `within`, with these experts chosen."""
        return contextlib.nullcontext(within) if chosen is None else replaying(self.routers, chosen, within)

    @property
    def routers(self) -> Routers | str:
        """The model's routers, or the reason why their choices cannot be recorded and replayed."""
        if self._routers is None:
            self._routers = find_routers(self)
        return self._routers

    def call_rows(self, module: nn.Module, rows: PaddedRows) -> Any:
        """Call the module on padded rows, with the arguments that its forward takes.

        Hugging Face models get no mask: no token of a sequence sees padding on the right, and attention keeps its fast
        causal kernel.
        """
        known: Json = {"attention_mask": rows.mask_ST} if "attention_mask" in self.arguments else {}
        if self.kind == "hf":
            known = {"use_cache": False} if takes_use_cache(base_model(unwrapped(module))) else {}
        try:
            return module(rows.ids_ST, **known)
        except IndexError as error:
            if self.kind != "plain":
                raise
            low, high, num = int(rows.ids_ST.min()), int(rows.ids_ST.max()), rows.ids_ST.shape[1]
            raise ValueError(
                f"{type(self.inner).__name__} raised IndexError: {error}; it was given ids from {low} to "
                f"{high}, rows of {num} tokens: does it know so many of both?"
            ) from error
        except RuntimeError as error:  # the model's own error or a lack of memory: keep its type and add a note
            if self.kind == "plain" and not rows.ids_ST.is_cuda:
                low, high = int(rows.ids_ST.min()), int(rows.ids_ST.max())
                error.add_note(f"the model was given ids from {low} to {high}, rows of {rows.ids_ST.shape[1]} tokens")
            raise

    # ---- how the model is read, found by one trial ----

    def fill_in_reading(self) -> None:
        """Fill in how rows are read, for `trial.try_out`."""
        trial.try_language_model(self, logits_of, last_hidden_state)

    def check_reading(self) -> None:
        """Raise a ValueError, with the reason, if the model's results would be wrong."""
        if not self.was_tried:
            trial.try_out(self)

    @property
    def packs(self) -> bool:
        """True if the model reads packed sequences; else it gets padded rows."""
        if not self.was_tried:
            trial.try_out(self)
        return self.no_packing_because is None

    @property
    def shares(self) -> bool:
        """True if prefixes that sequences of a batch share are read once."""
        return self.packs and self.no_sharing_because is None

    @property
    def pads(self) -> bool:
        """True if padding costs time and memory. The MoE's engine removes padding from its rows."""
        return self.kind != "moe" and not self.packs

    @property
    def fuses(self) -> bool:
        """True if decoder layers use `models.layers`. They then keep only an eighth of the memory for the backward."""
        return self.packs and self.fused is not None

    @property
    def scores_leanly(self) -> bool:
        """True if a forward without gradient needs little memory: no padding, and never the logits of all tokens."""
        return self.packs and self.no_hidden_because is None

    def read_padded(self, module: nn.Module, batch: TokenBatch, part: Callable[[Any], Any]) -> torch.Tensor:
        """Return the module's output [N, ..] for the batch as padded rows."""
        rows = batch.padded(self.pad_id)
        return part(self.call_rows(module, rows)).flatten(0, 1).index_select(0, rows.index_N)

    def read_packed(
        self,
        module: nn.Module,
        batch: TokenBatch,
        part: Callable[[Any], torch.Tensor],
        rules: dict[int, Rule] | None,
        within: Within = contextlib.nullcontext,
    ) -> tuple[torch.Tensor, dict[int, Rule]]:
        """Return the module's output [N, ..] for the batch as one packed row, and the attention rules of its layers.

        rules   attention rules of the layers; None learns them
        """
        pass_ = Packed(batch.lengths, batch.cu_seqlens) if batch.prefixes is None else WithPrefixes(batch)
        indices = sequence_indices(batch) if self.indexed else {}
        with reading(self.modules, pass_, within, rules):
            output = module(
                input_ids=batch.ids_N[None], position_ids=batch.positions_N[None], use_cache=False, **indices
            )
        return part(output)[0], pass_.rules

    @property
    def longest_together(self) -> int | None:
        """The longest row that can be read together with every shorter one; None if there is no bound."""
        bounds = (
            [self.max_length]
            if self.boundaries is None
            else [self.max_length, *self.boundaries.lengths, self.boundaries.apart]
        )
        return min((length for length in bounds if length is not None), default=None)

    # ---- several processes ----

    def shard(self, dtype: torch.dtype | None) -> None:
        """Shard the weights over the processes. Layers compute in `dtype`; None is the dtype of the weights."""
        inner = self.inner
        if self.kind == "moe":
            raise ValueError("shard must be 'none' for strop's MoE, whose engine reads whole weights, found 'full'")
        if self.model is not inner:
            raise ValueError("compile must be False with shard='full', found True")
        if not self.was_tried:
            trial.try_out(self)
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
        inner = self.inner
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
        ref.set_sharing(self.share_prefixes)
        ref.model.requires_grad_(False).eval()
        for param in ref.model.parameters():
            param.grad = None
        return Reference(ref, kind)

    def __repr__(self) -> str:
        return f"Policy({type(self.inner).__name__}, kind={self.kind!r}, device={self.device})"


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
        if self.kind != "adapter off":
            device = batch.ids_N.device  # the reference may live on another one
            batch = batch if device == self.policy.device else batch.to(self.policy.device)
            return self.policy.logps(batch, temperature=temperature).to(device)
        with self.policy.evaluating(), adapter_off(self.policy.inner):
            return self.policy.logps(batch, temperature=temperature)


def _listed_ids(value: int | Sequence[int] | None) -> list[int]:
    """Return one token id, several, or None as a list."""
    return [] if value is None else [int(one) for one in value] if isinstance(value, Sequence) else [int(value)]


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


def logits_of(output: object) -> Any:
    logits = getattr(output, "logits", None)
    if logits is not None:
        return logits
    logits = output["logits"] if isinstance(output, dict) else output
    return logits[0] if isinstance(logits, (tuple, list)) else logits


def last_hidden_state(output: Any) -> torch.Tensor:
    return output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
