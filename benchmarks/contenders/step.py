"""Who takes a GRPO step in the suite `step`: strop and TRL, each as a function that takes so many steps and tells of each.

Fairness, where it is a choice: TRL runs as its users run it on one device, with transformers' generation, its loss set to strop's
(grpo), without gradient checkpointing, its AdamW being torch's fused one; once with all completions in one micro-batch, its quickest,
and for one model once with eight at a time, its default and leaner. Both have their weights in the workload's dtype, and
its autocast.

Random weights draw the end once in a vocabulary, so all completions are full. Where a workload has `mean_tokens`, the end is
made likelier in the weights that both sides get (`raise_the_end`): lengths are then drawn, and no side knows them before.
"""

import dataclasses
import gc
import importlib.util
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

LEARNING_RATE, SEED = 1e-6, 0
TRIALS = 11  # rollouts that set how likely the end is
Steps = Callable[[int], "list[Step]"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """seconds of phases; tokens generated; the most memory of the device that was allocated"""

    seconds: float
    phases: dict[str, float]
    num_tokens: int
    peak_bytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """num_prompts · group_size completions of new_tokens each; shape: a transformers config by model type, or "moe"

    mean_tokens         completions have so many on average, and end by themselves; None: all have new_tokens
    autocast            float32 weights under autocast to bfloat16
    rollout_dtype       of strop's rollouts
    rounds              at most, where a step takes seconds
    beside              strop's step is also measured with other options: what they are called, and the options
    trl_micro_batches   TRL's: completions in one, None is all; empty: TRL is not measured, its step takes seconds
    """

    name: str
    model_type: str
    shape: dict[str, Any]
    num_prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 16
    new_tokens: int = 32
    mean_tokens: int | None = None
    autocast: bool = False
    kl_coef: float = 0.04
    device: str = "cpu"
    rollout_dtype: str | None = None
    rounds: int = 7
    beside: tuple[str, dict[str, Any]] | None = None
    trl_micro_batches: tuple[int | None, ...] = (None,)

    @property
    def num_completions(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def vocab_size(self) -> int:
        return self.shape["vocab_size"]

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" and not self.autocast else torch.float32

    def labels(self) -> dict[str, Any]:
        return {
            "model": self.name, "completions": self.num_completions, "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens, "kl_coef": self.kl_coef, "device": self.device,
            "dtype": str(self.dtype).removeprefix("torch."), "mean_tokens": self.mean_tokens, "autocast": self.autocast,
            "rollout_dtype": self.rollout_dtype,
        }  # fmt: skip

    def prompts(self) -> torch.Tensor:
        """[num_prompts, prompt_tokens]; ids from 2, for 0 and 1 are padding and end"""
        generator = torch.Generator().manual_seed(SEED)
        return torch.randint(2, self.vocab_size, (self.num_prompts, self.prompt_tokens), generator=generator)


QWEN2 = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
TINY_QWEN2 = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
QWEN2_7B = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
EXACT = "exact", {"exact": True}
LONG_PROMPTS: dict[str, Any] = {
    "beside": ("shared prefixes", {"share_prefixes": "always"}), "new_tokens": 256, "kl_coef": 0.0, "device": "cuda",
    "model_type": "qwen2", "trl_micro_batches": (),
}  # fmt: skip
LONG: dict[str, Any] = {"prompt_tokens": 64, "new_tokens": 256, "device": "cuda"}
ON_A_GPU = [
    Workload(name="Qwen2-0.5B shape", model_type="qwen2", shape=QWEN2, **LONG),
    Workload(name="Qwen2-0.5B shape, lengths vary", model_type="qwen2", shape=QWEN2, mean_tokens=96, trl_micro_batches=(), **LONG),
    Workload(name="SmolLM2-135M shape", model_type="llama", shape=SMOLLM2, trl_micro_batches=(), **LONG),
    Workload(
        name="SmolLM2-135M shape, short", model_type="llama", shape=SMOLLM2, num_prompts=16, prompt_tokens=64,
        new_tokens=16, autocast=True, device="cuda",
    ),
    Workload(name="Qwen2-0.5B shape, exact", model_type="qwen2", shape=QWEN2, beside=EXACT, trl_micro_batches=(), **LONG),
    *(
        Workload(name=f"{name}, long prompts of {tokens:,}", shape=shape | {"max_position_embeddings": 16384},
                 prompt_tokens=tokens, num_prompts=count, **LONG_PROMPTS)
        for name, shape, count in (
            ("Qwen2-0.5B shape", QWEN2, 4),
            ("Qwen2-7B shape of 7 layers", QWEN2_7B | {"num_hidden_layers": 7}, 1),  # both sides fit beside each other
        )
        for tokens in (1024, 8192)
    ),
    Workload(name="SmolLM2-135M shape, exact", model_type="llama", shape=SMOLLM2, beside=EXACT, trl_micro_batches=(), **LONG),
]  # fmt: skip
SMALL: dict[str, Any] = {
    "model_type": "llama", "shape": SMOLLM2, "num_prompts": 4, "group_size": 4, "kl_coef": 0.0, "rounds": 3,
}  # fmt: skip
ON_A_CPU = [
    Workload(name="tiny MoE", model_type="moe", shape={"vocab_size": 1000, "intermediate_dim": 256}),
    Workload(name="tiny Qwen2", model_type="qwen2", shape=TINY_QWEN2),
    Workload(name="SmolLM2-135M shape", **SMALL, prompt_tokens=36),
    Workload(name="SmolLM2-135M shape, rollouts in bfloat16", **SMALL, prompt_tokens=36, rollout_dtype="bfloat16"),
    Workload(name="SmolLM2-135M shape, long prompts", **SMALL | {"num_prompts": 1, "group_size": 8}, prompt_tokens=256),
    Workload(  # a vocabulary that is as small a part of the model as in all 30 layers
        name="SmolLM2-135M shape of 4 layers, long prompts", model_type="llama", num_prompts=1, prompt_tokens=512, new_tokens=64,
        shape=SMOLLM2 | {"num_hidden_layers": 4, "vocab_size": 6554}, trl_micro_batches=(),
        beside=("each reads its prompt", {"share_prefixes": "never"}),
    ),
]  # fmt: skip


def reward(completion_ids: Any, **columns: Any) -> list[float]:
    """The share of even ids: cheap, and different within a group."""
    return [sum(int(i) % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]


def hugging_face_model(workload: Workload) -> Any:
    import transformers

    torch.manual_seed(SEED)
    kind = transformers.AutoConfig.for_model(workload.model_type, eos_token_id=1, pad_token_id=0, **workload.shape)
    with torch.device(workload.device):  # half a billion random numbers take a CPU half a minute
        model = transformers.AutoModelForCausalLM.from_config(kind, dtype=workload.dtype)
    if workload.mean_tokens is not None:
        raise_the_end(model, workload)
    return model


@torch.no_grad()
def raise_the_end(model: Any, workload: Workload) -> None:
    """Make the end so likely that completions have mean_tokens on average.

    One coordinate of every embedding is 1, so that hidden states have a part in common whatever was read. Input and output
    share their embeddings, and the end's gets more of that part: as much as rollouts show to be right.
    """
    from strop.models import as_policy
    from strop.rollout import Sampling, generate

    assert model.config.tie_word_embeddings
    assert workload.mean_tokens is not None
    weight_VH, prompts = model.get_input_embeddings().weight, workload.prompts()
    weight_VH[:, 0] = 1
    common_H = model.get_decoder()(prompts.to(weight_VH.device)).last_hidden_state.flatten(0, 1).float().mean(0)
    end_H, common_H = weight_VH[1].float().clone(), common_H / common_H.square().sum()
    policy, sampling = as_policy(model), Sampling(max_new_tokens=workload.new_tokens)
    low, high = 0.0, 40.0  # more of the end's logit
    for _ in range(TRIALS):
        weight_VH[1] = end_H + (low + high) / 2 * common_H
        lengths = generate(policy, list(prompts), sampling, num_samples=4 * workload.group_size, seed=0).metrics
        too_long = lengths["completion/length"] > workload.mean_tokens
        low, high = ((low + high) / 2, high) if too_long else (low, (low + high) / 2)
    policy.rollout_engine = None  # its memory is none of the trainer's


def moe_model(workload: Workload) -> Any:
    from strop.moe import MoEConfig, MoETransformer

    config = MoEConfig(eos_token_id=1, pad_token_id=0, **workload.shape)
    return MoETransformer(config, seed=SEED)


def strop_trainer(workload: Workload, **options: Any) -> Any:
    from strop.algorithms.grpo import GRPO

    model = moe_model(workload) if workload.model_type == "moe" else hugging_face_model(workload)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*bfloat16")  # weights of 16 bits are the workload's
        return GRPO(
            model=model, reward_fn=_strop_reward, group_size=workload.group_size, kl_coef=workload.kl_coef,
            max_new_tokens=workload.new_tokens, learning_rate=LEARNING_RATE,
            autocast="bf16" if workload.autocast else None, rollout_dtype=workload.rollout_dtype, **options,
        )  # fmt: skip


def strop_steps(workload: Workload, grpo: Any) -> Steps:
    prompts = workload.prompts()

    def steps(number: int) -> list[Step]:
        found = []
        for _ in range(number):
            _reset_peak(workload)
            start = _now(workload)
            metrics = grpo.train_step(prompts)
            seconds = _now(workload) - start
            phases = {
                k.removeprefix("time/"): v for k, v in metrics.items() if k.startswith("time/") and k != "time/step"
            }
            tokens = round(metrics["completion/length"] * workload.num_completions)
            found.append(Step(seconds=seconds, phases=phases, num_tokens=tokens, peak_bytes=_peak(workload)))
        return found

    return steps


def _strop_reward(completion_ids: Any) -> list[float]:
    """`reward` of tensors, whose elements would be slow to take one by one."""
    return [int((ids % 2 == 0).sum()) / max(len(ids), 1) for ids in completion_ids]


def trl_installed() -> bool:
    return importlib.util.find_spec("trl") is not None


def trl_steps(workload: Workload, folder: str, at_a_time: int | None = None) -> Steps:
    """One trainer; a turn is one call of its train(). at_a_time: completions of a micro-batch, None is all."""
    import datasets
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    transformers.utils.logging.set_verbosity_error()
    on_gpu = workload.device == "cuda"
    at_a_time = at_a_time or workload.num_completions
    config = GRPOConfig(
        output_dir=folder, per_device_train_batch_size=at_a_time, num_generations=workload.group_size,
        gradient_accumulation_steps=workload.num_completions // at_a_time,
        model_init_kwargs={"dtype": workload.dtype},
        max_completion_length=workload.new_tokens, beta=workload.kl_coef, loss_type="grpo", learning_rate=LEARNING_RATE,
        use_cpu=not on_gpu, bf16=on_gpu or workload.autocast, gradient_checkpointing=False, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, shuffle_dataset=False, max_steps=1, seed=SEED,
    )  # fmt: skip
    texts = [" ".join(f"t{i}" for i in row) for row in workload.prompts().tolist()]
    lengths: list[int] = []

    def counted_reward(completion_ids: Any, **columns: Any) -> list[Any]:
        lengths.append(sum(map(len, completion_ids)))
        return reward(completion_ids)

    clock = _clock(workload)
    trainer = GRPOTrainer(
        model=_saved_model(workload, folder), reward_funcs=counted_reward, args=config, callbacks=[clock],
        train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in texts] * 64),
        processing_class=_word_tokenizer(workload.vocab_size),
    )  # fmt: skip
    clock.time_generation(trainer.model)

    def steps(number: int) -> list[Step]:
        trainer.args.max_steps = number
        lengths.clear()
        clock.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.train()
        return [
            Step(seconds=seconds, phases={"generate": generating}, num_tokens=tokens, peak_bytes=peak)
            for (seconds, generating, peak), tokens in zip(clock.steps, lengths, strict=True)
        ]

    return steps


def _clock(workload: Workload) -> Any:
    import transformers

    class Clock(transformers.TrainerCallback):
        """Seconds, seconds of generation and peak memory of every step."""

        def __init__(self) -> None:
            self.clear()

        def clear(self) -> None:
            self.steps: list[tuple[float, float, int | None]] = []
            self.generating = 0.0

        def time_generation(self, model: Any) -> None:
            generate = model.generate

            def timed(*args: Any, **kwargs: Any) -> Any:
                start = _now(workload)
                result = generate(*args, **kwargs)
                self.generating += _now(workload) - start
                return result

            model.generate = timed

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            _reset_peak(workload)
            self.generating, self.started = 0.0, _now(workload)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.steps.append((_now(workload) - self.started, self.generating, _peak(workload)))

    return Clock()


def _saved_model(workload: Workload, folder: str) -> str:
    """A folder with the weights strop has, from which TRL loads model and reference; the MoE's open as Mixtral."""
    path = f"{folder}/model"
    if workload.model_type == "moe":
        moe_model(workload).save(path)
    else:
        hugging_face_model(workload).save_pretrained(path)
    return path


def _word_tokenizer(vocab_size: int) -> Any:
    """The word t7 is the id 7."""
    import tokenizers
    import transformers

    words = {"<pad>": 0, "</s>": 1} | {f"t{i}": i for i in range(2, vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", padding_side="left"
    )


def _now(workload: Workload) -> float:
    """The time when all that was asked of the device is done."""
    if workload.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def memory_in_use(workload: Workload) -> int:
    if workload.device != "cuda":
        return 0
    gc.collect()
    return torch.cuda.memory_allocated()


def _reset_peak(workload: Workload) -> None:
    if workload.device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak(workload: Workload) -> int | None:
    return torch.cuda.max_memory_allocated() if workload.device == "cuda" else None
