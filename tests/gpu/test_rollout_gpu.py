"""Rollouts by CUDA graphs: tokens, log-probs, fresh weights, and nothing that grows."""

import math

import numpy as np
import pytest
import torch
from yardstick import check_logps

from strop.algorithms.grpo import GRPO
from strop.models import as_policy
from strop.rollout import Sampling, generate, sampling_logps
from strop.rollout.decoding import (
    BUCKETS,
    MAX_SAMPLINGS,
    Engine,
    engine_of,
)
from strop.rollout.sampling import uniforms

PROMPTS = [[1, 2, 3], [7], [5, 6, 7, 8, 9, 10, 11, 12], [4, 4]]
SIZES = {
    "vocab_size": 8003, "hidden_size": 120, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 20, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
FUSED = {"llama", "qwen2", "qwen3", "mistral", "gemma"}
KINDS = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "gemma": {}, "mistral": {"sliding_window": 5}, "mixtral": {"num_local_experts": 4},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0},
}  # fmt: skip


def model_of(kind, eos_token_id=None, dtype=torch.float32, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, eos_token_id=eos_token_id, **(SIZES | KINDS[kind] | changes))
    attention = "eager" if kind == "gemma2" else None  # the one that always caps
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to("cuda", dtype).eval()


def alone(model, prompt, num_tokens):
    ids = torch.tensor([prompt], device="cuda")
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.filterwarnings("ignore:decode steps cannot be captured")  # Mixtral's experts, one by one
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate(kind):
    model = model_of(kind)
    policy = as_policy(model)
    for _ in range(2):  # captured, then replayed from the first step on
        found = generate(policy, PROMPTS, Sampling(max_new_tokens=40, temperature=0))
    wanted = [alone(model, prompt, 40) for prompt in PROMPTS]
    assert [c.tolist() for c in found.completion_ids] == wanted
    assert "generate" not in found.engine
    layers = "fused layers" if kind in FUSED else "its own layers"
    assert found.engine.startswith(f"hf, {layers}, ")
    if kind != "mixtral":
        assert found.engine == f"hf, {layers}, cuda graphs"


@pytest.mark.filterwarnings("ignore:decode steps cannot be captured")
def test_experts_are_recorded_in_graphs_and_without():
    """Of rows that end at all times; the first rollout captures, the second has graphs without a record beside."""
    model = model_of("mixtral", eos_token_id=list(range(600)))
    policy, seen = as_policy(model), []
    for record in (True, False, True):
        found = generate(policy, PROMPTS, Sampling(max_new_tokens=60), num_samples=8, seed=2, record_routing=record)
    lengths = [len(c) for c in found.completion_ids]
    assert min(lengths) < 10 < 30 < max(lengths)
    routers = policy.routers.modules
    hooks = [one.register_forward_hook(lambda *args: seen.append(args[2][2])) for one in routers]
    same = []
    for line in found:
        seen.clear()
        with torch.no_grad():
            model(line.ids_T[None].cuda())
        assert (line.routing_TLk[-1] == -1).all()
        own = torch.stack(seen, 1).cpu().sort(-1)[0][:-1]
        same.append((own == line.routing_TLk[:-1].long().sort(-1)[0]).all(-1).flatten())
    for hook in hooks:
        hook.remove()
    assert torch.cat(same).float().mean() > 0.99  # but for choices so close that rounding decides


@pytest.mark.parametrize("sampling", [Sampling(max_new_tokens=1), Sampling(max_new_tokens=1, temperature=0.7, top_k=9)])
def test_samples_follow_the_exact_distribution(sampling):
    policy, count = as_policy(model_of("qwen2", vocab_size=50)), 1024
    prompt = torch.tensor(PROMPTS[0])
    seen = torch.zeros(50, dtype=torch.float64)
    for seed in range(4):
        found = generate(policy, [prompt], sampling, num_samples=count, seed=seed)
        seen += torch.bincount(torch.cat(found.completion_ids), minlength=50).double()
    logits = policy.model(prompt[None].cuda()).logits[:, -1].double().cpu()
    wanted = sampling_logps(logits, sampling).exp()[0].detach() * 4 * count
    assert seen[wanted == 0].sum() == 0
    cells = wanted >= 5
    chi_square = ((seen - wanted)[cells].square() / wanted[cells]).sum().item()
    assert cells.sum() > 5
    assert chi_square < cells.sum() + 4 * math.sqrt(2 * cells.sum())


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_logps_are_those_of_a_fresh_forward(dtype, error):
    """With rows that end at all times, so that steps of every size take part."""
    model = model_of("qwen2", eos_token_id=list(range(300)), dtype=dtype)
    found = generate(as_policy(model), PROMPTS, Sampling(max_new_tokens=100), num_samples=16, seed=2)
    lengths = [len(c) for c in found.completion_ids]
    assert min(lengths) < 10
    assert max(lengths) > 40
    check_logps(model, found, error)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_next_rollout_computes_with_the_new_weights(autocast):
    policy = as_policy(model_of("llama"))
    sampling = Sampling(max_new_tokens=24, temperature=0)
    before = []
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            found = generate(policy, PROMPTS, sampling)
            assert found.engine == "hf, fused layers, cuda graphs"
            check_logps(policy.model, found, 0.1 if autocast else 1e-4)
        tokens = [c.tolist() for c in found.completion_ids]
        assert tokens not in before
        before.append(tokens)
        with torch.no_grad():
            for param in policy.model.parameters():
                param.add_(0.1 * torch.randn_like(param))


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_completions_do_not_depend_on_how_many_are_decoded_together(kind, monkeypatch):
    """200 rows of very different lengths, all at once and 40 at a time, rows that wait entering as others end."""
    model = model_of(kind, eos_token_id=list(range(300)))
    policy, sampling = as_policy(model), Sampling(max_new_tokens=100)
    found = []
    for slots in (10**6, 40 * 100 + 40):
        monkeypatch.setattr(Engine, "_num_slots", lambda engine, slots=slots: slots)
        found.append([c.tolist() for c in generate(policy, PROMPTS, sampling, num_samples=50, seed=3).completion_ids])
    lengths = [len(one) for one in found[0]]
    assert min(lengths) < 5
    assert max(lengths) > 60
    same = sum(a == b for a, b in zip(*found, strict=True))
    assert same >= 195  # of 200: products of other sizes round otherwise, and a number on a border falls to either


@pytest.mark.parametrize("windowed", [False, True])
def test_long_prompts_read_together(windowed, monkeypatch):
    """Groups of rows that end and enter at all times, over prompts of one token and of hundreds."""
    from strop.rollout import launch

    model = model_of("mistral", eos_token_id=list(range(300)), sliding_window=700 if windowed else None,
                     max_position_embeddings=2048, vocab_size=8003)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(300, 8003, (length,), generator=generator) for length in (900, 1, 600, 30, 800)]
    policy, sampling, found = as_policy(model), Sampling(max_new_tokens=100), []
    for shared_from in (10**9, 512):
        monkeypatch.setattr(launch, "SHARED_FROM", shared_from)
        monkeypatch.setattr(Engine, "_num_slots", lambda engine: 2 * 2400)
        found.append(generate(policy, prompts, sampling, num_samples=8, seed=1))
        assert found[-1].engine == "hf, fused layers, cuda graphs"
    texts = [[c.tolist() for c in one.completion_ids] for one in found]
    same = [a == b for a, b in zip(*texts, strict=True)]
    assert sum(same) >= 38  # of 40
    for i, is_same in enumerate(same):
        if is_same:
            torch.testing.assert_close(found[0].logps[i], found[1].logps[i], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_a_first_long_prompt_compiles_nothing(kind):
    from strop.rollout import kernels

    def compiled():
        jitted = {name: one for name, one in vars(kernels).items() if hasattr(one, "device_caches")}
        return {name: sum(len(found[0]) for found in one.device_caches.values()) for name, one in jitted.items()}

    policy = as_policy(model_of(kind, max_position_embeddings=2048))
    sampling = Sampling(max_new_tokens=8)
    generate(policy, [torch.tensor([3, 4])], sampling, num_samples=4, seed=0)
    engine_of(policy).compiling.join()
    before = compiled()
    for lengths in ([5], [700, 3], [1500] * 3, [600] * 40):
        prompts = [torch.arange(length) % 8003 for length in lengths]
        generate(policy, prompts, sampling, num_samples=4, seed=0)
    assert compiled() == before


def test_more_stop_ids_than_before_are_captured_too():
    policy = as_policy(model_of("llama"))
    generate(policy, PROMPTS, Sampling(max_new_tokens=20))
    found = generate(policy, PROMPTS, Sampling(max_new_tokens=20, stop_ids=tuple(range(40))), num_samples=8)
    assert found.engine == "hf, fused layers, cuda graphs"
    engine = engine_of(policy)
    assert engine.num_graphs >= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_added_for_the_rollout_alone(dtype):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model_of("qwen2", dtype=dtype), lora)
    before = {name: param.clone() for name, param in model.named_parameters()}
    policy, sampling = as_policy(model), Sampling(max_new_tokens=24)
    texts = []
    for std in (0.0, 0.3, 0.3):
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    before[name] = param.normal_(std=std).clone()
        found = generate(policy, PROMPTS, sampling, num_samples=2, seed=0)
        assert found.engine == "hf, fused layers, cuda graphs"
        texts.append([c.tolist() for c in found.completion_ids])
        for name, param in model.named_parameters():
            assert torch.equal(param, before[name]), name
        check_logps(model, found, 1e-4 if dtype == torch.float32 else 0.2)
    assert texts[0] != texts[1] != texts[2]


def test_long_run_of_varying_lengths_grows_neither_memory_nor_graphs():
    """200 GRPO steps; what is allocated after a step and the graphs stay where they were."""
    model = model_of("qwen2", eos_token_id=list(range(100)))
    rows = torch.Generator().manual_seed(0)

    def prompts():
        lengths = torch.randint(1, 60, (8,), generator=rows).tolist()
        return [torch.randint(2, 8000, (length,), generator=rows).tolist() for length in lengths]

    grpo = GRPO(model=model, reward_fn=lambda completion_ids: [float(len(c) % 7) for c in completion_ids], group_size=8,
                max_new_tokens=96, learning_rate=1e-5, autocast="bf16")  # fmt: skip
    allocated, graphs = [], []
    for _ in range(200):
        grpo.train_step(prompts())
        allocated.append(torch.cuda.memory_allocated())
        with grpo.autocast():
            engine = engine_of(grpo.policy)
        assert isinstance(engine, Engine)
        graphs.append(engine.num_graphs)
    assert max(allocated[100:]) <= max(allocated[20:100]) * 1.01
    assert graphs[-1] <= len(BUCKETS) * MAX_SAMPLINGS
    assert graphs[-1] <= 7


class Steps:
    """A matcher: the token of step i is a multiple of i + 2, and the reply ends after 20 tokens."""

    vocab_size, num_tokens = SIZES["vocab_size"], 0

    def write_allowed(self, bits_NW, row):
        flags = np.zeros(32 * bits_NW.shape[1], bool)
        flags[: self.vocab_size : self.num_tokens + 2] = True
        bits_NW[row] = np.packbits(flags, bitorder="little").view(np.int32)

    def take(self, token):
        assert token % (self.num_tokens + 2) == 0
        self.num_tokens += 1

    @property
    def ended(self):
        return self.num_tokens == 20


@pytest.mark.parametrize("changes", [{}, {"temperature": 0}, {"top_k": 50, "temperature": 0.7}])
def test_rows_with_grammars_replay_graphs_too(changes):
    """Beside rows without one; log-probs are held against a forward of the whole row."""
    policy, sampling = as_policy(model_of("llama")), Sampling(max_new_tokens=40, **changes)
    engine, prompts = engine_of(policy), [torch.tensor(prompt) for prompt in PROMPTS]
    for _ in range(2):  # captured, then replayed from the first step on
        matchers = [Steps(), None, Steps(), None]
        ids_B, logps_B = engine.complete(prompts, sampling, 1, uniforms(0, range(4), 1, 40), (), matchers=matchers)
    assert engine.num_graphs >= 2
    assert [len(ids) for ids in ids_B] == [20, 40, 20, 40]
    for prompt, ids, logps, matcher in zip(prompts, ids_B, logps_B, matchers, strict=True):
        read = torch.cat([prompt, ids]).cuda()[None]
        with torch.no_grad():
            logits_TV = policy.model(read).logits[0, len(prompt) - 1 : -1].float()
        if matcher is not None:
            multiples = (
                torch.arange(logits_TV.shape[1], device="cuda")[None] % torch.arange(2, 22, device="cuda")[:, None]
            )
            logits_TV = logits_TV.masked_fill(multiples != 0, -torch.inf)
        wanted_TV = sampling_logps(logits_TV, sampling)
        wanted_t = wanted_TV.gather(1, ids.cuda()[:, None])[:, 0].cpu()
        torch.testing.assert_close(logps.float(), wanted_t, atol=1e-4, rtol=1e-4)
