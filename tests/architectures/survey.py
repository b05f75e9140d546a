"""Measure strop on tiny models of every causal type: right, refused, silently wrong, or a raw failure.

    python tests/architectures/survey.py [TYPE …] [--json FILE] [--jobs N]

Losses and gradients of a ragged batch are compared with the model alone on each row, greedy rollouts with the model's own
forward of every beginning of a row, and the log-probs that training gives rollouts with those that they were drawn with. A
model that is not causal must be refused. In float64; the truth is a fresh copy of the model, for some keep what they read.
"""

import argparse
import contextlib
import copy
import json
import logging
import os
import signal
import sys
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
from tiny_types import VOCAB, model_of, settings_of

from benchmarks.harness import SCHEMA
from strop.data.batch import TokenBatch, Trajectory
from strop.models import as_policy
from strop.models.policy import takes_use_cache
from strop.rollout import Sampling, generate
from strop.rollout.decoding import description

ROWS = ((5, 3), (1, 2), (12, 10), (20, 14))  # tokens of prompts and of completions
SHARED = (12, [2, 3])  # tokens that these rows begin with: a model that can reads them once
PROMPTS, NEW = (3, 1, 12, 20), 8
GRADIENT, LOGPS = 1e-3, 1e-3  # errors allowed: relative, and of a log-prob. Some norms compute in float32.
SECONDS = 60  # of a setting
ORDER = ("right", "refused", "raw failure", "silently wrong")


class Wrong(Exception):
    """Numbers that are not the model's."""


def ids_of(length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def alone(model: Any, ids_T: torch.Tensor) -> torch.Tensor:
    """[T, V] log-probs of the model's own forward of one row."""
    more = {"use_cache": False} if takes_use_cache(model) else {}  # rwkv has no gradient with a cache
    logits = model(input_ids=ids_T[None], **more).logits[0]
    return logits.double().log_softmax(-1)


def looks_ahead(model: Any) -> bool:
    ids = ids_of(14, 9)
    other = ids.clone()
    other[9:] = (other[9:] + 5) % VOCAB
    with torch.no_grad():
        one, two = (alone(copy.deepcopy(model), row)[:9] for row in (ids, other))
    return bool((one - two).abs().max() > 1e-4)


def check_training(model: Any) -> str:
    """Raise `Wrong` where loss or gradient are not those of the rows alone; return how the batch was read."""
    rows = [ids_of(sum(sizes), seed) for seed, sizes in enumerate(ROWS)]
    for row in SHARED[1]:
        rows[row][: SHARED[0]] = ids_of(SHARED[0], len(rows))
    wanted: dict[str, torch.Tensor] = {}
    losses = []
    for row, (prompt, _) in zip(rows, ROWS, strict=True):
        fresh = copy.deepcopy(model)
        logps = alone(fresh, row)[prompt - 1 : -1].gather(1, row[prompt:, None])[:, 0]
        losses.append(logps.detach())
        logps.sum().backward()
        for name, param in fresh.named_parameters():
            if param.grad is not None:
                wanted[name] = wanted.get(name, 0.0) + param.grad
    policy = as_policy(copy.deepcopy(model))
    batch = TokenBatch.of([Trajectory.of(*row.split(sizes)) for row, sizes in zip(rows, ROWS, strict=True)])
    batch.groups = [SHARED]
    logps_n = policy.logps(batch)
    if not (error := (logps_n - torch.cat(losses)).abs().max().item()) <= LOGPS:
        raise Wrong(f"log-probs of training off by {error:.1e} ({_how(policy)})")
    logps_n.sum().backward()
    found = {name: param.grad for name, param in policy.model.named_parameters() if param.grad is not None}
    total = torch.stack([one.norm() for one in wanted.values()]).norm()
    errors = [(found.get(name, torch.zeros(())) - one).norm() for name, one in wanted.items()]
    if not (error := (torch.stack(errors).norm() / total).item()) <= GRADIENT:
        raise Wrong(f"gradients off by {error:.1e} ({_how(policy)})")
    return _how(policy)


def _how(policy: Any) -> str:
    return "packed" if policy.packs else f"padded: {policy.no_packing_because}"


def check_rollouts(model: Any) -> str:
    """Raise `Wrong` where a greedy rollout is not what the model's own forwards give; return what it ran on."""
    policy = as_policy(copy.deepcopy(model))
    longest = (policy.max_length or 1000) - NEW
    prompts = [ids_of(min(length, longest), 20 + length) for length in PROMPTS]
    rollout = generate(policy, prompts, Sampling(max_new_tokens=NEW, temperature=0.0))
    how = description(policy) if policy.kind == "hf" else policy.kind
    changes_with_length = False
    with torch.no_grad():
        scored = policy.logps(TokenBatch.of(list(rollout))).split([len(one) for one in rollout.completion_ids])
        for line, logps, again in zip(rollout, rollout.logps, scored, strict=True):
            fresh, whole = copy.deepcopy(model), line.ids_T
            at_once = alone(copy.deepcopy(model), whole)
            for i, (token, logp) in enumerate(zip(line.completion_ids, logps, strict=True)):
                beginning = whole[: len(line.prompt_ids) + i]
                logps_V = alone(fresh, beginning)[-1]
                changes_with_length |= bool((logps_V - at_once[len(beginning) - 1]).abs().max() > LOGPS)
                if not (error := abs(logps_V[token] - logp).item()) <= LOGPS:
                    raise Wrong(f"log-probs of a rollout off by {error:.1e} at {len(beginning)} tokens ({how})")
                if logps_V[token] < logps_V.max() - LOGPS:
                    raise Wrong(f"a greedy token is not the likeliest ({how})")
            if not changes_with_length and not (error := (again - logps).abs().max().item()) <= LOGPS:
                raise Wrong(f"training gives a rollout other log-probs, off by {error:.1e} ({how})")
    return how


def outcome(check: Any, model: Any) -> tuple[str, str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return "right", check(model)
    except Wrong as error:
        return "silently wrong", str(error)
    except Exception as error:
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        refused = (
            isinstance(error, ValueError) and frame is not None and "strop" in frame.tb_frame.f_globals["__name__"]
        )
        text = f"{error}" if refused else f"{type(error).__name__}: {error}"
        return "refused" if refused else "raw failure", text.splitlines()[0][:300]


@contextlib.contextmanager
def limited(seconds: int) -> Any:
    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} seconds")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def measured(kind: str, setting: str, changes: dict[str, Any]) -> dict[str, str]:
    """What strop makes of one setting of one type."""
    line = {"type": kind, "setting": setting}
    try:
        with limited(SECONDS):
            model = model_of(kind, changes)
            try:
                alone(copy.deepcopy(model), ids_of(30, 0)).sum().backward()
            except RuntimeError:  # a constant of float64 in a tensor of float32
                model = model.float()
                alone(copy.deepcopy(model), ids_of(30, 0)).sum().backward()
            ahead = looks_ahead(model)
    except Exception as error:  # the model alone fails, or no config of this type is tiny
        lines = [one.strip() for one in f"{type(error).__name__}: {error}".splitlines() if one.strip()]
        return line | {"result": "not built", "training": " ".join(lines)[:300]}
    parts = {}
    for name, check in (("training", check_training), ("rollouts", check_rollouts)):
        try:
            with limited(SECONDS):
                parts[name] = outcome(check, model)
        except TimeoutError as error:
            parts[name] = "raw failure", str(error)
        if ahead and parts[name][0] == "right":
            parts[name] = "silently wrong", "not causal, and not refused"
    worst = max((result for result, _ in parts.values()), key=ORDER.index)
    return line | {"result": worst} | {name: f"{result}: {text}" for name, (result, text) in parts.items()}


def measured_type(kind: str) -> list[dict[str, str]]:
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        settings = list(settings_of(kind))
    except Exception:
        settings = [("default", {})]
    return [measured(kind, name, changes) for name, changes in settings]


def main() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    lines: list[dict[str, str]] = []
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    with ProcessPoolExecutor(options.jobs) as pool:
        for some in pool.map(measured_type, options.types or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
            lines += some
            for line in some:
                print(*line.values(), sep=" | ", flush=True)
            if options.json:  # as benchmarks.harness.load reads it
                options.json.parent.mkdir(parents=True, exist_ok=True)
                result = {"schema": SCHEMA, "versions": versions, "date": str(date.today()), "cases": lines}
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    counts = Counter(line["result"] for line in lines)
    print(f"{len(lines)} settings: " + ", ".join(f"{counts[name]} {name}" for name in (*ORDER, "not built")))
    sys.exit(bool(counts["silently wrong"] or counts["raw failure"]))


if __name__ == "__main__":
    main()
