"""Policy: log-probs against a forward done by hand, hidden states with the head, references, every kind of model."""

import contextlib
import copy
import json

import pytest
import torch
from tiny_models import VOCAB, PlainModel, every_kind, llama, moe, plain, qwen2
from yardstick import same

from strop.data.collate import collate, collate_into_bins
from strop.models import as_policy, counted, evaluating, load_model
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
    batch = collate(ROWS)
    logps, entropy = as_policy(model).logps(batch, temperature=temperature, entropy=True)
    assert logps.shape == entropy.shape == batch.input_ids_BT.shape
    wanted = by_hand(model, ROWS, temperature)
    mask = batch.completion_mask_BT
    torch.testing.assert_close(logps[mask].double(), torch.cat([w for w, _ in wanted]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy[mask].double(), torch.cat([e for _, e in wanted]), rtol=1e-5, atol=1e-5)
    assert logps[~mask].abs().sum() == 0
    assert entropy[~mask].abs().sum() == 0


@every_kind
def test_what_does_not_count_changes_nothing(make):
    """Other ids behind the end of the rows, and a mask that claims column 0."""
    policy = as_policy(make())
    batch, other = collate(ROWS), collate(ROWS)
    other.input_ids_BT[~other.attention_mask_BT] = 17
    other.completion_mask_BT[:, 0] = True
    same(policy.logps(other), policy.logps(batch))


@every_kind
def test_gradient_is_that_of_the_rows(make):
    model = make(scale=3.0)
    policy = as_policy(model)
    (policy.logps(collate(ROWS)) * torch.arange(1.0, 5)[:, None]).sum().backward()
    found = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    for weight, row in enumerate(ROWS, 1):
        if row[1]:
            (policy.logps(collate([row])) * weight).sum().backward()
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

    wanted = as_policy(plain()).logps(collate(ROWS))
    for wrap in (lambda x: x, lambda x: (x, 1), lambda x: {"logits": x}, lambda x: type("Output", (), {"logits": x})()):
        same(as_policy(Wrapped(wrap)).logps(collate(ROWS)), wanted)
    with pytest.raises(ValueError, match=r"model must return logits of shape \[4, 5, V\].*found \[4, 30\]"):
        as_policy(Wrapped(lambda x: x[:, -1])).logps(collate(ROWS))


def test_a_module_that_takes_a_mask_gets_it():
    seen = []

    class Masked(PlainModel):
        def forward(self, input_ids, attention_mask):
            seen.append(attention_mask)
            return super().forward(input_ids)

    batch = collate(ROWS)
    as_policy(Masked()).logps(batch)
    assert torch.equal(seen[0], batch.attention_mask_BT)


def test_packed_rows_have_the_log_probs_of_the_rows():
    rows = [row for row in ROWS if row[1]]
    policy = as_policy(llama())
    packed = collate_into_bins(rows, 12)
    assert len(packed) == 2
    apart = policy.logps(collate(rows))
    for index in range(len(rows)):
        here = (packed.sequence_ids_BT == index) & packed.completion_mask_BT
        wanted = apart[index][collate(rows).completion_mask_BT[index]]
        torch.testing.assert_close(policy.logps(packed)[here], wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="batch must not be packed for a 'plain' model"):
        as_policy(plain()).logps(packed)


@pytest.mark.parametrize("make", [llama, qwen2])
def test_scoring_without_gradient_gives_the_same(make):
    """There the tokens that count are known from before the batch travelled, and no mask is asked."""
    policy = as_policy(make(scale=3.0))
    rows = [row for row in ROWS if row[1]]
    for batch in (collate(rows), collate_into_bins(rows, 12)):
        wanted = policy.logps(batch, temperature=0.7).detach()
        batch.completion_mask_BT, mask = None, batch.completion_mask_BT
        with torch.no_grad():
            found = policy.logps(batch, temperature=0.7)
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
        assert found[~mask].abs().sum() == 0
        assert found[mask].abs().min() > 0


# ---- hidden states and the head ----


def hugging_face(name, **changes):
    import transformers

    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 8, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**(sizes | changes))
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
    policy, batch = as_policy(make()), collate(ROWS)
    hidden, weight, bias = policy.hidden(batch)
    found = linear_logp(hidden, weight, batch.input_ids_BT, bias=bias, completion_mask=counted(batch))
    logits = policy.logits(batch)[:, :-1]
    wanted = logp(logits, batch.input_ids_BT[:, 1:], completion_mask=counted(batch)[:, 1:])
    torch.testing.assert_close(found[:, 1:], wanted, rtol=1e-5, atol=1e-5)
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
    assert policy.hidden(collate(ROWS)) is None
    assert because in policy.no_hidden_because
    found = policy.logps(collate(ROWS))[collate(ROWS).completion_mask_BT]
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
    found = policy.logps(collate(ROWS))[collate(ROWS).completion_mask_BT]
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

    assert as_policy(Zero(llama().config).eval()).hidden(collate(ROWS)) is None


@pytest.mark.parametrize("options", [{"gradient_checkpointing": True}, {"autocast": True}, {"bf16": True}])
def test_modes_of_training(options):
    model = llama(scale=3.0).train()
    wanted = torch.cat([w for w, _ in by_hand(model, ROWS)])
    mask = collate(ROWS).completion_mask_BT
    if "gradient_checkpointing" in options:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if "bf16" in options:
        model = model.bfloat16()
    policy = as_policy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in options):
        found = policy.logps(collate(ROWS))
    assert policy.no_hidden_because is None
    assert found.dtype == torch.float32
    exact = "gradient_checkpointing" in options
    torch.testing.assert_close(found[mask].double(), wanted, rtol=1e-5 if exact else 0.05, atol=1e-5 if exact else 0.1)
    found.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_compiled_model_has_the_same_log_probs():
    model = llama()
    compiled = torch.compile(model, backend="eager")
    policy = as_policy(compiled)
    torch.testing.assert_close(policy.logps(collate(ROWS)), as_policy(model).logps(collate(ROWS)), rtol=1e-6, atol=1e-6)
    assert isinstance(policy._head[0], torch._dynamo.OptimizedModule)
    assert policy.kind == "hf"
    assert policy.eos_ids == as_policy(model).eos_ids


# ---- references ----


@every_kind
def test_reference_is_a_frozen_copy(make):
    model = make()
    model.train()
    policy, batch = as_policy(model), collate(ROWS)
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
        policy, batch = as_policy(model), collate(ROWS)
        reference = policy.reference()
        assert reference.kind == "adapter off"
        assert reference.model is None
        torch.testing.assert_close(
            reference.logps(batch), as_policy(llama()).logps(batch).detach(), rtol=1e-6, atol=1e-6
        )
        assert model.training
        with evaluating(model):
            assert not torch.allclose(policy.logps(batch), reference.logps(batch), atol=1e-3)

    def test_an_adapter_that_transformers_holds(self):
        model = llama()
        wanted = as_policy(llama()).logps(collate(ROWS)).detach()
        model.add_adapter(self.peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_B" in name:
                    param.normal_(std=0.5)
        policy = as_policy(model)
        reference = policy.reference()
        assert reference.kind == "adapter off"
        torch.testing.assert_close(reference.logps(collate(ROWS)), wanted, rtol=1e-6, atol=1e-6)
        assert not torch.allclose(policy.logps(collate(ROWS)), wanted, atol=1e-3)

    @pytest.mark.parametrize(("targets", "fused"), [(("q_proj",), True), (("q_proj", "lm_head"), False)])
    def test_log_probs_are_those_of_the_adapted_model(self, targets, fused):
        model = self.adapted(*targets).eval()
        policy, batch = as_policy(model), collate(ROWS)
        found = policy.logps(batch)[batch.completion_mask_BT]
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
    with contextlib.suppress(KeyError), evaluating(model):
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
    assert torch.equal(as_policy(again).logps(collate(ROWS)), as_policy(model).logps(collate(ROWS)))
    with pytest.raises(ValueError, match="preset must be one of tiny, small, found 'huge'"):
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
    (tmp_path / "run" / "final").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"without config\.json; the model of this run is .*final"):
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
    assert policy.logps(collate(ROWS)).abs().sum() > 0
    assert (policy.logps(collate(ROWS)) - other.logps(collate(ROWS))).abs().max() > 1e-3
