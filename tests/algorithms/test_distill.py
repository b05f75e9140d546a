"""Distill: its losses by hand and by plain torch, mixing, invariances, resume, learning, and bad input."""

import pytest
import torch
from tiny_models import read_padded
from tiny_qwen2 import tiny_qwen2
from trained_models import Bigram, shifted, tiny_moe, whole_and_resumed

from strop.algorithms.distill import Distill, DistillConfig
from strop.config.on_policy import DIVERGENCES

PROMPTS = [[2, 3], [4, 5, 6], [7], [8, 9]]
ROWS = [{"prompt": prompt, "completion": [10 + i, 11, 12][: 1 + i % 3]} for i, prompt in enumerate(PROMPTS)]
every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)


def sharper(model, factor=3.0):
    """A teacher whose head is `factor` times the student's: it is surer of everything."""
    model.lm_head.weight.data.mul_(factor)
    return model


def make(model=None, teacher=None, **options):
    model = tiny_qwen2() if model is None else model
    teacher = sharper(tiny_qwen2()) if teacher is None else teacher
    return Distill(
        model=model, teacher=teacher, **{"max_new_tokens": 5, "learning_rate": 1e-2, "batch_size": 4, **options}
    )


def lines_of(distill, rows):
    """The trajectories of a step on these rows, and how many completions are the student's own."""
    lines, metrics = distill.sample(distill.prepare(rows), range(len(rows)), distill.state.step)
    assert metrics["distill/on_policy_fraction"].number == len(rows)
    return lines, metrics["distill/on_policy_fraction"].total


# ---- values ----


def plain_torch(student, teacher, lines, divergence, beta=0.5):
    """Mean over completion tokens, one line at a time."""
    total, count = 0.0, 0
    for line in lines:
        p, q = (model(line.ids_T[None]).logits[0].double().log_softmax(-1) for model in (student, teacher))
        for t in line.loss_mask_T.nonzero().flatten().tolist():
            p_t, q_t = p[t - 1], q[t - 1]
            if divergence == "reverse_kl":
                total += (p_t.exp() * (p_t - q_t)).sum()
            elif divergence == "forward_kl":
                total += (q_t.exp() * (q_t - p_t)).sum()
            else:
                m_t = ((1 - beta) * p_t.exp() + beta * q_t.exp()).log()
                total += beta * (q_t.exp() * (q_t - m_t)).sum() + (1 - beta) * (p_t.exp() * (p_t - m_t)).sum()
            count += 1
    return total / count


@pytest.mark.parametrize("divergence", ["reverse_kl", "forward_kl", "jsd"])
@pytest.mark.parametrize("packs", [True, False])
def test_the_loss_and_its_gradient_are_those_of_plain_torch(divergence, packs):
    distill = make(divergence=divergence, on_policy=0.0, **({"beta": 0.3} if divergence == "jsd" else {}))
    if not packs:
        read_padded(distill.policy)
    lines, own = lines_of(distill, ROWS)
    assert own == 0
    loss = distill.loss_on(lines, sum(line.num_loss_tokens for line in lines)).loss
    student, teacher = tiny_qwen2(), sharper(tiny_qwen2())
    wanted = plain_torch(student, teacher, lines, divergence, 0.3)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    loss.backward()
    wanted.backward()
    for found, other in zip(distill.module.parameters(), student.parameters(), strict=True):
        torch.testing.assert_close(found.grad, other.grad, rtol=1e-3, atol=1e-5)
    assert all(param.grad is None for param in distill.reference.model.parameters())


@pytest.mark.parametrize("make_model", [Bigram, tiny_moe])
def test_from_logits_where_there_are_no_hidden_states(make_model):
    """Of a plain module by hand: the divergence of two rows of its table."""
    distill = make(make_model(), shifted(make_model()), on_policy=0.0)
    metrics = distill.train_step([{"prompt": [2, 3], "completion": [4]}])
    if make_model is Bigram:
        p, q = (m.table_VV[3].log_softmax(0) for m in (Bigram(), shifted(Bigram())))
        assert metrics["loss"] == pytest.approx((p.exp() * (p - q)).sum().item(), abs=1e-6)
    assert metrics["loss"] == pytest.approx(metrics["distill/divergence"], abs=1e-6)
    assert metrics["loss"] > 0


def test_what_tools_say_counts_for_nothing():
    from chat_templates import tokenizer
    from tiny_models import llama

    tokens = tokenizer("qwen")
    student, teacher = (llama(vocab_size=len(tokens), max_length=512) for _ in range(2))
    distill = Distill(model=student, teacher=teacher, tokenizer=tokens, on_policy=0.0)
    call, said = ({"role": "assistant", "content": text} for text in ("call", "ooh"))
    row = {"prompt": [{"role": "user", "content": "?"}], "completion": [call, {"role": "tool", "content": "13"}, said]}
    (line,), _ = lines_of(distill, [row])
    assert tokens.decode(line.ids_T[line.loss_mask_T]) == "call<|im_end|>ooh<|im_end|>"
    assert "13" in tokens.decode(line.ids_T)


def test_the_sampled_token_by_hand():
    """The loss is −mean of the advantages, their gradient −A for each token's log-prob."""
    distill = make(divergence="sampled", learning_rate=0.0)
    lines, _ = lines_of(distill, ROWS)
    num_tokens = sum(line.num_loss_tokens for line in lines)
    result = distill.loss_on(lines, num_tokens)
    advantages = []
    for line in lines:
        p, q = (model(line.ids_T[None]).logits[0].log_softmax(-1) for model in (distill.model, distill.reference.model))
        at = line.loss_mask_T.nonzero().flatten()
        p_t, q_t = (one[at - 1, line.ids_T[at]] for one in (p, q))
        advantages.append((q_t - p_t.detach(), p_t))
    wanted = -sum((a * p_t).sum() for a, p_t in advantages) / num_tokens
    assert result.loss.item() == pytest.approx(-torch.cat([a for a, _ in advantages]).mean().item(), abs=1e-4)
    gradient = torch.autograd.grad(result.loss, distill.module.lm_head.weight)[0]
    torch.testing.assert_close(
        gradient, torch.autograd.grad(wanted, distill.module.lm_head.weight)[0], rtol=1e-3, atol=1e-4
    )
    torch.testing.assert_close(
        -result.divergences_n, torch.cat([a for a, _ in advantages]).detach(), rtol=1e-3, atol=1e-3
    )


def test_a_student_that_is_the_teacher_has_nothing_to_learn():
    for divergence in DIVERGENCES:
        distill = make(teacher=tiny_qwen2(), divergence=divergence)
        metrics = distill.train_step(PROMPTS)
        assert metrics["distill/divergence"] == pytest.approx(0, abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(0, abs=1e-4)


# ---- whose completions ----


def test_mixing():
    """Half of the rows are the student's, the others the dataset's; which ones depends on seed and step alone."""
    rows = [{"prompt": [i % 20 + 2, 5], "completion": [30, 31, 30]} for i in range(64)]
    distill = make(on_policy=0.5, batch_size=64)
    lines, own = lines_of(distill, rows)
    of_dataset = [line.ids_T[2:].tolist() == [30, 31, 30] and line.rollout_logps_t is None for line in lines]
    assert 20 < own < 44
    assert sum(of_dataset) == 64 - own
    again, _ = lines_of(distill, rows)
    assert all(torch.equal(a.ids_T, b.ids_T) for a, b in zip(lines, again, strict=True))
    distill.state.step = 1
    other, _ = lines_of(distill, rows)
    assert [line.rollout_logps_t is None for line in other] != [line.rollout_logps_t is None for line in lines]


def test_the_teacher_samples():
    """A teacher that always writes the same token."""
    teacher = tiny_qwen2()
    teacher.lm_head.weight.data.zero_()
    teacher.lm_head.bias = torch.nn.Parameter(torch.zeros(32).index_fill(0, torch.tensor([17]), 50.0))
    distill = make(teacher=teacher, on_policy=0.0, off_policy="teacher")
    lines, _ = lines_of(distill, [{"prompt": p} for p in PROMPTS])
    assert all(line.ids_T[line.loss_mask_T].tolist() == [17] * 5 for line in lines)


# ---- invariances ----


@every_divergence
@pytest.mark.parametrize("make_model", [tiny_qwen2, tiny_moe], ids=["qwen2", "moe"])
def test_micro_batches_change_nothing(make_model, divergence):
    after = []
    for size, tokens in ((0, 0), (1, 0), (3, 16384), (0, 12)):
        options = {"micro_batch_size": size, "micro_batch_tokens": tokens, "divergence": divergence}
        distill = make(make_model(), shifted(make_model()), **options)
        metrics = distill.train_step(PROMPTS)
        after.append([metrics[name] for name in ("loss", "grad_norm", "distill/divergence", "completion/length")])
    for other in after[1:]:
        torch.testing.assert_close(other, after[0], rtol=1e-4, atol=1e-5)


@every_divergence
def test_a_ragged_batch_is_its_rows(divergence):
    distill = make(divergence=divergence)
    lines, _ = lines_of(distill, ROWS)
    num_tokens = sum(line.num_loss_tokens for line in lines)
    whole = distill.loss_on(lines, num_tokens).loss
    alone = [distill.loss_on([line], num_tokens).loss for line in lines]
    torch.testing.assert_close(whole, sum(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"on_policy": 0.5}, {"divergence": "sampled"}], ids=["own", "mixed", "sampled"]
)
def test_a_run_that_goes_on_is_the_whole_run(options, tmp_path):
    whole_and_resumed(lambda: make(**options), ROWS * 2, tmp_path)


# ---- learning ----


@every_divergence
def test_it_learns(divergence):
    rows = [{"prompt": [i % 20 + 2, i % 7 + 5]} for i in range(32)]
    distill = make(divergence=divergence, batch_size=16, learning_rate=1e-2)
    history = distill.train(rows[:16], eval_dataset=rows[16:], num_steps=25)
    first, last = (history.evaluations[i]["eval/distill/divergence"] for i in (0, -1))
    assert last < 0.7 * first


# ---- bad input ----


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: DistillConfig(divergence="kl"), ValueError, "divergence must be one of 'reverse_kl', 'forward_kl', 'jsd', 'sampled'"),
        (lambda: DistillConfig(beta=1.0), ValueError, "beta must be above 0 and below 1"),
        (lambda: DistillConfig(on_policy=1.5), ValueError, "on_policy must be at least 0 and at most 1"),
        (lambda: DistillConfig(off_policy="web"), ValueError, "off_policy must be one of 'dataset', 'teacher'"),
        (lambda: DistillConfig(divergence="sampled", on_policy=0.5), ValueError, "divergence must not be 'sampled' unless"),
        (lambda: Distill(model=tiny_qwen2()), ValueError, "Distill needs a teacher, found None"),
        (lambda: make(teacher=tiny_qwen2(vocab_size=40)), ValueError, "teacher must have the student's vocabulary of 32 tokens, found 40"),
        (lambda: make(teacher=tiny_qwen2(vocab_size=20)), ValueError, "teacher must know the model's 32 tokens, found 20"),
        (lambda: make(teacher=3), TypeError, "teacher must be a torch.nn.Module or a MoETransformer, found int"),
        (lambda: make(ref_model=tiny_qwen2()), ValueError, "teacher must be given once, found it and a ref_model"),
        (lambda: make(teacher=tiny_qwen2(max_position_embeddings=4)).train_step(PROMPTS), ValueError, "teacher must read rows of"),
        (lambda: make(on_policy=0.5).prepare([{"prompt": [2]}]), ValueError, "dataset[0] must have a completion where on_policy is below 1"),
        (lambda: make(on_policy=0.5).prepare([{"prompt": [2], "completion": []}]), ValueError, "the completion must have at least one token"),
    ],
)  # fmt: skip
def test_mistakes(build, error, message):
    with pytest.raises(error) as raised:
        build()
    assert message in str(raised.value)
