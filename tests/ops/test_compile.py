"""The operators inside torch.compile(fullgraph=True), and torch's own checks of every operator of torch.ops.strop."""

import pytest
import torch
from yardstick import needs_compiler, same

from strop.losses.rules import PolicyRule
from strop.ops import (
    grpo_loss,
    linear_divergence,
    linear_dpo_loss,
    linear_grpo_loss,
    linear_logp,
    logp,
    ratio_kl,
    registry,
)
from strop.ops.grpo_loss import policy_terms
from strop.ops.rows import implementation

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # the compiler itself calls what torch deprecates
    needs_compiler,
]

B, T, H, V = 2, 3, 4, 9
GENERATOR = torch.Generator().manual_seed(0)
HIDDEN, WEIGHT, BIAS = (torch.randn(*shape, generator=GENERATOR) for shape in ((B, T, H), (V, H), (V,)))
LOGITS, OLD, REWARDS = (torch.randn(*shape, generator=GENERATOR) for shape in ((B, T, V), (B, T), (B,)))
IDS, MASK = torch.randint(0, V, (B, T), generator=GENERATOR), torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()


class Model(torch.nn.Module):
    """A body, a head, and an operator on both."""

    def __init__(self, operator):
        super().__init__()
        self.body, self.head, self.operator = torch.nn.Linear(H, H), torch.nn.Linear(H, V), operator

    def forward(self, x):
        return self.operator(torch.tanh(self.body(x)), self.head)


OPERATORS = {
    "logp": lambda h, head: logp(head(h), IDS, completion_mask=MASK).sum(),
    "logp with entropy": lambda h, head: sum(x.sum() for x in logp(head(h), IDS, entropy=True, temperature=0.7)),
    "logp of the next token": lambda h, head: logp(head(h)[:, :-1], IDS[:, 1:]).sum(),
    "ratio_kl": lambda h, head: sum(x.sum() for x in ratio_kl(head(h), LOGITS, IDS, MASK, OLD)),
    "grpo_loss": lambda h, head: (
        grpo_loss(head(h), LOGITS, IDS, OLD, REWARDS, MASK, samples_per_prompt=2, beta=0.1).loss * 2
    ),
    "grpo_loss of a view": lambda h, head: (
        grpo_loss(head(h)[:, :-1], None, IDS[:, 1:], None, REWARDS, MASK[:, 1:], samples_per_prompt=2).loss
    ),
    "linear_logp": lambda h, head: linear_logp(h, head.weight, IDS, bias=head.bias, completion_mask=MASK).sum(),
    "linear_logp, frozen head": lambda h, head: (
        linear_logp(h, head.weight.detach(), IDS, completion_mask=MASK).sum() + head(h).mean()
    ),
    "linear_grpo_loss": lambda h, head: (
        linear_grpo_loss(h, head.weight, IDS, OLD, REWARDS, MASK, bias=head.bias, samples_per_prompt=2).loss * 2
    ),
    "linear_dpo_loss": lambda h, head: (
        linear_dpo_loss(h, head.weight, IDS, MASK, bias=head.bias, ref_logps=REWARDS).loss
    ),
    "linear_divergence": lambda h, head: (
        linear_divergence(h[0], head.weight, 2 * h[0].detach(), head.weight.detach(), OLD[0], beta=0.3).loss + head(h).mean()
    ),
    "linear_grpo_loss and its metrics": lambda h, head: (
        with_metric(linear_grpo_loss(h, head.weight, IDS, OLD, REWARDS, MASK, bias=head.bias, samples_per_prompt=2), "ratio/max")
    ),
    "linear_dpo_loss and its metrics": lambda h, head: (
        with_metric(linear_dpo_loss(h, head.weight, IDS, MASK, bias=head.bias, ref_logps=REWARDS), "margin")
    ),
}  # fmt: skip


def with_metric(result, name):
    return result.loss + result.metrics[name]


def value_and_gradients(function, model):
    model.zero_grad()
    value = function(HIDDEN)
    value.backward()
    return value.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("kind", "backend"), [("logits", "triton"), ("hidden states", "triton"), ("hidden states", "default")]
)
def test_the_graph_is_whole(kind, backend):
    """Of one model with every operator on logits, and one with every operator on hidden states."""
    chosen = [function for name, function in OPERATORS.items() if ("linear" in name) == (kind == "hidden states")]
    torch.manual_seed(0)
    model = Model(lambda h, head: sum(function(h, head) for function in chosen))
    with registry.use_backend(**{} if backend == "default" else dict.fromkeys(registry.ops(), "triton")):
        expected = value_and_gradients(model, model)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found = value_and_gradients(compiled, model)
        again = value_and_gradients(compiled, model)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-5)


def test_inductor():
    torch.manual_seed(0)
    model = Model(OPERATORS["linear_logp"])
    expected = value_and_gradients(model, model)
    found = value_and_gradients(torch.compile(model, fullgraph=True), model)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def grpo_of_any_shape(head, x, ids, rewards, mask, options):
    return grpo_loss(head(x), None, ids, None, rewards, mask, **options)


def linear_grpo_of_any_shape(head, x, ids, rewards, mask, options):
    return linear_grpo_loss(x, head.weight, ids, None, rewards, mask, bias=head.bias, **options)


GROUPS = {"samples_per_prompt": 2}, {"group_boundaries": [0, 2]}


@pytest.mark.parametrize(
    ("operator", "options", "backend"),
    [(grpo_of_any_shape, GROUPS[1], "triton"), (linear_grpo_of_any_shape, GROUPS[0], "default")],
)
def test_the_graph_is_whole_where_shapes_are_symbols(operator, options, backend):
    torch.manual_seed(0)
    head = torch.nn.Linear(H, V)
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (T, T - 1):
        given = head, HIDDEN[:, :tokens], IDS[:, :tokens], REWARDS, MASK[:, :tokens], options
        with registry.use_backend(**{} if backend == "default" else dict.fromkeys(registry.ops(), "triton")):
            expected = torch.autograd.grad(operator(*given).loss, head.parameters())
            found = torch.autograd.grad(compiled(*given).loss, head.parameters())
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("operator", "counted", "kind", "backend"),  # every two of them together
    [
        (grpo_of_any_shape, "num_tokens", int, "triton"), (grpo_of_any_shape, "num_sequences", float, "default"),
        (linear_grpo_of_any_shape, "num_tokens", float, "default"), (linear_grpo_of_any_shape, "num_sequences", int, "triton"),
    ],
)  # fmt: skip
def test_a_step_with_another_count_takes_the_same_graph(operator, counted, kind, backend):
    head, graphs = torch.nn.Linear(H, V), []
    options = {"samples_per_prompt": 2, "loss_type": "dapo" if counted == "num_tokens" else "grpo"}

    def loss(count):
        return operator(head, HIDDEN, IDS, REWARDS, MASK, {**options, counted: count}).loss

    def keep(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(loss, fullgraph=True, backend=keep)
    with registry.use_backend(**{} if backend == "default" else dict.fromkeys(registry.ops(), "triton")):
        for count in map(kind, (7, 9, 11, 14)):
            torch.testing.assert_close(compiled(count), loss(count), rtol=1e-5, atol=1e-6)
    assert len(graphs) == 2  # the first for its number alone, the second for any


def test_every_operator_of_the_library_is_checked_here():
    known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("strop::")}
    known -= {"strop::attend"}  # of the rollouts, tested there
    assert known == {f"strop::{name}" for name in CALLS}


def layouts(x):
    columns = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    shifted = torch.zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)
    return [x, torch.cat([x, x[:, :1]], 1)[:, :-1], columns, shifted]


I, M, O = IDS.view(-1), MASK.view(-1), OLD.view(-1)  # noqa: E741
STATS = torch.zeros(2, B * T), torch.zeros(B * T), torch.ones(B * T)
LOSS = 1.0, PolicyRule(beta=0.1).text
WITHOUT_KL = 1.0, PolicyRule().text
COEFFICIENTS = I, M, O, O - 0.1, REWARDS, torch.ones(B)
HEAD = HIDDEN.view(-1, H), WEIGHT, BIAS
CALLS = {
    "logp": [(x, I, M, 0.7, False) for x in layouts(LOGITS)[1:]] + [(LOGITS, I, None, 0.7, True)],
    "score": [(LOGITS, I, M, 0.7)],
    "logp_backward": [(x, I, M, *STATS, None, 0.7) for x in layouts(LOGITS)]
    + [(LOGITS, I, None, *STATS, STATS[2], 0.7)],
    "logp_backward_": [(x.clone(), I, M, *STATS, None, 0.7) for x in layouts(LOGITS)[:2]],
    "batch_coefficients": [
        (REWARDS, MASK, 2, None, 2.0, None),
        (REWARDS, MASK, 2, torch.tensor(5), 0.0, 1),
    ],
    "policy_terms": [(x, *COEFFICIENTS, *LOSS, True) for x in layouts(LOGITS)] + [(LOGITS, *COEFFICIENTS, *LOSS, False)],
    "policy_terms_": [(LOGITS.clone(), *COEFFICIENTS, *LOSS)],
    "linear_logp": [(*HEAD, I, M, 0.7, entropy, rows, 400, torch.float32) for rows, entropy in (("torch", False), ("triton", True))],
    "linear_logp_with_gradient": [(*HEAD, I, mask, 0.7, rows, 400, torch.float32) for rows, mask in (("torch", M), ("triton", None))],
    "linear_logp_backward": [
        (*HEAD, I, M, *STATS, None, 0.7, "torch", 400, torch.float32, wanted)
        for wanted in ([True, True, True], [True, False, False], [False, True, False])
    ],
    "linear_divergence": [
        (*HEAD, 2 * HEAD[0], WEIGHT, BIAS, O, beta, 0.7, "torch", 400, torch.float32, torch.float32, wanted)
        for beta, wanted in ((0.3, [True, True, True]), (0.0, [True, False, False]), (1.0, [False, False, False]))
    ],
    "linear_policy_loss": [
        (*HEAD, I, M, O, None, O, O, *WITHOUT_KL, "torch", 400, torch.float32, wanted)
        for wanted in ([True, True, True], [False, True, False], [False, False, False])
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    """Schema, fake shapes, strides and dtypes, and the registration."""
    for arguments in CALLS[name]:
        torch.library.opcheck(getattr(torch.ops.strop, name).default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [[True, True, False], [True, False, False], [False, True, False]])
def test_opcheck_under_autocast(dtype, wanted):
    """Hidden states in either dtype, a weight in float32, products in bfloat16; the gradients not asked for too."""
    head, autocast = (HEAD[0].to(dtype), WEIGHT, None), (torch.bfloat16, wanted)
    torch.library.opcheck(
        torch.ops.strop.linear_logp_backward.default, (*head, I, M, *STATS, None, 0.7, "torch", 400, *autocast)
    )
    torch.library.opcheck(
        torch.ops.strop.linear_logp_with_gradient.default, (*head, I, M, 0.7, "torch", 400, torch.bfloat16)
    )
    torch.library.opcheck(
        torch.ops.strop.linear_policy_loss.default,
        (*head, I, M, O, None, O, O, *WITHOUT_KL, "torch", 400, *autocast),
    )


@pytest.mark.parametrize("name", [name for name in OPERATORS if "linear" in name])
def test_shapes_on_the_meta_device(name, monkeypatch):
    """Without memory for any of it: the sizes and dtypes of the result and of its gradients."""
    for tensor in ("IDS", "MASK", "OLD", "REWARDS"):
        monkeypatch.setitem(globals(), tensor, globals()[tensor].to("meta"))
    model = Model(OPERATORS[name]).to("meta")
    value = model(HIDDEN.to("meta"))
    value.backward()
    gradients = [(p.grad.shape, p.grad.dtype, p.grad.device.type) for p in model.parameters()]
    assert (value.shape, value.dtype) == ((), torch.float32)
    assert gradients == [(p.shape, p.dtype, "meta") for p in model.parameters()]


def test_the_library_runs_the_function_itself():
    """A plain call does not go through the dispatcher; the operator gives the same."""
    arguments = (LOGITS, *COEFFICIENTS, *LOSS, True)
    same(policy_terms(*arguments), torch.ops.strop.policy_terms(*arguments))
    assert implementation("triton").INTERPRETED
