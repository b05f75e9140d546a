"""What a newcomer writes first, from TRL or by guessing: each ends in an error that says what to write."""

import os
import subprocess
import sys

import pytest
from tiny_models import llama, moe

import strop
from strop.algorithms.distill import Distill
from strop.algorithms.dpo import DPO
from strop.algorithms.grpo import GRPO
from strop.algorithms.ppo import PPO
from strop.algorithms.sft import SFT
from strop.config import DPOConfig, GRPOConfig
from strop.models import load_model

ROWS = [{"text": [1, 2, 3]}]


def zeros(completions):
    return [0.0 for _ in completions]


# ---- names of TRL ----


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("SFTTrainer", "SFTTrainer is TRL's; what strop has is SFT: from strop import SFT"),
        ("GRPOTrainer", "from strop import GRPO"),
        ("DPOTrainer", "from strop import DPO"),
        ("RewardTrainer", "from strop import RewardModel"),
        ("GRPOConfig", r"GRPOConfig is in strop.config; GRPO also takes single options"),
    ],
)
def test_classes_of_trl_name_what_strop_has(name, hint):
    with pytest.raises(ImportError, match=hint):
        exec(f"from strop import {name}")


def test_every_hint_names_something_that_exists():
    import strop.config
    from strop import _trl

    for here in _trl._CLASSES.values():
        assert hasattr(strop, here)
    for name in _trl._CONFIGS:
        assert hasattr(strop.config, name)
        assert hasattr(strop, name.removesuffix("Config"))


def test_an_unknown_name_of_the_package_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'strop' has no attribute 'nonsense'"):
        strop.nonsense  # noqa: B018


def test_methods_of_trl_name_what_strop_has():
    trainer = SFT(model=moe())
    with pytest.raises(AttributeError, match=r"SFT has no save_model; save_pretrained\(folder\) writes the model"):
        trainer.save_model("folder")
    with pytest.raises(AttributeError, match="'SFT' object has no attribute 'nonsense'"):
        trainer.nonsense  # noqa: B018


def test_property_that_fails_keeps_its_own_message():
    class Broken(SFT):
        @property
        def mine(self):
            raise AttributeError("what went wrong within")

    with pytest.raises(AttributeError, match="what went wrong within"):
        Broken(model=moe()).mine  # noqa: B018


# ---- arguments ----


def test_lora_as_a_number():
    with pytest.raises(TypeError, match=r"lora must be a LoRAConfig or a dict such as \{'r': 16\}, found 8"):
        SFT(model=llama(), lora=8)


def test_quantised_weights():
    message = "load_in_4bit is quantize, nf4 or int8, with lora"
    with pytest.raises(ValueError, match=message):
        SFT(model=llama(), load_in_4bit=True)


def test_quantised_weights_of_load_model(tmp_path):
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"load_in_4bit must not be given; .*quantize.*lora"):
        load_model(tmp_path, load_in_4bit=True)


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("logger", r"train has no argument 'logger'; it is one of SFT: SFT\(model=…, logger=…\)"),
        ("learning_rate", "it is one of SFT"),
        ("resume_from_checkpoint", r"what TRL calls resume_from_checkpoint is train\(…, output_dir=…, resume=True\)"),
        ("nonsense", "train has no argument 'nonsense'$"),
    ],
)
def test_arguments_that_train_does_not_have(argument, hint):
    with pytest.raises(TypeError, match=hint):
        SFT(model=moe()).train(ROWS, **{argument: None})


# ---- targets of LoRA ----


def test_an_adapter_brings_no_warning_of_bitsandbytes(tmp_path):
    """Which says on some CPUs, at its first import, that it lacks kernels."""
    script = "from tiny_models import llama; from strop import SFT; SFT(model=llama(), lora={'r': 4})"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "kernels" not in done.stderr


def test_missing_lora_target_lists_the_nearest():
    with pytest.raises(
        ValueError, match=r"found 'query_proj'; did you mean .*'q_proj'.*; its linear layers are q_proj, k_"
    ):
        SFT(model=llama(), lora={"target_modules": ["v_proj", "query_proj"]})
    with pytest.raises(ValueError, match=r"found the pattern '\.\*attn\.x', which matches none"):
        SFT(model=llama(), lora={"target_modules": ".*attn.x"})


@pytest.mark.parametrize("given", ["q_proj,v_proj", ["q_proj", "v_proj"], r".*\.(q|v)_proj"])
def test_lora_targets_as_a_list_names_with_commas_or_a_pattern(given):
    trainer = SFT(model=llama(), lora={"target_modules": given})
    adapted = {name.split(".")[-4] for name, _ in trainer.module.named_parameters() if "lora_A" in name}
    assert adapted == {"q_proj", "v_proj"}


# ---- options without effect ----


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Distill(model=moe(), teacher=moe(), beta=0.2), "beta has no effect: it is for divergence='jsd'"),
        (lambda: GRPO(model=moe(), reward_fn=zeros, importance_mode="mask"), "importance_mode has no effect"),
        (lambda: GRPO(model=moe(), reward_fn=zeros, sapo_temperatures=[2, 1]), "sapo_temperatures has no effect: .*, found grpo"),
        (lambda: PPO(model=llama(), reward_fn=zeros, vespo_gamma=[1, 2, 2, 3]), "vespo_gamma has no effect: .*, found dapo"),
        (lambda: DPO(model=moe(), simpo_gamma=1.0), "simpo_gamma has no effect: .*, found sigmoid"),
        (lambda: DPO(model=moe(), discopop_tau=0.5, loss_type="ipo,sft"), "discopop_tau has no effect: .*, found ipo, sft"),
    ],
)  # fmt: skip
def test_options_without_effect_warn(make, message):
    with pytest.warns(UserWarning, match=message):
        make()


def test_options_with_effect_do_not_warn():
    """Warnings are errors in the tests."""
    Distill(model=moe(), teacher=moe(), beta=0.2, divergence="jsd")
    GRPO(model=moe(), reward_fn=zeros, importance_mode="mask", importance_cap=2.0)
    GRPO(model=moe(), reward_fn=zeros, sapo_temperatures=[2, 1], loss_type="sapo")
    GRPO(model=moe(), reward_fn=zeros, vespo_gamma=[1, 2, 2, 3], loss_type="vespo")
    GRPO(model=moe(), reward_fn=zeros, vespo_gamma=[3, 2, 2, 3])  # the default, as YAML writes it
    DPO(model=moe(), simpo_gamma=1.0, loss_type=["ipo", "simpo"])


def test_loss_types_with_commas_are_several():
    assert DPOConfig.from_options(loss_type="ipo, sft").loss.types == ("ipo", "sft")
    assert DPOConfig.from_options(loss_type="ipo").loss.types == ("ipo",)
    with pytest.raises(ValueError, match=r"loss_type must be one of .*, found 'spo'; did you mean"):
        DPOConfig.from_options(loss_type="ipo,spo")
    with pytest.raises(ValueError, match=r"loss_type must be one of"):
        GRPOConfig.from_options(loss_type="grpo,dapo")


# ---- the guide ----


def test_from_checkpoint_ignores_env_id(tmp_path):
    DPO(model=moe()).save(tmp_path / "checkpoint.pt")
    with pytest.warns(UserWarning, match="env_id has no effect"):
        assert DPO.from_checkpoint(str(tmp_path / "checkpoint.pt"), env_id="unused").name == "DPO"
