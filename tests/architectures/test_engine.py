"""Today's architectures in the rollout engine: every way of a rollout against the model's own forward of each row."""

import pytest
import torch
from tiny_types import VOCAB, model_of, text_of
from torch.utils._python_dispatch import TorchDispatchMode

from strop.models import as_policy
from strop.rollout import Sampling, decoding, generate
from strop.rollout.cached_rows import CachedRows
from strop.rollout.decoding import Engine, engine_of

FAMILIES = {
    "gpt_oss": {},  # attention sinks
    "deepseek_v3": {},  # latent attention
    "qwen3_next": {}, "qwen3_5_text": {}, "olmo_hybrid": {}, "kimi_linear": {},  # gated delta
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},  # Mamba beside attention in each layer
    "granitemoehybrid": {}, "nemotron_h": {}, "bamba": {},  # Mamba in some layers
    "mamba2": {}, "mamba": {}, "jamba": {},  # no keys at all; states behind which only one token can be read
    "lfm2": {},  # convolutions
    "llama4_text": {"floor_scale": 6, "attn_scale": 2.0},  # chunks; queries scaled by their position
}  # fmt: skip
PROMPTS = [[3, 4, 5], [9], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [6, 6, 20, 21]]
families = pytest.mark.parametrize("kind", FAMILIES)


def policy_of(kind, eos_ids=()):
    """A tiny model with a window of 9 tokens and chunks of 11, where its type has them; in float64."""
    model = model_of(kind, FAMILIES[kind])
    model.generation_config.eos_token_id = list(eos_ids) or None
    text_of(model.config).eos_token_id = None
    return as_policy(model)


def check_rows(policy, rollout, greedy=False):
    """Hold every log-prob against a forward of the row alone; of a greedy rollout the tokens are its likeliest."""
    assert "its own layers" in rollout.engine
    for prompt, completion, logps in zip(rollout.prompt_ids, rollout.completion_ids, rollout.logps, strict=True):
        with torch.no_grad():
            ids = torch.cat([prompt, completion])[None]
            logps_TV = (
                policy.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
            )
        atol = 1e-3 if torch.float32 in engine_of(policy).dtypes else 2e-5  # some layers compute in float32
        torch.testing.assert_close(logps.double(), logps_TV.gather(1, completion[:, None])[:, 0], rtol=0, atol=atol)
        if greedy:
            assert logps_TV.argmax(1).tolist() == completion.tolist()


@families
def test_greedy_rollouts_of_ragged_prompts(kind):
    policy = policy_of(kind)
    assert isinstance(engine_of(policy), Engine)
    check_rows(policy, generate(policy, PROMPTS, Sampling(max_new_tokens=24, temperature=0)), greedy=True)


@families
def test_samples_of_a_prompt_and_rows_that_take_the_places_of_others(kind, monkeypatch):
    """16 rows, 5 at a time; a third of the ids ends a row."""
    policy = policy_of(kind, eos_ids=range(0, VOCAB, 6))
    monkeypatch.setattr("strop.rollout.decoding.BUCKETS", (1, 2, 4, 5))
    found = generate(policy, PROMPTS, Sampling(max_new_tokens=20), num_samples=4, seed=3)
    assert len({len(one) for one in found.completion_ids}) > 2
    check_rows(policy, found)
    monkeypatch.undo()
    together = generate(policy, PROMPTS, Sampling(max_new_tokens=20), num_samples=4, seed=3)
    same = [torch.equal(a, b) for a, b in zip(found.completion_ids, together.completion_ids, strict=True)]
    assert sum(same) >= 15  # of 16: a number on the border of two tokens may fall to either


@families
def test_several_turns_read_only_what_is_new(kind, monkeypatch):
    """Conversations of unequal lengths go on, not all of them; between turns they hear unequal numbers of tokens."""
    policy = policy_of(kind, eos_ids=range(0, VOCAB, 6))
    engine, cached, sampling, sizes = engine_of(policy), CachedRows(), Sampling(max_new_tokens=7), []

    def counting(layers, pass_, ids, *given, before=decoding.read, **options):
        sizes.append(ids.numel() if options else 0)  # not those of steps
        return before(layers, pass_, ids, *given, **options)

    monkeypatch.setattr(decoding, "read", counting)
    rows = dict(enumerate(torch.tensor(prompt) for prompt in PROMPTS))
    for turn, going in enumerate(([0, 1, 2, 3], [0, 2, 3], [3, 1, 0])):
        new = sum(len(rows[i]) - 1 - (cached.rows[i][0].shape[2] if i in cached.rows else 0) for i in going)
        sizes.clear()
        found = generate(policy, [rows[i] for i in going], sampling, seed=turn, cached=cached.of(going))
        assert sum(sizes) <= (new if engine.states.by_key else new + 9 * len(going)), "padding at most"
        check_rows(policy, found)
        for i, completion in zip(going, found.completion_ids, strict=True):
            heard = torch.arange(20 + i, 20 + i + 1 + (5 * turn + 3 * i) % 9)
            rows[i] = torch.cat([rows[i], completion, heard])
    assert sorted(cached.rows) == ([0, 1, 2, 3] if engine.continues else [])


class Watching(TorchDispatchMode):
    """Notes every operator and the shapes of its tensors; those whose result waits for a tensor's values are an error."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
            waits = any(places is not None and places.dtype == torch.bool for places in args[1])
        else:
            waits = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(operator.tags)
        if waits:
            raise AssertionError(f"a step waits for values: {operator}")
        found = operator(*args, **(kwargs or {}))
        several = found if isinstance(found, (list, tuple)) else [found]
        self.called.append((str(operator), [list(one.shape) for one in several if isinstance(one, torch.Tensor)]))
        return found


@families
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0), Sampling(), Sampling(top_k=5, top_p=0.9)], ids=["greedy", "drawn", "cut"]
)
def test_a_step_could_be_captured_in_a_graph(kind, sampling):
    """Nothing asks the device for a value, and the next step has the same operators and shapes, with rows that ended too."""
    policy = policy_of(kind)
    engine = engine_of(policy)
    if hasattr(policy.model, "set_experts_implementation"):
        policy.model.set_experts_implementation("batched_mm")  # what it is by default on a GPU knows no float64
    engine.layers.refresh(60)
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    with engine.layers.ready():
        round_, rows = engine.begin(prompts, 2, 8, sampling, torch.rand(8, sampling.max_new_tokens), (3, 9))
        engine._prefill(prompts, round_)
        steps = []
        for _ in range(4):
            with Watching() as watching:
                engine._step(rows, round_, sampling)
            steps.append(watching.called)
            rows.finished_N[::3] = 1
    assert steps[1:] == steps[:-1]


@pytest.mark.parametrize("bad", [lambda x: x.max().item(), torch.nonzero, lambda x: x[x > 0], lambda x: bool(x.any())])
def test_the_watch_finds_what_waits(bad):
    with pytest.raises(AssertionError, match="waits for values"), Watching():
        bad(torch.arange(3))
