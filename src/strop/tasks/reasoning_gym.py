"""The datasets of the package `reasoning-gym` as tasks: many generators of problems in words, with verifiable answers.

task = strop.tasks.get("reasoning_gym:leg_counting", max_animals=5)
GRPO(model=model, tokenizer=tokenizer, reward_fn=task.reward).train(task.rows("train", 1000))
"""

from collections.abc import Sequence
from types import ModuleType

from strop._checks import as_count, check_choice, did_you_mean
from strop._install import missing
from strop._types import Json, Row
from strop.tasks.base import DEFAULT_ROWS, SPLITS, split_of

ROUNDS = 50  # rounds of drawing; each draws at least as many problems as are wanted


class ReasoningGym:
    """A dataset of reasoning-gym with the interface of strop's tasks; options are those of the dataset's config.

    The reward is the dataset's own score of an answer, between 0 and 1; some problems have several right answers.
    """

    def __init__(self, name: str, **options: object):
        gym, datasets = _package()
        if name not in datasets:
            hint = did_you_mean(name, datasets, " ({})")
            raise ValueError(f"reasoning-gym has no dataset {name!r}{hint}; it has {', '.join(sorted(datasets))}")
        if taken := {"seed", "size"} & options.keys():
            raise ValueError(f"{min(taken)} must be given to rows(), found it among the options of {name!r}")
        self.name = f"reasoning_gym:{name}"
        self._make = lambda seed, size: gym.create_dataset(name, seed=seed, size=size, **options)
        self._scorer = self._make(0, 1)

    def rows(self, split: str = "train", limit: int | None = None, *, seed: int = 0) -> list[Json]:
        """Return `limit` different problems: {"prompt", "answer", "completion", "entry"}; `reward` needs the entry.

        limit   None is 1000, or all problems found if there are fewer

        The hash of a problem's text decides its split, so train and test never overlap, whatever the seeds.
        """
        check_choice(split, "split", SPLITS)
        wanted = DEFAULT_ROWS if limit is None else as_count(limit, "limit", 1)
        first_seed = ROUNDS * (len(SPLITS) * as_count(seed, "seed", 0) + SPLITS.index(split))
        found: dict[str, Json] = {}
        for round_seed in range(first_seed, first_seed + ROUNDS):
            for entry in self._make(round_seed, max(wanted, 100)):
                if split_of(entry["question"]) == split:
                    found.setdefault(entry["question"], entry)
                if len(found) == wanted:
                    return [_row(e) for e in found.values()]
        if limit is not None or not found:
            raise ValueError(f"limit must be at most {len(found)} for {split} of {self.name}, found {wanted}")
        return [_row(e) for e in found.values()]

    def reward(self, completions: Sequence[str], entry: Sequence[Row]) -> list[float]:
        if len(completions) != len(entry):
            raise ValueError(f"entry must hold one entry per completion ({len(completions)}), found {len(entry)}")
        return [float(self._scorer.score_answer(c.strip(), e)) for c, e in zip(completions, entry, strict=True)]

    def __repr__(self) -> str:
        return f"ReasoningGym({self.name.partition(':')[2]!r})"


def _row(entry: Row) -> Json:
    return {"prompt": entry["question"], "answer": entry["answer"], "completion": entry["answer"], "entry": entry}


def _package() -> tuple[ModuleType, list[str]]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise missing("this task", "reasoning-gym", "reasoning-gym") from None
    return reasoning_gym, list(DATASETS)
