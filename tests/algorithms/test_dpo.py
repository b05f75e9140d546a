"""DPO: losses by hand, masks and padding, learning, and bad input."""

import pytest
import torch
from tiny_models import Letters, llama
from tiny_qwen2 import tiny_qwen2
from trained_models import Bigram, shifted, tiny_moe, weights_of

from strop.algorithms.dpo import DPO
from strop.algorithms.sft import SFT
from strop.config.preference_losses import WITHOUT_REFERENCE
from strop.losses import PREFERENCE_LOSS_TYPES


def random_pairs(num_pairs, seed=0, vocab_size=20):
    draw = torch.Generator().manual_seed(seed)

    def ids(low, high):
        length = int(torch.randint(low, high, (1,), generator=draw))
        return torch.randint(2, vocab_size, (length,), generator=draw)

    return [(ids(2, 5), ids(1, 6), ids(1, 6)) for _ in range(num_pairs)]


def columns(pairs):
    return tuple(list(column) for column in zip(*pairs, strict=True))


# ---- values ----


@pytest.mark.parametrize("loss_type", PREFERENCE_LOSS_TYPES)
def test_the_first_loss_by_hand(loss_type):
    """Where policy and reference are the same, every formula is a number one can write down."""
    smoothing = 0.1 if loss_type == "exo_pair" else 0.0
    dpo = DPO(model=Bigram(), beta=0.5, loss_type=loss_type, label_smoothing=smoothing, learning_rate=0.0)
    log2 = 0.6931471805599453
    exo = 0.5 * (-log2 - torch.tensor(0.9).log()) + 0.5 * (-log2 - torch.tensor(0.1).log())
    wanted = {
        "hinge": 1.0, "ipo": 1.0, "sppo_hard": 2.0, "nca_pair": 2 * log2, "apo_zero": 1.0, "apo_down": 1.0,
        "exo_pair": exo.item(), "bco_pair": 2 * log2, "discopop": (log2 + 1) / 2,
    }.get(loss_type, log2)  # fmt: skip
    metrics = dpo.train_step(*columns(random_pairs(3)))
    if loss_type in WITHOUT_REFERENCE:
        assert dpo.reference is None
        assert metrics["loss"] > 0
    else:
        assert metrics["loss"] == pytest.approx(wanted, abs=1e-5)
        assert metrics["preference/margin"] == pytest.approx(0, abs=1e-5)


def test_the_sft_loss_of_dpo_is_that_of_sft():
    """Its loss is SFT's of the chosen completions, and so is its gradient."""
    pairs = random_pairs(5)
    prompts, chosen, _ = columns(pairs)
    dpo = DPO(model=Bigram(), loss_type="sft", learning_rate=0.0, micro_batch_size=2)
    sft = SFT(model=Bigram(), learning_rate=0.0)
    found, wanted = dpo.train_step(*columns(pairs)), sft.train_step(prompts, chosen)
    assert [found[name] for name in ("loss", "grad_norm")] == pytest.approx(
        [wanted[name] for name in ("loss", "grad_norm")], rel=1e-5
    )


def test_a_reference_without_use_warns():
    with pytest.warns(UserWarning, match="ref_model has no effect: simpo has no reference"):
        assert DPO(model=Bigram(), ref_model=Bigram(), loss_type="simpo").reference is None


def test_a_step_by_hand():
    """Two tokens, one pair, a bigram model: the gradient of −log σ(β·margin) is −β/2 on the margin, SGD follows it."""
    model = Bigram(4)
    before = model.table_VV.detach().clone()
    dpo = DPO(
        model=model, beta=0.1, learning_rate=1.0, max_grad_norm=0,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0),
    )  # fmt: skip
    dpo.train_step(torch.tensor([[2]]), torch.tensor([[3]]), torch.tensor([[0]]))
    # margin = logit[3] − logit[0] at token 2 (the normaliser cancels): dloss/dlogit = ∓ 0.1 · σ(0)
    change = torch.zeros(4, 4)
    change[2, 3], change[2, 0] = 0.05, -0.05
    torch.testing.assert_close(model.table_VV.detach() - before, change, rtol=0, atol=1e-6)


# ---- invariances ----


def test_padding_and_what_stands_behind_the_end_do_not_count():
    """Left-padded and right-padded prompts, completions with garbage behind EOS: the loss of the bare rows."""
    bare = [[5, 6, 7], [8, 9]], [[3, 1], [4, 5, 1]], [[6, 7, 8, 1], [9]]
    padded = [[5, 6, 7, 0], [0, 0, 8, 9]], [[3, 1, 17, 18], [4, 5, 1, 0]], [[6, 7, 8, 1], [9, 0, 0, 0]]
    losses = []
    for batch in (bare, padded):
        dpo = DPO(model=tiny_qwen2(), ref_model=shifted(tiny_qwen2()), learning_rate=0.0)
        losses.append(dpo.train_step(*([torch.tensor(row) for row in rows] for rows in batch))["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert losses[0] != pytest.approx(0.6931, abs=1e-3)


def test_a_mask_says_what_is_padding_where_the_pad_id_is_the_end():
    model = tiny_qwen2(pad_token_id=1)
    dpo = DPO(model=model, ref_model=shifted(tiny_qwen2()), learning_rate=0.0)
    bare = dpo.train_step([torch.tensor([5, 6, 1])], [torch.tensor([3, 1])], [torch.tensor([4, 5])])
    masked = dpo.train_step(
        torch.tensor([[5, 6, 1, 1, 1]]), torch.tensor([[3, 1, 1]]), torch.tensor([[4, 5]]),
        prompt_mask=torch.tensor([[1, 1, 1, 0, 0]]),
    )  # fmt: skip
    assert masked["loss"] == pytest.approx(bare["loss"], abs=1e-6)


def test_texts_with_a_tokenizer():
    class Alphabet:
        eos_token_id, pad_token_id = 1, 0

        def encode(self, text):
            return [ord(letter) - 95 for letter in text]

    model, reference = tiny_moe(vocab_size=30), shifted(tiny_moe(vocab_size=30))
    dpo = DPO(model=model, ref_model=reference, tokenizer=Alphabet(), learning_rate=0.0)
    written = dpo.train_step(["ab", "c"], ["de", "f"], ["g", "hij"])["loss"]
    ids = dpo.train_step([[2, 3], [4]], [[5, 6, 1], [7, 1]], [[8, 1], [9, 10, 11, 1]])["loss"]
    assert written == pytest.approx(ids, abs=1e-6)
    assert written != pytest.approx(0.6931, abs=1e-3)
    with pytest.raises(ValueError, match="chosen must have 2 rows as prompt has, found 1"):
        dpo.train_step(["ab", "c"], ["de"], ["g", "hij"])


def test_a_plain_module_has_no_padding_unless_told():
    """0 is a token like any other where nobody names a pad id."""
    prompt, chosen, rejected = torch.tensor([[0, 5]]), torch.tensor([[3, 0]]), torch.tensor([[4, 6]])
    free = DPO(model=Bigram(), ref_model=shifted(Bigram()), learning_rate=0.0).train_step(prompt, chosen, rejected)
    told = DPO(model=Bigram(), ref_model=shifted(Bigram()), learning_rate=0.0, pad_id=0)
    found, bare = (told.train_step(prompt, ids, rejected)["loss"] for ids in (chosen, chosen[:, :1]))
    assert found != pytest.approx(free["loss"], abs=1e-4)
    assert found == pytest.approx(bare, abs=1e-6)


def test_train_and_train_step_are_the_same_step():
    rows = [{"prompt": p.tolist(), "chosen": c.tolist(), "rejected": r.tolist()} for p, c, r in random_pairs(4)]
    options = {"learning_rate": 0.1, "optimizer": torch.optim.SGD}  # AdamW makes much of a small gradient's rounding
    loop = DPO(model=tiny_qwen2(), batch_size=4, shuffle=False, **options)
    start = weights_of(loop)
    loop.train(rows, num_steps=2)
    step = DPO(model=tiny_qwen2(), **options)
    for _ in range(2):
        step.train_step(*([row[name] for row in rows] for name in ("prompt", "chosen", "rejected")))
    assert (weights_of(loop) - start).abs().max() > 1e-3
    torch.testing.assert_close(weights_of(loop), weights_of(step), rtol=0, atol=1e-6)


def test_the_reference_stays_and_is_frozen():
    dpo = DPO(model=tiny_qwen2(), learning_rate=1e-2)
    before = [param.clone() for param in dpo.reference.model.parameters()]
    assert not dpo.reference.model.training
    for _ in range(2):
        dpo.train_step(*columns(random_pairs(3)))
    after = list(dpo.reference.model.parameters())
    assert all(torch.equal(a, b) and not b.requires_grad and b.grad is None for a, b in zip(before, after, strict=True))


# ---- learning ----


def test_it_learns_a_preference_and_generalises():
    """The better answer repeats the prompt's first token, the worse one anything else; on held-out prompts too."""
    draw = torch.Generator().manual_seed(0)

    def rows(num_rows):
        made = []
        for _ in range(num_rows):
            prompt = torch.randint(2, 12, (3,), generator=draw).tolist()
            wrong = [token for token in range(2, 12) if token != prompt[0]]
            other = wrong[int(torch.randint(len(wrong), (1,), generator=draw))]
            made.append({"prompt": prompt, "chosen": [prompt[0], 1], "rejected": [other, 1]})
        return made

    model = tiny_moe(hidden_dim=32, head_dim=16, intermediate_dim=32)
    dpo = DPO(model=model, beta=0.1, learning_rate=1e-2, batch_size=32)
    held_out = rows(200)
    before = dpo.evaluate(held_out)["eval/preference/accuracy"]
    history = dpo.train(rows(1000), eval_dataset=held_out, num_steps=120)
    assert before < 0.7
    assert history.evaluations[-1]["eval/preference/accuracy"] > 0.95
    assert history.steps[-1]["preference/accuracy"] > 0.95


# ---- bad input ----

ROW = {"prompt": [2, 3], "chosen": [4, 1], "rejected": [5, 1]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": [2], "completion": [3]}], r"DPO needs preference.*found the columns prompt, completion"),
        ([], "dataset must have rows, found none"),
        ([{**ROW, "chosen": []}], r"dataset\[0\]: chosen must have at least one token, found none"),
        ([ROW, {**ROW, "prompt": [2] * 40}], r"dataset\[1\].*prompt must be shorter than the model's context, 32 tokens, found 40"),
        ([{**ROW, "rejected": [2] * 31}], r"rejected: prompt and completion must fit.*32 tokens, found 33; max_length=32 cuts"),
    ],
)  # fmt: skip
def test_bad_datasets(rows, message):
    dpo = DPO(model=tiny_moe(), batch_size=1)
    with pytest.raises(ValueError, match=message):
        dpo.train(rows, num_steps=1)
    assert dpo.state.step == 0


def test_max_length_cuts_completions():
    pairs = [[2, 3]], [[4, 5, 6, 7]], [[8, 9, 10]]
    cut = [[2, 3]], [[4, 5]], [[8, 9]]
    dpo = DPO(model=tiny_moe(), ref_model=shifted(tiny_moe()), max_length=4, learning_rate=0.0)
    found, wanted = (dpo.train_step(*map(torch.tensor, rows))["loss"] for rows in (pairs, cut))
    assert found == pytest.approx(wanted, abs=1e-6)
    free = DPO(model=tiny_moe(), ref_model=shifted(tiny_moe()), learning_rate=0.0)
    assert found != pytest.approx(free.train_step(*map(torch.tensor, pairs))["loss"], abs=1e-5)


def test_batch_larger_than_the_dataset():
    with pytest.raises(ValueError, match="batch_size must be at most the number of rows, 3, found 8"):
        DPO(model=tiny_moe()).train([ROW] * 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bta": 0.1}, "'bta' is no option of DPO; did you mean 'beta'"),
        ({"ref_modle": None}, "did you mean 'ref_model'"),
        ({"learning_rat": 0.1}, "did you mean 'learning_rate'"),
        ({"loss_type": "sigmoid_nrm"}, "did you mean 'sigmoid_norm'"),
        ({"beta": 0.0}, "beta must be finite and above 0, found 0"),
        ({"loss_type": "ipo", "label_smoothing": 0.1}, "label_smoothing must be 0 for 'ipo'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        DPO(model=Bigram(), **options)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (([[2]], [[3], [4]], [[5]]), "chosen must have 1 rows as prompt has, found 2"),
        ((torch.tensor([2]), [[3]], [[5]]), r"prompt must have shape \[B, T\], found \[1\]"),
        (([[0, 0]], [[3]], [[5]]), "pair 0: the prompt must have at least one token"),
        (([[2]], [[99]], [[5]]), "pair 0: chosen must hold ids from 0 to 19, found 99"),
        (([[2]], [[3]], [[0, 0]]), "pair 0: rejected must have at least one token"),
    ],
)
def test_bad_batches(batch, message):
    dpo = DPO(model=tiny_moe())
    with pytest.raises(ValueError, match=message):
        dpo.train_step(*batch)


@pytest.mark.parametrize(
    ("arguments", "mask", "error", "message"),
    [
        (("ab", ["c"], ["d"]), None, TypeError, "prompt must be a batch, found a single text"),
        ((["ab"], "c", ["d"]), None, TypeError, "chosen must be a batch as prompt is, found 'c'"),
        (([{"role": "user", "content": "a"}], [], []), None, TypeError, "prompt must be a batch, found a single conv"),
        ((["ab"], ["c"], ["d"]), [[1, 1]], ValueError, "prompt_mask must be None for texts"),
    ],
)
def test_a_text_is_no_batch_of_letters(arguments, mask, error, message):
    with pytest.raises(error, match=message):
        DPO(model=llama(), tokenizer=Letters()).train_step(*arguments, prompt_mask=mask)


def test_a_reference_by_name_has_the_policys_dtype(tmp_path):
    """Files in bfloat16: the policy is loaded in float32, and were the reference not, KL would not begin at 0."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tiny_qwen2().to(torch.bfloat16).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(8)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="3").save_pretrained(tmp_path)
    dpo = DPO(model=str(tmp_path), ref_model=tmp_path)
    assert {param.dtype for param in dpo.reference_model.parameters()} == {torch.float32}
    metrics = dpo.train_step([[1, 2]], [[4, 5, 6]], [[7, 4]])
    assert (metrics["rewards/chosen"], metrics["rewards/rejected"]) == pytest.approx((0, 0), abs=1e-6)
    with pytest.warns(UserWarning, match="trained in torch.bfloat16"):
        half = DPO(model=tiny_qwen2().to(torch.bfloat16), ref_model=tmp_path)
    assert {param.dtype for param in half.reference_model.parameters()} == {torch.bfloat16}
