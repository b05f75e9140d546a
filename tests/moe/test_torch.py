"""The torch module over every engine: gradients, Mixtral as the oracle, shared memory, and every refused input."""

import copy
import io
import subprocess
import sys
import warnings

import numpy as np
import pytest
from moe_models import random_batch, random_model, small_config

from strop.moe import MoEConfig, MoETransformer
from strop.moe.weights import to_mixtral

torch = pytest.importorskip("torch")

from strop.moe.torch import MoEForCausalLM  # noqa: E402

IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])


def module(engine="numpy", *, dtype=np.float32, seed=0, std=0.4, **changes):
    return MoEForCausalLM(random_model(small_config(**changes), engine, seed=seed, dtype=dtype, std=std))


@pytest.fixture
def model(moe_engine):
    return module(moe_engine)


def grads(model):
    return {name: param.grad.numpy().copy() for name, param in model.named_parameters()}


def relative_error(found, wanted):
    return np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-6)


def assert_same_grads(found, wanted, tolerance=1e-4):
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert relative_error(found[name], wanted[name]) <= tolerance, name


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


def test_gradcheck_of_the_loss(float64_engine):
    model = module(float64_engine, dtype=np.float64, num_layers=1, vocab_size=5, hidden_dim=4, aux_loss_coef=0.5)
    ids = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    labels = torch.tensor([[0, 1, -100, 3], [-100, 3, 2, 1]])

    def loss(*params):
        return model(ids, MASK, labels=labels).loss

    assert torch.autograd.gradcheck(loss, tuple(model.parameters()), eps=1e-6, atol=1e-6, rtol=1e-5)


def test_gradcheck_has_teeth(monkeypatch):
    """A router gradient of 0 must not pass."""
    model = module(dtype=np.float64, num_layers=1, vocab_size=5, hidden_dim=4)
    backward = model.moe.engine.backward

    def without_router(*args):
        result = backward(*args)
        result["model.layers.0.mlp.gate.weight"][...] = 0
        return result

    monkeypatch.setattr(model.moe.engine, "backward", without_router)
    with pytest.raises(RuntimeError, match="Jacobian mismatch for output 0 with respect to input 7"):
        torch.autograd.gradcheck(spread(model), tuple(model.parameters()), eps=1e-6, atol=1e-6, rtol=1e-5)


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
    assert_same_grads(grads(model), want, 0)
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


def test_without_gradients_nothing_is_saved(model, monkeypatch):
    want = model(IDS, MASK).logits
    monkeypatch.setattr(model.moe.engine, "forward_saved", None)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            found = model(IDS, MASK).logits
        assert not found.requires_grad
        assert torch.equal(found, want)
    assert want.requires_grad


def test_aux_loss_without_gradients(moe_engine):
    model = module(moe_engine, aux_loss_coef=0.5)
    want = model(IDS, labels=IDS)
    with torch.no_grad():
        assert model(IDS).aux_loss is None  # it would cost the activations, and nobody asked
        assert model(IDS, output_router_logits=True).aux_loss == want.aux_loss
        assert model(IDS, labels=IDS).loss == want.loss
        ce = model(IDS, labels=IDS, output_router_logits=False)
        assert ce.aux_loss is None
        assert ce.loss.item() == pytest.approx(want.loss.item() - 0.5 * want.aux_loss.item(), rel=1e-5)


def test_a_retained_graph_serves_again(model):
    loss = model(IDS, MASK, labels=IDS).loss
    loss.backward(retain_graph=True)
    once = grads(model)
    loss.backward()
    assert_same_grads(grads(model), {name: 2 * grad for name, grad in once.items()}, 0)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):  # torch's own
        loss.backward()


def test_ids_may_be_reused_before_the_backward(model):
    model(IDS).logits.square().sum().backward()
    want = grads(model)
    model.zero_grad()
    ids = IDS.clone()
    loss = model(ids).logits.square().sum()
    ids.zero_()
    loss.backward()
    assert_same_grads(grads(model), want, 0)


def test_weights_may_not_change_before_the_backward(model):
    loss = model(IDS, labels=IDS).loss
    with torch.no_grad():
        model.get_parameter("model.norm.weight").add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_second_derivative(model):
    with pytest.raises(RuntimeError, match="create_graph must be False: the engine has first derivatives only"):
        torch.autograd.grad(model(IDS).logits.sum(), model.lm_head.weight, create_graph=True)


def test_under_autocast_and_compile(model):
    want = model(IDS, labels=IDS).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(IDS, labels=IDS).loss, want)
    loss = torch.compile(model, backend="eager")(IDS, labels=IDS).loss
    assert torch.equal(loss, want)
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())


# ---- log-probs ----


COMPLETION = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]])


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


def test_log_probs_without_gradients_save_nothing(model, monkeypatch):
    want = model.logps(IDS, MASK, COMPLETION)
    monkeypatch.setattr(model.moe.engine, "logps_saved", None)
    with torch.no_grad():
        found = model.logps(IDS, MASK, COMPLETION)
    assert [one.requires_grad for one in found] == [False, False]
    assert all(torch.equal(one, wanted) for one, wanted in zip(found, want, strict=True))


def test_the_graph_of_log_probs_is_as_that_of_logits(model):
    ids = IDS.clone()
    loss = model.logps(ids, MASK, COMPLETION)[0].sum()
    ids.zero_()
    loss.backward(retain_graph=True)
    once = grads(model)
    loss.backward()
    assert_same_grads(grads(model), {name: 2 * grad for name, grad in once.items()}, 0)
    with pytest.raises(RuntimeError, match="create_graph must be False"):
        torch.autograd.grad(model.logps(IDS)[0].sum(), model.lm_head.weight, create_graph=True)
    loss = model.logps(IDS)[0].sum()
    with torch.no_grad():
        model.get_parameter("model.norm.weight").add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_log_probs_of_nothing(model):
    logps, entropy = model.logps(IDS, MASK, torch.zeros_like(MASK))
    assert not logps.any()
    (logps.sum() + entropy.sum()).backward()
    assert not any(param.grad.any() for param in model.parameters())


def test_log_probs_refuse(model):
    with pytest.raises(ValueError, match=r"completion_mask must have the shape \(2, 4\) of input_ids, found \(1, 4\)"):
        model.logps(IDS, MASK, COMPLETION[:1])
    with pytest.raises(ValueError, match="temperature must be above 0"):
        model.logps(IDS, temperature=0)


# ---- Mixtral ----


@pytest.fixture
def transformers():
    """With its warnings off: they are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("transformers")


def mixtral_of(model, transformers):
    config = transformers.MixtralConfig(
        **to_mixtral(model.moe.config), attn_implementation="eager", experts_implementation="eager"
    )
    mixtral = transformers.MixtralForCausalLM(config).float().eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if model.moe.config.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    mixtral.load_state_dict(state)
    return mixtral


def ragged_batch(config, *, seed=0, shape=(3, 9)):
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(rng.integers(0, config.vocab_size, shape))
    first = torch.tensor([0, 3, 6])[:, None]
    mask = (torch.arange(shape[1]) >= first).long()
    labels = torch.where(torch.arange(shape[1]) > first, ids, -100)  # Mixtral lets padding predict the first token
    labels[0, 4] = labels[2, 8] = -100
    return ids, mask, labels


@pytest.mark.parametrize("changes", [{}, {"aux_loss_coef": 0.5}, {"tie_embeddings": True, "num_kv_heads": 1}])
def test_logits_loss_and_gradients_are_mixtrals(moe_engine, transformers, changes):
    model = module(moe_engine, std=0.15, vocab_size=40, **changes)
    mixtral = mixtral_of(model, transformers)
    ids, mask, labels = ragged_batch(model.config)
    want, found = mixtral(ids, mask, labels=labels), model(ids, mask, labels=labels)
    assert type(found) is type(want)
    assert (found.logits - want.logits)[mask.bool()].abs().max() <= 1e-5
    assert not found.logits[~mask.bool()].any()
    assert found.loss.item() == pytest.approx(want.loss.item(), abs=1e-6, rel=1e-6)
    assert (found.aux_loss is None) == (want.aux_loss is None)
    if want.aux_loss is not None:
        assert found.aux_loss.item() == pytest.approx(want.aux_loss.item(), rel=1e-6)
    want.loss.backward()
    found.loss.backward()
    assert_same_grads(grads(model), grads(mixtral))


def test_other_arguments_mean_what_they_mean_to_mixtral(moe_engine, transformers):
    model = module(moe_engine, std=0.15, vocab_size=40, aux_loss_coef=0.5)
    mixtral = mixtral_of(model, transformers)
    ids, mask, labels = ragged_batch(model.config)
    with torch.no_grad():
        for arguments in (
            {"logits_to_keep": 1},
            {"logits_to_keep": torch.tensor([7, 8])},
            {"labels": labels, "num_items_in_batch": 5},
            {"labels": labels, "output_router_logits": False},
            {"labels": labels, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)},
        ):
            found, want = model(ids, mask, **arguments), mixtral(ids, mask, **arguments)
            assert found.logits.shape == want.logits.shape
            columns = [*range(9)][-want.logits.shape[1] :]
            assert (found.logits - want.logits)[mask[:, columns].bool()].abs().max() <= 1e-5
            if "labels" in arguments:
                assert found.loss.item() == pytest.approx(want.loss.item(), rel=1e-6)
        values = model(ids, mask, labels=labels, output_router_logits=True, return_dict=False)
        wanted = mixtral(ids, mask, labels=labels, output_router_logits=True, return_dict=False, use_cache=False)
        assert [value.shape for value in values] == [value.shape for value in wanted[:3]]


def test_adamw_follows_mixtral(moe_engine, transformers):
    model = module(moe_engine, std=0.15, vocab_size=40, aux_loss_coef=0.1)
    mixtral = mixtral_of(model, transformers)
    ids, mask, labels = ragged_batch(model.config)
    curves = []
    for trained in (model, mixtral):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, weight_decay=0.1)
        losses, norms = [], []
        for _ in range(8):
            optimizer.zero_grad()
            loss = trained(ids, mask, labels=labels).loss
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.5).item())
            optimizer.step()
            losses.append(loss.item())
        curves.append((losses, norms))
    (losses, norms), (want_losses, want_norms) = curves
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_allclose(losses, want_losses, rtol=1e-4)
    np.testing.assert_allclose(norms, want_norms, rtol=1e-3)


@pytest.mark.parametrize("eos", [None, 27, [6, 25, 30]])
def test_greedy_generation_is_mixtrals(moe_engine, transformers, eos):
    model = module(moe_engine, vocab_size=40, max_seq_len=64, seed=3)
    mixtral = mixtral_of(model, transformers)
    num_padded = 0
    for seed in range(4):
        ids, mask, _ = ragged_batch(model.config, seed=seed)
        arguments = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
        want = mixtral.generate(ids, attention_mask=mask, **arguments)
        found = model.generate(ids, attention_mask=mask, **arguments)
        assert found.tolist() == want.tolist()
        if eos is not None:
            last_is_eos = torch.isin(found[:, -1], torch.tensor(eos))
            num_padded += int((torch.isin(found[:, 9:], torch.tensor(eos)).any(1) & ~last_is_eos).sum())
    assert eos is None or num_padded > 0


def test_padding_is_inferred_as_transformers_does(moe_engine, transformers):
    model = module(moe_engine, vocab_size=40, max_seq_len=64)
    mixtral = mixtral_of(model, transformers)
    ids, mask, _ = ragged_batch(model.config)
    ids = torch.where(mask.bool(), ids.clamp(min=2), 0)
    for eos, pad in ((1, 0), (0, 0), (None, None), (0, None)):
        arguments = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": eos, "pad_token_id": pad}
        assert model.generate(ids, **arguments).tolist() == mixtral.generate(ids, **arguments).tolist(), (eos, pad)


def test_checkpoints_go_both_ways(moe_engine, transformers, tmp_path):
    model = module(moe_engine, aux_loss_coef=0.2)
    model.config.eos_token_id, model.config.pad_token_id = 3, 0
    model.config.router_aux_loss_coef = 0.4
    model.save_pretrained(tmp_path / "ours")
    mixtral = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", experts_implementation="eager")
    assert type(mixtral).__name__ == "MixtralForCausalLM"
    assert (mixtral.config.eos_token_id, mixtral.config.pad_token_id) == (3, 0)
    assert mixtral(IDS, labels=IDS).loss.item() == pytest.approx(model(IDS, labels=IDS).loss.item(), rel=1e-5)
    assert (
        mixtral.generate(IDS, max_new_tokens=6, do_sample=False).tolist()
        == model.generate(IDS, max_new_tokens=6).tolist()
    )

    mixtral.save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        again = MoEForCausalLM.from_pretrained(tmp_path / folder, engine=moe_engine)
        assert again.moe.engine.name == moe_engine
        assert again.config.router_aux_loss_coef == pytest.approx(0.4)
        assert again.dtype == torch.float32
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
        assert torch.equal(again(IDS, labels=IDS).loss, model(IDS, labels=IDS).loss)
    double = MoEForCausalLM.from_pretrained(tmp_path / "ours", engine="numpy", dtype=torch.float64)
    assert double.dtype == torch.float64


def test_state_dicts_go_both_ways(moe_engine, transformers):
    for tied in (False, True):
        model = module(moe_engine, tie_embeddings=tied)
        mixtral = mixtral_of(model, transformers)
        other = module(moe_engine, seed=1, tie_embeddings=tied)
        other.load_state_dict(mixtral.state_dict())
        assert torch.equal(other(IDS).logits, model(IDS).logits)


# ---- memory ----


def test_parameters_are_the_engines_memory(model):
    params = dict(model.named_parameters())
    assert list(params) == list(model.moe.config.parameter_shapes())
    for name, array in model.moe.params.items():
        assert params[name].data_ptr() == array.ctypes.data
        assert params[name].shape == array.shape
    assert model.num_parameters() == model.moe.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == model.moe.num_parameters() - 11 * 8


def test_what_an_optimiser_does_is_what_the_engine_and_generate_see(model):
    before = model(IDS).logits.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(IDS, labels=IDS).loss.backward()
    wanted = {name: param.detach() - 0.5 * param.grad for name, param in model.named_parameters()}
    optimizer.step()
    fresh = MoETransformer(
        model.moe.config, model.moe.engine.name, params={name: value.numpy() for name, value in wanted.items()}
    )
    after = model(IDS).logits
    assert (after - before).abs().max() > 0.1
    np.testing.assert_allclose(after.detach().numpy(), fresh.forward(IDS.numpy()), atol=1e-5)
    np.testing.assert_allclose(model.moe.forward(IDS.numpy()), fresh.forward(IDS.numpy()), atol=1e-5)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        assert model.generate(IDS, max_new_tokens=3)[:, 4:].tolist() == [[0] * 3] * 2  # all logits equal: the lowest id
        model.lm_head.weight[9] = model.model.norm.weight.new_ones(8)
        says_nine = (model(IDS).logits[:, -1, 9] > 0).tolist()
    assert (model.generate(IDS, max_new_tokens=1)[:, 4] == 9).tolist() == says_nine


def test_training_memorises(moe_engine):
    model = module(moe_engine, std=0.1, tie_embeddings=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for _ in range(60):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
    assert model.generate(IDS[:, :1], max_new_tokens=3).tolist() == IDS.tolist()


def test_state_dict_round_trip_is_in_place(model):
    state = copy.deepcopy(model.state_dict())
    want = model(IDS).logits.detach()
    addresses = [param.data_ptr() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    assert not torch.equal(model(IDS).logits, want)
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert torch.equal(model(IDS).logits, want)
    assert [param.data_ptr() for param in model.parameters()] == addresses
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = module(model.moe.engine.name, seed=5)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(IDS).logits, want)


def copied(model, how):
    if how == "deepcopy":
        return copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_is_independent(moe_engine, how):
    model = module(moe_engine, tie_embeddings=True, aux_loss_coef=0.3)
    model.config.eos_token_id = 4
    model.lm_name = "mine"
    model.get_parameter("model.norm.weight").requires_grad_(False)
    model.eval()
    other = copied(model, how)
    want = model(IDS).logits.detach().clone()
    assert torch.equal(other(IDS).logits, want)
    assert (other.config.eos_token_id, other.lm_name, other.training) == (4, "mine", False)
    assert other.moe.engine.name == moe_engine
    assert not other.get_parameter("model.norm.weight").requires_grad
    assert other.get_output_embeddings() is other.get_input_embeddings()
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.5)
    assert not torch.equal(other(IDS).logits, want)
    assert torch.equal(other(IDS).logits, torch.from_numpy(other.moe.forward(IDS.numpy())))
    assert torch.equal(model(IDS).logits, want)
    other(IDS, labels=IDS).loss.backward()
    assert all(param.grad is None for param in model.parameters())


def test_moving_to_where_it_is_changes_nothing(model):
    moe, addresses = model.moe, [param.data_ptr() for param in model.parameters()]
    assert model.to("cpu").float().cpu().train().eval().to(torch.float32) is model
    assert model.moe is moe
    assert [param.data_ptr() for param in model.parameters()] == addresses


def test_double_is_a_new_engine_over_new_memory(float64_engine):
    model = module(float64_engine)
    single = model(IDS).logits
    single.sum().backward()
    assert model.double() is model
    assert model.dtype == torch.float64
    assert model.moe.dtype == np.float64
    assert {param.grad.dtype for param in model.parameters()} == {torch.float64}
    np.testing.assert_allclose(model(IDS).logits.detach(), single.detach(), atol=1e-5)
    test_parameters_are_the_engines_memory(model)
    model.zero_grad()
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    assert not model(IDS).logits.any()


def test_shared_memory_is_the_engines_too(model):
    want = model(IDS).logits
    assert model.share_memory() is model
    assert all(param.is_shared() for param in model.parameters())
    assert torch.equal(model(IDS).logits, want)
    test_parameters_are_the_engines_memory(model)


@pytest.mark.parametrize(
    "move",
    [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.to("meta"), lambda m: m.to("meta", torch.float32)],
)
def test_moves_the_engine_cannot_follow(model, move):
    want = model(IDS).logits
    with pytest.raises(TypeError, match=r"the model must stay on the CPU in torch.float32 or torch.float64 .*found a"):
        move(model)
    assert torch.equal(model(IDS).logits, want)


def test_exchanged_memory_is_noticed(model):
    param = model.get_parameter("model.layers.1.mlp.gate.weight")
    param.data = param.data.clone()
    match = "model.layers.1.mlp.gate.weight must share its memory with the engine"
    for call in (lambda: model(IDS), lambda: model.generate(IDS), lambda: model.save_pretrained("nowhere")):
        with pytest.raises(RuntimeError, match=match):
            call()
    with pytest.raises(RuntimeError, match="must share its memory"):
        torch.func.functional_call(module(), {"lm_head.weight": torch.zeros(11, 8)}, IDS)


def test_nothing_can_be_put_in_the_engines_way(model):
    with pytest.raises(TypeError, match="q_proj must not be set to a Linear"):
        model.model.layers[0].self_attn.q_proj = torch.nn.Linear(8, 16)
    with pytest.raises(TypeError, match="weight must not be set to a Parameter"):
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(11, 8))
    with pytest.raises(TypeError, match="must not be set to a Sealed"):
        model.model.layers[0] = model.model.layers[1]
    with pytest.raises(TypeError, match="must not be set to a ModuleDict"):
        torch.nn.utils.parametrize.register_parametrization(model.lm_head, "weight", torch.nn.Identity())
    with pytest.raises(TypeError, match="only holds parameters"):
        model.get_input_embeddings()(IDS)
    assert len(model.model.layers) == 2


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


def test_samples_follow_the_distribution(model):
    """One token of one prompt, many times: frequencies are the softmax's."""
    with torch.no_grad():
        want = torch.softmax(model(IDS[:1]).logits[0, -1] / 0.8, -1)
    torch.manual_seed(0)
    rows = model.generate(
        IDS[:1], max_new_tokens=1, do_sample=True, temperature=0.8, top_k=0, num_return_sequences=4000
    )
    assert rows.shape == (4000, 5)
    counts = torch.bincount(rows[:, -1], minlength=11) / 4000
    assert (counts - want).abs().max() < 0.03


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


def test_a_padded_batch_has_the_loss_of_its_rows(model):
    ids = torch.tensor([[1, 2, 3, 4, 5], [0, 0, 6, 7, 8], [9, 10, 1, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    labels = torch.where(mask.bool(), ids, -100)
    rows = [ids[0], ids[1, 2:], ids[2, :3]]
    losses = [model(row[None], labels=row[None]).loss * (len(row) - 1) for row in rows]
    want = sum(losses) / 8
    assert model(ids, mask, labels=labels).loss.item() == pytest.approx(want.item(), rel=1e-6)


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
        assert torch.equal(model(IDS, MASK, positions).logits, want)
    packed = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
    match = r"position_ids must rise by one .*\(packed rows are not supported\), found 0 at row 0, column 2"
    with pytest.raises(ValueError, match=match):
        model(IDS, position_ids=packed)
    holes = torch.tensor([[1, 0, 1, 1]])
    with pytest.raises(ValueError, match="position_ids must rise by one"):
        model(IDS[:1], holes, torch.arange(4)[None])


# ---- refusals ----


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"input_ids": torch.tensor([[1, 11]])}, ValueError, r"input_ids must be from 0 to 10 .*found 11 at row 0, column 1"),
        ({"input_ids": torch.tensor([1, 2])}, ValueError, r"input_ids must have the shape \(batch, tokens\), found \(2,\)"),
        ({"input_ids": torch.tensor([[0.5]])}, TypeError, "input_ids must be integers, found float32"),
        ({"input_ids": torch.zeros(0, 3, dtype=torch.long)}, ValueError, "input_ids must hold at least one row"),
        ({"input_ids": torch.ones(1, 25, dtype=torch.long)}, ValueError, "input_ids must have at most max_seq_len=24"),
        ({"input_ids": torch.ones(1, 2, dtype=torch.long, device="meta")}, TypeError, "input_ids must be on the CPU"),
        ({"attention_mask": MASK[:, :3]}, ValueError, r"attention_mask must have the shape \(2, 4\) of input_ids"),
        ({"attention_mask": MASK * 2}, ValueError, "attention_mask must hold only 0 and 1, found 2"),
        ({"attention_mask": MASK * 0}, ValueError, "attention_mask must keep at least one token in each row"),
        ({"labels": IDS[:, 1:]}, ValueError, r"labels must have the shape \(2, 4\) of input_ids, found \(2, 3\)"),
        ({"labels": IDS + 3}, ValueError, r"labels must be from 0 to 10 .*found 11 at row 1, column 3"),
        ({"labels": IDS - 3}, ValueError, r"labels must be from 0 to 10 .*found -2"),
        ({"labels": IDS.float()}, TypeError, "labels must be integers, found float32"),
        ({"position_ids": torch.arange(3)[None]}, ValueError, r"position_ids must have the shape \(2, 4\) .*or \(1, 4\)"),
        ({"logits_to_keep": -1}, ValueError, "logits_to_keep must be at least 0, found -1"),
        ({"inputs_embeds": torch.zeros(1)}, ValueError, "inputs_embeds must be None or False .*found Tensor"),
        ({"use_cache": True}, ValueError, "use_cache must be None or False .*found True"),
        ({"output_hidden_states": True}, ValueError, "output_hidden_states must be None or False"),
        ({"past_key_values": object()}, ValueError, "past_key_values must be None or False"),
        ({"token_type_ids": IDS}, TypeError, "unexpected keyword argument 'token_type_ids'"),
    ],
)  # fmt: skip
def test_forward_refuses(model, arguments, error, match):
    with pytest.raises(error, match=match):
        model(**{"input_ids": IDS, **arguments})


def test_forward_takes_what_only_says_off(model):
    found = model(IDS, use_cache=False, past_key_values=None, output_attentions=False, output_hidden_states=False)
    assert torch.equal(found.logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"num_beams": 4}, TypeError, "unexpected keyword argument 'num_beams'"),
        ({"repetition_penalty": 1.1}, TypeError, "unexpected keyword argument 'repetition_penalty'"),
        ({"input_ids": [[1, 2], [3]]}, ValueError, "input_ids must be rectangular"),
        ({"input_ids": torch.tensor([[1, 11]])}, ValueError, "input_ids must be from 0 to 10 .*found 11"),
        ({"attention_mask": MASK[:1]}, ValueError, r"attention_mask must have the shape \(2, 4\) of input_ids"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, found 0"),
        ({"max_new_tokens": 21}, ValueError, "max_new_tokens must be at most 20 after a prompt of 4 tokens"),
        ({"num_return_sequences": 0}, ValueError, "num_return_sequences must be at least 1, found 0"),
        ({"eos_token_id": 11}, ValueError, "eos_token_id must be below vocab_size=11, found 11"),
        ({"pad_token_id": -1}, ValueError, "pad_token_id must be at least 0, found -1"),
        ({"do_sample": True, "temperature": 0.0}, ValueError, "temperature must be above 0 with do_sample=True, found 0"),
        ({"do_sample": True, "temperature": -1.0}, ValueError, "temperature must be finite and at least 0"),
        ({"do_sample": True, "top_p": 1.5}, ValueError, "top_p must be above 0 and at most 1, found 1.5"),
        ({"do_sample": True, "top_k": -1}, ValueError, "top_k must be at least 0"),
    ],
)  # fmt: skip
def test_generate_refuses(model, arguments, error, match):
    with pytest.raises(error, match=match):
        model.generate(**{"input_ids": IDS, "max_new_tokens": 2, **arguments})


def test_options_without_effect_say_so(model):
    with pytest.warns(UserWarning, match="temperature, top_p without effect: do_sample=False is greedy"):
        model.generate(IDS, max_new_tokens=1, temperature=0.7, top_p=0.5)
    model.generate(IDS, max_new_tokens=1, temperature=0.0, top_k=0)  # says the same as greedy
    with pytest.warns(UserWarning, match="gradient checkpointing has no effect"):
        model.gradient_checkpointing_enable()
    assert not model.is_gradient_checkpointing
    model.gradient_checkpointing_disable()


def test_wrong_construction():
    with pytest.raises(TypeError, match="moe must be a MoETransformer, found MoEConfig"):
        MoEForCausalLM(small_config())
    moe = random_model(small_config(), dtype=np.float32)
    moe.params["model.norm.weight"].flags.writeable = False
    with pytest.raises(ValueError, match=r"moe.params\['model.norm.weight'\] must be writable"):
        MoEForCausalLM(moe)


def test_wrong_loading(model, tmp_path):
    state = model.state_dict()
    with pytest.raises(ValueError, match="assign must be False"):
        model.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match=r"Missing key.*model.norm.weight"):
        model.load_state_dict({name: value for name, value in state.items() if name != "model.norm.weight"})
    with pytest.raises(RuntimeError, match=r"size mismatch for model.norm.weight"):
        model.load_state_dict({**state, "model.norm.weight": torch.ones(9)})
    tied = module(model.moe.engine.name, tie_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head.weight in state_dict must equal model.embed_tokens.weight"):
        tied.load_state_dict({**tied.state_dict(), "lm_head.weight": torch.zeros(11, 8)})
    with pytest.raises(TypeError, match=r"dtype must be torch.float32 or torch.float64, found torch.bfloat16"):
        MoEForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(FileNotFoundError):
        MoEForCausalLM.from_pretrained(tmp_path / "nothing", engine="numpy")


# ---- what trainers read ----


def test_what_trainers_read():
    config = MoEConfig(eos_token_id=2, pad_token_id=0)
    model = MoEForCausalLM(MoETransformer(config, "numpy"))
    assert model.config.model_type == "mixtral"
    assert (model.config.vocab_size, model.config.hidden_size, model.config.max_position_embeddings) == (1000, 64, 512)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (2, 0)
    assert model.config.to_dict()["num_local_experts"] == 4
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert model.get_input_embeddings().weight.shape == (1000, 64)
    assert model.get_output_embeddings().weight is model.lm_head.weight
    assert model.training
    assert "engine='numpy'" in repr(model)


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None  # as if it were not installed
import torch
from strop.moe import MoEConfig, MoETransformer
from strop.moe.torch import MoEForCausalLM
model = MoEForCausalLM(MoETransformer(MoEConfig(vocab_size=9, eos_token_id=(1, 2)), "numpy"))
ids = torch.tensor([[1, 2, 3]])
out = model(ids, labels=ids)
assert list(out) == ["loss", "aux_loss", "logits"] and out["logits"] is out.logits is out[2]
assert out.to_tuple()[0] is out.loss
assert model(ids, labels=ids, return_dict=False)[0] == out.loss
assert model(ids, output_router_logits=False).loss is None
assert model.config.eos_token_id == [1, 2] and model.config.to_dict()["vocab_size"] == 9
out.loss.backward()
model.generate(ids, max_new_tokens=2)
model.save_pretrained(sys.argv[1])
assert MoEForCausalLM.from_pretrained(sys.argv[1], engine="numpy").moe.config == model.moe.config
"""


def test_transformers_is_not_needed(tmp_path):
    subprocess.run([sys.executable, "-c", WITHOUT_TRANSFORMERS, tmp_path], check=True)


def test_strop_moe_does_not_import_torch():
    code = "import sys, strop.moe; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
