"""`MoETransformer`: parameters, an engine that computes with them, and everything a user calls.

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

INIT_STD = 0.02  # Mixtral's


@dataclass(frozen=True)
class Generation:
    """The completions that `generate` returns, without the prompts. Row b ends after lengths_B[b] tokens, its EOS among them."""

    tokens_BT: np.ndarray  # int64; the pad id behind the end
    logps_BT: np.ndarray  # log-prob of each token under the distribution it was drawn from; 0 behind the end
    lengths_B: np.ndarray

    @property
    def completions(self) -> list[np.ndarray]:
        return [row[:length] for row, length in zip(self.tokens_BT, self.lengths_B, strict=True)]


class Params(dict[str, np.ndarray]):
    """The parameters by name: the engine's own memory, to be changed in place.

    `params[name] -= step` and `params[name][...] = array` do that. Another array under the name is refused: the compiled
    engine would not compute with it.
    """

    def __setitem__(self, name: str, array: np.ndarray) -> None:
        if self.get(name) is not array:
            self._refuse(name)

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        name = args[0] if args and isinstance(args[0], str) else "name"
        raise TypeError(f"params must keep the engine's arrays: write into them, params[{name!r}][...] = array")

    __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (dict(self),)  # a copy is no engine's


class MoETransformer:
    """A Mixture-of-Experts transformer with Mixtral's arithmetic, names and checkpoints.

    engine   "native" (compiled) or "numpy" (the reference); the same weights give the same numbers
    seed     of the initial weights, which are normal with a standard deviation of 0.02; norms are 1
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
        """{name: array} as `config.parameter_shapes()` names them; change them in place."""
        return self._params

    def forward(self, tokens: Array, attention_mask: Array | None = None) -> np.ndarray:
        """Return logits (B, T, V) of token ids (B, T).

        attention_mask   (B, T), 0 at padding, wherever it stands: a padded row has the logits of the row without it.
                         Logits at padding are 0.
        """
        return self.engine.forward(*_inputs.as_batch(tokens, attention_mask, self.config))

    __call__ = forward

    def logps(
        self, tokens: Array, mask: Array | None = None, *, attention_mask: Array | None = None, temperature: float = 1.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return log π(token | the tokens before it) under softmax(logits / temperature), and the entropies: (B, T), float64.

        mask   (B, T), 1 where a log-prob is wanted; elsewhere, at padding and at the first token of a row both are 0.
               None wants all. Tokens of `generate` have the log-probs that it returned, bit for bit.
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
        """Return the mean cross-entropy over the targets that count + aux_loss_coef·(load-balancing loss), and every gradient.

        targets   (B, T), the token that follows each token
        mask      (B, T), 1 where a target counts; elsewhere it may be anything (−100). None counts all.
                  Where no target counts the cross-entropy is 0.
        out       gradient arrays of an earlier call to write over, so that a training loop allocates none
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
        """Complete prompts with a KV cache; finished rows leave the batch.

        prompts        a list of rows of ids, of any lengths; or (B, T) with an attention_mask where it is padded
        temperature    0 is greedy; see `strop.moe.sampling` for it, top_k and top_p
        num_samples    completions of each prompt, next to each other; the prompt is read once
        seed           the same seed draws the same tokens; None draws new ones
        uniforms       (rows, max_new_tokens) in [0, 1), the random numbers themselves in place of a seed
        eos_token_id   one or several ids that end a row, pad_token_id what stands behind it; the config's where None
        cache          of `engine.new_cache`: the prompts follow what it holds of each row, and it keeps what is read, all
                       but a row's last token; with num_samples=1
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
        """Return tokens, the mask of real ones, and the length of the longest row, its part in the cache included."""
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
        """Write config.json and model.safetensors as transformers' Mixtral has them."""
        weights.save(folder, self.config, self.params)

    @classmethod
    def load(cls, folder: str | Path, engine: str = "native", *, dtype: DTypeLike | None = None) -> "MoETransformer":
        """Open a folder that `save` or `MixtralForCausalLM.save_pretrained` wrote.

        dtype   of the parameters; None keeps float64 and brings everything else to float32
        """
        config, params = weights.load(folder, dtype=dtype)
        return cls(config, engine, params=params)

    def __reduce__(self) -> tuple[object, ...]:
        """Return what deepcopy and pickle need: all but the engine, which is made anew over the copied parameters."""
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
    """Return normal weights, and norms of 1; drawn in float64, so that every dtype starts from the same numbers."""
    rng = np.random.default_rng(seed)
    return {
        name: np.ones(shape, dtype) if len(shape) == 1 else (INIT_STD * rng.standard_normal(shape)).astype(dtype)
        for name, shape in config.parameter_shapes().items()
    }


def _checked_params(params: Arrays, config: MoEConfig) -> Arrays:
    """Return the same arrays in the config's order, not copied; raise where one does not fit."""
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
