"""The torch module against Mixtral in transformers: values, gradients, training, generation, checkpoints."""

import warnings

import numpy as np
import pytest
from yardstick import clearly_greedy

torch = pytest.importorskip("torch")

from torch_models import IDS, mixtral_of, module, same_tensor  # noqa: E402

from strop.moe.torch import MoEForCausalLM  # noqa: E402


@pytest.fixture
def transformers():
    """With its warnings off: they are its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("transformers")


def ragged_batch(config, *, seed=0, shape=(3, 9)):
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(rng.integers(0, config.vocab_size, shape))
    first = torch.tensor([0, 3, 6])[:, None]
    mask = (torch.arange(shape[1]) >= first).long()
    labels = torch.where(torch.arange(shape[1]) > first, ids, -100)  # Mixtral lets padding predict the first token
    labels[0, 4] = labels[2, 8] = -100
    return ids, mask, labels


def test_other_arguments_work_as_in_mixtral(moe_engine, transformers):
    model = module(moe_engine, std=0.15, vocab_size=40, aux_loss_coef=0.5)
    mixtral = mixtral_of(model.moe)
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
            assert type(found) is type(want)
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
    mixtral = mixtral_of(model.moe)
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
    mixtral = mixtral_of(model.moe)
    num_padded = 0
    for seed in range(4):
        ids, mask, _ = ragged_batch(model.config, seed=seed)
        arguments = {"max_new_tokens": 12, "eos_token_id": eos, "pad_token_id": 0}
        want = clearly_greedy(mixtral, ids, attention_mask=mask, **arguments)
        found = model.generate(ids, attention_mask=mask, **arguments)
        assert found.tolist() == want.tolist()
        if eos is not None:
            last_is_eos = torch.isin(found[:, -1], torch.tensor(eos))
            num_padded += int((torch.isin(found[:, 9:], torch.tensor(eos)).any(1) & ~last_is_eos).sum())
    assert eos is None or num_padded > 0


def test_padding_is_inferred_as_transformers_does(moe_engine, transformers):
    model = module(moe_engine, vocab_size=40, max_seq_len=64)
    mixtral = mixtral_of(model.moe)
    ids, mask, _ = ragged_batch(model.config)
    ids = torch.where(mask.bool(), ids.clamp(min=2), 0)
    for eos, pad in ((1, 0), (0, 0), (None, None), (0, None)):
        arguments = {"max_new_tokens": 5, "eos_token_id": eos, "pad_token_id": pad}
        assert model.generate(ids, **arguments).tolist() == clearly_greedy(mixtral, ids, **arguments).tolist(), (
            eos,
            pad,
        )


def test_checkpoints_go_both_ways(moe_engine, transformers, tmp_path):
    model = module(moe_engine, aux_loss_coef=0.2)
    model.config.eos_token_id, model.config.pad_token_id = 3, 0
    model.config.router_aux_loss_coef = 0.4
    model.save_pretrained(tmp_path / "ours")
    mixtral = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", experts_implementation="eager")
    assert type(mixtral).__name__ == "MixtralForCausalLM"
    assert (mixtral.config.eos_token_id, mixtral.config.pad_token_id) == (3, 0)
    assert mixtral(IDS, labels=IDS).loss.item() == pytest.approx(model(IDS, labels=IDS).loss.item(), rel=1e-5)
    assert clearly_greedy(mixtral, IDS, max_new_tokens=6).tolist() == model.generate(IDS, max_new_tokens=6).tolist()

    mixtral.save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        again = MoEForCausalLM.from_pretrained(tmp_path / folder, engine=moe_engine)
        assert again.moe.engine.name == moe_engine
        assert again.config.router_aux_loss_coef == pytest.approx(0.4)
        assert again.dtype == torch.float32
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())
        same_tensor(again(IDS).logits, model(IDS).logits, model)
    double = MoEForCausalLM.from_pretrained(tmp_path / "ours", engine="numpy", dtype=torch.float64)
    assert double.dtype == torch.float64


def test_state_dicts_go_both_ways(moe_engine, transformers):
    for tied in (False, True):
        model = module(moe_engine, tie_embeddings=tied)
        mixtral = mixtral_of(model.moe)
        other = module(moe_engine, seed=1, tie_embeddings=tied)
        other.load_state_dict(mixtral.state_dict())
        same_tensor(other(IDS).logits, model(IDS).logits, model)
