"""Compute what verl 0.9.1 and TRL 1.16 give for advantages, corrections and trust regions: corrections.json, float64 on a CPU.

    python tests/golden/make_corrections.py          # with verl==0.9.1, trl==1.16 and what they import installed

The functions are called as they are in their packages. Of TRL's trainer, plain objects stand in for `self`. The few casts
to float32 are turned into float64 by stand-ins for torch and numpy in verl's module.
"""

import json
from pathlib import Path
from types import SimpleNamespace as Names
from unittest.mock import MagicMock

import numpy as np
import torch
import trl
import verl
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo import rollout_corr_helper as corrections
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

torch.set_default_dtype(torch.float64)
torch.Tensor.float = torch.Tensor.double  # TRL's quantile and verl's masks cast to float32


class Wide:
    """A module whose float32 is float64."""

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        return getattr(self.module, name.replace("float32", "float64"))


core_algos.torch, core_algos.np = Wide(torch), Wide(np)


def rows_of(lengths, width):
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).long()


# ---- advantages ----

SIZE, LENGTHS = 4, [3, 1, 5, 2, 4, 4, 1, 6, 2, 3, 5, 1]


def advantages(name, generator, weights=None, **options):
    """One estimator on three groups of four, of which one has equal rewards.

    Rewards are large, because verl adds 1e-8 to variances and to numbers of tokens.
    """
    num = 1 if weights is None else len(weights)
    rewards = 1e4 * torch.randn(num, len(LENGTHS), generator=generator)
    rewards[:, 4:8] = rewards[:, 4:5]
    ones = [1] * len(LENGTHS)  # gdpo: every sequence counts once, as in TRL and the paper
    lengths = LENGTHS if weights is None else ones
    mask = rows_of(lengths, max(lengths))
    last = torch.zeros(mask.shape)
    last[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = rewards[0]
    index = np.arange(len(lengths)) // SIZE
    config = AlgoConfig(**({"gamma": 1.0} | options.pop("config", {})))
    if weights is not None:
        names = [f"reward{i}" for i in range(num)]
        config = {"gdpo_reward_keys": names, "gdpo_reward_weights": weights}
        options |= {
            "batch": {"prompts": torch.zeros(len(lengths), 2), "attention_mask": torch.ones(len(lengths), 3).long()}
        }
        options["non_tensor_batch"] = dict(zip(names, rewards.numpy(), strict=True))
    compute = core_algos.get_adv_estimator_fn(name)
    found, _ = compute(token_level_rewards=last, response_mask=mask, index=index, config=config, **options)
    return {
        "rewards": rewards.tolist(), "lengths": lengths, "group_size": SIZE, "weights": weights,
        "advantages": found[:, 0].tolist(),
    }  # fmt: skip


def all_advantages(generator):
    return {
        "grpo": advantages("grpo", generator, epsilon=1e-4),
        "dr_grpo": advantages("grpo", generator, norm_adv_by_std_in_grpo=False),
        "rloo": advantages("rloo", generator),
        "reinforce++": advantages("reinforce_plus_plus", generator),
        "reinforce++_baseline": advantages("reinforce_plus_plus_baseline", generator),
        "pass@k": advantages("grpo_passk", generator, config={"norm_adv_by_std_in_grpo": False}),
        "gdpo": advantages("gdpo", generator, weights=[1e4, 3e3, 5e3], epsilon=1e-12),
    }


# ---- corrections between sampler and trainer ----


def log_probs(generator, spread=0.5, rows=6, width=9):
    """Log-probs in training and sampling, and a mask."""
    trained, noise = torch.randn(2, rows, width, generator=generator)
    trained = trained * 0.5 - 2.0
    lengths = torch.randint(1, width + 1, (rows,), generator=generator).tolist()
    return trained.clamp(max=-0.05), (trained + spread * noise).clamp(max=-0.05), rows_of(lengths, width)


def importance_case(level, bounds, generator):
    trained, sampled, mask = log_probs(generator)
    low, high = bounds
    threshold = str(high) if low is None else f"{low}_{high}"
    weights, _ = corrections.compute_rollout_correction_weights(trained - sampled, mask, level, threshold)
    found = {"level": level, "mode": "truncate" if low is None else "mask", "low": low or 0.0, "high": high}
    tensors = {"trained": trained, "sampled": sampled, "mask": mask, "weights": weights}
    return found | {name: tensor.tolist() for name, tensor in tensors.items()}


def rejection_case(criterion, bounds, generator):
    trained, sampled, mask = log_probs(generator)
    threshold = "_".join(map(str, bounds)) if isinstance(bounds, tuple) else bounds
    kept, _ = corrections.compute_rollout_rejection_mask(trained - sampled, mask, criterion, threshold)
    tensors = {"trained": trained, "sampled": sampled, "mask": mask, "kept": kept}
    return {"criterion": criterion, "bounds": bounds} | {name: tensor.tolist() for name, tensor in tensors.items()}


REJECTIONS = [
    ("token_k1", (0.7, 1.5)), ("token_k1", 1.3), ("token_k2", 0.1), ("token_k3", 0.1), ("seq_sum_k1", (0.4, 2.0)),
    ("seq_sum_k2", 0.5), ("seq_sum_k3", 0.5), ("seq_mean_k1", (0.9, 1.3)), ("seq_mean_k1", 1.2), ("seq_mean_k2", 0.14),
    ("seq_mean_k3", 0.12), ("seq_max_k2", 0.25), ("seq_max_k3", 0.3),
]  # fmt: skip


# ---- trust regions ----


def policy_case(name, generator, spread, low, high, delta, **options):
    """One loss on random log-probs; the mean over tokens."""
    logps, old, mask = log_probs(generator, spread)
    advantages_BT = (torch.randn(len(mask), 1, generator=generator) * 2).expand(mask.shape).clone()
    logps.requires_grad_()
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=delta,
        policy_loss=PolicyLossConfig(loss_mode=name, **options),
    )  # fmt: skip
    loss, _ = core_algos.get_policy_loss_fn(name)(old, logps, advantages_BT, mask, "token-mean", config)
    (gradient,) = torch.autograd.grad(loss, logps)
    tensors = {"logps": logps, "old_logps": old, "advantages": advantages_BT, "mask": mask, "grad": gradient}
    found = {"loss_type": name, "clip_eps": (low, high), "delta": delta, "loss": loss.item(), **options}
    return found | {name: tensor.detach().tolist() for name, tensor in tensors.items()}


def all_policy_cases(generator):
    everywhere = {"clip_cov_lb": 0.5, "clip_cov_ub": 2.5, "clip_cov_ratio": 1.0}  # no draw among the candidates
    return [
        policy_case("dppo_tv", generator, 0.5, 0.05, 0.03, 20.0),
        policy_case("dppo_tv", generator, 1.5, 0.15, 0.1, 1.5),
        policy_case("dppo_kl", generator, 0.5, 0.02, 0.01, 20.0),
        policy_case("dppo_kl", generator, 1.5, 0.05, 0.02, 1.5),
        policy_case("clip_cov", generator, 0.03, 0.2, 0.28, 3.0, **everywhere),
        policy_case("kl_cov", generator, 0.5, 0.2, 0.2, 3.0, kl_cov_ratio=0.2, ppo_kl_coef=0.7),
    ]


# ---- entropy ----

ACCELERATOR = Names(
    device=torch.device("cpu"), num_processes=1, sync_gradients=True, gather=lambda x: x, gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x, pad_across_processes=lambda x, dim, pad_index: x,
)  # fmt: skip


def quantile_case(quantile, generator):
    entropies, mask = torch.rand(5, 8, generator=generator), rows_of([8, 3, 5, 1, 6], 8)
    kept = trl.GRPOTrainer.get_high_entropy_mask(Names(accelerator=ACCELERATOR), entropies, mask, 1 - quantile)
    return {"quantile": quantile, "entropies": entropies.tolist(), "mask": mask.tolist(), "kept": kept.tolist()}


def adaptive_case(generator, steps=8):
    """The coefficient of an entropy bonus that follows a target, step by step; the bonus is all of the loss."""
    mask, target, delta = rows_of([4, 2, 3], 4), 1.0, 0.01
    trainer = Names(
        _metrics={"train": MagicMock()}, model=Names(training=True), accelerator=ACCELERATOR, loss_type="bnpo",
        importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.2, beta=0.0, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, use_vllm=False, vllm_importance_sampling_correction=False, aux_loss_enabled=False,
        _entropy_bonus_enabled=True, use_adaptive_entropy=True, entropy_coef=0.005, _entropy_window_stats=None,
        _last_world_entropy=torch.inf, current_gradient_accumulation_steps=1, max_completion_length=4,
        args=Names(
            delta=None, use_bias_correction_kl=False, entropy_target=target, entropy_coef_delta=delta, entropy_coef_min=0.0,
            entropy_coef_max=0.03, steps_per_generation=1,
        ),
    )  # fmt: skip
    ids, zeros = torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, 4)
    found = {
        "target": target,
        "delta": delta,
        "max": 0.03,
        "first": 0.005,
        "entropies": [],
        "losses": [],
        "coefficients": [],
    }
    for step in range(steps):
        entropies = torch.rand(3, 4, generator=generator) + (0.2 if step < 5 else 1.0)
        trainer._get_per_token_logps_and_entropies = lambda *_, entropies=entropies, **__: (zeros - 1, entropies, None)
        inputs = {
            "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask,
            "advantages": torch.zeros(3), "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        found["losses"].append(trl.GRPOTrainer._compute_loss(trainer, None, inputs).item())
        found["entropies"].append((entropies * mask).sum().item() / mask.sum().item())
        found["coefficients"].append(trainer.entropy_coef)
    return found


def main():
    generator = torch.Generator().manual_seed(0)
    found = {
        "source": f"verl {verl.__version__} and TRL {trl.__version__} on CPU, float64",
        "advantages": all_advantages(generator),
        "importance": [
            importance_case(level, bounds, generator)
            for level in ("token", "sequence") for bounds in ((None, 1.4), (0.6, 1.7))
        ],
        "rejection": [rejection_case(*case, generator) for case in REJECTIONS],
        "policy": all_policy_cases(generator),
        "quantile": [quantile_case(quantile, generator) for quantile in (0.2, 0.5, 0.0)],
        "adaptive": adaptive_case(generator),
    }  # fmt: skip
    path = Path(__file__).with_name("corrections.json")
    path.write_text(json.dumps(found) + "\n")
    for name in list(found)[1:]:
        print(name, len(found[name]))
    for case in found["rejection"]:
        print(case["criterion"], np.mean(case["kept"]) / np.mean(case["mask"]))
    print([case["loss"] for case in found["policy"]], found["adaptive"])


if __name__ == "__main__":
    main()
