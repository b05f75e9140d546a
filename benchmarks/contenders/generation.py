"""Who generates in the suite `generation`: strop, transformers and vLLM, each in a process of its own, which answers one
rollout at a time. So every process is a fresh one for its first rollout, and no one's memory is in another's way.

All have the same random weights, the same prompts, other ones in each rollout, and draw from softmax(logits); all return
the log-prob of every token. On a CPU there is a fourth: strop without its engine, whose rollouts are those of models that the engine cannot run.

Fairness, where it is a choice: transformers runs as its users run it, with a cache that grows,
its log-probs taken by a logits processor; vLLM runs inside its process, with its CUDA graphs and without a tokenizer.

How completions end: what random weights draw never ends by itself. So one id, END, has its row of the LM head scaled until
it is drawn once in `once_in` tokens. It ends a completion where lengths vary, and is a token as any other where they do not.

Shapes: B rows, T tokens, V vocabulary.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import environment
from benchmarks.contenders.step import QWEN2, QWEN2_7B, SMOLLM2

PAD, END, SEED = 0, 1, 0
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A transformers config by model type; once_in: how often END is drawn, in tokens"""

    name: str
    model_type: str
    shape: dict[str, Any]
    device: str = "cuda"
    once_in: int = 150

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """num_samples completions of each prompt, of exactly new_tokens tokens

    varied         of at most so many
    transformers   whether its `generate` is measured: at some sizes it takes minutes of a GPU's time
    """

    model: Model
    num_prompts: int = 8
    num_samples: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 256
    varied: bool = False
    transformers: bool = True

    @property
    def stop_ids(self) -> list[int]:
        return [END] if self.varied else []

    def prompts(self, seed: int) -> torch.Tensor:
        """[num_prompts, prompt_tokens]; other ones for each seed, since a cache of prompts is no use after an update"""
        generator = torch.Generator().manual_seed(seed)
        shape = self.num_prompts, self.prompt_tokens
        return torch.randint(2, self.model.shape["vocab_size"], shape, generator=generator)

    def labels(self) -> dict[str, Any]:
        return {
            "operator": "generation", "model": self.model.name, "completions": self.num_prompts * self.num_samples,
            "prompts": self.num_prompts, "prompt_tokens": self.prompt_tokens, "new_tokens": self.new_tokens,
            "lengths": "varied" if self.varied else "full", "device": self.model.device,
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }  # fmt: skip


LONG = {"max_position_embeddings": 8192}
SMALL = Model(name="Qwen2-0.5B shape", model_type="qwen2", shape=QWEN2 | LONG)
SMALLEST = Model(name="SmolLM2-135M shape", model_type="llama", shape=SMOLLM2 | LONG)
LARGE = Model(name="Qwen2-7B shape", model_type="qwen2", shape=QWEN2_7B | LONG)
ON_A_GPU = [
    Workload(model=SMALL),
    Workload(model=SMALL, varied=True, transformers=False),
    Workload(model=SMALL, varied=True, num_prompts=64, new_tokens=1024, transformers=False),
    Workload(model=SMALL, prompt_tokens=4096, new_tokens=512, transformers=False),
    Workload(model=SMALLEST),
    Workload(model=SMALLEST, varied=True, transformers=False),
    Workload(model=LARGE, transformers=False),
    Workload(model=LARGE, varied=True, transformers=False),
]
TINY = Model(
    name="tiny Qwen2", model_type="qwen2", device="cpu", once_in=20,
    shape={"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
)  # fmt: skip

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # the name, and what is beside TINY's shape
    "starcoder2": ("StarCoder 2", {}),
    "gpt_oss": ("gpt-oss", EXPERTS | {"head_dim": 16, "sliding_window": 16, "rope_parameters": None}),
    "deepseek_v3": ("DeepSeek V3", {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "moe_intermediate_size": 32,
    }),
    "qwen3_next": ("Qwen3-Next", LINEAR | {
        "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    }),
    "qwen3_5_text": ("Qwen3.5", LINEAR | {"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]}),
    "falcon_h1": ("Falcon-H1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16,
                                "mamba_n_groups": 1}),
    "granitemoehybrid": ("Granite 4", EXPERTS | {
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
        "mamba_n_groups": 1, "shared_intermediate_size": 32,
    }),
    "nemotron_h": ("Nemotron-H", {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 16,
                                  "ssm_state_size": 16, "n_groups": 1, "head_dim": 16}),
    "lfm2": ("LFM2", {"layer_types": ["conv", "full_attention"]}),
    "llama4_text": ("Llama 4", EXPERTS | {
        "head_dim": 16, "intermediate_size_mlp": 128, "attention_chunk_size": 16, "no_rope_layers": [1, 0], "floor_scale": 16,
        "num_experts_per_tok": 1,
    }),
}  # fmt: skip
TINY_MODELS = [TINY] + [
    dataclasses.replace(TINY, name=f"tiny {name}", model_type=kind, shape=TINY.shape | shape)
    for kind, (name, shape) in FAMILIES.items()
]
ON_A_GPU += [
    Workload(model=dataclasses.replace(model, device="cuda"), prompt_tokens=16, new_tokens=32)
    for model in TINY_MODELS[1:]
]
ON_A_CPU = [
    Workload(model=model, prompt_tokens=16, new_tokens=32, varied=varied)
    for model in TINY_MODELS
    for varied in ((False, True) if model is TINY else (False,))
]


# ---- the model ----


def make_model(model: Model) -> Any:
    """The same weights in every process of a machine."""
    import transformers

    torch.manual_seed(SEED)
    config = transformers.AutoConfig.for_model(model.model_type, eos_token_id=None, pad_token_id=PAD, **model.shape)
    with torch.device(model.device):  # where they are made: a CPU takes a minute for the large one
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    made.generation_config.eos_token_id = None
    give_end(made.eval(), 1 / model.once_in)
    return made


@torch.no_grad()
def give_end(model: Any, probability: float) -> None:
    """Scale END's row of the LM head until its probability has this mean over random tokens."""
    head_VH = model.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(SEED)
    ids_BT = torch.randint(2, len(head_VH), (8, 64), generator=generator).to(head_VH.device)
    logits_NV = model(input_ids=ids_BT).logits.flatten(0, 1).float()
    end_N = logits_NV[:, END].double()
    logits_NV[:, END] = -torch.inf
    others_N = logits_NV.logsumexp(-1).double()
    low, high = 0.0, 1e4
    for _ in range(60):
        scale = (low + high) / 2
        low, high = (scale, high) if (scale * end_N - others_N).sigmoid().mean() < probability else (low, scale)
    head_VH[END] *= low


def weight_bytes(model: Model) -> int:
    """What a decode step reads at the least: every weight once, but of a table of embeddings that is no LM head."""
    import transformers

    config = transformers.AutoConfig.for_model(model.model_type, **model.shape)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    table = made.get_input_embeddings().weight
    unread = 0 if made.get_output_embeddings().weight is table else table.numel()
    return (sum(weight.numel() for weight in made.parameters()) - unread) * model.dtype.itemsize


def bandwidth(device: str) -> float:
    """Bytes a second of a copy, what it reads and what it writes; the best of a few."""
    size = 2**32 if device == "cuda" else 2**28
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(6):
        start = _now(device)
        target.copy_(source)
        seconds.append(_now(device) - start)
    del source, target
    torch.cuda.empty_cache()  # for the contenders' processes
    return 2 * size / min(seconds)


def _now(device: str) -> float:
    """The time when all that was asked of the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# ---- the contenders: seconds that starting took, and (workload, seed) → the lengths of the completions ----


Rollouts = Callable[[Workload, int], list[int]]


def strop_rollouts(model: Model) -> tuple[float, Rollouts]:
    from strop.models import as_policy

    return 0.0, _rollouts_of(as_policy(make_model(model)))


def fallback_rollouts(model: Model) -> tuple[float, Rollouts]:
    """strop with the way of its rollouts that a model has which the engine cannot run."""
    from strop.models import as_policy
    from strop.rollout import decoding

    policy = as_policy(make_model(model))
    policy.check_reading()
    policy.rollout_engine = (
        decoding.signature(policy.model, policy.boundaries),
        decoding._fallback(policy, "to measure it"),
    )
    return 0.0, _rollouts_of(policy)


def _rollouts_of(policy: Any) -> Rollouts:
    from strop.rollout import Sampling, generate

    def run(workload: Workload, seed: int) -> list[int]:
        sampling = Sampling(max_new_tokens=workload.new_tokens, stop_ids=tuple(workload.stop_ids))
        prompts = list(workload.prompts(seed))
        rollout = generate(policy, prompts, sampling, num_samples=workload.num_samples, seed=seed)
        assert [len(row) for row in rollout.logps] == [len(row) for row in rollout.completion_ids]
        return [len(row) for row in rollout.completion_ids]

    return run


class Recorder:
    """A logits processor that keeps the log-prob of every token drawn; it is known at the next step, or from the result."""

    def __init__(self) -> None:
        self.before_BV: torch.Tensor | None = None
        self.logps: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        self.take(input_ids[:, -1])
        self.before_BV = logits_BV.float().log_softmax(-1)
        return self.before_BV

    def take(self, tokens_B: torch.Tensor) -> None:
        if self.before_BV is not None:
            self.logps.append(self.before_BV.gather(-1, tokens_B[:, None])[:, 0])


def transformers_rollouts(model: Model) -> tuple[float, Rollouts]:
    from transformers import GenerationConfig, LogitsProcessorList

    made = make_model(model)

    def run(workload: Workload, seed: int) -> list[int]:
        torch.manual_seed(seed)
        prompts_BT = workload.prompts(seed).to(model.device)
        config = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, num_return_sequences=workload.num_samples,
            max_new_tokens=workload.new_tokens, eos_token_id=workload.stop_ids or None, pad_token_id=PAD,
        )  # fmt: skip
        recorder = Recorder()
        with torch.no_grad():
            found_BT = made.generate(
                prompts_BT, attention_mask=torch.ones_like(prompts_BT), generation_config=config,
                logits_processor=LogitsProcessorList([recorder]),
            )  # fmt: skip
        new_BT = found_BT[:, workload.prompt_tokens :]
        recorder.take(new_BT[:, -1])
        new_BT, logps_BT = new_BT.cpu(), torch.stack(recorder.logps, 1).cpu()
        assert logps_BT.shape == new_BT.shape
        ended_BT = (new_BT == END).cumsum(1).bool() if workload.varied else torch.zeros_like(new_BT, dtype=torch.bool)
        return (~ended_BT).sum(1).add(ended_BT.any(1)).tolist()

    return 0.0, run


def vllm_rollouts(model: Model) -> tuple[float, Rollouts]:
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        made = make_model(model)
        made.save_pretrained(folder)
        del made
        torch.cuda.empty_cache()
        start = time.perf_counter()
        engine = vllm.LLM(
            model=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=SEED, gpu_memory_utilization=0.4,
            max_model_len=model.shape["max_position_embeddings"],
        )  # fmt: skip
        seconds = time.perf_counter() - start

    def run(workload: Workload, seed: int) -> list[int]:
        params = vllm.SamplingParams(
            n=workload.num_samples, temperature=1.0, max_tokens=workload.new_tokens, ignore_eos=True, logprobs=0,
            stop_token_ids=workload.stop_ids, detokenize=False,
        )  # fmt: skip
        prompts = [{"prompt_token_ids": row} for row in workload.prompts(seed).tolist()]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        return [len(one.token_ids) for output in outputs for one in output.outputs]

    return seconds, run


CONTENDERS = {
    "strop": strop_rollouts,
    "transformers": transformers_rollouts,
    "fallback": fallback_rollouts,
    "vLLM": vllm_rollouts,
}


def left_out(model: Model) -> dict[str, str]:
    """Contenders that do not take part, and why."""
    without = {} if model.device == "cpu" else {"fallback": "it would take minutes"}
    if importlib.util.find_spec("vllm") is None:
        return without | {"vLLM": "it is not installed"}
    return {"vLLM": "it needs a GPU"} if model.device == "cpu" else without


# ---- a process of its own ----


class Failed(RuntimeError):
    """A contender's process could not make the rollout."""


@dataclasses.dataclass(frozen=True)
class Made:
    seconds: float
    lengths: list[int]


class Side:
    """A contender in its own process. cache: the folder for compiled kernels, which others may have filled."""

    def __init__(self, name: str, model: Model, cache: str) -> None:
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed with the side)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.contenders.generation", name, json.dumps(dataclasses.asdict(model))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, encoding="utf-8",
            env=environment() | {variable: f"{cache}/{variable}" for variable in CACHES} | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )  # fmt: skip
        self._started: float | None = None

    def start(self) -> float:
        """Wait until it has started; the seconds of an engine that is started, besides its first rollout."""
        if self._started is None:
            self._started = self._answer()["seconds"]
        return self._started

    def rollout(self, workload: Workload, seed: int) -> Made:
        assert self.process.stdin is not None
        self.start()
        self.process.stdin.write(json.dumps([dataclasses.asdict(workload), seed]) + "\n")
        self.process.stdin.flush()
        return Made(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": self._last_error()}
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def _last_error(self) -> str:
        self.process.wait()
        self.errors.seek(0)
        said = [line.strip() for line in self.errors if line.strip()] or ["no message"]
        self.close()
        return said[-1][:200]

    def close(self) -> None:
        if not self.errors.closed:
            self.process.communicate()  # the end of its input is the end of the process
            self.errors.close()


def main(name: str, model: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print is no answer

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    seconds, run = CONTENDERS[name](Model(**json.loads(model)))
    answer({"seconds": seconds})
    for line in sys.stdin:
        asked, seed = json.loads(line)
        workload = Workload(**asked | {"model": Model(**asked["model"])})
        start = _now(workload.model.device)
        try:
            lengths = run(workload, seed)
            answer({"seconds": _now(workload.model.device) - start, "lengths": lengths})
        except Exception as error:  # told to the one who asked, who decides
            answer({"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]})


if __name__ == "__main__":
    main(*sys.argv[1:])
