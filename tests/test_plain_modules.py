"""What is found out about a module that says nothing of itself: which ids it knows, and whether it looks ahead."""

import pytest
import torch
from tiny_models import VOCAB, PlainModel, plain
from torch.nn import functional as F
from trained_models import Bigram

from strop.algorithms.best_of_n import BestOfN
from strop.algorithms.dpo import DPO
from strop.algorithms.grpo import GRPO
from strop.algorithms.sft import SFT
from strop.models import as_policy

ROWS = ([[1, 2, 3], [4, 5]], [[6, 7], [8, 9, 10]])


def lengths(completions):
    return [float(len(x)) for x in completions]


# ---- ids ----


class Positions(PlainModel):
    """Tokens, one of them for padding alone, positions and kinds of tokens: three tables, of which the first counts."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB + 1, 16)
        self.positions, self.kinds = torch.nn.Embedding(12, 16), torch.nn.Embedding(2, 16)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.embed(tokens) + self.positions(places) + self.kinds(torch.zeros_like(tokens))
        return self.head(x.cumsum(1))


@pytest.mark.parametrize(("make", "size"), [(plain, VOCAB), (Positions, VOCAB + 1)])
@pytest.mark.parametrize("wrong", [-1, VOCAB + 1])
def test_an_id_outside_the_vocabulary_is_named_before_the_first_step(make, size, wrong):
    says = rf"must hold ids from 0 to {size - 1}, found {wrong}"
    with pytest.raises(ValueError, match=rf"^row 1 {says}$"):
        SFT(model=make()).train_step([[1], [2, wrong]], [[3], [4]])
    with pytest.raises(ValueError, match=rf"^pair 0: rejected {says}$"):
        DPO(model=make()).train_step([[1]], [[3]], [[wrong]])
    grpo = GRPO(model=make(), reward_fn=lengths, group_size=2, max_new_tokens=2)
    with pytest.raises(ValueError, match=rf"^dataset\[1\] {says}$"):
        grpo.train([{"prompt": [1]}, {"prompt": [wrong]}])
    with pytest.raises(ValueError, match=rf"^prompts\[0\] {says}$"):
        BestOfN(model=make(), reward_fn=lengths, n=2, max_new_tokens=2).generate([[wrong]])
    grpo.train_step([[1, size - 1], [2]])  # the last id that there is


def test_a_module_without_an_embedding_fails_with_what_it_was_given():
    """What cannot be found out before is told when it happens: of a table that is no nn.Embedding, of too many positions."""
    says = (
        r"Bigram raised IndexError: .*; it was given ids from 1 to 99, rows of 3 tokens: does it know so many of both\?"
    )
    with pytest.raises(ValueError, match=says):
        SFT(model=Bigram()).train_step([[1, 99]], [[3]])
    says = r"Positions raised IndexError: index out of range in self; it was given ids from 1 to 1, rows of 13 tokens"
    with pytest.raises(ValueError, match=says):
        SFT(model=Positions()).train_step([[1] * 12], [[1]])


def test_the_trial_of_ids_leaves_no_trace():
    """Neither in the random numbers nor in the mode or the hooks; a module that cannot take it is not refused."""

    class Picky(PlainModel):
        def forward(self, tokens):
            assert not self.training or tokens.shape[1] == 5
            torch.rand(3)
            if tokens.shape[1] != 5:
                raise RuntimeError("rows must have 5 tokens")
            return super().forward(tokens)

    model = Picky().train()
    before = torch.get_rng_state()
    as_policy(model).check_ids(torch.tensor([1, 99]), "row")
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert not model.embed._forward_pre_hooks
    SFT(model=model).train_step([[1, 2, 3]], [[4, 5]])


# ---- causality ----


class LooksAhead(PlainModel):
    """Attention over the whole row, later tokens included."""

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + F.scaled_dot_product_attention(x, x, x))


class Shifted(PlainModel):
    """The off-by-one of a hand-written model: the logits at t have read token t + 1."""

    def forward(self, tokens):
        return super().forward(tokens.roll(-1, 1))


class Averages(PlainModel):
    def forward(self, tokens):
        return self.head(self.embed(tokens).mean(1, keepdim=True).expand(-1, tokens.shape[1], -1))


class Banned(LooksAhead):
    """Of two tokens nothing is to be drawn."""

    def forward(self, tokens):
        banned = torch.zeros(VOCAB).index_fill(0, torch.tensor([0]), -torch.inf).index_fill(0, torch.tensor([1]), -1e9)
        return super().forward(tokens) + banned


@pytest.mark.parametrize("make", [LooksAhead, Shifted, Averages, Banned])
def test_a_module_that_looks_ahead_is_refused(make):
    says = f"model must be causal, found that the logits {make.__name__} gives for a token change with that token"
    with pytest.raises(ValueError, match=says):
        SFT(model=make()).train_step(*ROWS)
    with pytest.raises(ValueError, match=says):
        DPO(model=make()).train_step(ROWS[0], *ROWS[1:], [[1], [2]])
    grpo = GRPO(model=make(), reward_fn=lengths, group_size=2, max_new_tokens=3)
    weights = [param.clone() for param in grpo.model.parameters()]
    with pytest.raises(ValueError, match=says):
        grpo.train_step(ROWS[0])
    assert all(torch.equal(a, b) for a, b in zip(weights, grpo.model.parameters(), strict=True))
    with pytest.raises(ValueError, match=says):
        BestOfN(model=make(), reward_fn=lengths, n=2, max_new_tokens=3, seed=0).generate(ROWS[0])


class Causal(LooksAhead):
    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + F.scaled_dot_product_attention(x, x, x, is_causal=True))


class Recurrent(PlainModel):
    def __init__(self):
        super().__init__()
        self.rnn = torch.nn.GRU(16, 16, batch_first=True)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


class ByFourier(PlainModel):
    """A causal convolution by a product of spectra: later tokens leave a trace in the last bits of earlier ones."""

    def forward(self, tokens):
        x = self.embed(tokens)
        length = x.shape[1]
        kernel = torch.linspace(1, 0.2, length)[:, None].expand(length, 16)
        spectrum = torch.fft.rfft(x, n=2 * length, dim=1) * torch.fft.rfft(kernel, n=2 * length, dim=0)
        return self.head(torch.fft.irfft(spectrum, n=2 * length, dim=1)[:, :length])


class Noisy(PlainModel):
    """Random also in eval mode; its noise is larger than what any token changes."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits + 5 * torch.randn_like(logits)


class Remembers(PlainModel):
    """Every call gives other logits."""

    calls = 0

    def forward(self, tokens):
        self.calls += 1
        return super().forward(tokens) + self.calls * torch.arange(VOCAB)


class PrefixLM(PlainModel):
    """Sees all of what stands before token 0, as a prompt, and behind it only what came before."""

    def forward(self, tokens):
        x = self.embed(tokens)
        prompt = ((tokens == 0).cumsum(1) == 0)[..., None]
        seen = (x * prompt).sum(1, keepdim=True) / prompt.sum(1, keepdim=True).clamp(min=1)
        return self.head(seen + torch.where(prompt, 0, x).cumsum(1))


class Crowded(PlainModel):
    """Rows come into each other's way, as tokens do at experts of limited room: the last row sees all before it."""

    def forward(self, tokens):
        is_last = (torch.arange(len(tokens)) == len(tokens) - 1)[:, None, None]
        return super().forward(tokens) + torch.arange(VOCAB) * self.embed(tokens[:-1]).sum() * is_last


class FixedSize(PlainModel):
    """Takes batches of two rows and nothing else."""

    def forward(self, tokens):
        if len(tokens) != 2:
            raise RuntimeError("rows must be two")
        return super().forward(tokens)


@pytest.mark.parametrize(
    "make", [PlainModel, Causal, Recurrent, ByFourier, Noisy, Remembers, PrefixLM, Crowded, FixedSize]
)
def test_a_module_that_does_not_or_cannot_be_told_is_trained(make):
    model = make()
    before = [param.clone() for param in model.parameters()]
    prompts = [[1, 2, 0], [4, 0]]  # 0 ends the prompt of a prefix LM
    SFT(model=model, learning_rate=1e-2).train_step(prompts, ROWS[1])
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("make", [Causal, LooksAhead])
def test_completions_that_cannot_tell_wait_for_those_that_can(make):
    """Of one id alone no other is known to be a token of the model."""
    sft = SFT(model=make())
    sft.train_step([[5]], [[5, 5]])
    if make is Causal:
        sft.train_step(*ROWS)
    else:
        with pytest.raises(ValueError, match="model must be causal"):
            sft.train_step(*ROWS)


def test_the_trial_of_causality_is_made_once_and_leaves_no_trace():
    sft = SFT(model=plain())
    calls = []
    sft.model.register_forward_pre_hook(lambda module, _: calls.append(module.training))
    state = torch.get_rng_state()
    sft.train_step(*ROWS)
    assert calls == [False, False, False, True]  # the ids', the two of causality, the step's
    assert torch.equal(torch.get_rng_state(), state)
    sft.train_step(*ROWS)
    assert calls[4:] == [True]
