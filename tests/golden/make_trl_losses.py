"""Compute what TRL 1.16 gives for the losses that tests/golden/trl-1.16.json lacks: trl-1.16-more.json, float64 on a CPU.

    python tests/golden/make_trl_losses.py          # with trl==1.16 and its requirements installed

TRL's trainers are not built: a plain object with the few attributes a loss reads stands in for `self`, and a function
that returns given log-probs for the model's forward.
"""

import json
from pathlib import Path
from types import SimpleNamespace as Names
from unittest.mock import MagicMock

import torch
import trl
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.experimental.orpo import orpo_trainer

torch.set_default_dtype(torch.float64)
orpo_trainer.torch.Tensor.float = torch.Tensor.double  # ORPO's loss casts to float32
ACCELERATOR = Names(device=torch.device("cpu"), num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x,
                    reduce=lambda x, reduction: x)  # fmt: skip


def with_metrics(**attributes):
    metrics = {"train": MagicMock(), "eval": MagicMock()}
    return Names(_metrics=metrics, model=Names(training=False), accelerator=ACCELERATOR, **attributes)


# ---- policy losses ----

POLICY = [
    {"loss_type": "sapo", "importance_level": "token", "sapo_temperatures": (1.05, 1.0), "beta": 0.0},
    {"loss_type": "sapo", "importance_level": "sequence", "sapo_temperatures": (2.0, 0.5), "beta": 0.1},
    {"loss_type": "luspo", "importance_level": "sequence", "clip_eps": (0.2, 0.28), "beta": 0.1},
    {"loss_type": "luspo", "importance_level": "token", "clip_eps": (0.1, 0.3), "beta": 0.0},
    {"loss_type": "vespo", "importance_level": "token", "vespo_gamma": (3.0, 2.0, 2.0, 3.0), "beta": 0.0},
    {"loss_type": "vespo", "importance_level": "token", "vespo_gamma": (1.5, 0.5, 1.0, 2.5), "beta": 0.1},
    {"loss_type": "grpo", "importance_level": "geometric", "clip_eps": (0.4, 0.4), "beta": 0.0},
    {"loss_type": "grpo", "importance_level": "geometric", "clip_eps": (0.1, 0.2), "beta": 0.1},
    {"loss_type": "dapo", "importance_level": "token", "clip_eps": (0.2, 0.28), "stale_kl": 0.05, "beta": 0.1},
    {"loss_type": "cispo", "importance_level": "sequence", "clip_eps": (0.2, 2.0), "stale_kl": 0.2, "beta": 0.0},
]


def policy_case(case, generator, importance=None):
    """One loss on random log-probs; importance: the mode and bounds of TRL's correction for the sampler."""
    logps, old, ref, sampled = torch.randn(4, 4, 7, generator=generator) * 0.4 - 1.5
    mask = (torch.arange(7) < torch.tensor([7, 3, 1, 5])[:, None]).long()
    advantages = torch.randn(4, generator=generator) * torch.tensor([1.0, -1.0, 1.0, -1.0])
    logps.requires_grad_()
    low, high = case.get("clip_eps", (0.2, 0.2))
    heat = case.get("sapo_temperatures", (1.05, 1.0))
    k_neg, decay_neg, k_pos, decay_pos = case.get("vespo_gamma", (3.0, 2.0, 2.0, 3.0))
    level = case["importance_level"]
    trainer = with_metrics(
        loss_type=case["loss_type"], importance_sampling_level=level, epsilon_low=low, epsilon_high=high,
        beta=case["beta"], top_entropy_quantile=1.0, off_policy_mask_threshold=case.get("stale_kl"),
        use_vllm=importance is not None, vllm_importance_sampling_correction=True, aux_loss_enabled=False,
        _entropy_bonus_enabled=False, max_completion_length=11, current_gradient_accumulation_steps=1,
        args=Names(
            delta=None, use_bias_correction_kl=False, sapo_temperature_pos=heat[1], sapo_temperature_neg=heat[0],
            vespo_k_pos=k_pos, vespo_lambda_pos=decay_pos, vespo_k_neg=k_neg, vespo_lambda_neg=decay_neg,
            steps_per_generation=1,
        ),
        get_gamma_weights=trl.GRPOTrainer.get_gamma_weights, get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, torch.zeros(4, 7), None),
    )  # fmt: skip
    ids = torch.zeros(4, 7, dtype=torch.long)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask, "advantages": advantages,
        "old_per_token_logps": old, "ref_per_token_logps": ref, "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    found = dict(case)
    if importance is not None:
        inputs["importance_sampling_ratio"] = importance_ratio(old, sampled, mask, *importance)
        found |= {"sampled_logps": sampled.tolist(), "importance_mode": importance[0], "importance_cap": importance[1]}
    compute = GMPOTrainer._compute_loss if level == "geometric" else trl.GRPOTrainer._compute_loss
    loss = compute(trainer, None, inputs)
    (gradient,) = torch.autograd.grad(loss, logps)
    tensors = {"logps": logps, "old_logps": old, "ref_logps": ref, "advantages": advantages, "mask": mask}
    found |= {name: tensor.detach().tolist() for name, tensor in tensors.items()}
    return found | {"loss": loss.item(), "grad": gradient.tolist()}


def importance_ratio(old, sampled, mask, mode, bounds):
    """Those lines of `GRPOTrainer._generate_and_score_completions`, which cannot be called without a rollout."""
    ratio = torch.exp((old - sampled) * mask)
    low, high = bounds
    return ratio.clamp(low, high) if mode == "truncate" else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


# ---- preference losses ----

PREFERENCE = [
    {"loss_type": ["bco_pair"], "loss_weights": [1.0]},
    {"loss_type": ["discopop"], "loss_weights": [1.0], "discopop_tau": 0.05},
    {"loss_type": ["discopop"], "loss_weights": [1.0], "discopop_tau": 0.5},
    {"loss_type": ["sft"], "loss_weights": [1.0]},
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    {"loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.3]},
]
WITHOUT_REFERENCE = [
    {"loss_type": ["simpo"], "loss_weights": [1.0], "simpo_gamma": 0.5, "label_smoothing": 0.0},
    {"loss_type": ["simpo", "sft"], "loss_weights": [1.0, 0.7], "simpo_gamma": 1.1, "label_smoothing": 0.1},
    {"loss_type": ["cpo"], "loss_weights": [1.0], "label_smoothing": 0.0},
    {"loss_type": ["cpo", "sft"], "loss_weights": [1.0, 1.0], "label_smoothing": 0.2},
    {"loss_type": ["orpo", "sft"], "loss_weights": [1.0, 1.0]},
]


def preference_tensors(generator):
    """Per-token log-probs of four rows, two chosen and two rejected, and a reference's sums."""
    mask = (torch.arange(6) < torch.tensor([6, 2, 3, 5])[:, None]).long()
    logps = -torch.rand(4, 6, generator=generator) * 2
    return logps.requires_grad_(), mask, (-torch.rand(4, generator=generator) * 5).chunk(2)


def preference_case(case, generator):
    logps, mask, (ref_chosen, ref_rejected) = preference_tensors(generator)
    trainer = with_metrics(
        loss_types=case["loss_type"], loss_weights=case["loss_weights"], beta=0.3, label_smoothing=0.0, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", use_weighting=False, aux_loss_enabled=False,
        _total_train_tokens=0, args=Names(discopop_tau=case.get("discopop_tau", 0.05)),
    )  # fmt: skip
    padded = torch.nn.functional.pad(mask, (1, 0))  # TRL shifts by one
    inputs = {
        "input_ids": padded, "completion_mask": padded, "ref_chosen_logps": ref_chosen,
        "ref_rejected_logps": ref_rejected,
    }  # fmt: skip
    zeros = torch.zeros(4, 6)
    output = Names(log_probs=logps * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    loss = trl.DPOTrainer._compute_loss(trainer, lambda **_: output, inputs, False)
    return preference_result(case | {"beta": 0.3}, loss, logps, mask, ref_chosen.tolist(), ref_rejected.tolist())


def reference_free_case(case, generator):
    logps, mask, _ = preference_tensors(generator)
    first = case["loss_type"][0]
    sums, lengths = (logps * mask).sum(-1), mask.sum(-1)
    pair = (sums if first == "cpo" else sums / lengths).chunk(2)
    options = {"beta": 0.3, "accelerator": ACCELERATOR}
    if first == "orpo":
        loss = -orpo_trainer.ORPOTrainer.odds_ratio_loss(Names(**options), *pair)[0].mean()
    else:
        options |= {"loss_type": {"cpo": "sigmoid"}.get(first, first), "simpo_gamma": case.get("simpo_gamma")}
        options |= {"alpha": 0.0, "label_smoothing": case["label_smoothing"]}
        loss = CPOTrainer.cpo_loss(Names(**options), *pair)[0].mean()
    if "sft" in case["loss_type"]:  # the cross-entropy of the chosen tokens, as both trainers add it
        loss = loss - case["loss_weights"][1] * sums[:2].sum() / lengths[:2].sum()
    return preference_result(case | {"beta": 0.3}, loss, logps, mask, None, None)


def preference_result(case, loss, logps, mask, ref_chosen, ref_rejected):
    (gradient,) = torch.autograd.grad(loss, logps)
    return case | {
        "logps": logps.tolist(), "completion_mask": mask.tolist(), "ref_chosen": ref_chosen,
        "ref_rejected": ref_rejected, "loss": loss.item(), "grad": gradient.tolist(),
    }  # fmt: skip


# ---- distillation ----


def gkd_case(beta, temperature, generator):
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((5, 4), (13, 4), (13,)))
    teacher_hidden, teacher_weight = (torch.randn(*shape, generator=generator) for shape in ((5, 6), (13, 6)))
    weights = torch.rand(5, generator=generator)
    hidden.requires_grad_()
    logits = hidden @ weight.T + bias
    teacher = teacher_hidden @ teacher_weight.T
    # one token at a time: TRL sums over the vocabulary, and divides by the number of tokens
    each = [
        GKDTrainer.generalized_jsd_loss(
            logits[i : i + 1, None], teacher[i : i + 1, None], beta=beta, temperature=temperature
        )
        for i in range(5)
    ]
    loss = (weights * torch.stack(each)).sum()
    (gradient,) = torch.autograd.grad(loss, hidden)
    tensors = {
        "hidden": hidden, "weight": weight, "bias": bias, "teacher_hidden": teacher_hidden,
        "teacher_weight": teacher_weight, "weights": weights, "divergences": torch.stack(each), "grad": gradient,
    }  # fmt: skip
    found = {"beta": beta, "temperature": temperature, "loss": loss.item()}
    return found | {name: tensor.tolist() for name, tensor in tensors.items()}


def main():
    generator = torch.Generator().manual_seed(0)
    importance = [("truncate", (0.0, 1.2)), ("truncate", (0.8, 1.2)), ("mask", (0.0, 1.2)), ("mask", (0.7, 1.5))]
    base = [POLICY[3], POLICY[4], POLICY[8] | {"stale_kl": None}, POLICY[0]]
    found = {
        "source": f"TRL {trl.__version__} on CPU, float64",
        "policy": [policy_case(case, generator) for case in POLICY],
        "importance": [policy_case(case, generator, mode) for mode, case in zip(importance, base, strict=True)],
        "preference": [preference_case(case, generator) for case in PREFERENCE],
        "without_reference": [reference_free_case(case, generator) for case in WITHOUT_REFERENCE],
        "gkd": [
            gkd_case(beta, temperature, generator)
            for beta, temperature in ((0.0, 1.0), (0.1, 1.0), (0.5, 1.0), (0.9, 0.7), (1.0, 1.0), (1.0, 2.0))
        ],
    }
    path = Path(__file__).with_name("trl-1.16-more.json")
    path.write_text(json.dumps(found) + "\n")
    for name in list(found)[1:]:
        print(name, [round(case["loss"], 6) for case in found[name]])


if __name__ == "__main__":
    main()
