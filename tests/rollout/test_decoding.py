"""Our engine for Hugging Face models: against generate, on many architectures; its weights; with its kernels."""

import copy
import dataclasses
import gc
import os
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_models import llama, qwen2
from yardstick import check_logps, clearly_greedy

from strop.models import as_policy, attention
from strop.rollout import Sampling, generate
from strop.rollout.decoding import ASK_EVERY, Engine, bucket_of, engine_of

PROMPTS = [[1, 2, 3], [7], [5, 6, 7, 8, 9, 10, 11, 12], [4, 4]]
GREEDY = Sampling(max_new_tokens=3 * ASK_EVERY, temperature=0)

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels on a CPU need TRITON_INTERPRET=1"
)

ARCHITECTURES = {
    "llama": {}, "qwen2": {}, "qwen3": {"head_dim": 12}, "mistral": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4}, "phi3": {"pad_token_id": 0}, "gpt2": {}, "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gemma": {"head_dim": 16}, "smollm3": {"no_rope_layers": [1, 0, 1]},
    "gemma2": {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0,
               "final_logit_softcapping": 3.0},
    "gemma3_text": {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16},
    "granite": {"tie_word_embeddings": True}, "olmo2": {}, "cohere": {},
    "phimoe": {"sliding_window": 5, "num_local_experts": 4},  # windows that stand in the mask alone
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3, "num_experts": 4,
                  "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "rope_parameters": None},
    "deepseek_v3": {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
                    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                    "first_k_dense_replace": 1, "moe_intermediate_size": 16},
    "llama4_text": {"attention_chunk_size": 5, "num_hidden_layers": 2, "no_rope_layers": [1, 0], "head_dim": 8, "num_local_experts": 2,
                    "intermediate_size_mlp": 32, "floor_scale": 4, "attn_scale": 1.0},
}  # fmt: skip
FUSED = {"llama", "qwen2", "qwen3", "mistral", "gemma", "granite"}


def model_of(kind, eos_token_id=None, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "bos_token_id": None,
        "eos_token_id": eos_token_id, "pad_token_id": None,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **(sizes | ARCHITECTURES.get(kind, {}) | changes))
        )
        with torch.no_grad():
            for name, param in model.named_parameters():
                if param.ndim == 1 and "norm" not in name:
                    param.normal_(std=0.2)  # biases, which begin as 0
    return model.eval()


def generated_alone(model, prompt, sampling):
    """transformers' own greedy completion of one prompt without padding."""
    output = clearly_greedy(
        model, torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=sampling.max_new_tokens, pad_token_id=0,
    )  # fmt: skip
    return output[0, len(prompt) :].tolist()


def with_kernels(policy, monkeypatch=None):
    """The engine as it is on a GPU, kernels interpreted (slowly: in one part each), without graphs."""
    if monkeypatch is not None:
        from strop.rollout import launch

        monkeypatch.setattr(launch, "PROGRAMS", 1)
        monkeypatch.setattr(launch, "CHUNK", 64)
    engine = engine_of(policy)
    assert isinstance(engine, Engine)
    engine.on_gpu, engine.why_no_graphs = True, "the interpreter has none"
    if engine.why_own is None:
        from strop.rollout import launch

        engine.layers.kernels = launch
    return engine


# ---- against transformers ----


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_greedy_equals_generate(kind):
    model = model_of(kind)
    policy = as_policy(model)
    assert isinstance(engine_of(policy), Engine), "not through generate itself"
    found = generate(policy, PROMPTS, GREEDY)
    assert ("fused layers" in found.engine) == (kind in FUSED), engine_of(policy).why_own
    wanted = [generated_alone(model, prompt, GREEDY) for prompt in PROMPTS]
    assert [c.tolist() for c in found.completion_ids] == wanted
    assert model.config._attn_implementation in ("sdpa", "eager"), "as it was"


def test_rows_that_end_leave_and_the_others_go_on():
    """Ends spread over the whole length: steps of 12, then fewer rows; each row as alone."""
    model = model_of("llama", eos_token_id=[3, 9, 11, 30, 40, 50])
    sampling = Sampling(max_new_tokens=40)
    policy = as_policy(model)
    found = generate(policy, PROMPTS, sampling, num_samples=8, seed=2)
    lengths = [len(c) for c in found.completion_ids]
    assert min(lengths) < ASK_EVERY < 2 * ASK_EVERY < max(lengths)
    check_logps(model, found, 1e-5)
    for completion, reason in zip(found.completion_ids, found.finish_reasons, strict=True):
        ended = int(completion[-1]) in model.generation_config.eos_token_id
        assert ended == (reason == "eos")
        assert ended or len(completion) == 40


def test_several_rounds_are_one(monkeypatch):
    policy = as_policy(model_of("qwen2"))
    sampling = Sampling(max_new_tokens=10)
    whole = generate(policy, PROMPTS, sampling, num_samples=3, seed=4)
    monkeypatch.setattr("strop.rollout.decoding.BUCKETS", (1, 2, 4, 5))
    parts = generate(policy, PROMPTS, sampling, num_samples=3, seed=4)
    # a number on the border of two tokens may fall to either
    assert sum(not torch.equal(a, b) for a, b in zip(whole.completion_ids, parts.completion_ids, strict=True)) <= 1


def test_prompts_read_in_several_parts_are_one(monkeypatch):
    policy = as_policy(model_of("qwen2"))
    whole = generate(policy, PROMPTS, GREEDY)
    monkeypatch.setattr("strop.rollout.decoding.PREFILL_TOKENS", 4)
    assert [c.tolist() for c in whole.completion_ids] == [
        c.tolist() for c in generate(policy, PROMPTS, GREEDY).completion_ids
    ]


# ---- models it cannot run ----


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "attention interface"),
    ],
)  # fmt: skip
def test_other_models_go_through_generate_and_say_why(kind, changes, reason):
    """Windows and chunks are longer than what the engine reads to find out whether it is right."""
    policy = as_policy(model_of(kind, **changes))
    sampling = Sampling(max_new_tokens=12, temperature=0)
    with pytest.warns(UserWarning, match=reason):
        found = generate(policy, PROMPTS[:2], sampling)
    assert reason in found.engine
    wanted = [generated_alone(policy.model, prompt, sampling) for prompt in PROMPTS[:2]]
    assert [c.tolist() for c in found.completion_ids] == wanted


def test_threads_take_turns_with_one_model_and_with_several():
    policies = [as_policy(model_of("llama")), as_policy(model_of("qwen2"))]
    policies.append(as_policy(policies[0].model))
    sampling = Sampling(max_new_tokens=40)

    def texts(policy):
        found = generate(policy, PROMPTS, sampling, num_samples=4, seed=0)
        return [completion.tolist() for completion in found.completion_ids]

    wanted = [texts(policy) for policy in policies]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(texts, policies * 3)) == wanted * 3


def test_a_model_that_counts_positions_by_itself_is_found_out():
    model = model_of("llama")
    forward = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None])
    with pytest.warns(UserWarning, match="not those of its forward"):
        generate(as_policy(model), PROMPTS, GREEDY)


def test_weights_on_several_devices_go_through_generate():
    model = model_of("llama")
    model.lm_head.extra = torch.nn.Parameter(torch.empty(1, device="meta"))
    with pytest.warns(UserWarning, match="several devices, cpu and meta"):
        generate(as_policy(model), PROMPTS, GREEDY)


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_a_model_of_few_positions_is_not_asked_for_more(kind):
    model = model_of(kind, max_position_embeddings=4)
    sampling = Sampling(max_new_tokens=2, temperature=0)
    found = generate(as_policy(model), [[1, 2], [3]], sampling)
    assert [c.tolist() for c in found.completion_ids] == [generated_alone(model, p, sampling) for p in ([1, 2], [3])]


def test_a_compiled_model_has_compiled_steps(monkeypatch):
    """Without graph breaks, for several numbers of rows. (The backend only traces: compiling is inductor's part.)"""
    model = model_of("olmo2", num_hidden_layers=2)  # no fused layers, which need no compiler
    compile = torch.compile
    policy = as_policy(compile(model, backend="aot_eager"))
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compile(f, backend="aot_eager", fullgraph=True, **options)
    )
    for prompts in (PROMPTS, PROMPTS[:2], PROMPTS[2:3]):
        found = generate(policy, prompts, GREEDY)
        assert [c.tolist() for c in found.completion_ids] == [generated_alone(model, p, GREEDY) for p in prompts]


# ---- weights ----


def test_an_engine_is_freed_when_it_is_let_go():
    """By reference counts alone: 16-bit copies and graphs must not wait for the garbage collector."""
    gc.disable()
    try:
        policy = as_policy(model_of("llama"))
        with torch.autocast("cpu", torch.bfloat16):
            generate(policy, PROMPTS, GREEDY)
            engine, model = weakref.ref(engine_of(policy)), weakref.ref(policy.model)
        policy.rollout_engine = None
        assert engine() is None
        generate(policy, PROMPTS, GREEDY)
        del policy
        assert model() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda policy: pickle.loads(pickle.dumps(policy))])
def test_a_copy_of_a_policy_has_an_engine_of_its_own(copied):
    policy = as_policy(model_of("llama"))
    wanted = generate(policy, PROMPTS, GREEDY)
    other = copied(policy)
    with torch.no_grad():
        policy.model.lm_head.weight.zero_()
    found = generate(other, PROMPTS, GREEDY)
    assert [c.tolist() for c in found.completion_ids] == [c.tolist() for c in wanted.completion_ids]
    assert engine_of(other).model is other.model is not policy.model


def test_a_parameter_made_anew_over_the_same_memory_stays():
    policy = as_policy(model_of("llama"))
    with torch.autocast("cpu", torch.bfloat16):
        generate(policy, PROMPTS, GREEDY)
        new = policy.model.lm_head.weight = torch.nn.Parameter(policy.model.lm_head.weight.data)
        generate(policy, PROMPTS, GREEDY)
    assert policy.model.lm_head.weight is new


def test_a_rollout_in_inference_mode_leaves_nothing_of_it():
    policy = as_policy(model_of("llama"))
    with torch.autocast("cpu", torch.bfloat16):
        with torch.inference_mode():
            first = generate(policy, PROMPTS, GREEDY)
        second = generate(policy, PROMPTS, GREEDY)  # writes its copies over the first one's
    assert not first.logps[0].is_inference()
    assert [c.tolist() for c in first.completion_ids] == [c.tolist() for c in second.completion_ids]


def test_an_interrupted_rollout_leaves_the_model_as_it_was():
    model = model_of("llama").train()
    policy, params = as_policy(model), list(model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        wanted = generate(policy, PROMPTS, GREEDY)
        calls = iter(range(7))
        hook = model.model.layers[1].register_forward_hook(lambda *_: None if next(calls, None) is not None else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(policy, PROMPTS, GREEDY)
        assert "own layers" in engine_of(policy).name, "fused layers call no hooks"
        hook.remove()
        assert model.training
        assert model.config._attn_implementation == "sdpa"
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        found = generate(policy, PROMPTS, GREEDY)
    assert [c.tolist() for c in found.completion_ids] == [c.tolist() for c in wanted.completion_ids]


def test_the_next_rollout_computes_with_the_new_weights():
    policy = as_policy(model_of("llama"))
    first = generate(policy, PROMPTS, GREEDY)
    engine = engine_of(policy)
    with torch.no_grad():
        for param in policy.model.parameters():
            param.add_(0.05 * torch.randn(param.shape, generator=torch.Generator().manual_seed(0)))
    second = generate(policy, PROMPTS, GREEDY)
    assert engine_of(policy) is engine
    wanted = [generated_alone(policy.model, prompt, GREEDY) for prompt in PROMPTS]
    assert [c.tolist() for c in second.completion_ids] == wanted
    assert wanted != [c.tolist() for c in first.completion_ids]


@pytest.mark.parametrize("what", ["weight", "buffer"])
def test_what_moved_makes_a_new_engine(what):
    policy = as_policy(model_of("llama"))
    engine = engine_of(policy)
    if what == "weight":
        policy.model.lm_head.weight.data = policy.model.lm_head.weight.data.clone().flip(0)
    else:
        rotation = next(module for module in policy.model.modules() if "inv_freq" in module._buffers)
        rotation.inv_freq = rotation.inv_freq * 0.5
    assert engine_of(policy) is not engine
    found = generate(policy, PROMPTS, GREEDY)
    assert found.completion_ids[0].tolist() == generated_alone(policy.model, PROMPTS[0], GREEDY)


def test_autocast_reads_16_bit_copies_made_anew_for_each_rollout():
    policy = as_policy(model_of("qwen2", tie_word_embeddings=True))
    before = [(param.data_ptr(), param.dtype) for param in policy.model.parameters()]
    for change in (0.0, 0.1):
        with torch.no_grad():
            for param in policy.model.parameters():
                param.add_(change * torch.randn(param.shape, generator=torch.Generator().manual_seed(0)))
        with torch.autocast("cpu", torch.bfloat16):
            found = generate(policy, PROMPTS, Sampling(max_new_tokens=8), num_samples=4, seed=0)
            check_logps(policy.model, found, rtol=0.05, atol=0.1)  # logits up to 10 in 8 bits
    assert before == [(param.data_ptr(), param.dtype) for param in policy.model.parameters()]


def test_adapters_are_part_of_the_model():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        model_of("llama"), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    policy = as_policy(model)
    base = generate(policy, PROMPTS, GREEDY)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
    adapted = generate(policy, PROMPTS, GREEDY)
    with model.disable_adapter():
        again = generate(policy, PROMPTS, GREEDY)
    texts = [[c.tolist() for c in found.completion_ids] for found in (base, adapted, again)]
    assert texts[0] == texts[2] != texts[1]
    engine = engine_of(policy)
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(0.5)
    assert engine_of(policy) is not engine, "a graph has the scaling as a number"
    for module in model.modules():
        if hasattr(module, "unscale_layer"):
            module.unscale_layer()
    model.eval()
    assert texts[1] == [generated_alone(model.merge_and_unload(), prompt, GREEDY) for prompt in PROMPTS]


@pytest.mark.parametrize(("options", "fused"), [({}, True), ({"use_rslora": True}, True), ({"use_dora": True}, False)])
@pytest.mark.parametrize("autocast", [False, True])
def test_adapters_are_added_to_copies_alone(options, fused, autocast):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", **options)
    torch.manual_seed(0)  # A is drawn from torch's generator, and how much bfloat16 rounds depends on it
    model = peft.get_peft_model(model_of("llama"), lora)
    policy = as_policy(model)
    for std in (0.0, 0.2):
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    param.normal_(std=std, generator=torch.Generator().manual_seed(0))
        before = [param.clone() for param in model.parameters()]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = generate(policy, PROMPTS, Sampling(max_new_tokens=8), num_samples=2, seed=0)
            assert ("fused layers" in found.engine) == fused
            check_logps(model, found, 0.1 if autocast else 1e-4)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# ---- with kernels ----


@interpreted
@pytest.mark.parametrize(
    "kind", ["qwen2", "qwen3", "gemma", "gemma2", "mixtral", "gpt_oss", "deepseek_v3", "llama4_text"]
)
def test_the_engine_with_kernels_equals_generate(kind, monkeypatch):
    model = model_of(kind, eos_token_id=9, num_hidden_layers=2)
    policy = as_policy(model)
    with_kernels(policy, monkeypatch)
    sampling = dataclasses.replace(GREEDY, max_new_tokens=6)
    found = generate(policy, PROMPTS, sampling)
    assert [c.tolist() for c in found.completion_ids] == [generated_alone(model, p, sampling) for p in PROMPTS]


# spare rows of a step read parts that none has written, and nobody reads what they give
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@interpreted
def test_prompts_read_together_with_kernels(monkeypatch):
    """From 2 tokens on; rows that end and rows that enter change who is beside whom."""
    from strop.rollout import launch

    model = model_of("qwen2", eos_token_id=list(range(20)), num_hidden_layers=2)
    policy, sampling = as_policy(model), Sampling(max_new_tokens=20)
    wanted = generate(policy, PROMPTS, sampling, num_samples=3, seed=1)
    assert len({len(c) for c in wanted.completion_ids}) > 3
    engine = with_kernels(policy, monkeypatch)
    monkeypatch.setattr(launch, "SHARED_FROM", 2)
    monkeypatch.setattr(engine, "_num_slots", lambda: 5 * 20 + 20)
    tiles = []
    monkeypatch.setattr(
        launch, "tiles_of", lambda *given, before=launch.tiles_of: tiles.append(before(*given)) or tiles[-1]
    )
    found = generate(policy, PROMPTS, sampling, num_samples=3, seed=1)
    assert len(tiles) > 2
    assert max(count for one in tiles for _, count in one) == 3
    same = [a.tolist() == b.tolist() for a, b in zip(wanted.completion_ids, found.completion_ids, strict=True)]
    assert sum(same) >= 11  # of 12: a number on the border of two tokens may fall to either


@interpreted
@pytest.mark.parametrize("sampling", [Sampling(max_new_tokens=6), Sampling(max_new_tokens=6, top_k=5, temperature=0.8)])
def test_the_engine_with_kernels_draws_as_torch_does(sampling, monkeypatch):
    tokens = []
    for kernels in (False, True):
        policy = as_policy(qwen2(eos_token_id=3, scale=2.0))
        if kernels:
            with_kernels(policy, monkeypatch)
        found = generate(policy, PROMPTS, sampling, num_samples=2, seed=1)
        tokens.append([c.tolist() for c in found.completion_ids])
    same = sum(a == b for a, b in zip(*tokens, strict=True))
    assert same >= 7  # of 8: a number on the border of two tokens may fall to either


def scripted(engine, monkeypatch, lengths):
    """Steps that only count: row i ends after lengths[i] tokens. The sizes of the steps, and each row's number of steps."""
    sizes, steps = [], [0] * len(lengths)

    def step(rows, round_, sampling):
        sizes.append(len(rows))
        going = rows.finished_N == 0
        assert len(rows.row_N[going].unique()) == int(going.sum()), "a row is decoded once"
        last_slot = round_.kv.shape[2] - 1
        assert (rows.suffix_start_N[going] + rows.step_N[going] < last_slot).all()
        assert len(rows.suffix_start_N[going].unique()) == int(going.sum()), "in slots of its own"
        for n in going.nonzero().flatten().tolist():
            row = int(rows.row_N[n])
            assert int(rows.step_N[n]) == steps[row]
            steps[row] += 1
            ends = steps[row] == lengths[row]
            rows.finished_N[n] = int(ends)
            rows.step_N[n] += int(not ends)

    monkeypatch.setattr(engine, "_step", step)
    return sizes, steps


def test_spare_rows_neither_write_to_others_nor_keep_a_step_large(monkeypatch):
    """9 rows in steps of 16, and so on: sizes follow from the completions' lengths alone, also where the first is long."""
    engine = with_kernels(as_policy(model_of("llama")))
    lengths = [30, 3, 5, 9, 20, 2, 2, 2, 17]
    sizes, steps = scripted(engine, monkeypatch, lengths)
    sampling = Sampling(max_new_tokens=40)
    round_, rows = engine.begin([torch.tensor([1, 2, 3])], 9, 9, sampling, torch.zeros(9, 40), ())
    assert rows.suffix_start_N[9:].eq(2 + 9 * 40).all(), "behind everyone's slots"
    engine._decode(rows, round_, sampling)
    assert sizes == [16] * 8 + [4] * 8 + [4] * 8 + [1] * 8
    assert steps == lengths


@pytest.mark.parametrize("on_gpu", [True, False])
def test_rows_that_wait_enter_the_places_of_those_that_ended(on_gpu, monkeypatch):
    """24 rows, 8 at a time: with lengths from 1 to 40 it takes the time of their tokens, not of the longest of each eight."""
    policy = as_policy(model_of("llama"))
    engine = with_kernels(policy) if on_gpu else engine_of(policy)
    lengths = [40, 1, 2, 3, 4, 5, 6, 7] * 3
    sizes, steps = scripted(engine, monkeypatch, lengths)
    sampling = Sampling(max_new_tokens=40)
    prompts = [torch.tensor([1, 2, 3]), torch.tensor([7]), torch.tensor([5, 6])]
    round_, rows = engine.begin(prompts, 8, 8, sampling, torch.zeros(24, 40), ())
    engine._decode(rows, round_, sampling)
    assert steps == lengths
    assert len(sizes) <= 56, "three rounds would take 120 steps"


def test_completions_do_not_depend_on_how_many_are_decoded_together(monkeypatch):
    """A row's random numbers are those of its row and position, wherever and whenever it is decoded."""
    policy = as_policy(model_of("llama", eos_token_id=[3, 9, 11, 30, 40, 50]))
    sampling = Sampling(max_new_tokens=40)
    whole = generate(policy, PROMPTS, sampling, num_samples=8, seed=2)
    lengths = [len(c) for c in whole.completion_ids]
    assert min(lengths) < ASK_EVERY < 2 * ASK_EVERY < max(lengths)
    for slots in (200, 40, 20):  # 4, 1 and 1 rows at a time; prompts in one round, and in several
        monkeypatch.setattr(Engine, "_num_slots", lambda engine, slots=slots: slots)
        some = generate(policy, PROMPTS, sampling, num_samples=8, seed=2)
        pairs = list(zip(whole.completion_ids, some.completion_ids, strict=True))
        assert sum(not torch.equal(a, b) for a, b in pairs) <= 1
        assert all(a[0] == b[0] for a, b in pairs)


def test_rounds_of_prompts_that_do_not_fit_together(monkeypatch):
    engine = engine_of(as_policy(model_of("llama")))
    prompts = [torch.zeros(length) for length in (30, 30, 30, 90)]
    monkeypatch.setattr(engine, "_num_slots", lambda: 120)
    assert list(engine._rounds(prompts, 4, 10)) == [(0, 2, 6), (2, 3, 4), (3, 4, 3)]
    monkeypatch.setattr(engine, "_num_slots", lambda: 10**6)
    assert list(engine._rounds(prompts, 4, 10)) == [(0, 4, 16)]


def test_buckets():
    assert [bucket_of(n) for n in (1, 2, 3, 64, 65, 1024)] == [1, 2, 4, 64, 128, 1024]


def test_slots_are_for_transformers_only_within(recwarn):
    model = llama()
    with attention.attending(model, rules={}):
        assert model.config._attn_implementation == attention.NAME
    assert model.config._attn_implementation != attention.NAME


def test_spare_rows_leave_what_other_rows_draw():
    """As on a GPU, where a step has rows that only fill it up: they point at the first row, whose token stays."""
    engine = engine_of(as_policy(model_of("llama")))
    sampling = Sampling(max_new_tokens=2, temperature=0)
    round_, rows = engine.begin([torch.tensor([1, 2])], 4, 4, sampling, torch.zeros(4, 2), ())
    round_.make_spare(rows.after(2))
    logits_NV = torch.eye(64)[[5, 6, 7, 8]]
    engine._draw(logits_NV, rows, round_, sampling)
    assert round_.tokens_BT[:, 0].tolist() == [5, 6, 0, 0]
    assert rows.step_N.tolist() == [1, 1, 0, 0]
