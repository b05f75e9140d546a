"""The algorithms on a GPU: the same numbers as on the CPU, in bfloat16 too, and back from a checkpoint."""

import time

import pytest
import torch
from measure import without_waiting
from tiny_models import VOCAB, llama, qwen2

from strop.algorithms.best_of_n import BestOfN
from strop.algorithms.dpo import DPO
from strop.algorithms.grpo import GRPO
from strop.algorithms.online_dpo import OnlineDPO
from strop.algorithms.sft import SFT
from strop.data.batch import TokenBatch, Trajectory
from strop.models import as_policy
from strop.rollout import Sampling, generate

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11], [12]]


def share_of_even(completion_ids):
    return [float((ids % 2 == 0).float().mean()) for ids in completion_ids]


def batch_of(rows, device="cpu"):
    return TokenBatch.of([Trajectory.of(*row) for row in rows], device)


def rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(2, VOCAB, (n,), generator=generator)  # noqa: E731
    return [(draw(n), draw(m)) for n, m in ((3, 4), (1, 7), (5, 2), (2, 1))]


@pytest.mark.parametrize("make", [llama, qwen2])
def test_log_probs_as_on_the_cpu(make):
    cpu = as_policy(make()).logps(batch_of(rows()))
    gpu = as_policy(make().cuda()).logps(batch_of(rows(), "cuda"))
    torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-4, atol=1e-5)


def test_greedy_rollouts_as_on_the_cpu():
    sampling = Sampling(max_new_tokens=12, temperature=0.0)
    cpu, gpu = (generate(as_policy(model), PROMPTS, sampling) for model in (llama(), llama().cuda()))
    assert [c.tolist() for c in gpu.completion_ids] == [c.tolist() for c in cpu.completion_ids]
    torch.testing.assert_close(torch.cat(gpu.logps), torch.cat(cpu.logps), rtol=1e-4, atol=1e-4)


def test_log_probs_of_a_rollout_are_those_of_the_training_forward():
    policy = as_policy(qwen2().cuda())
    rollout = generate(policy, PROMPTS, Sampling(max_new_tokens=10, temperature=0.8), num_samples=3, seed=1)
    scored = policy.logps(TokenBatch.of(rollout, "cuda"), temperature=0.8).cpu()
    torch.testing.assert_close(scored, torch.cat(rollout.logps), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("autocast", [None, "bf16"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo"])
def test_grpo_learns(autocast, loss_type):
    grpo = GRPO(
        model=qwen2(seed=2).cuda(), reward_fn=share_of_even, group_size=16, kl_coef=0.01, learning_rate=1e-2,
        max_new_tokens=8, loss_type=loss_type, autocast=autocast, inner_epochs=2,
    )  # fmt: skip
    first, *_, last = (grpo.train_step(PROMPTS) for _ in range(25))
    assert first["mismatch_kl"] < (1e-6 if autocast is None else 1e-2)
    assert first["memory"] > 0
    assert last["mean_reward"] > first["mean_reward"] + 0.15


def test_micro_batches_change_nothing():
    weights = []
    for size, tokens in ((0, 0), (3, 0), (0, 40)):
        grpo = GRPO(
            model=llama().cuda(), reward_fn=share_of_even, group_size=4, max_new_tokens=8, micro_batch_size=size,
            micro_batch_tokens=tokens, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
        )  # fmt: skip
        grpo.train_step(PROMPTS)
        weights.append(torch.cat([p.flatten() for p in grpo.model.parameters()]))
    moved = (weights[0] - torch.cat([p.flatten() for p in llama().cuda().parameters()])).abs().max()
    for other in weights[1:]:
        assert (weights[0] - other).abs().max() < 0.02 * moved


@pytest.mark.parametrize("top_k", [0, 5])
def test_scoring_does_not_wait_for_the_gpu(top_k, monkeypatch):
    """So that the reward functions run beside it. transformers alone asks, at the start of a forward, whether it is packed."""
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    grpo = GRPO(model=llama().cuda(), reward_fn=share_of_even, group_size=4, max_new_tokens=8, kl_coef=0.1, top_k=top_k,
                micro_batch_tokens=60)  # fmt: skip
    grpo.train_step(PROMPTS)  # what is asked once: whether the head gives the logits
    lines = grpo.draw(grpo.prepare([{"prompt": p} for p in PROMPTS]), range(len(PROMPTS)), 0)
    with without_waiting():
        grpo.score(lines)
    assert lines[0].old_logps_t.is_cuda == (top_k > 0)  # recomputed; else those of sampling
    assert lines[0].ref_logps_t.is_cuda
    batch = TokenBatch.of(lines, "cuda")
    logps = batch.split(grpo.policy.logps(batch, temperature=1.0))
    for line, wanted in zip(lines, logps, strict=True):
        torch.testing.assert_close(line.old_logps_t.cuda(), wanted, rtol=1e-3, atol=1e-4 if top_k else 1e-3)
    online = OnlineDPO(model=llama().cuda(), reward_fn=share_of_even, max_new_tokens=6)
    online.train_step(PROMPTS)
    lines = online.draw(online.prepare([{"prompt": p} for p in PROMPTS]), range(len(PROMPTS)), 0)
    with without_waiting():
        online.score(lines)


def test_slow_rewards_run_beside_the_scoring():
    """The phases are read off the GPU's course and add up; the seconds of a reward are not counted twice."""

    def slow(completions):
        time.sleep(0.2)
        return [float(len(c)) for c in completions]

    grpo = GRPO(model=llama().cuda(), reward_fn=slow, group_size=4, max_new_tokens=8, kl_coef=0.1)
    grpo.train_step(PROMPTS)
    metrics = grpo.train_step(PROMPTS)
    phases = {name: value for name, value in metrics.items() if name.startswith("time/") and name != "time/step"}
    assert all(value >= 0 for value in phases.values())
    assert 0.1 < metrics["time/reward"] < 0.25
    assert 0.7 * metrics["time/step"] < sum(phases.values()) < 1.02 * metrics["time/step"]


def test_the_optimiser_is_fused_and_a_checkpoint_of_a_cpu_goes_on_here(tmp_path):
    sft = SFT(model=llama(), learning_rate=1e-3)
    prompt, completion = torch.tensor([[3, 4], [5, 6]]), torch.tensor([[7, 8, 9], [10, 11, 12]])
    sft.train_step(prompt, completion)
    sft.save(tmp_path / "sft.safetensors")
    wanted = [sft.train_step(prompt, completion)["loss"] for _ in range(3)]
    there = SFT.from_checkpoint(tmp_path / "sft.safetensors", model=llama().cuda())
    assert all(group["fused"] for group in there.optimizer.param_groups)
    assert all(state["step"].is_cuda for state in there.optimizer.state.values())
    assert [there.train_step(prompt, completion)["loss"] for _ in range(3)] == pytest.approx(wanted, rel=1e-4)


def test_out_of_memory_is_told_and_freed():
    """The real thing: an update whose logits alone are larger than the GPU."""
    model = llama(max_length=64, vocab_size=VOCAB).cuda()
    sft = SFT(model=model)
    sft.train_step(torch.tensor([[3, 4]]), torch.tensor([[5]]))
    before = torch.cuda.memory_allocated()

    def logps(batch, **_):
        hidden = model.model(batch.ids_N[None]).last_hidden_state
        activations = hidden.sum() * torch.ones(2**24, device="cuda")  # 64 MiB of the step's own
        return activations.sum() * torch.empty(2**40, device="cuda")

    sft.policy.hidden, sft.policy.logps = lambda batch: None, logps
    with pytest.raises(torch.OutOfMemoryError, match=r"in the forward of an update, step 2 .*4096.00 GiB asked for of"):
        sft.train_step(torch.tensor([[3, 4]]), torch.tensor([[5]]))
    assert torch.cuda.memory_allocated() < before + 2**20


def test_sft_and_dpo_as_on_the_cpu():
    prompt, chosen, rejected = (
        torch.tensor([[3, 4], [5, 6]]),
        torch.tensor([[7, 8, 9], [10, 11, 12]]),
        torch.tensor([[13], [14]]),
    )
    losses = []
    for device in ("cpu", "cuda"):
        dpo = DPO(model=llama().to(device), beta=0.1, learning_rate=1e-3)
        sft = SFT(model=llama().to(device), learning_rate=1e-3)
        losses.append([dpo.train_step(prompt, chosen, rejected)["loss"] for _ in range(3)]
                      + [sft.train_step(prompt, chosen)["loss"] for _ in range(3)])  # fmt: skip
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_online_dpo_and_best_of_n():
    online = OnlineDPO(
        model=llama().cuda(), preference_fn=lambda pairs: [int(b.sum() > a.sum()) for a, b in pairs], max_new_tokens=6
    )
    assert online.train_step(PROMPTS)["loss"] == pytest.approx(0.6931, abs=1e-3)  # before the first update
    best = BestOfN(model=llama().cuda(), reward_fn=share_of_even, n=4, max_new_tokens=6).generate(PROMPTS)
    assert best.shape[0] == len(PROMPTS)


def test_a_checkpoint_continues_the_run(tmp_path):
    def made():
        return GRPO(model=llama().cuda(), reward_fn=share_of_even, group_size=4, max_new_tokens=6, learning_rate=1e-3)

    one = made()
    one.train_step(PROMPTS)
    one.save(tmp_path / "grpo.pt")
    other = GRPO.from_checkpoint(tmp_path / "grpo.pt", reward_fn=share_of_even)
    other.model.cuda()
    assert other.state.step == 1
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a.cpu(), b.cpu())


def test_bfloat16_weights_with_an_adapter():
    pytest.importorskip("peft")
    model = llama().cuda().to(torch.bfloat16)
    grpo = GRPO(model=model, reward_fn=share_of_even, group_size=4, max_new_tokens=6, lora={"r": 4}, autocast="bf16")
    assert grpo.train_step(PROMPTS)["mean_kl"] == pytest.approx(0.0, abs=1e-3)
