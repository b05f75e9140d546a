"""Seconds of rollouts on a GPU, and their log-probs against the model's own forward.

    python tests/gpu/generation.py full varied long          # with src on PYTHONPATH; an older checkout's src: what it took

    full     8 prompts of 64 tokens × 8 samples, exactly 256 new ones, in the shapes of Qwen2-0.5B, SmolLM2-135M, Qwen2-7B
    varied   512 completions of 128 tokens in the mean: in rounds of 64, 64 at a time, 128 at a time, all at once
    long     8 prompts of 4,096 tokens × 8 samples × 512 new ones: prompts read together, and by each row

Weights are random, bfloat16.
"""

import sys
import time

import torch

from strop.models import as_policy
from strop.rollout import Sampling, decoding, generate

SHAPES = {
    "Qwen2-0.5B": {
        "kind": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True, "max_position_embeddings": 32768,
    },
    "SmolLM2-135M": {
        "kind": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "max_position_embeddings": 8192,
    },
    "Qwen2-7B": {
        "kind": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False, "max_position_embeddings": 32768,
    },
}  # fmt: skip


def model_of(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(SHAPES[name])
    config = AutoConfig.for_model(sizes.pop("kind"), eos_token_id=None, bos_token_id=None, pad_token_id=None, **sizes)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def prompts_of(model, count, length):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2000, model.config.vocab_size, (length,), generator=generator) for _ in range(count)]


def timed(function):
    torch.cuda.synchronize()
    start = time.perf_counter()
    made = function()
    torch.cuda.synchronize()
    return time.perf_counter() - start, made


def rollouts(policy, prompts, sampling, count):
    return [timed(lambda i=i: generate(policy, prompts, sampling, num_samples=8, seed=i)) for i in range(count)]


def error(model, found, i):
    """The largest difference of a completion's log-probs to a fresh forward's."""
    prompt, completion = found.prompt_ids[i], found.completion_ids[i].cuda()
    with torch.no_grad():
        logits = model(torch.cat([prompt.cuda(), completion])[None]).logits[0, len(prompt) - 1 : -1].float()
    return (found.logps[i] - logits.log_softmax(-1).gather(-1, completion[:, None])[:, 0].cpu()).abs().max().item()


def report(label, times, found, model):
    seconds = " ".join(f"{one:.3f}" for one in times)
    print(f"{label:28s} {seconds} s, {found.num_tokens} tokens, log-probs off by {error(model, found, 3):.3f}, {found.engine}",
          flush=True)  # fmt: skip


def full():
    for name in SHAPES:
        model = model_of(name)
        policy, prompts, sampling = as_policy(model), prompts_of(model, 8, 64), Sampling(max_new_tokens=256)
        runs = rollouts(policy, prompts, sampling, 5)
        assert runs[-1][1].num_tokens == 64 * 256
        report(f"full, {name}", [seconds for seconds, _ in runs], runs[-1][1], model)
        del model, policy, runs
        torch.cuda.empty_cache()


def varied():
    model = model_of("Qwen2-0.5B")
    policy, prompts = as_policy(model), prompts_of(model, 64, 64)
    sampling, num_slots = Sampling(max_new_tokens=512, stop_ids=tuple(range(1187))), decoding.Engine._num_slots

    def rounds(seed):
        parts = [generate(policy, prompts[i : i + 8], sampling, num_samples=8, seed=seed + i) for i in range(0, 64, 8)]
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.joined(part)
        return whole

    def at_once(seed):
        return generate(policy, prompts, sampling, num_samples=8, seed=seed)

    for label, lanes, function in (("rounds of 64", 0, rounds), ("64 at a time", 64, at_once),
                                   ("128 at a time", 128, at_once), ("all 512", 0, at_once)):  # fmt: skip
        slots = 64 * 64 + lanes * 512
        decoding.Engine._num_slots = (lambda engine, slots=slots: slots) if lanes else num_slots
        runs = [timed(lambda i=i, function=function: function(100 * i)) for i in range(3)]
        report(f"varied, {label}", [seconds for seconds, _ in runs], runs[-1][1], model)
    decoding.Engine._num_slots = num_slots


def long():
    from strop.rollout import launch

    model = model_of("Qwen2-0.5B")
    policy, prompts, sampling = as_policy(model), prompts_of(model, 8, 4096), Sampling(max_new_tokens=512)
    for label, shared_from in (("prompts read together", launch.SHARED_FROM), ("by each row", 10**9)):
        launch.SHARED_FROM = shared_from
        runs = rollouts(policy, prompts, sampling, 3)
        report(f"long, {label}", [seconds for seconds, _ in runs], runs[-1][1], model)


if __name__ == "__main__":
    for name in sys.argv[1:] or ("full", "varied", "long"):
        {"full": full, "varied": varied, "long": long}[name]()
