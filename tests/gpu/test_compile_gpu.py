"""A model and an operator compiled whole by inductor on a GPU: the values and gradients of eager."""

import pytest
import torch

from strop.ops import grpo_loss, linear_grpo_loss, linear_logp, logp

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

B, T, H, V = 4, 8, 64, 1003


def test_the_graph_is_whole():
    torch.manual_seed(0)
    x, ids = torch.randn(B, T, H, device="cuda"), torch.randint(0, V, (B, T), device="cuda")
    rewards, mask = torch.randn(B, device="cuda"), (torch.arange(T, device="cuda") < 6).expand(B, T)
    operators = {
        "logp": lambda h, head: logp(head(h)[:, :-1], ids[:, 1:]).sum(),
        "grpo_loss": lambda h, head: 2 * grpo_loss(head(h), None, ids, None, rewards, mask, samples_per_prompt=2).loss,
        "linear_logp": lambda h, head: linear_logp(h, head.weight, ids, bias=head.bias, completion_mask=mask).sum(),
        "linear_grpo_loss": lambda h, head: (
            linear_grpo_loss(h, head.weight, ids, None, rewards, mask, bias=head.bias, samples_per_prompt=2).loss
        ),
    }
    for name, operator in operators.items():
        torch.compiler.reset()
        body, head = torch.nn.Linear(H, H, device="cuda"), torch.nn.Linear(H, V, device="cuda")
        model = lambda: operator(torch.tanh(body(x)), head)  # noqa: B023, E731
        results = []
        for function in (model, torch.compile(model, fullgraph=True)):
            body.zero_grad()
            head.zero_grad()
            value = function()
            value.backward()
            results.append((value.detach(), *(p.grad for p in (*body.parameters(), *head.parameters()))))
        for found, expected in zip(*results[::-1], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
