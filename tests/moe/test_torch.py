"""The torch module over every engine: gradients, log-probs, generation, the loss."""

import numpy as np
import pytest
from moe_models import random_batch

torch = pytest.importorskip("torch")

from torch_models import IDS, MASK, assert_same_grads, grads, module, same_tensor  # noqa: E402

COMPLETION = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]])


@pytest.fixture
def model(moe_engine):
    return module(moe_engine)


# ---- gradients ----


def spread(model):
    """A loss that every logit and the auxiliary loss enter with a weight of its own."""
    ids, _, _, mask = (torch.from_numpy(array) for array in random_batch(model.moe.config, (2, 5), padding="left"))
    weights = torch.linspace(-1, 1, 2 * 5 * model.config.vocab_size, dtype=torch.float64).reshape(2, 5, -1)

    def loss(*params):
        result = model(ids, mask, output_router_logits=True)
        return (weights * result.logits).sum(), result.aux_loss

    return loss


@pytest.mark.parametrize("tied", [False, True])
def test_gradcheck(float64_engine, tied):
    """Finite differences move the parameters in place, and the engine must see it."""
    model = module(float64_engine, dtype=np.float64, num_layers=1, vocab_size=5, hidden_dim=4, tie_embeddings=tied)
    assert torch.autograd.gradcheck(spread(model), tuple(model.parameters()), eps=1e-6, atol=1e-6, rtol=1e-5)


def test_loss_and_gradients_are_the_engines_own(moe_engine):
    """The way through torch's cross-entropy and the engine's fused loss are one loss."""
    model = module(moe_engine, aux_loss_coef=0.3)
    tokens = np.random.default_rng(0).integers(0, 11, (3, 7))
    mask = np.arange(7) >= np.array([0, 2, 5])[:, None]
    targets, counts = np.roll(tokens, -1, 1), np.arange(7) < 6
    want_loss, want = model.moe.loss_and_grads(tokens, targets, np.tile(counts, (3, 1)), attention_mask=mask)
    loss = model(tokens, mask, labels=tokens).loss
    loss.backward()
    assert loss.item() == pytest.approx(want_loss, rel=1e-6)
    assert_same_grads(grads(model), want, 1e-5)


def test_the_auxiliary_loss_alone_has_a_gradient(float64_engine):
    model = module(float64_engine, dtype=np.float64)
    model(IDS, output_router_logits=True).aux_loss.backward()
    saved = model.moe.engine.forward_saved(IDS.numpy(), None)
    want = model.moe.engine.backward(saved, np.zeros_like(saved.logits_BTV), 1.0)
    assert np.abs(want["model.layers.0.mlp.gate.weight"]).max() > 0
    assert_same_grads(grads(model), want, 1e-12)
    assert not model.get_output_embeddings().weight.grad.any()


def test_the_caller_may_write_over_the_logits(model):
    model(IDS).logits.mul(2).logsumexp(-1).sum().backward()
    want = grads(model)
    model.zero_grad()
    logits = model(IDS).logits
    scaled = logits.mul(2)
    logits.data.fill_(float("nan"))  # what a loss kernel that works in place does
    scaled.logsumexp(-1).sum().backward()
    assert_same_grads(grads(model), want, 1e-6)
    model.zero_grad()
    logits = model(IDS).logits
    logits *= 2
    logits.logsumexp(-1).sum().backward()
    assert_same_grads(grads(model), want, 1e-6)


def test_gradient_accumulation_is_the_whole_batch(model):
    """Two micro-batches of different numbers of targets, divided by the number of all."""
    labels = torch.tensor([[0, 2, -100, 4], [-100, -100, 7, 8]])
    model(IDS, MASK, labels=labels).loss.backward()
    want = grads(model)  # 2 targets + 1: padding predicts nothing, so the 7 is none
    model.zero_grad()
    for row in (slice(0, 1), slice(1, 2)):
        model(IDS[row], MASK[row], labels=labels[row], num_items_in_batch=torch.tensor(3)).loss.backward()
    assert_same_grads(grads(model), want, 1e-5)


def test_two_forwards_before_their_backwards(model):
    """As a preference loss has it: both graphs alive at once, backward in either order."""
    first, second = model(IDS[:1]).logits.sum(), model(IDS[1:]).logits.square().sum()
    first.backward()
    second.backward()
    found = grads(model)
    model.zero_grad()
    (model(IDS[1:]).logits.square().sum() + model(IDS[:1]).logits.sum()).backward()
    assert_same_grads(found, grads(model), 1e-5)


def test_frozen_parameters_get_no_gradient(model):
    for name, param in model.named_parameters():
        param.requires_grad_("self_attn" in name)
    model(IDS, labels=IDS).loss.backward()
    got = {name for name, param in model.named_parameters() if param.grad is not None}
    assert got == {name for name, _ in model.named_parameters() if "self_attn" in name}
    attention = sum(param.numel() for name, param in model.named_parameters() if "self_attn" in name)
    assert model.num_parameters(only_trainable=True) == attention
    model.requires_grad_(False)
    assert not model(IDS, labels=IDS).loss.requires_grad


def test_aux_loss_without_gradients(moe_engine):
    model = module(moe_engine, aux_loss_coef=0.5)
    want = model(IDS, labels=IDS)
    with torch.no_grad():
        assert model(IDS).aux_loss is None  # it would cost the activations, and nobody asked
        assert model(IDS, output_router_logits=True).aux_loss.item() == pytest.approx(want.aux_loss.item(), rel=1e-6)
        assert model(IDS, labels=IDS).loss.item() == pytest.approx(want.loss.item(), rel=1e-6)
        ce = model(IDS, labels=IDS, output_router_logits=False)
        assert ce.aux_loss is None
        assert ce.loss.item() == pytest.approx(want.loss.item() - 0.5 * want.aux_loss.item(), rel=1e-5)


LOSSES = {
    "logits": lambda model, ids: model(ids, MASK).logits.square().sum(),
    "log-probs": lambda model, ids: model.logps(ids, MASK, COMPLETION)[0].sum(),
}


@pytest.mark.parametrize("saving", ["forward_saved", "logps_saved"])
def test_without_gradients_nothing_is_saved(model, monkeypatch, saving):
    def results():
        return (model(IDS, MASK).logits,) if saving == "forward_saved" else model.logps(IDS, MASK, COMPLETION)

    want = results()
    monkeypatch.setattr(model.moe.engine, saving, None)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            found = results()
        for one, wanted in zip(found, want, strict=True):
            assert (one.requires_grad, wanted.requires_grad) == (False, True)
            same_tensor(one, wanted, model)


@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
def test_a_graph_can_be_reused_as_in_torch(model, loss_of):
    """It serves twice where it is kept, whatever became of the ids; not after a change of weights, and for no second derivative."""
    ids = IDS.clone()
    loss_of(model, ids).backward()
    once = grads(model)
    model.zero_grad()
    loss = loss_of(model, ids)
    ids.zero_()
    loss.backward(retain_graph=True)
    assert_same_grads(grads(model), once, 1e-6)
    loss.backward()
    assert_same_grads(grads(model), {name: 2 * grad for name, grad in once.items()}, 1e-6)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):  # torch's own
        loss.backward()
    with pytest.raises(RuntimeError, match="create_graph must be False: the engine has first derivatives only"):
        torch.autograd.grad(loss_of(model, IDS), model.lm_head.weight, create_graph=True)
    loss = loss_of(model, IDS)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_under_autocast_and_compile(model):
    want = model(IDS, labels=IDS).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(IDS, labels=IDS).loss.item() == pytest.approx(want.item(), rel=1e-6)
    loss = torch.compile(model, backend="eager")(IDS, labels=IDS).loss
    assert loss.item() == pytest.approx(want.item(), rel=1e-6)
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())


# ---- log-probs ----


@pytest.mark.parametrize("tied", [False, True])
def test_gradcheck_of_log_probs_and_entropies(float64_engine, tied):
    model = module(float64_engine, dtype=np.float64, num_layers=1, vocab_size=5, hidden_dim=4, tie_embeddings=tied)
    ids = torch.tensor([[0, 1, 2, 3], [0, 1, 4, 2]])  # a prompt in common

    def both(*params):
        return model.logps(ids, None, COMPLETION, temperature=0.7)

    assert torch.autograd.gradcheck(both, tuple(model.parameters()), eps=1e-6, atol=1e-6, rtol=1e-5)


def test_log_probs_are_those_of_the_logits(model):
    """Values and gradients, one at a time: a loss of log-probs alone, of entropies alone, of both."""
    log_p = model(IDS, MASK).logits[:, :-1].div(0.7).log_softmax(-1)
    logps = log_p.gather(-1, IDS[:, 1:, None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    counts = (COMPLETION * (MASK.cumsum(1) > 1))[:, 1:]
    weights = torch.tensor([[0.3, -2.0, 1.0], [0.5, 1.5, -0.7]]) * counts
    for a, b in ((1.0, 0.0), (0.0, 1.0), (0.4, -0.9)):
        found_logps, found_entropy = model.logps(IDS, MASK, COMPLETION, temperature=0.7)
        assert found_logps.dtype == torch.float32
        torch.testing.assert_close(found_logps[:, 1:], logps * counts, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found_entropy[:, 1:], entropy * counts, rtol=1e-5, atol=1e-5)
        terms = [weight * values for weight, values in ((a, found_logps), (b, found_entropy)) if weight]
        model.zero_grad()
        sum((weights * term[:, 1:]).sum() for term in terms).backward()
        found = grads(model)
        model.zero_grad()
        (weights * (a * logps + b * entropy)).sum().backward(retain_graph=True)
        assert_same_grads(found, grads(model))


def test_log_probs_refuse(model):
    with pytest.raises(ValueError, match=r"completion_mask must have the shape \(2, 4\) of input_ids, found \(1, 4\)"):
        model.logps(IDS, MASK, COMPLETION[:1])
    with pytest.raises(ValueError, match="temperature must be finite and above 0"):
        model.logps(IDS, temperature=0)


# ---- generation ----


def test_sampling_obeys_the_generator(model):
    def drawn(**arguments):
        return model.generate(IDS, max_new_tokens=10, do_sample=True, **arguments).tolist()

    torch.manual_seed(5)
    first, second = drawn(), drawn()
    assert first != second
    torch.manual_seed(5)
    assert [drawn(), drawn()] == [first, second]
    seeded = [drawn(generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert seeded[0] == seeded[1] != drawn(generator=torch.Generator().manual_seed(2))
    state = torch.get_rng_state()
    model.generate(IDS, max_new_tokens=3)
    assert torch.equal(torch.get_rng_state(), state)  # greedy draws nothing


def test_sampling_arguments_reach_the_sampler(model, monkeypatch):
    seen = []
    complete = model.moe.engine.complete

    def spy(*prompts, **arguments):
        seen.append((arguments["temperature"], arguments["top_k"], arguments["top_p"]))
        return complete(*prompts, **arguments)

    monkeypatch.setattr(model.moe.engine, "complete", spy)
    for arguments in (
        {"do_sample": True, "temperature": 0.7, "top_k": 3, "top_p": 0.9},
        {"do_sample": True},
        {"do_sample": True, "temperature": None, "top_k": None, "top_p": None},
        {"do_sample": True, "top_k": 0},
        {},
    ):
        model.generate(IDS, max_new_tokens=1, **arguments)
    assert seen == [(0.7, 3, 0.9), (1.0, 50, 1.0), (1.0, 0, 1.0), (1.0, 0, 1.0), (0.0, 0, 1.0)]


def test_layout_of_a_generation(model):
    """Prompts stand unchanged, padding included; samples of a prompt next to each other; the pad id after EOS."""
    ids = torch.tensor([[1, 2, 3, 4], [99, -5, 7, 8]])  # what stands under padding is nobody's business
    rows = model.generate(ids, MASK, max_new_tokens=8, do_sample=True, num_return_sequences=3, eos_token_id=(0, 1, 2))
    assert rows.dtype == torch.int64
    assert rows[:, :4].tolist() == [[1, 2, 3, 4]] * 3 + [[99, -5, 7, 8]] * 3
    alone = model.generate(IDS[1:, 2:], max_new_tokens=6)
    both = model.generate(ids, MASK, max_new_tokens=6)
    assert both[1, 4:].tolist() == alone[0, 2:].tolist()
    free = both[0, 4:].tolist()
    eos = free[2]
    ended = model.generate(IDS[:1], max_new_tokens=6, eos_token_id=eos, pad_token_id=10)[0, 4:].tolist()
    assert ended == free[: free.index(eos) + 1]
    pair = model.generate(torch.cat([IDS[:1], IDS[:1]]), max_new_tokens=6, eos_token_id=torch.tensor([eos]))
    assert pair[1, 4:].tolist() == ended


def test_eos_and_pad_come_from_the_config(model):
    free = model.generate(IDS, max_new_tokens=6)[:, 4:]
    row, other = (0, 1) if free[0, 0] not in free[1] else (1, 0)
    eos = int(free[row, 0])
    assert eos not in free[other]
    model.config.eos_token_id, model.config.pad_token_id = eos, 9
    rows = model.generate(IDS, max_new_tokens=6)[:, 4:]
    assert rows[row].tolist() == [eos, 9, 9, 9, 9, 9]
    assert rows[other].tolist() == free[other].tolist()
    assert torch.equal(model.generate(IDS, max_new_tokens=6, eos_token_id=None)[:, 4:], free)
    model.config.pad_token_id = None
    assert model.generate(IDS, max_new_tokens=6)[row, 4:].tolist() == [eos] * 6


# ---- the loss ----


def test_a_batch_without_targets_has_no_loss(model):
    loss = model(IDS, labels=torch.full_like(IDS, -100)).loss
    assert loss.item() == 0
    loss.backward()
    assert all(not param.grad.any() for param in model.parameters())
    assert model(IDS[:, :1], labels=IDS[:, :1]).loss.item() == 0


def test_positions_are_checked(model):
    want = model(IDS, MASK).logits
    for positions in (
        torch.arange(4)[None],  # transformers' default for a left-padded row
        torch.tensor([[0, 1, 2, 3], [1, 1, 0, 1]]),  # what its generate makes of the mask
        torch.tensor([[7, 8, 9, 10], [0, 0, 0, 1]]),
    ):
        same_tensor(model(IDS, MASK, positions).logits, want, model)
    packed = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
    match = r"position_ids must rise by one .*\(packed rows are not supported\), found 0 at row 0, column 2"
    with pytest.raises(ValueError, match=match):
        model(IDS, position_ids=packed)
    holes = torch.tensor([[1, 0, 1, 1]])
    with pytest.raises(ValueError, match="position_ids must rise by one"):
        model(IDS[:1], holes, torch.arange(4)[None])
