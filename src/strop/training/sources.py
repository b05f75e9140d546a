"""What a run computes with besides its options: functions of the user, the chat template, the rows. Known by hashes."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import strop
from strop.rewards import described

if TYPE_CHECKING:
    from strop.training.trainer import Trainer

PACKAGE = Path(strop.__file__).parent
Sources = dict[str, str]  # by what it is: its hash, or nothing where it has no file


def sources_of(trainer: "Trainer", rows: str) -> Sources:
    """Return the hashes of the trainer's functions, environment, tools and chat template, and the digest of its rows."""
    found = {}
    for kind, functions in (("function", trainer.functions), ("environment or tool", trainer.environments)):
        for about in map(described, functions):
            own = Path(about.get("file", "")).is_relative_to(PACKAGE)  # another version of strop is no other run
            found[f"{kind} {about['name']}"] = "" if own else about.get("sha256", "")
    template = json.dumps(getattr(trainer.tokenizer, "chat_template", None), sort_keys=True, default=str)
    return found | {"chat template": hashlib.sha256(template.encode()).hexdigest(), "dataset": rows}


def changed_sources(before: Mapping[str, object], now: Sources) -> list[str]:
    """Return the names of the sources that are not what they were; one without a hash then or now is not compared."""
    names = before.keys() | now.keys() if before else set()
    return sorted(
        name for name in names if before.get(name, "gone") != now.get(name, "gone") and _is_known(name, before, now)
    )


def _is_known(name: str, *all_sources: Mapping[str, object]) -> bool:
    return all(sources.get(name) != "" for sources in all_sources)
