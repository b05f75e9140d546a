"""Configs: flat, nested and dotted options, what they check, and what they say of a wrong one."""

import dataclasses
import inspect
import json
import re
from pathlib import Path

import pytest

from strop import DPO, GRPO, KTO, PPO, SFT, Distill, RewardModel, _trl
from strop.config import (
    Config,
    EntropyConfig,
    LoRAConfig,
    OptimConfig,
    RewardCalls,
    RunConfig,
    TrainerConfig,
    TurnsConfig,
)
from strop.config.base import option_names, parse_number
from strop.losses import PolicyRule, PreferenceRule, UnpairedRule
from strop.rollout import Sampling
from strop.rollout.client import ServerConfig

ROOT = Path(__file__).resolve().parents[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part(Config):
    size: int = 3
    share: float = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole(TrainerConfig):
    beta: float = 0.1
    part: Part = dataclasses.field(default_factory=lambda: Part(size=7))


def test_betas_are_floats():
    """torch refuses (0.9, 0): "either both floats or both Tensors"."""
    assert OptimConfig(betas=(0.9, 0)).betas == (0.9, 0.0)
    assert isinstance(OptimConfig(betas=(0.9, 0)).betas[1], float)


def test_flat_nested_and_dotted_are_the_same():
    wanted = Whole(beta=0.2, part=Part(size=4), run=RunConfig(batch_size=2))
    assert Whole.from_options({"beta": 0.2, "size": 4, "batch_size": 2}) == wanted
    assert Whole.from_options({"beta": 0.2, "part": {"size": 4}, "run": {"batch_size": 2}}) == wanted
    assert Whole.from_options({"beta": 0.2, "part.size": 4, "run.batch_size": 2}) == wanted
    assert Whole.from_options(beta=0.2, part=Part(size=4), run={"batch_size": 2}) == wanted
    assert Whole.from_options({"run": {"batch_size": 5}, "seed": 3}).run == RunConfig(batch_size=5, seed=3)


def test_a_part_keeps_the_defaults_of_the_config_it_is_in():
    assert Whole.from_options({"share": 0.1}).part == Part(size=7, share=0.1)
    assert Whole.from_options({"part": {"share": 0.1}}).part == Part(size=7, share=0.1)


def test_an_optional_part():
    assert Whole().lora is None
    assert Whole.from_options({"lora": {"r": 4}}).lora == LoRAConfig(r=4)
    assert Whole.from_options({"lora.alpha": 3}).lora == LoRAConfig(alpha=3.0)
    assert Whole.from_options({"lora": None}).lora is None


def test_to_dict_round_trips_through_json():
    config = Whole.from_options({"betas": (0.8, 0.9), "lora": {"target_modules": ["q", "v"]}, "autocast": "bf16"})
    assert Whole.from_options(json.loads(json.dumps(config.to_dict()))) == config


def test_numbers_as_yaml_reads_them():
    config = Whole.from_options(
        {"learning_rate": "1e-4", "max_grad_norm": 2, "batch_size": "12", "betas": ["9e-1", ".95"]}
    )
    assert (config.optim.learning_rate, config.run.batch_size, config.optim.betas) == (1e-4, 12, (0.9, 0.95))
    assert isinstance(config.optim.max_grad_norm, float)
    assert isinstance(config.run.batch_size, int)


ODD = [" 1", "1 ", "1\n", "1_000", "١", "１", "0x10", "1,000", "nan", "inf", "1e", ".", "", "--1", "1d3"]


@pytest.mark.parametrize("text", ODD)
def test_a_number_in_text_is_plain_decimal(text):
    """One rule for every field that is a number, and the error states it."""
    assert parse_number(text) is None
    for name, wanted in (("learning_rate", "number"), ("batch_size", "whole number"), ("betas", "number")):
        with pytest.raises(TypeError) as caught:
            Whole.from_options({name: [text, 0.9] if name == "betas" else text})
        rule = "in plain decimal digits, without spaces or underscores"
        assert str(caught.value).endswith(f"{name} must be a {wanted} {rule}, found {text!r}")


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("-3", -3), ("+12", 12), ("007", 7), ("1.", 1.0), ("-.5e+2", -50.0), ("1E3", 1000.0), ("9" * 5000, float("inf"))],
)  # fmt: skip
def test_plain_decimal_numbers(text, number):
    found = parse_number(text)
    assert (found, type(found)) == (number, type(number))


def test_a_whole_number_in_text_has_no_point():
    with pytest.raises(
        TypeError, match=r"run\.batch_size must be a whole number in plain decimal digits, .* found '1e3'"
    ):
        Whole.from_options({"batch_size": "1e3"})


@pytest.mark.parametrize("name", ["seed", "batch_size", "num_steps", "warmup_steps", "lora.r"])
@pytest.mark.parametrize("value", [2**63, 2**70, str(2**70)])
def test_counts_and_seeds_end_where_torch_takes_no_more(name, value):
    leaf = name.rpartition(".")[2]
    with pytest.raises(ValueError, match=rf"^{leaf} must be at least \d and below 2\*\*63, found {value}$"):
        Whole.from_options({name: value})
    assert Whole.from_options({"seed": 2**63 - 1}).run.seed == 2**63 - 1


def test_an_integer_too_large_for_a_float():
    for make in (OptimConfig, OptimConfig.from_options):
        with pytest.raises(ValueError, match="learning_rate must be finite and at least 0, found inf"):
            make(learning_rate=10**400)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"learing_rate": 1}, ValueError, "'learing_rate' is no option of Whole; did you mean 'learning_rate'?"),
        ({"run": {"batchsize": 1}}, ValueError, "'run.batchsize' is no option; did you mean 'run.batch_size'?"),
        ({"rank": 4}, ValueError, "'rank' is no option of Whole"),
        ({"lora.rr": 4}, ValueError, "did you mean 'lora.r'?"),
        ({"batch_size": "many"}, TypeError, "run.batch_size must be a whole number in plain decimal digits"),
        ({"batch_size": 2.0}, TypeError, "run.batch_size must be int, found 2.0"),
        ({"shuffle": 1}, TypeError, "run.shuffle must be bool, found 1"),
        ({"learning_rate": "fast"}, TypeError, "optim.learning_rate must be a number in plain decimal digits"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, found 0"),
        ({"learning_rate": float("nan")}, ValueError, "learning_rate must be finite and at least 0, found nan"),
        ({"autocast": "bf61"}, ValueError, "did you mean 'bf16'?"),
        ({"schedule": "cosin"}, ValueError, "did you mean 'cosine'?"),
        ({"betas": [0.9]}, ValueError, "betas must be two numbers"),
        ({"betas": 0.9}, TypeError, "optim.betas must be a list, found 0.9"),
        ({"betas": ("a", 0.9)}, TypeError, "betas must be a number in plain decimal digits"),
        ({"betas": (None, 0.9)}, TypeError, "betas must be a number, found NoneType"),
        ({"batch_size": 2, "run": {"batch_size": 3}}, ValueError, "batch_size must be given once, found 2 and 3"),
        ({"run": 3}, TypeError, "run must be a RunConfig or a dict such as {'batch_size': 8}, found 3"),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error) as caught:
        Whole.from_options(options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainerConfig(run={"batch_size": 3}), "run must be a RunConfig, found {'batch_size': 3}"),
        (lambda: TrainerConfig(lora=True), "lora must be a LoRAConfig, found True"),
        (lambda: RunConfig(shuffle="no"), "shuffle must be bool, found 'no'"),
        (lambda: RunConfig(autocast=3), "autocast must be None or str, found 3"),
        (lambda: OptimConfig(learning_rate="1e-4"), "learning_rate must be a number, found str"),
    ],
)
def test_a_config_made_directly_checks_itself_too(make, message):
    with pytest.raises(TypeError) as caught:
        make()
    assert message in str(caught.value)


def test_the_names():
    """A new option is a decision."""
    assert sorted(f.name for f in dataclasses.fields(OptimConfig)) == [
        "betas", "eps", "learning_rate", "max_grad_norm", "min_learning_rate", "offload_optimizer", "optimizer", "schedule", "warmup_steps",
        "weight_decay",
    ]  # fmt: skip
    assert sorted(f.name for f in dataclasses.fields(RunConfig)) == [
        "autocast", "batch_size", "compile", "curriculum", "dropout", "eval_every", "gradient_checkpointing", "keep_checkpoints",
        "log_every", "micro_batch_size", "micro_batch_tokens", "num_epochs", "num_steps", "samples_every", "save_every", "seed",
        "shard", "share_prefixes", "shuffle",
    ]  # fmt: skip
    names = option_names(Whole)
    assert len(names) == len(set(names))
    assert {"beta", "size", "learning_rate", "batch_size", "lora.r"} <= set(names)


SHARED = "optim run lora quantize pad_id "
FIELDS = {
    SFT.Config: SHARED + "max_length assistant_only",
    DPO.Config: SHARED + "max_length loss",
    KTO.Config: SHARED + "max_length loss",
    RewardModel.Config: SHARED + "max_length center_coef",
    Distill.Config: SHARED + "divergence beta on_policy off_policy sampling server",
    PPO.Config: SHARED + "group_size kl_coef gamma lam whiten value_coef value_clip critic_learning_rate inner_epochs "
    "minibatch_size entropy old_logps exact mask_truncated reward_weights reward_timeout find_failing "
    "rollout_dtype num_eval_samples calls sampling server loss",
    GRPO.Config: SHARED
    + "group_size kl_coef inner_epochs minibatch_size advantage pass_k advantage_scale advantage_ddof advantage_eps "
    "mask_truncated resample_rounds fill_batch fill_rounds importance_cap importance_mode importance_reject "
    "importance_reject_bounds entropy old_logps replay_routing exact reward_weights "
    "reward_timeout find_failing rollout_dtype num_eval_samples calls sampling server turns loss",
    PreferenceRule: "beta loss_type loss_weights label_smoothing simpo_gamma discopop_tau",
    UnpairedRule: "beta loss_type desirable_weight undesirable_weight",
    PolicyRule: "loss_type importance_level clip_eps delta beta kl_estimator entropy_coef max_completion_length "
    "sapo_temperatures vespo_gamma cov_fraction cov_bounds cov_kl_coef stale_kl",
    EntropyConfig: "top_entropy_quantile entropy_target entropy_coef_delta entropy_coef_min entropy_coef_max",
    ServerConfig: "rollout_server sync sync_folder sync_tolerance max_staleness order rollout_device server_requests server_timeout "
    "server_start_timeout",
    Sampling: "max_new_tokens temperature top_k top_p min_p stop_ids",
    TurnsConfig: "max_turns max_tokens turn_discount credit environment_workers environment_timeout agent_workers "
    "on_error error_reward rewritten_turns",
    RewardCalls: "reward_retries reward_concurrency on_reward_error",
}


@pytest.mark.parametrize("config", FIELDS, ids=lambda config: config.__name__)
def test_the_fields_of_every_config(config):
    """A new option is a decision."""
    assert {field.name for field in dataclasses.fields(config)} == set(FIELDS[config].split())


# ---- names of TRL ----


@pytest.mark.parametrize(
    ("config", "name", "told"),
    [
        ("grpo", "num_generations", "is group_size"),
        ("grpo", "beta", "'kl_coef' is what sets it"),
        ("grpo", "lr", "is learning_rate"),
        ("grpo", "logging_steps", "is log_every; 0 is off"),
        ("sft", "assistant_only_loss", "is assistant_only"),
        ("sft", "load_best_model_at_end", "is the callback BestCheckpoint"),
        ("kto", "per_device_train_batch_size", "is batch_size, their product"),
        ("sft", "per_device_train_batch_size", "is batch_size, their product; micro_batch_tokens or"),
        ("grpo", "per_device_train_batch_size", "is batch_size, which counts prompts"),
        ("dpo", "bf16", 'is autocast="bf16"'),
        ("grpo", "max_completion_length", "'max_new_tokens' is what sets it"),
        ("sft", "packing", "nothing in place of TRL's packing: training never pads"),
        ("sft", "num_generations", "SFT has nothing for TRL's num_generations"),
        ("grpo", "reward_funcs", "is reward_fn="),
        ("grpo", "optim.lr", "is learning_rate"),
    ],
)
def test_a_name_of_trl_is_told_what_it_is_here(config, name, told):
    config = {"sft": SFT, "dpo": DPO, "grpo": GRPO, "kto": KTO}[config].Config
    with pytest.raises(ValueError, match=f"{re.escape(repr(name))} is no option.*; .*{re.escape(told)}"):
        config.from_options({name: 1})


def test_a_trainer_tells_it_too():
    with pytest.raises(ValueError, match=r"'processing_class' is no option of GRPO; .* is tokenizer="):
        GRPO(model="moe:tiny", reward_fn=len, processing_class=None)
    with pytest.raises(
        ValueError, match=r"'reward_funcs' is no option of GRPO; what TRL calls reward_funcs is reward_fn="
    ):
        GRPO(model="moe:tiny", reward_funcs=len)
    with pytest.raises(ValueError, match="what TRL calls environment_factory is environment="):
        GRPO(model="moe:tiny", environment_factory=object)


def test_the_table_has_every_option_of_trl():
    """tests/golden/trl-1.16-options.json has the names; those of transformers' own come from the one that is installed."""
    named = {name for row in (*_trl.ARGUMENTS, *_trl.OPTIONS) for name in row.names}
    options = json.loads((ROOT / "tests/golden/trl-1.16-options.json").read_text(encoding="utf-8"))["configs"]
    for config, names in options.items():
        assert set(names) <= named, config
    transformers = pytest.importorskip("transformers")
    arguments = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert len(arguments - named) <= 5, arguments - named  # room for a newer transformers


def test_what_the_table_names_is_there():
    """Every name in backquotes is an option of the algorithms, an argument, or of the command line."""
    known = {"train", "load_model", "tokenizer", "config", "reward_fn", "model", "optimizer", "logger", "on_evaluate"}
    known |= {"log", "map", "prompt", "completion", "text", "chat_template_kwargs", "samples", "dry", "quiet", "device"}
    known |= {"TrackioLogger", "WandbLogger", "BestCheckpoint", "best", "trainer", "push", "final", "environment"}
    for algorithm in (SFT, DPO, KTO, RewardModel, GRPO):
        known |= set(option_names(algorithm.Config)) | set(inspect.signature(algorithm.train).parameters)
    for row in (*_trl.ARGUMENTS, *_trl.OPTIONS):
        for quoted in re.findall(r"`(.*?)`", row.here):
            assert re.match(r"(?:--)?(\w+)", quoted)[1] in known, quoted


def test_the_page_has_the_tables():
    page = (ROOT / "docs" / "coming_from_trl.md").read_text(encoding="utf-8")
    arguments = [(quoted(row.trl), row.here) for row in _trl.ARGUMENTS]
    assert markdown(("TRL", "strop"), arguments) in page
    options = [
        (quoted(row.trl) + (f" ({', '.join(row.of)})" if row.of else ""), row.default, row.here, row.default_here)
        for row in _trl.OPTIONS
    ]
    assert markdown(("TRL", "default", "strop", "default"), options) in page


def markdown(head, rows):
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ("---",) * len(head), *rows))


def quoted(names):
    return re.sub(r"\w+", lambda found: f"`{found[0]}`", names)
