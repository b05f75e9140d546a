"""The MoE's engines and their peer, transformers' Mixtral, behind one set of questions.

Every method returns a function without arguments that does the work once. The models of one config have the same weights
in every contender. Fairness, where it is a choice:

- Mixtral runs as transformers configures it by default on this machine (the fastest of its attention and expert
  implementations), without a cache in plain forwards, with torch's fused AdamW.
- torch.compile has its defaults: the first shape is compiled for itself, further ones with dynamic sizes. In training
  the experts stay outside its graph, and run as in eager mode: inductor stops at the backward of their grouped product in
  float32 on a CPU, and everything would run in pieces, slower than eager.
- The learning rate of a timed training step is 0: the arithmetic is the same, and every step works on the same numbers.
- The auxiliary loss is off: Mixtral's own breaks the graph of torch.compile.
"""

import functools
import importlib.util
import logging
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import strop
from benchmarks.contenders.moe_kernels import KERNELS
from strop._install import missing
from strop.moe import AdamW, MoEConfig, MoETransformer, available_engines
from strop.moe.model import initial_params
from strop.moe.weights import to_mixtral

Call = Callable[[], Any]
SEED = 42
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.95), 1e-8, 0.1
COLD_THREADS = 2
BLAS_THREADS = 1  # more than one makes NumPy's small products slower; the suite measures it


class StropContender:
    """An engine of `strop.moe`, by its registered name."""

    def __init__(self, engine: str):
        self.name = engine

    def set_threads(self, count: int) -> None:
        if strop.get_num_threads() != count:
            strop.set_num_threads(count)

    def model(self, config: MoEConfig, dtype: Any = np.float32) -> MoETransformer:
        return MoETransformer(config, self.name, params=initial_params(config, SEED, dtype))

    def forward(self, config: MoEConfig, tokens_BT: np.ndarray) -> Call:
        model = self.model(config)
        return lambda: model.forward(tokens_BT)

    def trainer(self, config: MoEConfig, learning_rate: float = 0.0) -> "StropTrainer":
        return StropTrainer(self.model(config), learning_rate)

    def train_step(self, config: MoEConfig, tokens_BT: np.ndarray, targets_BT: np.ndarray) -> Call:
        trainer = self.trainer(config)
        return lambda: trainer.step(tokens_BT, targets_BT)

    def loss_and_grads(self, config: MoEConfig, tokens_BT: np.ndarray, targets_BT: np.ndarray) -> tuple[float, dict]:
        return self.model(config).loss_and_grads(tokens_BT, targets_BT)

    def generate(self, config: MoEConfig, prompts_BT: np.ndarray, count: int) -> Call:
        model = self.model(config)
        return lambda: model.generate(prompts_BT, max_new_tokens=count, temperature=0).tokens_BT

    def kernel(self, name: str, *arrays: np.ndarray) -> Call | None:
        kernel = KERNELS.get(self.name, {}).get(name)
        return None if kernel is None else kernel(*arrays)

    def forward_by_workers(self, config: MoEConfig, batches: Sequence[np.ndarray]) -> Call:
        """One thread and one engine for each batch; the engines share the weights."""
        params = initial_params(config, SEED)
        models = [MoETransformer(config, self.name, params=params) for _ in batches]
        run = _workers(len(batches))
        return lambda: run(lambda model, tokens_BT: model.forward(tokens_BT), models, batches)

    def train_by_workers(self, config: MoEConfig, batches: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> Call:
        """Gradients of each batch in its own thread, their mean, one step of AdamW."""
        params = initial_params(config, SEED)
        models = [MoETransformer(config, self.name, params=params) for _ in batches]
        optimizer = _adamw(models[0], params, 0.0)
        grads: list[dict[str, np.ndarray] | None] = [None] * len(batches)
        run = _workers(len(batches))

        def step() -> float:
            found = run(lambda m, x, y, out: m.loss_and_grads(x, y, out=out), models, batches, targets, grads)
            grads[:] = [g for _, g in found]
            total: dict[str, np.ndarray] = grads[0]  # type: ignore[assignment]
            for more in grads[1:]:
                for name, grad in more.items():  # type: ignore[union-attr]
                    total[name] += grad
            optimizer.step(total, grad_scale=1 / len(batches))
            return sum(loss for loss, _ in found) / len(batches)

        return step

    def products(self, config: MoEConfig, tokens_BT: np.ndarray, targets_BT: np.ndarray) -> Call | None:
        """Exactly the matrix products of a step's forward and backward, by the engine's own routine, and nothing else."""
        recorded = record_products(config, tokens_BT, targets_BT)
        replay = KERNELS.get(self.name, {}).get("products")
        return None if replay is None else replay(recorded)

    @property
    def cold_program(self) -> str:
        """Makes `logits`: all that a new process does up to its first forward."""
        return (
            "import numpy as np; from strop.moe import MoEConfig, MoETransformer;"
            f"model = MoETransformer(MoEConfig.preset('tiny', intermediate_dim=256), {self.name!r}, seed={SEED});"
            "logits = model.forward(np.arange(64).reshape(2, 32))"
        )


class StropTrainer:
    """One step is forward, backward and AdamW; it returns the loss before the update."""

    def __init__(self, model: MoETransformer, learning_rate: float):
        self.model = model
        self.optimizer = _adamw(model, model.params, learning_rate)
        self.grads: dict[str, np.ndarray] | None = None

    def step(self, tokens_BT: np.ndarray, targets_BT: np.ndarray, learning_rate: float | None = None) -> float:
        loss, self.grads = self.model.loss_and_grads(tokens_BT, targets_BT, out=self.grads)
        self.optimizer.step(self.grads, learning_rate=learning_rate)
        return loss

    def logits(self, tokens_BT: np.ndarray) -> np.ndarray:
        return self.model.forward(tokens_BT)


class MixtralTrainer:
    """The same with torch: `plain` holds the weights, `model` is called."""

    def __init__(self, plain: Any, model: Any, learning_rate: float):
        self.model, self.optimizer = model, _torch_adamw(plain, learning_rate)

    def step(self, tokens_BT: np.ndarray, targets_BT: np.ndarray, learning_rate: float | None = None) -> float:
        import torch

        if learning_rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
        self.optimizer.zero_grad()
        loss = _mixtral_loss(self.model, torch.from_numpy(tokens_BT), torch.from_numpy(targets_BT))
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def logits(self, tokens_BT: np.ndarray) -> np.ndarray:
        import torch

        with torch.no_grad():
            return self.model(input_ids=torch.from_numpy(tokens_BT), use_cache=False).logits.numpy()


class MixtralContender:
    """transformers' MixtralForCausalLM with the same weights, eager or through torch.compile."""

    def __init__(self, *, compiled: bool):
        self.compiled = compiled
        self.name = "Mixtral compiled" if compiled else "Mixtral eager"

    def set_threads(self, count: int) -> None:
        import torch

        torch.set_num_threads(count)

    def model(self, config: MoEConfig) -> Any:
        """The module to call; one per config, so that what is compiled is compiled once."""
        return _compiled_mixtral(config) if self.compiled else _mixtral(config)

    def training_model(self, config: MoEConfig) -> tuple[Any, Any]:
        """The module with the weights, and what is called to train it."""
        return _compiled_for_training(config) if self.compiled else (_mixtral(config), _mixtral(config))

    def forward(self, config: MoEConfig, tokens_BT: np.ndarray) -> Call:
        import torch

        model, tokens = self.model(config), torch.from_numpy(tokens_BT)

        def forward() -> Any:
            with torch.no_grad():
                return model(input_ids=tokens, use_cache=False).logits

        return forward

    def trainer(self, config: MoEConfig, learning_rate: float = 0.0) -> "MixtralTrainer":
        """With a learning rate the model has weights of its own; without, it is the one everything else runs on."""
        if not learning_rate:
            return MixtralTrainer(*self.training_model(config), learning_rate)
        plain = _new_mixtral(config)
        return MixtralTrainer(plain, _compile_for_training(plain) if self.compiled else plain, learning_rate)

    def train_step(self, config: MoEConfig, tokens_BT: np.ndarray, targets_BT: np.ndarray) -> Call:
        trainer = self.trainer(config)
        return lambda: trainer.step(tokens_BT, targets_BT)

    def loss_and_grads(self, config: MoEConfig, tokens_BT: np.ndarray, targets_BT: np.ndarray) -> tuple[float, dict]:
        import torch

        plain, model = self.training_model(config)
        plain.zero_grad()
        loss = _mixtral_loss(model, torch.from_numpy(tokens_BT), torch.from_numpy(targets_BT))
        loss.backward()
        return loss.item(), {name: p.grad.numpy().copy() for name, p in plain.named_parameters()}

    def generate(self, config: MoEConfig, prompts_BT: np.ndarray, count: int) -> Call | None:
        """Hugging Face's own `generate` with its cache. It does not go through a compiled module's forward."""
        import torch

        if self.compiled:
            return None
        model, prompts = _mixtral(config), torch.from_numpy(prompts_BT)
        mask = torch.ones_like(prompts)
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}

        def generate() -> Any:
            with torch.no_grad():
                return model.generate(prompts, attention_mask=mask, **options)[:, prompts.shape[1] :]

        return generate

    def kernel(self, name: str, *arrays: np.ndarray) -> Call | None:
        import torch
        from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm

        tensors = [torch.from_numpy(array) for array in arrays]
        if name == "rms_norm":
            norm = MixtralRMSNorm(arrays[0].shape[-1], eps=1e-5)
            norm.weight.data = tensors.pop()
            function: Any = norm
        else:
            function = {"matmul": torch.mm, "softmax": functools.partial(torch.nn.functional.softmax, dim=-1)}[name]
        if self.compiled:
            _quiet()
            function = torch.compile(function)

        def call() -> Any:
            with torch.no_grad():
                return function(*tensors)

        return call

    def forward_by_workers(self, config: MoEConfig, batches: Sequence[np.ndarray]) -> Call:
        forwards = [self.forward(config, batch) for batch in batches]
        first = functools.cache(forwards[0])  # compiles, where it does, outside the threads
        run = _workers(len(batches), lambda: self.set_threads(1))
        return lambda: (first(), run(lambda forward: forward(), forwards))[1]

    def train_by_workers(self, config: MoEConfig, batches: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> Call:
        import torch

        plain, model = self.training_model(config)
        params = list(plain.parameters())
        optimizer = _torch_adamw(plain, 0.0)
        run = _workers(len(batches), lambda: self.set_threads(1))
        pairs = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in zip(batches, targets, strict=True)]

        def work(pair: tuple[Any, Any]) -> tuple[float, Sequence[Any]]:
            loss = _mixtral_loss(model, *pair)
            return loss.item(), torch.autograd.grad(loss, params)

        first = functools.cache(lambda: work(pairs[0])[0])  # compiles, where it does, outside the threads

        def step() -> float:
            first()
            found = run(work, pairs)
            for param, *grads in zip(params, *(grads for _, grads in found), strict=True):
                total = grads[0]
                for grad in grads[1:]:
                    total += grad
                param.grad = total / len(pairs) if len(pairs) > 1 else total
            optimizer.step()
            return sum(loss for loss, _ in found) / len(pairs)

        return step

    def products(self, config: MoEConfig, tokens_BT: np.ndarray, targets_BT: np.ndarray) -> Call | None:
        """The products as ATen sees them, on the step's own tensors. Attention is one fused operator and counts as a product."""
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        recorded: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

        class Record(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                name = function._schema.name.removeprefix("aten::")
                if name in ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm") or "attention" in name:
                    recorded.append((function, args, kwargs or {}))
                return function(*args, **(kwargs or {}))

        with Record():
            _mixtral_loss(_mixtral(config), torch.from_numpy(tokens_BT), torch.from_numpy(targets_BT)).backward()

        def replay() -> None:
            with torch.no_grad():
                for function, args, kwargs in recorded:
                    function(*args, **kwargs)

        return replay

    @property
    def cold_program(self) -> str:
        compiled = "model = torch.compile(model)\n" if self.compiled else ""
        return (
            "import torch; from benchmarks.contenders.moe import _mixtral; from strop.moe import MoEConfig\n"
            f"torch.set_num_threads({COLD_THREADS})\n"
            f"model = _mixtral(MoEConfig.preset('tiny', intermediate_dim=256))\n{compiled}"
            "with torch.no_grad(): logits = model(torch.arange(64).view(2, 32), use_cache=False).logits"
        )


Contender = StropContender | MixtralContender


def contenders() -> list[Contender]:
    """Every engine that is registered and runs here, the fastest of ours first; then Mixtral where it is installed."""
    names = available_engines()
    found: list[Contender] = [StropContender(name) for name in sorted(names, key=lambda name: name == "numpy")]
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        found += [MixtralContender(compiled=False), MixtralContender(compiled=True)]
    return found


def contender(name: str) -> Contender:
    return next(c for c in contenders() if c.name == name)


def set_threads(count: int) -> None:
    """The same number for every contender; NumPy's BLAS has its own, `BLAS_THREADS`."""
    try:
        from threadpoolctl import threadpool_limits
    except ModuleNotFoundError:
        raise missing("fixing the threads of NumPy's BLAS", "threadpoolctl", "bench") from None
    for c in contenders():
        c.set_threads(count)
    threadpool_limits(BLAS_THREADS, "blas")


def _workers(count: int, start: Callable[[], None] | None = None) -> Callable[..., list[Any]]:
    """A function that calls another one on `count` waiting threads, one column of arguments each."""
    pool = ThreadPoolExecutor(count, initializer=start)
    return lambda function, *columns: list(pool.map(function, *columns))


# ---- what is recorded -------------------------------------------------------------------------------------------------


class _Recorded(np.ndarray):
    """An array that notes every matrix product it takes part in, and hands this on to what is computed from it."""

    products: list[tuple[np.ndarray, np.ndarray]]

    def __array_finalize__(self, parent: Any) -> None:
        self.products = getattr(parent, "products", [])

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        values = [_plain(value) for value in inputs]
        options = {name: _plain(value) for name, value in options.items()}
        if ufunc is np.matmul and values[0].ndim > 1:
            self.products.append((values[0], values[1]))
        return self._recorded(getattr(ufunc, method)(*values, **options))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return self._recorded(super().__array_function__(function, types, args, kwargs))

    def _recorded(self, value: Any) -> Any:
        if type(value) is np.ndarray:
            value = value.view(_Recorded)
        if isinstance(value, _Recorded):
            value.products = self.products
        return value


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value.view(np.ndarray) if isinstance(value, _Recorded) else value


def record_products(
    config: MoEConfig, tokens_BT: np.ndarray, targets_BT: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The operands of every matrix product of one forward and backward, as the reference computes it."""
    from strop.moe.reference.engine import NumpyEngine

    products: list[tuple[np.ndarray, np.ndarray]] = []
    params = {name: param.view(_Recorded) for name, param in initial_params(config, SEED).items()}
    for param in params.values():
        param.products = products
    NumpyEngine(config, params).loss_and_grads(tokens_BT, targets_BT)  # type: ignore[arg-type]
    return products


# ---- Mixtral ----------------------------------------------------------------------------------------------------------


def _quiet() -> None:
    """torch.compile tells at length what it could not fuse; the tables show what it cost."""
    import torch

    warnings.filterwarnings("ignore", module=r"torch\..*")
    torch._logging.set_logs(dynamo=logging.CRITICAL, inductor=logging.CRITICAL, aot=logging.CRITICAL)
    torch._dynamo.config.recompile_limit = 64


def _new_mixtral(config: MoEConfig) -> Any:
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    mixtral = MixtralForCausalLM(MixtralConfig(**to_mixtral(config))).float().eval()
    state = {name: torch.from_numpy(param) for name, param in initial_params(config, SEED).items()}
    if config.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    mixtral.load_state_dict(state)
    return mixtral


@functools.cache
def _mixtral(config: MoEConfig) -> Any:
    return _new_mixtral(config)


@functools.cache
def _compiled_mixtral(config: MoEConfig) -> Any:
    import torch

    _quiet()
    return torch.compile(_mixtral(config))


@functools.cache
def _compiled_for_training(config: MoEConfig) -> tuple[Any, Any]:
    plain = _new_mixtral(config)
    return plain, _compile_for_training(plain)


def _compile_for_training(plain: Any) -> Any:
    import torch

    _quiet()
    for layer in plain.model.layers:
        layer.mlp.experts.forward = torch.compiler.disable(layer.mlp.experts.forward)
    return torch.compile(plain)


def _mixtral_loss(model: Any, tokens: Any, targets: Any) -> Any:
    """Mean cross-entropy of the given targets, as strop takes them: nothing is shifted."""
    import torch

    logits = model(input_ids=tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _adamw(model: MoETransformer, params: dict[str, np.ndarray], learning_rate: float) -> AdamW:
    update = model.engine.adamw_update_all
    return AdamW(params, learning_rate=learning_rate, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, update=update)


def _torch_adamw(model: Any, learning_rate: float) -> Any:
    """Matrices decay, norms do not, as in `strop.moe.AdamW`."""
    import torch

    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
