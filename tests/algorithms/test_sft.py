"""SFT: the loss against transformers' own and by hand, options of the model, bad input."""

import functools
import locale

import pytest
import torch
from tiny_models import Letters, llama, read_padded
from tiny_qwen2 import tiny_qwen2
from tiny_tokenizers import hugging_face as chat_tokenizer
from trained_models import Bigram, tiny_moe, weights_of
from yardstick import needs_compiler

from strop.algorithms.sft import SFT
from strop.losses import NLL


def random_examples(num_rows, seed=0, vocab_size=20):
    draw = torch.Generator().manual_seed(seed)

    def ids(low, high):
        length = int(torch.randint(low, high, (1,), generator=draw))
        return torch.randint(2, vocab_size, (length,), generator=draw)

    return [(ids(2, 6), ids(1, 8)) for _ in range(num_rows)]


def columns(examples):
    return tuple(list(column) for column in zip(*examples, strict=True))


# ---- values ----


def test_the_loss_is_that_of_transformers():
    examples = random_examples(4)
    width = max(len(p) + len(c) for p, c in examples)
    ids_BT, labels_BT = torch.zeros(4, width, dtype=torch.long), torch.full((4, width), -100)
    for row, (prompt, completion) in enumerate(examples):
        whole = torch.cat([prompt, completion])
        ids_BT[row, : len(whole)] = whole
        labels_BT[row, len(prompt) : len(whole)] = completion
    wanted = tiny_qwen2()(ids_BT, labels=labels_BT).loss.item()
    found = SFT(model=tiny_qwen2()).train_step(*columns(examples))["loss"]
    assert found == pytest.approx(wanted, abs=1e-5)


def test_whole_texts_count_from_their_second_token():
    model = Bigram()
    ids_T = torch.tensor([3, 7, 2, 9])
    wanted = -model(ids_T).log_softmax(-1)[torch.arange(3), ids_T[1:]].mean().item()
    assert SFT(model=model).train_step([ids_T])["loss"] == pytest.approx(wanted, abs=1e-6)
    rows = [{"text": ids_T.tolist()}]
    assert SFT(model=Bigram()).evaluate(rows)["eval/loss"] == pytest.approx(wanted, abs=1e-6)


def test_conversations_alone_are_whole_texts():
    conversations = [[{"role": "user", "content": "ab"}, {"role": "assistant", "content": "dab"}]]
    found = SFT(model=llama(), tokenizer=Letters(), assistant_only=False).train_step(conversations)
    wanted = SFT(model=llama()).train_step([Letters().encode("abdab")])
    assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-6)


def test_of_conversations_the_assistants_turns_count():
    """The mean over their tokens, whose log-probs a forward of the whole conversation gives."""
    tokenizer, model = chat_tokenizer(), llama(vocab_size=60, max_length=256)
    said = ["ab.", "cd"]
    messages = [
        {"role": role, "content": text} for text in said for role, text in (("user", "hi"), ("assistant", text))
    ]
    texts = [f"<|user|>hi<eos>\n<|assistant|>{text}<eos>\n" for text in said]
    ids_T = torch.tensor(tokenizer.encode("".join(texts), add_special_tokens=False))
    places = [6, 7, 8, 16, 17]
    assert tokenizer.convert_ids_to_tokens(ids_T[places]) == ["ab", ".", "<eos>", "cd", "<eos>"]
    logps_TV = model(ids_T[None]).logits[0].log_softmax(-1)
    wanted = -logps_TV[[i - 1 for i in places], ids_T[places]].mean().item()
    sft = SFT(model=model, tokenizer=tokenizer)
    assert sft.evaluate([{"messages": messages}])["eval/loss"] == pytest.approx(wanted, abs=1e-5)
    assert sft.train_step([messages])["completion/length"] == 5


def test_a_step_by_hand():
    """One token to predict: SGD adds lr·(onehot − softmax) to its logits."""
    model = Bigram(4)
    before = model.table_VV.detach().clone()
    sft = SFT(model=model, learning_rate=0.5, max_grad_norm=0, optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0))
    sft.train_step(torch.tensor([[2]]), torch.tensor([[3]]))
    wanted = before.clone()
    wanted[2] += 0.5 * (torch.eye(4)[3] - before[2].softmax(-1))
    torch.testing.assert_close(model.table_VV.detach(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("packs", [False, True])
def test_a_gradient_made_on_the_way_is_that_of_the_log_probs(packs):
    """Of ragged rows, with padding that does not count."""
    sft, found = SFT(model=tiny_qwen2()), []
    if not packs:
        read_padded(sft.policy)
    batch = sft._batch(sft._trajectories(*columns(random_examples(4)), None), 5)
    for loss_of in (lambda: sft.policy.loss(batch, NLL()).loss, lambda: -sft.policy.logps(batch).sum() / 5):
        sft.policy.model.zero_grad()
        loss = loss_of()
        (loss / 3).backward()
        found.append([loss.detach(), *(p.grad for p in sft.policy.model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


# ---- invariances ----


# ---- options of the model ----


def test_gradient_checkpointing_changes_nothing():
    examples = random_examples(4)
    results = []
    for checkpointing in (False, True):
        sft = SFT(
            model=tiny_qwen2(), gradient_checkpointing=checkpointing, learning_rate=0.1, optimizer=torch.optim.SGD
        )
        sft.train_step(*columns(examples))
        results.append(weights_of(sft))
        assert sft.module.is_gradient_checkpointing == checkpointing
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)


def test_autocast_computes_in_bfloat16_and_keeps_float32_weights():
    examples = random_examples(4)
    exact = SFT(model=tiny_qwen2(), learning_rate=0.0).train_step(*columns(examples))["loss"]
    sft = SFT(model=tiny_qwen2(), learning_rate=0.0, autocast="bf16")
    rounded = sft.train_step(*columns(examples))["loss"]
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)
    assert {param.dtype for param in sft.module.parameters()} == {torch.float32}


def test_dropout_is_off_unless_asked_for():
    examples = random_examples(4)
    losses = {}
    for dropout in (False, True):
        torch.manual_seed(0)
        sft = SFT(model=tiny_qwen2(attention_dropout=0.5), dropout=dropout, learning_rate=0.0)
        losses[dropout] = [sft.train_step(*columns(examples))["loss"] for _ in range(2)]
    assert losses[False][0] == pytest.approx(losses[False][1], abs=1e-6)
    assert losses[True][0] != pytest.approx(losses[True][1], abs=1e-4)


def test_dropout_kept_as_a_number_is_off_too():
    """OPT's: without it the policy would not be its reference at step 0."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {
        "hidden_size": 16,
        "word_embed_proj_dim": 16,
        "ffn_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    dropped = dict.fromkeys(("dropout", "attention_dropout", "layerdrop"), 0.5)
    config = OPTConfig(vocab_size=30, max_position_embeddings=32, **dropped, **sizes)
    sft = SFT(model=OPTForCausalLM(config), learning_rate=0.0)
    losses = [sft.train_step([[2, 3]], [[4, 5]])["loss"] for _ in range(4)]
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-6)


def test_lora_trains_the_adapter_only():
    model = tiny_qwen2()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    sft = SFT(model=model, learning_rate=1e-2, lora={"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]})
    losses = [sft.train_step(*columns(random_examples(4)))["loss"] for _ in range(5)]
    trained = [name for name, param in sft.module.named_parameters() if param.requires_grad]
    assert trained
    assert all("lora_" in name and ("q_proj" in name or "v_proj" in name) for name in trained)
    assert losses[-1] < losses[0]
    for name, param in sft.module.named_parameters():
        if "lora_" not in name:
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(param, before[plain]), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler itself calls what torch deprecates
@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad")
def test_lora_with_gradient_checkpointing():
    lora = {"r": 4, "alpha": 8}
    results = []
    for checkpointing in (False, True):
        sft = SFT(
            model=tiny_qwen2(), learning_rate=0.1, lora=lora, gradient_checkpointing=checkpointing,
            optimizer=torch.optim.SGD,
        )  # fmt: skip
        sft.train_step(*columns(random_examples(4)))
        results.append(weights_of(sft))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6)


def test_half_precision_weights_are_warned_of():
    with pytest.warns(UserWarning, match=r'is trained in torch.bfloat16.*use autocast="bf16"'):
        SFT(model=tiny_qwen2().bfloat16())


def test_a_dataset_of_datasets():
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": [2, 3 + i], "completion": [4 + i, 1]} for i in range(6)]
    histories = []
    for data in (rows, datasets.Dataset.from_list(rows)):
        histories.append(SFT(model=tiny_moe(), batch_size=3).train(data, num_steps=2).values("loss"))
    assert histories[0] == pytest.approx(histories[1], abs=1e-6)


@needs_compiler
def test_compile_changes_no_numbers(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # no C++ to wait for
    examples = random_examples(4)
    options = {"model": Bigram(), "learning_rate": 0.1, "optimizer": torch.optim.SGD}
    plain, compiled = SFT(**options), SFT(**options | {"model": Bigram()}, compile=True)
    assert compiled.model is not compiled.module
    for _ in range(2):
        a, b = (sft.train_step(*columns(examples))["loss"] for sft in (plain, compiled))
        assert a == pytest.approx(b, abs=1e-6)
    torch.testing.assert_close(weights_of(plain), weights_of(compiled))


def test_compile_where_the_locale_knows_ascii_alone(monkeypatch):
    """torch opens its own templates in the locale's encoding, and would end in the middle of the first step."""
    monkeypatch.setattr(locale, "getencoding", lambda: "ANSI_X3.4-1968")
    with pytest.raises(
        ValueError, match=r"compile must be False .* ASCII alone, found ANSI_X3.4-1968; set PYTHONUTF8=1"
    ):
        SFT(model=Bigram(), compile=True)


def test_it_memorises():
    rows = [{"prompt": [2 + i, 3], "completion": [10 + i, 4 + i, 1]} for i in range(4)]
    sft = SFT(model=tiny_moe(), learning_rate=2e-2, batch_size=4)
    history = sft.train(rows, num_steps=60)
    assert history.values("loss")[0] > 2.5
    assert history.values("loss")[-1] < 0.05


def test_what_a_run_of_ids_wrote_can_be_trained_on(tmp_path):
    """A Hugging Face folder without a tokenizer."""
    SFT(model=llama()).save_pretrained(tmp_path)
    sft = SFT(model=tmp_path, learning_rate=0.0)
    assert sft.tokenizer is None
    wanted = SFT(model=llama()).train_step([[1, 2, 3]])["loss"]
    assert sft.train_step([[1, 2, 3]])["loss"] == pytest.approx(wanted, abs=1e-6)


# ---- bad input ----


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": [2], "answer": [3]}], "found the columns question, answer"),
        ([{"prompt": [2], "chosen": [3], "rejected": [4]}], "SFT needs prompt_completion"),
        ([{"prompt": [2], "completion": []}], r"dataset\[0\]: the completion must have at least one token, found 0"),
        ([{"prompt": [2], "completion": [-1, 2]}], r"dataset\[0\] must hold ids from 0 to \d+, found -1"),
        ([{"text": [2, 3]}, {"text": [2, 999]}], r"dataset\[1\] must hold ids from 0 to \d+, found 999"),
        ([{"text": [2]}], r"dataset\[0\]: a text must have at least two tokens, found 1"),
        ([{"prompt": "a", "completion": "b"}], "text needs a tokenizer"),
        ([{"text": [2] * 40}], "context, 32 tokens, found 40"),
    ],
)
def test_bad_datasets(rows, message):
    with pytest.raises(ValueError, match=message):
        SFT(model=tiny_moe(), batch_size=1).train(rows)


def test_it_takes_no_reference():
    with pytest.raises(ValueError, match="SFT has no reference"):
        SFT(model=Bigram(), ref_model=Bigram())
