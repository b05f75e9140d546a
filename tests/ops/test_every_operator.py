"""What every operator promises on every backend: exactness, gradients, masks, empty batches, graphs, autocast, chunks."""

import itertools
import math

import pytest
import torch
from operators import (
    CASES,
    LINEAR,
    MASKED,
    OPERATORS,
    ROW_CASES,
    B,
    T,
    V,
    arguments,
    call,
    check_as_exact_as_eager,
    compare,
    name_of,
    results_of,
    run_backend,
    run_reference,
    total,
    with_floats,
    with_leaves,
    with_rows,
)
from operators import run as run_function
from torch.nn.functional import linear, pad
from yardstick import (
    RULES,
    backends,
    clip_of,
    eager_logps,
    float64,
    same,
)

from strop.losses import (
    KL_ESTIMATORS,
    PREFERENCE_LOSS_TYPES,
    PolicyRule,
    group_advantages,
    kl_estimate,
    policy_loss,
    preference_loss,
    sequence_logps,
)
from strop.ops import registry

ONCE = (
    "grpo_loss",
    "linear_grpo_loss",
    "linear_divergence",
    "linear_token_loss",
)  # the gradient is made in the forward
LOSSES = ("grpo_loss", "linear_grpo_loss")
ON_LOGITS = ("logp", "ratio_kl", "grpo_loss")
REF_HEAD = ("ref_hidden", "ref_weight", "ref_bias")
WITH_ENTROPY = (("grpo", "token"), ("cispo", "sequence"))


def on_every_backend(cases, dtype=torch.float32, fast=False):
    """Parametrise a test with cases and the backends of their operators; `fast` omits the reference."""
    pairs = [(case, backend) for case in cases for backend in backends(name_of(case), dtype)]
    pairs = [(case, backend) for case, backend in pairs if not (fast and backend == registry.REFERENCE)]
    return pytest.mark.parametrize(("case", "backend"), pairs, ids=lambda value: value.replace(" ", "-"))


def test_every_operator_that_is_registered_is_here():
    assert set(OPERATORS) == set(registry.ops())


# ---- numbers ----


def eager_logp(logits, ids, completion_mask, temperature, **_):
    return torch.where(completion_mask == 1, eager_logps(logits, ids, temperature), 0.0)


def eager_ratio_kl(policy_logits, ref_logits, action_ids, completion_mask, old_logps, temperature):
    logps, ref_logps = (eager_logps(logits, action_ids, temperature) for logits in (policy_logits, ref_logits))
    return (
        torch.where(completion_mask == 1, (logps - old_logps).exp(), 1.0),
        torch.where(completion_mask == 1, kl_estimate(logps, ref_logps), 0.0),
    )


def eager_grpo_loss(
    policy_logits, ref_logits, action_ids, old_logps, rewards, completion_mask, samples_per_prompt, beta
):
    advantages, ref_logps = group_advantages(rewards, samples_per_prompt=2), eager_logps(ref_logits, action_ids)
    logps = eager_logps(policy_logits, action_ids)
    return policy_loss(logps, old_logps, advantages, completion_mask, ref_logps=ref_logps, beta=beta)


# what a user would write in torch; elsewhere the reference in the dtype
EAGER = {
    "logp": eager_logp, "ratio_kl": eager_ratio_kl, "grpo_loss": eager_grpo_loss,
    "linear_logp": lambda hidden, weight, bias, **given: eager_logp(linear(hidden, weight, bias), **given),
}  # fmt: skip


@pytest.mark.parametrize(
    ("large", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16), (True, torch.float16)]
)
@on_every_backend(ROW_CASES)
def test_as_exact_as_eager(case, backend, large, dtype):
    """For vocabularies small and large: one of more than one tile, but for those that multiply and have a tile of rows."""
    whole_rows = case in ON_LOGITS or name_of(case) == "linear_divergence"
    given = arguments(case, dtype, V=(8003 if whole_rows else 203) if large else 8, H=16)
    if whole_rows:  # fewer rows, for the interpreter
        given = with_rows(given, lambda _, x: x[:2, :2] if x.ndim > 1 and case in MASKED else x[:2])
    if "entropy" in given:
        given["entropy"] = False
    check_as_exact_as_eager(case, backend, given, dtype, EAGER.get(case))


@on_every_backend([case for case in CASES if "cispo" not in case], torch.float64)
@pytest.mark.parametrize("workspace", [None, 400])
def test_gradients_against_finite_differences(case, backend, workspace):
    """Along random directions of each input. The weight of cispo is a constant for its gradient."""
    given = arguments(case, torch.float64, V=5, H=3)
    if name_of(case) in LINEAR:
        given["workspace"] = workspace
    _, gradients = run_backend(case, backend, given)
    generator = torch.Generator().manual_seed(1)
    for name, gradient in gradients.items():
        for _ in range(6):
            direction = torch.randn(gradient.shape, dtype=torch.float64, generator=generator)
            ahead, behind = (
                total(call(case, backend, given | {name: given[name] + step * direction})) for step in (1e-6, -1e-6)
            )
            assert (ahead - behind).item() / 2e-6 == pytest.approx(
                (gradient * direction).sum().item(), rel=1e-5, abs=1e-7
            )


@on_every_backend(["logp", "linear_logp"], torch.float64)
def test_trl_golden_log_probs(case, backend, golden):
    assert golden["logp"]
    for known in golden["logp"]:
        logits = float64(known["logits"])
        given = {"ids": torch.tensor(known["ids"]), "temperature": known["temperature"], "entropy": True}
        # hidden states that are the logits have a head that is the identity
        head = {"hidden": logits, "weight": torch.eye(logits.shape[-1], dtype=torch.float64), "workspace": 200}
        found, entropy = call(case, backend, given | ({"logits": logits} if case == "logp" else head))
        torch.testing.assert_close(found, float64(known["logp"]), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(entropy, float64(known["entropy"]), rtol=1e-9, atol=1e-9)


@on_every_backend(["linear_divergence"], torch.float64)
def test_trl_golden_divergences(case, backend, golden_more):
    assert len(golden_more["gkd"]) == 6
    for known in golden_more["gkd"]:
        names = ("hidden", "weight", "bias", "teacher_hidden", "teacher_weight", "weights")
        given = {name: float64(known[name]) for name in names if known.get(name) is not None}
        given |= {name: known[name] for name in ("beta", "temperature")}
        found, gradients = run_backend(case, backend, given)
        assert found.loss.item() == pytest.approx(known["loss"], rel=1e-12)
        torch.testing.assert_close(found.divergences.tolist(), known["divergences"], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradients["hidden"], float64(known["grad"]), rtol=1e-10, atol=1e-12)


# ---- every option of the policy losses ----

REFERENCES = ("ref", "ref_logps", "neither")
OPTIONS = [
    # each loss type with each importance level, each KL and each kind of reference at least once
    *((*rule, *rest) for rule, *rest in zip(RULES, itertools.cycle(KL_ESTIMATORS), itertools.cycle(REFERENCES))),
    *(("grpo", "token", kl, ref) for kl, ref in itertools.product(KL_ESTIMATORS, REFERENCES[:2])),
    ("cispo", "token", "k2", "ref"),
    ("dr_grpo", "token", "k1", "ref_logps"),
    ("bnpo", "token", "k3", "neither"),
]  # fmt: skip


@on_every_backend(LOSSES, fast=True)
@pytest.mark.parametrize(("loss_type", "level", "kl", "reference"), sorted(set(OPTIONS)))
def test_every_option(case, backend, loss_type, level, kl, reference):
    given = arguments(case)
    ids = given["action_ids"]
    ref_logits = given["ref_logits"] if case == "grpo_loss" else linear(*(given[name] for name in REF_HEAD))
    if reference != "ref":
        given |= {name: None for name in ("ref_logits", *REF_HEAD) if name in given}
    given |= {"loss_type": loss_type, "importance_level": level, "kl_estimator": kl, "clip_eps": clip_of(loss_type)}
    given |= {"beta": 0.0 if reference == "neither" else 0.1, "max_completion_length": 9, "temperature": 0.9}
    given |= {"ref_logps": eager_logps(ref_logits, ids)} if reference == "ref_logps" else {}
    if case == "grpo_loss":
        # a row's coefficient is that of the policy's loss less that of the kl: float32 rounds those
        p = (given["policy_logits"] / 0.9).softmax(-1)
        gradients = check_as_exact_as_eager(case, backend, given, p=p)
        assert (gradients["policy_logits"][given["completion_mask"] == 0] == 0).all()
    else:
        given |= {"workspace": 1500, "entropy_coef": 0.01 if (loss_type, level) in WITH_ENTROPY else 0.0}
        compare(run_backend(case, backend, given), run_reference(case, given), rtol=1e-4, atol=2e-6)


@on_every_backend(["linear_dpo_loss"])
@pytest.mark.parametrize("loss_type", PREFERENCE_LOSS_TYPES)
def test_every_preference_loss_is_that_of_the_log_probs(case, backend, loss_type):
    """With log-probs of the reference from its head, summed, or for each token with garbage under the mask."""
    given = arguments(case) | {"loss_type": loss_type, "beta": 0.3}
    given["label_smoothing"] = 0.1 if loss_type == "exo_pair" else 0.0
    ids, mask = given["ids"], given["completion_mask"]
    ref_logps = eager_logps(linear(*(given[name] for name in REF_HEAD)), ids)

    def by_log_probs(hidden, weight, bias, **_):
        chosen, rejected = sequence_logps(eager_logps(linear(hidden, weight, bias), ids), mask).chunk(2)
        lengths = dict(zip(("chosen_lengths", "rejected_lengths"), mask.sum(-1).chunk(2), strict=True))
        options = {name: given[name] for name in ("loss_type", "beta", "label_smoothing")}
        return preference_loss(chosen, rejected, *sequence_logps(ref_logps, mask).chunk(2), **options, **lengths)

    expected = run_function(by_log_probs, given)
    compare(run_backend(case, backend, given | {"workspace": 3000}), expected, atol=1e-5)
    without = given | dict.fromkeys(REF_HEAD)
    for known in (ref_logps.masked_fill(mask == 0, math.nan), sequence_logps(ref_logps, mask)):
        compare(run_backend(case, backend, without | {"ref_logps": known}), expected, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "chunked", "triton"])
def test_linear_token_loss_is_linear_grpo_loss_of_the_tokens_that_count(backend):
    """[B, T] with a mask, flattened by hand; dapo, whose weights are the same for all."""
    given = arguments("linear_grpo_loss") | dict.fromkeys(("rewards", "samples_per_prompt", *REF_HEAD))
    mask = given["completion_mask"] == 1
    given |= {"advantages": torch.linspace(-1, 1, B * T).view(B, T), "ref_logps": given["old_logps"] + 0.1}
    wanted = run_backend("linear_grpo_loss", backend, given | {"loss_type": "dapo"})
    names = ("hidden", "weight", "bias", "old_logps", "ref_logps", "advantages")
    tokens = {name: given[name] if name in ("weight", "bias") else given[name][mask] for name in names}
    tokens |= {"ids": given["action_ids"][mask], "weights": torch.full((int(mask.sum()),), 1 / mask.sum())}
    rule = PolicyRule(loss_type="dapo", beta=0.1)
    found, gradients = run_backend("linear_token_loss", backend, tokens | {"rule": rule})
    gradients["hidden"] = torch.zeros_like(given["hidden"]).index_put((mask,), gradients["hidden"])
    compare((found, gradients), wanted)


# ---- what changes nothing ----


@on_every_backend([case for case in CASES if name_of(case) in MASKED])
def test_masked_garbage_changes_nothing(case, backend):
    given, results = arguments(case), []
    out = given["completion_mask"] == 0
    for value, garbage_id in ((0.0, 0), (math.nan, -100), (math.inf, V + 5), (-math.inf, 2**40)):

        def spoilt(_, x, value=value, garbage_id=garbage_id):
            if x.ndim < 2 or x is given["completion_mask"]:
                return x
            return x.masked_fill(out[..., None] if x.ndim == 3 else out, value if x.is_floating_point() else garbage_id)

        found, gradients = run_backend(case, backend, with_rows(given, spoilt))
        for name, gradient in gradients.items():
            assert name in ("weight", "bias") or (gradient[out] == 0).all()
        if not hasattr(found, "loss"):
            wanted = (1, 0) if case == "ratio_kl" else (0, 0)
            assert all((x[out] == number).all() for x, number in zip(found, wanted, strict=True))
        results.append((*results_of(found), *gradients.values(), *getattr(found, "metrics", {}).values()))
    for other in results[1:]:
        same(other, results[0], scale=1.0)


@on_every_backend(OPERATORS)
@pytest.mark.parametrize("shape", [(0, T), (2, 0), (0, 0), (B, T)], ids=str)
def test_nothing_counts(case, backend, shape):
    """No rows, no tokens, or a mask of zeros: results of nothing, and gradients of 0."""
    given = arguments(case)
    if case in MASKED:
        given = with_rows(given, lambda _, x: x[: shape[0], : shape[1]] if x.ndim > 1 else x[: shape[0]])
        given["completion_mask"] = 0 * given["completion_mask"]
    else:
        given = with_rows(given, lambda _, x: x[:0])
    found, gradients = run_backend(case, backend, given)
    for number, result in enumerate(results_of(found)):
        wanted = (
            math.log(2)
            if (case, number) == ("linear_dpo_loss", 0) and shape[0]
            else float((case, number) == ("ratio_kl", 0))
        )
        torch.testing.assert_close(result.detach(), torch.full_like(result, wanted))
    for name, gradient in gradients.items():
        assert gradient.shape == given[name].shape
        assert (gradient == 0).all()
    assert getattr(found, "metrics", {}).get("clip_fraction", 0) == 0


@on_every_backend(OPERATORS)
def test_ids_may_be_int32_and_others_of_another_engines_dtype(case, backend):
    """Log-probs in float64 beside a model in float32: the loss keeps the model's dtype, and so does every metric."""
    given = arguments(case)
    expected = run_backend(case, backend, given)
    others = {name: given[name].int() for name in ("ids", "action_ids") if name in given}
    others |= {name: given[name].double() for name in ("old_logps", "ref_logps") if name in given}
    found = run_backend(case, backend, given | others)
    dtypes = {x.dtype for x in (*results_of(found[0]), *getattr(found[0], "metrics", {}).values())}
    assert dtypes == {torch.float32}
    compare(found, expected, rtol=1e-6, atol=1e-6)


@on_every_backend(OPERATORS)
def test_without_gradients(case, backend):
    given = arguments(case)
    expected = [x.detach() for x in results_of(call(case, backend, with_leaves(given)[0]))]
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            found = call(case, backend, with_leaves(given)[0])
            assert not any(x.requires_grad for x in results_of(found))
            same([x.clone() for x in results_of(found)], expected, scale=1.0)
            assert all(value.isfinite() for value in getattr(found, "metrics", {}).values())


@on_every_backend(OPERATORS)
def test_autocast(case, backend):
    """Logits are taken as they are. Products are in bfloat16, as F.linear's under autocast; gradients keep their dtypes."""
    given = arguments(case)
    with torch.autocast("cpu", torch.bfloat16):
        found, gradients = run_backend(case, backend, given)
    if case not in LINEAR:
        compare((found, gradients), run_backend(case, backend, given))
        return
    low = {k: x.bfloat16().float() if k.endswith(("hidden", "weight", "bias")) else x for k, x in given.items()}
    expected, expected_gradients = run_reference(case, low)
    torch.testing.assert_close(results_of(found), results_of(expected), rtol=0.05, atol=0.05)
    for name, wanted in expected_gradients.items():
        assert gradients[name].dtype == torch.float32
        torch.testing.assert_close(gradients[name], wanted, rtol=0.1, atol=0.05 * wanted.abs().max().item())


LAYOUTS = {
    "next token": lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],
    "wider rows": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "last dimension first": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "time first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "misaligned": lambda x: torch.zeros(x.numel() + 1)[1:].view(x.shape).copy_(x),
}


@on_every_backend(MASKED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(case, backend, layout):
    """Logits and hidden states of any layout, ids, masks and log-probs that are views, heads that are transposed."""

    def laid(_, x):
        return LAYOUTS[layout](x) if x.ndim == 3 else torch.stack([x, x], -1)[..., 0]

    given = arguments(case)
    heads = {name: given[name].T.contiguous().T for name in ("weight", "ref_weight") if name in given}
    found = run_backend(case, backend, with_rows(given, laid) | heads)
    compare(found, run_backend(case, backend, given), rtol=1e-5, atol=2e-6)


@on_every_backend([*LOSSES, "linear_dpo_loss"])
def test_a_padded_batch_is_the_same_batch(case, backend):
    given = arguments(case)
    padded = with_rows(given, lambda _, x: pad(x, (0, 0) * (x.ndim == 3) + (0, 2)) if x.ndim > 1 else x)
    found, gradients = run_backend(case, backend, padded)
    for name in gradients.keys() - {"weight", "bias"}:
        assert (gradients[name][:, T:] == 0).all()
        gradients[name] = gradients[name][:, :T]
    compare((found, gradients), run_backend(case, backend, given))


@on_every_backend(OPERATORS)
def test_banned_tokens(case, backend):
    """Logits of −inf take a token out of a distribution: all is as with a vocabulary without it."""
    given = arguments(case)
    given |= {name: given[name].clamp(max=V - 3) for name in ("ids", "action_ids") if name in given}
    banned = torch.zeros(V).index_fill(0, torch.tensor([V - 2, V - 1]), -math.inf)
    of_logits = [name for name in given if name.endswith(("logits", "bias"))]
    left_out = {name: given[name][..., :-2] for name in of_logits}
    left_out |= {name: given[name][:-2] for name in given if name.endswith("weight")}
    wanted, wanted_gradients = run_backend(case, backend, given | left_out)
    found, gradients = run_backend(case, backend, given | {name: given[name] + banned for name in of_logits})
    for name in gradients.keys() - {"hidden"}:
        of_vocabulary = gradients[name] if name == "weight" else gradients[name].movedim(-1, 0)
        assert (of_vocabulary[-2:] == 0).all()
        gradients[name] = of_vocabulary[:-2] if name == "weight" else of_vocabulary[:-2].movedim(0, -1)
    compare((found, gradients), (wanted, wanted_gradients), rtol=1e-4, atol=4e-6)


@on_every_backend(OPERATORS)
def test_a_vocabulary_of_one(case, backend):
    """The only token is certain: no logit changes that."""
    given = arguments(case, V=1)
    compare(run_backend(case, backend, given), run_reference(case, given), atol=1e-5)


@on_every_backend([case for case in ROW_CASES if name_of(case) in LINEAR], fast=True)
@pytest.mark.parametrize("workspace", [100, 1500, 10**9])
def test_the_size_of_the_chunks_changes_nothing(case, backend, workspace):
    given = arguments(case)
    compare(
        run_backend(case, backend, given | {"workspace": workspace}), run_reference(case, given), rtol=1e-4, atol=3e-6
    )


MICRO_BATCHES = [
    *(("grpo_loss", loss_type) for loss_type in ("grpo", "dapo", "dr_grpo", "cispo")),
    ("linear_grpo_loss", "dapo"), ("linear_dpo_loss", "sigmoid"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "loss_type"), MICRO_BATCHES)
@pytest.mark.parametrize("on_device", [False, True])
def test_micro_batches_add_up_to_the_batch(case, loss_type, on_device):
    """With the numbers of the whole batch, on the host or as tensors."""
    given = arguments(case) | {"loss_type": loss_type}
    parts, counts = ([0, 2], [1, 3]), {"num_pairs": torch.tensor(2)}  # a pair is a row of either half
    if case in LOSSES:
        given |= {"clip_eps": clip_of(loss_type), "max_completion_length": 5}
        counts = {"num_tokens": given["completion_mask"].sum(), "num_sequences": torch.tensor(B)}
        parts = ([0, 1], [2, 3])
    given |= counts if on_device else {name: value.item() for name, value in counts.items()}
    for backend in backends(case):
        whole, gradients = run_backend(case, backend, given)
        sums = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
        loss = 0.0
        for rows in parts:
            found, part = run_backend(
                case, backend, with_rows(given, lambda key, x, rows=rows: x if key in counts else x[rows])
            )
            loss += found.loss.detach()
            for name, gradient in part.items():
                sums[name][rows if name in ("policy_logits", "hidden") else slice(None)] += gradient
        torch.testing.assert_close(loss, whole.loss.detach())
        torch.testing.assert_close(sums, gradients, rtol=1e-5, atol=1e-6)


# ---- autograd ----


@on_every_backend(["logp", "linear_logp"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_of_one_of_two_results(case, backend, which):
    given, reference = arguments(case), registry.get_op(case).reference
    found = run_function(lambda **arguments: call(case, backend, arguments)[which], given)
    compare(found, run_function(lambda **arguments: reference(**arguments)[which], given))


@on_every_backend(OPERATORS)
def test_only_the_policy_has_a_gradient(case, backend):
    given = with_floats(arguments(case), lambda x: x.clone().requires_grad_())
    found = call(case, backend, given)
    assert not hasattr(found, "loss") or [x.requires_grad for x in found] == [True] + [False] * (len(found) - 1)
    total(found).backward()
    with_gradient = {name for name, x in given.items() if isinstance(x, torch.Tensor) and x.grad is not None}
    assert with_gradient == set(with_leaves(given)[1])


@on_every_backend(LINEAR)
@pytest.mark.parametrize(
    ("frozen", "workspace"),
    [(("weight", "bias"), 1000), (("hidden", "bias"), None), (("hidden", "weight"), 1000), (("hidden",), None)],
    ids=str,
)
def test_frozen_parts_have_no_gradient_and_change_no_other(case, backend, frozen, workspace):
    given = arguments(case) | {"workspace": workspace}
    _, expected = run_backend(case, backend, given)
    _, found = run_backend(case, backend, given, frozen=frozen, scale=3.0)
    wanted = {name: 3 * gradient for name, gradient in expected.items() if name not in frozen}
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=3e-6)


@on_every_backend(OPERATORS)
def test_a_graph_runs_twice_or_says_that_it_runs_once(case, backend):
    given, leaves = with_leaves(arguments(case))
    loss = total(call(case, backend, given))
    loss.backward(retain_graph=True)
    once = {name: leaf.grad.clone() for name, leaf in leaves.items()}
    if backend != registry.REFERENCE and case in ONCE:
        with pytest.raises(
            RuntimeError, match=f"backward of {case} can run once: its gradient was made in the forward"
        ):
            loss.backward()
    else:
        loss.backward()
        torch.testing.assert_close(
            {name: leaf.grad for name, leaf in leaves.items()}, {k: 2 * g for k, g in once.items()}
        )
    if backend != registry.REFERENCE:
        gradient, *_ = torch.autograd.grad(total(call(case, backend, given)), leaves.values(), create_graph=True)
        with pytest.raises(RuntimeError, match="this backend has no gradient of its gradient"):
            gradient.sum().backward()


@on_every_backend(ONCE)
@pytest.mark.parametrize(
    "scale",
    [lambda loss: loss * 3, lambda loss: loss.mul_(3), lambda loss: loss.double() * 3],
    ids=["product", "in_place", "in_float64"],
)
def test_backward_scales_the_gradient(case, backend, scale):
    _, expected = run_backend(case, backend, arguments(case))
    given, leaves = with_leaves(arguments(case))
    scale(total(call(case, backend, given))).backward()
    wanted = {name: 3 * gradient for name, gradient in expected.items()}
    torch.testing.assert_close({name: leaf.grad for name, leaf in leaves.items()}, wanted, rtol=1e-5, atol=1e-6)


@on_every_backend(ON_LOGITS)
@pytest.mark.parametrize("view", [False, True])
def test_in_place(case, backend, view):
    """The gradient in the memory of the logits; what lies between its rows stays as it was."""
    given = arguments(case)
    name = "logits" if case == "logp" else "policy_logits"
    expected, gradients = run_backend(case, backend, given, scale=2.0)
    base = torch.cat([given[name], given[name][:, :1]], 1)[:, : T + view].contiguous()
    before = base.clone()
    leaf = base[:, :T].detach().requires_grad_()
    found = call(case, backend, given | {name: leaf, "in_place": True})
    (2 * total(found)).backward()
    compare((found, {name: leaf.grad}), (expected, gradients))
    assert torch.equal(base[:, T:], before[:, T:])
    if backend == "triton":
        assert torch.equal(leaf, leaf.grad)
        columns = given[name].permute(2, 0, 1).contiguous().permute(1, 2, 0).requires_grad_()
        with pytest.raises(ValueError, match="in_place needs logits whose rows lie in memory one after another"):
            call(case, backend, given | {name: columns, "in_place": True})


@on_every_backend(ON_LOGITS, fast=True)
def test_in_place_is_refused_where_another_operator_saved_the_logits(case, backend):
    """A tanh keeps its output, another loss its input: both would read the gradient for logits."""
    given = arguments(case)
    name = "logits" if case == "logp" else "policy_logits"
    leaf = given[name].clone().requires_grad_()
    for make, other in ((torch.tanh, torch.zeros_like), (torch.clone, torch.square)):
        x = make(leaf)
        kept = other(x).sum()
        loss = total(call(case, backend, given | {name: x, "in_place": True}))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (loss + kept).backward()
