"""Policy: log-probs against a forward done by hand, hidden states with the head, references, every kind of model."""

import contextlib
import copy
import json
import warnings

import pytest
import torch
from tiny_models import VOCAB, PlainModel, batch_of, every_kind, llama, moe, plain, qwen2, read_padded
from yardstick import same

from strop.data.batch import TokenBatch, Trajectory
from strop.models import as_policy, load_model
from strop.moe import MoEConfig, MoETransformer
from strop.ops import linear_logp, logp

ROWS = [([1, 2, 3], [4, 5]), ([7], [8, 9, 10, 11]), ([3, 3], []), ([6, 5, 4, 3], [2])]


def by_hand(model, rows, temperature=1.0):
    """[(log-probs, entropies) of each row's completion], each row alone."""
    found = []
    for prompt, completion in rows:
        output = model(torch.tensor([prompt + completion]))
        logits = getattr(output, "logits", output)[0, len(prompt) - 1 : -1].double() / temperature
        logps = logits.log_softmax(-1)
        found.append((logps.gather(-1, torch.tensor(completion).long()[:, None])[:, 0], -(logps.exp() * logps).sum(-1)))
    return found


# ---- log-probs ----


@every_kind
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_ragged_batch_equals_its_rows(make, temperature):
    model = make(scale=3.0)
    batch = batch_of(ROWS)
    logps, entropy = as_policy(model).logps(batch, temperature=temperature, entropy=True)
    assert logps.shape == entropy.shape == batch.targets_n.shape
    wanted = by_hand(model, ROWS, temperature)
    torch.testing.assert_close(logps.double(), torch.cat([w for w, _ in wanted]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), torch.cat([e for _, e in wanted]), rtol=1e-5, atol=1e-5)


@every_kind
def test_what_does_not_count_changes_nothing(make):
    """Another id behind the end of padded rows, and a trajectory that claims its first token."""
    policy, other = as_policy(make()), as_policy(make())
    if policy.kind == "hf":
        read_padded(policy), read_padded(other)
    type(other).pad_id, before = 17, type(other).pad_id
    try:
        batch = batch_of(ROWS)
        wrong = TokenBatch.of(
            [Trajectory(t.ids_T, t.loss_mask_T | (torch.arange(len(t)) == 0)) for t in map(line_of, ROWS)]
        )
        found = other.logps(wrong)
    finally:
        type(other).pad_id = before
    torch.testing.assert_close(policy.logps(batch), found, rtol=1e-6, atol=1e-6)


def line_of(row):
    return Trajectory.of(*row)


@every_kind
def test_gradient_is_that_of_the_rows(make):
    model = make(scale=3.0)
    policy, batch = as_policy(model), batch_of(ROWS)
    (policy.logps(batch) * (batch.sequence_n + 1.0)).sum().backward()
    found = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    for weight, row in enumerate(ROWS, 1):
        if row[1]:
            (policy.logps(batch_of([row])) * weight).sum().backward()
    assert any(grad.abs().max() > 1e-3 for grad in found.values())
    for name, param in model.named_parameters():
        torch.testing.assert_close(found[name], param.grad, rtol=2e-4, atol=2e-5)


def test_a_module_may_return_a_tensor_a_tuple_a_dict_or_logits():
    class Wrapped(torch.nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.inner, self.wrap = plain(), wrap

        def forward(self, x):
            return self.wrap(self.inner(x))

    wanted = as_policy(plain()).logps(batch_of(ROWS))
    for wrap in (lambda x: x, lambda x: (x, 1), lambda x: {"logits": x}, lambda x: type("Output", (), {"logits": x})()):
        same(as_policy(Wrapped(wrap)).logps(batch_of(ROWS)), wanted)
    with pytest.raises(ValueError, match=r"model must return logits of shape \[4, 5, V\].*found \[4, 30\]"):
        as_policy(Wrapped(lambda x: x[:, -1])).logps(batch_of(ROWS))


def test_a_module_that_takes_a_mask_gets_it():
    seen = []

    class Masked(PlainModel):
        def forward(self, input_ids, attention_mask):
            seen.append(attention_mask)
            return super().forward(input_ids)

    batch = batch_of(ROWS)
    as_policy(Masked()).logps(batch)
    assert torch.equal(seen[0], batch.padded(0).mask_ST)


# ---- packed ----

PACKS = {
    "llama": lambda **more: hugging_face("Llama", **more),
    "qwen2": lambda **more: hugging_face("Qwen2", **more),
    "qwen3": lambda **more: hugging_face("Qwen3", **more),
    "mistral, window 3": lambda **more: hugging_face("Mistral", sliding_window=3, **more),
    "gemma": lambda **more: hugging_face("Gemma", **more),
    "gemma 2, soft caps, window 3": lambda **more: hugging_face(
        "Gemma2", sliding_window=3, num_hidden_layers=2, attn_logit_softcapping=0.5, final_logit_softcapping=2.0, **more
    ),
    "gemma 3, window 3": lambda **more: hugging_face(
        "Gemma3", "Gemma3Text", sliding_window=3, num_hidden_layers=2, **more
    ),
    "phi 3": lambda **more: hugging_face("Phi3", num_key_value_heads=2, **more),
    "granite": lambda **more: hugging_face("Granite", logits_scaling=4.0, **more),
    "cohere": lambda **more: hugging_face("Cohere", **more),
    "olmo 2": lambda **more: hugging_face("Olmo2", **more),
    "mixtral": lambda **more: with_eager_experts(hugging_face("Mixtral", **more)),
    "smollm 3": lambda **more: hugging_face("SmolLM3", **more),
    "gpt2": lambda **more: gpt2(),
}


def with_eager_experts(model):
    model.set_experts_implementation("eager")  # the others know no float64
    return model


def loss_and_gradients(policy, batch):
    weights_n = torch.linspace(0.5, 2.0, batch.num_loss_tokens, dtype=torch.float64)
    loss = (policy.logps(batch) * weights_n).sum()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("make", PACKS.values(), ids=PACKS)
def test_packed_padded_and_one_by_one_are_the_same(make):
    """Loss and gradients in float64; lengths beyond the windows, and a sequence of one token."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        torch.randint(1, VOCAB, (n,), generator=generator).split([m, n - m])
        for n, m in ((9, 2), (1, 1), (7, 3), (5, 1))
    ]
    packed, padded, alone = (as_policy(make().double()) for _ in range(3))
    assert packed.packs, packed.no_packing_because
    # these have norms that compute in float32 whatever they are given
    tolerance = 1e-5 if packed.config.model_type.startswith(("gemma", "cohere")) else 1e-10
    found = [loss_and_gradients(packed, batch_of(rows)), loss_and_gradients(read_padded(padded), batch_of(rows))]
    weights_n = torch.linspace(0.5, 2.0, batch_of(rows).num_loss_tokens, dtype=torch.float64)
    total, start = 0.0, 0
    for row in rows:
        batch = batch_of([row])
        if batch.num_loss_tokens:
            part = (alone.logps(batch) * weights_n[start : start + batch.num_loss_tokens]).sum()
            part.backward()
            total, start = total + part.detach(), start + batch.num_loss_tokens
    found.append((total, {name: p.grad for name, p in alone.model.named_parameters() if p.grad is not None}))
    for loss, gradients in found[1:]:
        assert abs(loss - found[0][0]) < tolerance
        assert gradients.keys() == found[0][1].keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, found[0][1][name], rtol=tolerance, atol=tolerance)


def test_packed_attention_of_any_lengths_is_that_of_each_sequence_alone():
    """Lengths near each other share padded rows; 24 and 20 do, 19 and 7 stand apart."""
    from strop.models.attention import Packed, Rule, attention_of_rows

    lengths = [20, 7, 24, 19, 24, 1]
    torch.manual_seed(0)
    states = [torch.randn(1, heads, sum(lengths), 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    pass_ = Packed(lengths, torch.tensor([0, *lengths]).cumsum(0).int())
    together = pass_.attend(*states, 0, Rule(0.3))
    d_out = torch.randn_like(together)
    grads = torch.autograd.grad(together, states, d_out)
    parts = zip(*(one.split(lengths, 2) for one in states), strict=True)
    alone = torch.cat([attention_of_rows(*part, Rule(0.3)) for part in parts], 1)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads, torch.autograd.grad(alone, states, d_out), rtol=0, atol=1e-12)
    assert pass_._in_rows.counts == [3, 1, 1, 1]


def test_packed_layers_that_are_computed_again_in_the_backward():
    """Gradient checkpointing: outside of the forward, where nothing else would tell a layer that its row is packed."""
    found = []
    for again in (False, True):
        model = llama(scale=3.0).double().train()
        if again:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy = as_policy(model)
        assert policy.packs
        found.append(loss_and_gradients(policy, batch_of([row for row in ROWS if row[1]])))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_models_that_cannot_read_packed_sequences_say_why():
    assert as_policy(plain()).packs is False
    assert as_policy(moe()).packs is False
    model = llama()

    def with_the_token_before(module, inputs, states_BTH):  # a convolution: it reaches over where a sequence begins
        return states_BTH + torch.nn.functional.pad(states_BTH[:, :-1], (0, 0, 1, 0))

    model.model.embed_tokens.register_forward_hook(with_the_token_before)
    policy = as_policy(model)
    assert not policy.packs
    assert "its logits of packed sequences are not those of its rows" in policy.no_packing_because
    wanted = torch.cat([w for w, _ in by_hand(model, ROWS)])
    torch.testing.assert_close(policy.logps(batch_of(ROWS)).double(), wanted, rtol=1e-5, atol=1e-5)
    compiled = as_policy(torch.compile(llama(), backend="eager"))
    assert not compiled.packs
    assert "compiled" in compiled.no_packing_because


def test_a_trial_leaves_model_and_random_numbers_alone():
    model = llama().train()
    before = torch.random.get_rng_state()
    assert as_policy(model).packs
    assert torch.equal(before, torch.random.get_rng_state())
    assert model.training
    assert model.config._attn_implementation == "sdpa"


# ---- hidden states and the head ----


def hugging_face(name, config_name=None, **changes):
    import transformers

    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 8, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}  # fmt: skip
    config = getattr(transformers, f"{config_name or name}Config")(**(sizes | changes))
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, eos_token_id=None, bos_token_id=None)
    ).eval()


@pytest.mark.parametrize(
    "make", [llama, qwen2, gpt2, lambda: qwen2(tie_word_embeddings=True), lambda: hugging_face("Mixtral")]
)
def test_head_of_hidden_states_is_the_logits(make):
    policy, batch = as_policy(make()), batch_of(ROWS)
    hidden, weight, bias = policy.hidden(batch)
    found = linear_logp(hidden, weight, batch.targets_n, bias=bias)
    wanted = logp(policy.logits(batch), batch.targets_n)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert policy.no_hidden_because is None
    same(policy.logps(batch), found)


@pytest.mark.parametrize(
    ("make", "because"),
    [
        (lambda: hugging_face("Gemma2", final_logit_softcapping=2.0), "final_logit_softcapping"),
        (lambda: hugging_face("Cohere", logit_scale=0.3), "logit_scale"),
        (lambda: hugging_face("Granite", logits_scaling=4.0), "logits_scaling"),
        (moe, "moe"),
        (plain, "plain"),
    ],
)
def test_other_heads_go_through_logits(make, because):
    model = make()
    policy = as_policy(model)
    assert policy.hidden(batch_of(ROWS)) is None
    assert because in policy.no_hidden_because
    found = policy.logps(batch_of(ROWS))
    wanted = torch.cat([w for w, _ in by_hand(model, ROWS)])
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_forward_that_does_something_else_to_the_logits_is_found_out():
    """No config key tells of it: the numbers do."""
    import transformers

    class Odd(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 1.01
            return output

    model = Odd(llama().config).eval()
    policy = as_policy(model)
    found = policy.logps(batch_of(ROWS))
    assert "not its hidden states times" in policy.no_hidden_because
    torch.testing.assert_close(found.double(), torch.cat([w for w, _ in by_hand(model, ROWS)]), rtol=1e-5, atol=1e-5)


def test_scaled_to_nothing_is_no_match():
    """A model whose logits are all 0 while its head's are not must not pass for equal."""
    import transformers

    class Zero(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 0
            return output

    assert as_policy(Zero(llama().config).eval()).hidden(batch_of(ROWS)) is None


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"autocast": True}, {"bf16": True}])
def test_modes_of_training(options):
    model = llama(scale=3.0).train()
    wanted = torch.cat([w for w, _ in by_hand(model, ROWS)])
    if "gradient_checkpointing" in options:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if "bf16" in options:
        model = model.bfloat16()
    policy = as_policy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in options):
        found = policy.logps(batch_of(ROWS))
    assert policy.no_hidden_because is None
    assert found.dtype == torch.float32
    exact = "gradient_checkpointing" in options
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5 if exact else 0.05, atol=1e-5 if exact else 0.1)
    found.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_compiled_model_has_the_same_log_probs():
    model = llama()
    compiled = torch.compile(model, backend="eager")
    policy = as_policy(compiled)
    torch.testing.assert_close(
        policy.logps(batch_of(ROWS)), as_policy(model).logps(batch_of(ROWS)), rtol=1e-6, atol=1e-6
    )
    assert isinstance(policy.head[0], torch._dynamo.OptimizedModule)
    assert policy.kind == "hf"
    assert policy.eos_ids == as_policy(model).eos_ids


# ---- references ----


@every_kind
def test_reference_is_a_frozen_copy(make):
    model = make()
    model.train()
    policy, batch = as_policy(model), batch_of(ROWS)
    reference = policy.reference()
    before = policy.logps(batch)
    same(reference.logps(batch), before.detach())
    assert not reference.logps(batch).requires_grad
    assert not reference.model.training
    assert not any(p.requires_grad for p in reference.model.parameters())
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.05 * torch.randn_like(param))
    same(reference.logps(batch), before.detach())
    assert (policy.logps(batch) - before).abs().max() > 1e-3


def test_given_reference_is_frozen_and_must_be_another_model():
    policy, other = as_policy(llama()), llama(seed=1).train()
    reference = policy.reference(other)
    assert reference.kind == "given"
    assert reference.model is other
    assert not other.training
    assert not any(p.requires_grad for p in other.parameters())
    with pytest.raises(ValueError, match="ref_model must not share parameters with model"):
        policy.reference(policy.model)
    with pytest.raises(ValueError, match="ref_model must know the model's 30 tokens, found 20"):
        policy.reference(llama(vocab_size=20))


def test_reference_by_name_is_in_the_policys_dtype(tmp_path):
    llama(seed=1).half().save_pretrained(tmp_path)
    reference = as_policy(llama()).reference(tmp_path)
    assert reference.kind == "given"
    assert {param.dtype for param in reference.model.parameters()} == {torch.float32}


class TestLoRA:
    peft = pytest.importorskip("peft")

    def adapted(self, *targets):
        torch.manual_seed(0)
        model = self.peft.get_peft_model(
            llama(), self.peft.LoraConfig(r=2, target_modules=list(targets), lora_dropout=0.5, task_type="CAUSAL_LM")
        )
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    param.normal_(std=0.5)
        return model.train()

    def test_reference_is_the_base_with_the_adapter_off(self):
        model = self.adapted("q_proj", "v_proj")
        policy, batch = as_policy(model), batch_of(ROWS)
        reference = policy.reference()
        assert reference.kind == "adapter off"
        assert reference.model is None
        torch.testing.assert_close(
            reference.logps(batch), as_policy(llama()).logps(batch).detach(), rtol=1e-6, atol=1e-6
        )
        assert model.training
        with as_policy(model).evaluating():
            assert not torch.allclose(policy.logps(batch), reference.logps(batch), atol=1e-3)

    def test_an_adapter_that_transformers_holds(self):
        model = llama()
        wanted = as_policy(llama()).logps(batch_of(ROWS)).detach()
        model.add_adapter(self.peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    param.normal_(std=0.5)
        policy = as_policy(model)
        reference = policy.reference()
        assert reference.kind == "adapter off"
        torch.testing.assert_close(reference.logps(batch_of(ROWS)), wanted, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(policy.logps(batch_of(ROWS)), wanted, atol=1e-3)

    @pytest.mark.parametrize(("targets", "fused"), [(("q_proj",), True), (("q_proj", "lm_head"), False)])
    def test_log_probs_are_those_of_the_adapted_model(self, targets, fused):
        model = self.adapted(*targets).eval()
        policy, batch = as_policy(model), batch_of(ROWS)
        found = policy.logps(batch)
        assert (policy.hidden(batch) is not None) == fused
        torch.testing.assert_close(
            found.double(), torch.cat([w for w, _ in by_hand(model, ROWS)]), rtol=1e-5, atol=1e-5
        )
        found.sum().backward()
        trained = {name for name, param in model.named_parameters() if param.grad is not None}
        assert trained
        assert all("lora" in name for name in trained)


# ---- what a model says of itself ----


class Tokenizer:
    eos_token_id, pad_token_id = 5, None


def test_ends_and_padding():
    assert as_policy(llama(eos_token_id=3)).eos_ids == (3,)
    assert as_policy(llama(eos_token_id=[3, 4]), Tokenizer()).eos_ids == (3, 4, 5)
    assert as_policy(moe(eos_token_id=[3, 4])).eos_ids == (3, 4)
    assert as_policy(plain(), Tokenizer()).eos_ids == (5,)
    assert as_policy(plain()).eos_ids == ()
    assert as_policy(plain()).pad_id == 0
    assert as_policy(llama(eos_token_id=3)).pad_id == 3
    assert as_policy(llama(pad_token_id=9, eos_token_id=3)).pad_id == 9
    model = llama()
    model.generation_config.eos_token_id = [1, 99]  # outside of the vocabulary: cannot be drawn, must not be read
    assert as_policy(model).eos_ids == (1,)
    assert as_policy(moe()).max_length == as_policy(llama()).max_length == 64
    assert as_policy(plain()).max_length is None


def test_bare_moe_is_wrapped_and_shares_its_weights():
    bare = MoETransformer(MoEConfig(vocab_size=VOCAB))
    policy = as_policy(bare)
    assert policy.kind == "moe"
    assert policy.model.moe is bare
    assert as_policy(policy) is policy


def test_other_things_are_no_models():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module or a MoETransformer, found str"):
        as_policy("gpt2")


def test_evaluating_restores_every_module():
    model = llama().train()
    model.model.norm.eval()
    modes = [module.training for module in model.modules()]
    with contextlib.suppress(KeyError), as_policy(model).evaluating():
        assert not any(module.training for module in model.modules())
        raise KeyError  # also where something fails within
    assert [module.training for module in model.modules()] == modes


# ---- loading ----


def test_load_presets_and_folders(tmp_path):
    model, tokenizer = load_model("moe:tiny", vocab_size=VOCAB, seed=3)
    assert tokenizer is None
    assert model.moe.config == MoEConfig(vocab_size=VOCAB)
    wanted = MoETransformer(MoEConfig(vocab_size=VOCAB), seed=3).params["lm_head.weight"]
    assert (model.moe.params["lm_head.weight"] == wanted).all()
    model.save_pretrained(tmp_path / "moe")
    again, _ = load_model(tmp_path / "moe")
    assert as_policy(again).kind == "moe"
    assert torch.equal(as_policy(again).logps(batch_of(ROWS)), as_policy(model).logps(batch_of(ROWS)))
    with pytest.raises(ValueError, match="preset must be one of 'tiny', 'small', found 'huge'"):
        load_model("moe:huge")


def test_load_hugging_face_folder(tmp_path):
    from tokenizers import Tokenizer as Tokens
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model = llama()
    model.save_pretrained(tmp_path)
    words = Tokens(WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="3").save_pretrained(tmp_path)
    found, tokenizer = load_model(tmp_path, dtype="bfloat16")
    assert tokenizer.eos_token_id == 3
    assert found.dtype == torch.bfloat16
    assert load_model(str(tmp_path))[0].dtype == torch.float32
    with pytest.raises(ValueError, match="dtype must be one of float32"):
        load_model(tmp_path, dtype="float99")
    with pytest.raises(FileNotFoundError, match="found no folder"):
        load_model(tmp_path / "missing")
    with pytest.raises(NotADirectoryError, match="found the file"):
        load_model(tmp_path / "config.json")
    for place, file in (("final/adapter", "adapter_config.json"), ("final", "config.json")):
        (tmp_path / "run" / place).mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / place / file).touch()
        with pytest.raises(FileNotFoundError, match=rf"without config\.json; the model of this run is .*{place}$"):
            load_model(tmp_path / "run")


def test_folder_of_a_foreign_mixtral_is_opened_by_transformers(tmp_path):
    load_model("moe:tiny", vocab_size=VOCAB)[0].save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if not k.startswith("strop")}))
    from strop.models.loading import _is_strop_folder

    assert not _is_strop_folder(tmp_path)
    assert not _is_strop_folder(tmp_path / "missing")


def test_copying_a_policys_model_keeps_it_apart():
    policy = as_policy(moe())
    other = as_policy(copy.deepcopy(policy.model))
    with torch.no_grad():
        other.model.get_parameter("lm_head.weight").zero_()
    assert policy.logps(batch_of(ROWS)).abs().sum() > 0
    assert (policy.logps(batch_of(ROWS)) - other.logps(batch_of(ROWS))).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("knows", "dtype", "options", "message"),
    [
        (False, torch.float32, {"autocast": "bf16"}, 'autocast="bf16" is slow here: this CPU has no instructions'),
        (False, torch.bfloat16, {"lora": {"r": 2}}, "a model in bfloat16 is slow here"),
        (False, torch.float32, {}, None),
        (True, torch.float32, {"autocast": "bf16"}, None),
    ],
)
def test_bfloat16_on_a_cpu_without_it_is_told(knows, dtype, options, message, monkeypatch):
    from strop import SFT

    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: knows)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SFT(model=qwen2().to(dtype), **options)
    told = [str(warning.message) for warning in caught if "slow here" in str(warning.message)]
    assert len(told) == (message is not None)
    assert not told or told[0].startswith(message)
