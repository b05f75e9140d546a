"""The interface of models for algorithms: log-probs of tokens, hidden states with the LM head, a frozen reference.

policy = as_policy(model, tokenizer)        a plain nn.Module that returns logits, any Hugging Face causal LM, a peft
                                            model, MoEForCausalLM or a bare MoETransformer
logps_n = policy.logps(batch)               log-probs of the tokens of the loss in a TokenBatch; differentiable
ref_logps_n = policy.reference().logps(batch)
"""

from strop._contexts import one_thread
from strop.models.kinds import adapter_off, base_model, has_adapter, unwrapped
from strop.models.loading import load_model
from strop.models.policy import Policy, Reference, as_policy

__all__ = [
    "Policy",
    "Reference",
    "adapter_off",
    "as_policy",
    "base_model",
    "has_adapter",
    "load_model",
    "one_thread",
    "unwrapped",
]
