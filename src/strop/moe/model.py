"""`MoETransformer`, the public class: parameters and an engine that computes with them.

Shapes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import DTypeLike

from strop._checks import as_count
from strop._types import Array
from strop.moe import _inputs, weights
from strop.moe.config import MoEConfig
from strop.moe.engine import Arrays, KVCache
from strop.moe.engines import engine_class
from strop.moe.sampling import check_sampling, check_temperature

INIT_STD = 0.02  # as Mixtral


@dataclass(frozen=True)
class Generation:
    """The completions of `generate`, without the prompts. Row b has lengths_B[b] tokens, including its EOS."""

    tokens_BT: np.ndarray  # int64; the pad id after the end
    logps_BT: np.ndarray  # log-prob of each token under the distribution it was drawn from; 0 after the end
    lengths_B: np.ndarray

    @property
    def completions(self) -> list[np.ndarray]:
        return [row[:length] for row, length in zip(self.tokens_BT, self.lengths_B, strict=True)]


class Params(dict[str, np.ndarray]):
    """The parameters by name, in the engine's own memory. Change them only in place.

    Use `params[name] -= step` or `params[name][...] = array`. Assigning another array raises an error, because the
    compiled engine would not use it.
    """

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        if self.get(name) is not array:
            self._refuse(name)

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        name = args[0] if args and isinstance(args[0], str) else "name"
        raise TypeError(f"params must keep the engine's arrays: write into them, params[{name!r}][...] = array")

    __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (dict(self),)  # a copy belongs to no engine, so it is a plain dict


class MoETransformer:
    """A Mixture-of-Experts transformer with Mixtral's arithmetic, names and checkpoints.

    engine   "native" (compiled) or "numpy" (the reference); the same weights give the same numbers
    seed     the seed of the initial weights: normal with a standard deviation of 0.02; norms are 1
    params   weights to use instead; the arrays are shared, not copied
    """

    def __init__(
        self,
        config: MoEConfig,
        engine: str = "native",
        seed: int = 42,
        *,
        dtype: DTypeLike = np.float32,
        params: Arrays | None = None,
    ):
        if not isinstance(config, MoEConfig):
            raise TypeError(f"config must be a MoEConfig, found {type(config).__name__}")
        make_engine = engine_class(engine)
        self.config = config
        self._params = Params(
            initial_params(config, seed, dtype) if params is None else _checked_params(params, config)
        )
        self.dtype = self.params["model.norm.weight"].dtype
        if self.dtype not in make_engine.dtypes:
            known = " or ".join(np.dtype(d).name for d in make_engine.dtypes)
            raise TypeError(f"dtype must be {known} for engine={engine!r}, found {self.dtype}")
        self.engine = make_engine(config, self.params)

    @property
    def params(self) -> Params:
        """The parameters, {name: array} with the names of `config.parameter_shapes()`; change them only in place."""
        return self._params

    def forward(self, tokens: Array, attention_mask: Array | None = None) -> np.ndarray:
        """Return logits (B, T, V) of token ids (B, T).

        attention_mask   (B, T), 0 at padding, which may be anywhere: a padded row has the logits of the row without it.
                         Logits at padding are 0.
        """
        return self.engine.forward(*_inputs.as_batch(tokens, attention_mask, self.config))

    __call__ = forward

    def logps(
        self, tokens: Array, mask: Array | None = None, *, attention_mask: Array | None = None, temperature: float = 1.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return log π(token | the tokens before it) under softmax(logits / temperature), and the entropies: (B, T), float64.

        mask   (B, T), 1 where a log-prob is wanted; elsewhere, at padding and at the first token of a row both are 0.
               None is all. Tokens of `generate` have the log-probs that it returned, bit for bit.
        """
        check_temperature(temperature)
        tokens_BT, attention_mask_BT = _inputs.as_batch(tokens, attention_mask, self.config)
        counts_BT = _inputs.as_counts(mask, tokens_BT, attention_mask_BT, "mask")
        return self.engine.logps(tokens_BT, counts_BT, attention_mask_BT, temperature=float(temperature))

    def loss_and_grads(
        self,
        tokens: Array,
        targets: Array,
        mask: Array | None = None,
        *,
        attention_mask: Array | None = None,
        out: Arrays | None = None,
    ) -> tuple[float, Arrays]:
        """Return the mean cross-entropy over unmasked targets + aux_loss_coef·(load-balancing loss), and its gradients.

        targets   (B, T), the token that follows each token
        mask      (B, T), 1 at the targets in the loss; others may have any value (−100). None is all.
                  Without any target the cross-entropy is 0.
        out       gradient arrays of an earlier call to overwrite, so that a training loop allocates no new ones
        """
        tokens_BT, attention_mask_BT = _inputs.as_batch(tokens, attention_mask, self.config)
        targets_BT, target_mask_BT = _inputs.as_targets(targets, mask, tokens_BT, attention_mask_BT, self.config)
        return self.engine.loss_and_grads(tokens_BT, targets_BT, target_mask_BT, attention_mask_BT, out)

    def generate(
        self,
        prompts: Array,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        num_samples: int = 1,
        seed: int | None = None,
        uniforms: np.ndarray | None = None,
        attention_mask: Array | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        cache: KVCache | None = None,
    ) -> Generation:
        """Return completions of the prompts, sampled with a KV cache; finished rows leave the batch.

        prompts        a list of rows of ids, of any lengths; or (B, T), with an attention_mask if padded
        temperature    0 is greedy; `strop.moe.sampling` explains temperature, top_k and top_p
        num_samples    completions of each prompt, in consecutive rows; the prompt is read once
        seed           the same seed draws the same tokens; None uses a random seed
        uniforms       (rows, max_new_tokens) random numbers in [0, 1), instead of a seed
        eos_token_id   one or several ids that end a row; pad_token_id fills the rest. None takes the config's
        cache          from `engine.new_cache`, with num_samples=1: the prompts continue its rows. Afterwards it holds
                       all of each row except the last token
        """
        check_sampling(temperature, top_k, top_p)
        for name, value in (("max_new_tokens", max_new_tokens), ("num_samples", num_samples)):
            as_count(value, name, 1)
        tokens_BT, mask_BT, longest = self._prompt_batch(prompts, attention_mask, cache)
        if longest + max_new_tokens > self.config.max_seq_len:
            raise ValueError(
                f"max_new_tokens must be at most {self.config.max_seq_len - longest} after a prompt of {longest} tokens "
                f"(max_seq_len={self.config.max_seq_len}), found {max_new_tokens}"
            )
        if cache is not None:
            _check_room(cache, len(tokens_BT), longest + max_new_tokens, num_samples)
        eos, pad = self._end_tokens(eos_token_id, pad_token_id)

        shape = (len(tokens_BT) * num_samples, max_new_tokens)
        if uniforms is None:
            uniforms = np.random.default_rng(seed).random(shape)
        elif uniforms.shape != shape:
            raise ValueError(f"uniforms must have shape {shape}, found {uniforms.shape}")
        new_BT, logps_BT, lengths_B = self.engine.complete(
            tokens_BT, mask_BT, uniforms, capacity=longest + max_new_tokens, num_samples=num_samples,
            eos=np.array(eos, np.int64), pad=pad, temperature=float(temperature), top_k=int(top_k), top_p=float(top_p),
            cache=cache,
        )  # fmt: skip
        width = int(lengths_B.max())
        return Generation(new_BT[:, :width], logps_BT[:, :width], lengths_B)

    def _prompt_batch(
        self, prompts: Array, attention_mask: Array | None, cache: KVCache | None
    ) -> tuple[np.ndarray, np.ndarray | None, int]:
        """Return the tokens, the mask of real ones, and the length of the longest row including its cached tokens."""
        if isinstance(prompts, (list, tuple)):
            if attention_mask is not None:
                raise ValueError(
                    "attention_mask must be left out for a list of prompts, whose lengths speak for themselves"
                )
            prompts, attention_mask = _inputs.left_padded(prompts)
        tokens_BT, mask_BT = _inputs.as_batch(prompts, attention_mask, self.config)
        lengths_B = np.full(len(tokens_BT), tokens_BT.shape[1]) if mask_BT is None else mask_BT.sum(1)
        if cache is not None and len(cache.lengths_B) == len(lengths_B):
            lengths_B = lengths_B + cache.lengths_B
        return tokens_BT, mask_BT, int(lengths_B.max())

    def _end_tokens(
        self, eos_token_id: int | Sequence[int] | None, pad_token_id: int | None
    ) -> tuple[tuple[int, ...], int]:
        eos = self.config.eos_token_ids if eos_token_id is None else tuple(np.atleast_1d(eos_token_id).tolist())
        for token in eos:
            self.config.check_token(token, "eos_token_id")
        if pad_token_id is not None:
            pad_token_id = self.config.check_token(pad_token_id, "pad_token_id")
        return eos, next(token for token in (pad_token_id, self.config.pad_token_id, *eos, 0) if token is not None)

    def num_parameters(self, *, active: bool = False) -> int:
        return self.config.num_parameters(active=active)

    def save(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors in the format of transformers' Mixtral."""
        weights.save(folder, self.config, self.params)

    @classmethod
    def load(cls, folder: str | Path, engine: str = "native", *, dtype: DTypeLike | None = None) -> "MoETransformer":
        """Return the model in a folder written by `save` or `MixtralForCausalLM.save_pretrained`.

        dtype   of the parameters; None keeps float64 and converts every other dtype to float32
        """
        config, params = weights.load(folder, dtype=dtype)
        return cls(config, engine, params=params)

    def __reduce__(self) -> tuple[object, ...]:
        """Return the state for deepcopy and pickle, without the engine, which is recreated on the copied parameters."""
        return _remade, (self.config, self.engine.name, dict(self.params))

    def __repr__(self) -> str:
        return f"MoETransformer({self.num_parameters():,} parameters, engine={self.engine.name!r}, {self.dtype})"


def _check_room(cache: KVCache, num_rows: int, length: int, num_samples: int) -> None:
    if num_samples != 1:
        raise ValueError(f"num_samples must be 1 with a cache, found {num_samples}")
    if len(cache.lengths_B) != num_rows:
        raise ValueError(f"cache must have a row for each of the {num_rows} prompts, found {len(cache.lengths_B)}")
    if cache.capacity < length:
        raise ValueError(f"cache must have room for {length} tokens in a row, found {cache.capacity}")


def _remade(config: MoEConfig, engine: str, params: Arrays) -> MoETransformer:
    return MoETransformer(config, engine, params=params)


def initial_params(config: MoEConfig, seed: int, dtype: DTypeLike = np.float32) -> Arrays:
    """Return random normal weights, and norms of 1. All dtypes start from the same float64 draws."""
    rng = np.random.default_rng(seed)
    return {
        name: np.ones(shape, dtype) if len(shape) == 1 else (INIT_STD * rng.standard_normal(shape)).astype(dtype)
        for name, shape in config.parameter_shapes().items()
    }


def _checked_params(params: Arrays, config: MoEConfig) -> Arrays:
    """Return the same arrays, not copied, in the config's order; raise if a name, shape or dtype is wrong."""
    shapes = config.parameter_shapes()
    weights.check_names(params.keys(), shapes.keys(), "params")
    for name, array in params.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f"params[{name!r}] must be a NumPy array, found {type(array).__name__}")
    dtype = params["model.norm.weight"].dtype
    for name, shape in shapes.items():
        array = params[name]
        if array.shape != shape:
            raise ValueError(f"params[{name!r}] must have the shape {shape}, found {array.shape}")
        if array.dtype != dtype:
            raise TypeError(f"params[{name!r}] must be {dtype} as model.norm.weight is, found {array.dtype}")
        if not array.flags.c_contiguous:
            raise ValueError(f"params[{name!r}] must be C-contiguous, found strides {array.strides}")
        if not array.flags.writeable:
            raise ValueError(f"params[{name!r}] must be writable, found a read-only array")
    return {name: params[name] for name in shapes}
