"""The pages of the algorithms say what the code has: every option with its default, every metric, every command's flags."""

import inspect
import json
import re
import shlex
import urllib.request
from pathlib import Path

import pytest
import torch
from tiny_models import mixtral
from tiny_qwen2 import tiny_qwen2

from strop.algorithms.best_of_n import BestOfN
from strop.algorithms.distill import Distill, DistillConfig
from strop.algorithms.dpo import DPO, DPOConfig
from strop.algorithms.grpo import GRPO, GRPOConfig
from strop.algorithms.kto import KTO, KTOConfig
from strop.algorithms.online_dpo import OnlineDPO, OnlineDPOConfig
from strop.algorithms.ppo import PPO, PPOConfig
from strop.algorithms.reward_model import RewardModel, RewardModelConfig
from strop.algorithms.sft import SFT, SFTConfig
from strop.cli.job import JobConfig
from strop.config import EntropyConfig, LoRAConfig, OptimConfig, RewardCalls, RunConfig
from strop.config.base import options_in
from strop.environments import Environment, Turn, TurnsConfig
from strop.losses import PolicyRule, PreferenceRule, UnpairedRule
from strop.moe import MoEConfig, MoETransformer
from strop.rollout import Sampling
from strop.rollout.client import ServerConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs/algorithms"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TABLES = [
    ("sft.md", SFTConfig), ("dpo.md", DPOConfig), ("grpo.md", GRPOConfig), ("online_dpo.md", OnlineDPOConfig),
    ("kto.md", KTOConfig), ("reward_model.md", RewardModelConfig), ("ppo.md", PPOConfig), ("distill.md", DistillConfig), ("kto.md", UnpairedRule),
    ("grpo.md", PolicyRule), ("grpo.md", EntropyConfig),
    ("dpo.md", PreferenceRule), ("common.md", OptimConfig), ("common.md", RunConfig), ("common.md", LoRAConfig),
    ("common.md", Sampling), ("common.md", RewardCalls), ("../command_line.md", JobConfig), ("../rollouts.md", ServerConfig),
    ("../environments.md", TurnsConfig),
]  # fmt: skip


def tables(text, *header):
    """The rows of every table with these columns, each a list of its cells."""
    found, lines = [], text.splitlines()
    for start, line in enumerate(lines):
        if cells(line) == list(header):
            rows = []
            for row in lines[start + 2 :]:
                if not row.startswith("|"):
                    break
                rows.append(cells(row))
            found.append(rows)
    return found


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


def option_table(page, config):
    """The table of a page that is about this config: the one whose first option is one of its fields."""
    known = {field.name for field in options_in(config)}
    matching = [t for t in tables((PAGES / page).read_text(encoding="utf-8"), "option", "default", "meaning")
                if {code(row[0])[0] for row in t} & known]  # fmt: skip
    assert len(matching) == 1, f"{page} must have one table of {config.__name__}"
    return {code(row[0])[0]: code(row[1])[0] for row in matching[0]}


@pytest.mark.parametrize(
    ("page", "config"), TABLES, ids=lambda value: value if isinstance(value, str) else value.__name__
)
def test_option_tables_are_the_configs(page, config):
    table = option_table(page, config)
    assert sorted(table) == sorted(field.name for field in options_in(config))
    names = {part.__name__: part for _, part in TABLES}
    for name, default in table.items():
        assert eval(default, names) == getattr(config(), name), (
            f"{page}: {name} has the default {getattr(config(), name)!r}"
        )


def test_best_of_n_table_is_its_arguments():
    rows = tables((PAGES / "best_of_n.md").read_text(encoding="utf-8"), "option", "default", "meaning")[0]
    parameters = {p.name: p for p in inspect.signature(BestOfN).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert sorted(code(row[0])[0] for row in rows) == sorted(parameters)
    for row in rows:
        wanted = parameters[code(row[0])[0]].default
        assert row[1] == "required" if wanted is inspect.Parameter.empty else eval(code(row[1])[0]) == wanted


# ---- metrics ----


def small_model():
    config = MoEConfig(vocab_size=20, hidden_dim=16, num_layers=1, num_heads=2, head_dim=8, eos_token_id=1)
    return MoETransformer(config)


def count(completions):
    return [float(len(ids.unique())) for ids in completions]


def step_of_sft():
    return SFT(model=small_model()).train_step([[2, 3]], [[4, 1]])


def step_of_dpo():
    return DPO(model=small_model()).train_step([[2, 3]], [[4, 1]], [[5, 1]])


def step_of_kto():
    return KTO(model=small_model()).train_step([[2, 3], [4, 5]], [[4, 1], [5, 1]], [True, False])


def step_of_reward_model():
    model = tiny_qwen2("ForSequenceClassification", num_labels=1)
    return RewardModel(model=model).train_step([[2, 3]], [[4, 1]], [[5, 1]])


def step_of_grpo():
    options = {
        "resample_rounds": 1,
        "fill_batch": True,
        "importance_cap": 2.0,
        "importance_reject": "seq_mean_k1",
        "importance_reject_bounds": 2.0,
        "entropy_coef": 0.1,
        "entropy_target": 1.0,
        "replay_routing": True,
    }
    grpo = GRPO(model=mixtral(), reward_fn=count, max_new_tokens=4, **options)
    return grpo.train_step([[2, 3], [4, 5]])


def step_of_ppo():
    critic = tiny_qwen2("ForSequenceClassification", num_labels=1)
    ppo = PPO(
        model=small_model(), critic=critic, reward_fn=count, max_new_tokens=4, entropy_coef=0.1, entropy_target=1.0
    )
    return ppo.train_step([[2, 3], [4, 5]])


def step_of_distill():
    return Distill(model=small_model(), teacher=small_model(), max_new_tokens=4).train_step([[2, 3], [4, 5]])


def step_of_online_dpo():
    return OnlineDPO(model=small_model(), reward_fn=count, max_new_tokens=4).train_step([[i, 3] for i in range(2, 10)])


def documented_metrics(page, having=""):
    """The metrics in a page's table, or in the one of its tables that has this metric."""
    found = tables((PAGES / page).read_text(encoding="utf-8"), "metric", "meaning")
    (names,) = ({name for row in table for name in code(row[0])} for table in found if f"`{having}" in str(table))
    return {name.replace("<function>", "count") for name in names}


@pytest.mark.parametrize("step", [made for name, made in globals().items() if name.startswith("step_of_")])
def test_metric_tables_are_what_a_step_returns(step):
    torch.manual_seed(0)
    own = documented_metrics(f"{step.__name__.removeprefix('step_of_')}.md")
    common = documented_metrics("common.md") - {"memory"}  # on a GPU only
    assert set(step()) == own | common


class Partner(Environment):
    def step(self, reply):
        return Turn([3], reward=1.0, info={"name": 1.0})


def partner_agent(row, client):
    body = json.dumps({"prompt": row["prompt"]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {client.api_key}"}
    urllib.request.urlopen(urllib.request.Request(f"{client.base_url}/completions", body, headers)).close()
    return {"name": 1.0}


@pytest.mark.parametrize(
    ("how", "having"), [({"environment": Partner}, "turns/mean"), ({"agent": partner_agent}, "agent/calls")],
    ids=["environment", "agent"],
)  # fmt: skip
def test_metrics_of_environments_are_what_a_step_has_besides(how, having):
    grpo = GRPO(model=small_model(), max_new_tokens=4, resample_rounds=1, importance_cap=2.0, importance_reject="token_k3",
                importance_reject_bounds=1.0, fill_batch=True, **how)  # fmt: skip
    found = set(grpo.train_step([{"prompt": [2, 3]}])) - {"reward/count"}
    common = documented_metrics("common.md") - {"memory"}
    own = {name.replace("<name>", "name") for name in documented_metrics("../environments.md", having)}
    not_here = {"reward/count", "routing/changed_fraction", "entropy_coef"}  # routing is replayed of one turn only
    assert found == own | (documented_metrics("grpo.md") - not_here) | common


# ---- names in other pages ----


def commands():
    """Every `strop …` line of the documents' code blocks, without its comment."""
    found = []
    for path in DOCUMENTS:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        lines = [line for language, block in blocks if not language for line in block.splitlines()]
        found += [
            pytest.param(line.partition(" #")[0], id=f"{path.name}: {line[:40]}")
            for line in lines
            if line.startswith("strop ")
        ]
    return found


@pytest.mark.parametrize("line", commands())
def test_commands_have_the_flags_they_are_shown_with(line):
    from typer.main import get_command

    from strop.cli import app

    words = shlex.split(line)[1:]
    command = get_command(app)
    while getattr(command, "commands", None):
        assert words[0] in command.commands, f"no command {words[0]}"
        command = command.commands[words.pop(0)]
    flags = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= flags | {"--help"}
    for file in (word for word in words if word.startswith("examples/")):
        assert (ROOT / file.partition(":")[0]).is_file(), file
