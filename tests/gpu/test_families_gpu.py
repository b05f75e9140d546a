"""Decode steps of today's families on a GPU: captured as graphs, with the log-probs of a forward over the whole row."""

import pytest
import torch

from benchmarks.contenders.generation import FAMILIES, TINY
from strop.models import as_policy
from strop.rollout import Sampling, generate

PROMPTS = [[5, 6, 7], [9], list(range(20, 60)), [4, 4]]


def model_of(kind, dtype=torch.float32):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = TINY.shape | FAMILIES[kind][1]
    config = AutoConfig.for_model(kind, eos_token_id=list(range(30)), pad_token_id=None, bos_token_id=None, **shape)
    return AutoModelForCausalLM.from_config(config).to("cuda", dtype).eval()


@pytest.mark.filterwarnings("ignore:decode steps cannot be captured")  # experts in float32, which go one by one
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-3), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("kind", FAMILIES)
def test_log_probs_are_those_of_a_fresh_forward(kind, dtype, error):
    """Later rollouts replay what the first captured; weights that changed between them are the ones read."""
    policy = as_policy(model_of(kind, dtype))
    for seed in range(3):
        found = generate(policy, PROMPTS, Sampling(max_new_tokens=48), num_samples=8, seed=seed)
        for line in found:
            start = len(line.ids_T) - len(line.rollout_logps_t)
            with torch.no_grad():
                logits_TV = policy.model(line.ids_T[None].cuda()).logits[0, start - 1 : -1].float()
            wanted = logits_TV.log_softmax(-1).cpu().gather(1, line.ids_T[start:, None])[:, 0]
            torch.testing.assert_close(line.rollout_logps_t, wanted, atol=error, rtol=0)
        with torch.no_grad():
            for weight in policy.model.parameters():
                weight.mul_(1.01)
    assert found.engine.startswith("hf, its own layers, ")
    if dtype == torch.bfloat16:
        assert found.engine == "hf, its own layers, cuda graphs"
