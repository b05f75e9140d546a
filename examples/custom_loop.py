"""GRPO in your own training loop: a model of your own, and from strop two operators.

The model is a GRU that knows nothing. A prompt is one number; the completion should count on from it. The reward is what
a rule can verify: the share of tokens that are their predecessor plus one. Seconds on a CPU:

    python examples/custom_loop.py

The logits [B, T, V] of the update never exist: `linear_logp` and `linear_grpo_loss` take the hidden states and the LM head.
The same lines run on a GPU with bfloat16 weights; the operators choose their kernels by the tensors they get.

Shapes: B sequences (prompts × samples), T completion tokens, H hidden, V the vocabulary.
"""

import torch

from strop.ops import linear_grpo_loss, linear_logp

V, H, T = 16, 64, 8
PROMPTS, SAMPLES = 16, 8
STEPS, INNER_UPDATES = 50, 2


class Model(torch.nn.Module):
    """tokens [B, T] → hidden states [B, T, H] and the state after them; the LM head stands beside, for the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(V, H)
        self.gru = torch.nn.GRU(H, H, batch_first=True)
        self.head = torch.nn.Linear(H, V, bias=False)

    def forward(self, tokens: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gru(self.embedding(tokens), state)


@torch.no_grad()
def sample(model: Model, prompts_B: torch.Tensor) -> torch.Tensor:
    """[B, 1 + T]: the prompt and its completion, token by token."""
    tokens, state = prompts_B[:, None], None
    for _ in range(T):
        hidden_B1H, state = model(tokens[:, -1:], state)
        probs_BV = model.head(hidden_B1H[:, 0]).softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probs_BV, 1)], 1)
    return tokens


def reward(tokens: torch.Tensor) -> torch.Tensor:
    """[B]: the share of tokens that count on from the one before."""
    return (tokens[:, 1:] == (tokens[:, :-1] + 1) % V).float().mean(-1)


def train(steps: int = STEPS, seed: int = 0) -> list[float]:
    """The mean reward of every step."""
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rewards_so_far = []
    for step in range(steps):
        # 1. Rollout: every prompt SAMPLES times, the samples of a prompt one after another.
        prompts = torch.randint(0, V, (PROMPTS,)).repeat_interleave(SAMPLES)
        tokens = sample(model, prompts)
        rewards_B = reward(tokens)
        inputs_BT, action_ids_BT = tokens[:, :-1], tokens[:, 1:]  # position t predicts action t
        completion_mask_BT = torch.ones_like(action_ids_BT)

        # 2. The log-probs of the policy that sampled: what the ratio is measured from.
        with torch.no_grad():
            hidden_BTH, _ = model(inputs_BT)
            old_logps_BT = linear_logp(hidden_BTH, model.head.weight, action_ids_BT)

        # 3. Update: the first has ratio 1 everywhere, later ones are held by the clip.
        for _ in range(INNER_UPDATES):
            hidden_BTH, _ = model(inputs_BT)
            result = linear_grpo_loss(
                hidden_BTH,
                model.head.weight,
                action_ids_BT,
                old_logps_BT,
                rewards_B,
                completion_mask_BT,
                samples_per_prompt=SAMPLES,
                clip_eps=0.2,
            )
            optimizer.zero_grad()
            result.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        rewards_so_far.append(rewards_B.mean().item())
        if step % 10 == 0 or step == steps - 1:
            clipped = result.metrics["clip_fraction"].item()
            print(f"step {step:3d}   reward {rewards_so_far[-1]:.3f}   clipped {clipped:.1%}")
    return rewards_so_far


if __name__ == "__main__":
    train()
