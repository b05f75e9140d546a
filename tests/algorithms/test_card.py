"""The model card of a run, and the way to the Hub."""

import json

import pytest
from tiny_qwen2 import tiny_qwen2
from trained_models import tiny_moe

from strop.algorithms.sft import SFT
from strop.training.card import sparkline

ROWS = [{"prompt": [2 + i], "completion": [3 + i, 1]} for i in range(4)]


def test_the_card_says_what_was_measured(tmp_path):
    sft = SFT(model=tiny_moe(), batch_size=4, learning_rate=1e-2, eval_every=1)
    history = sft.train(ROWS, eval_dataset=ROWS, num_steps=3, output_dir=tmp_path / "run")
    card = (tmp_path / "run" / "final" / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: transformers\ntags: [strop, sft]\n---\n\n# run\n")
    first, last = history.evaluations[0]["eval/loss"], history.evaluations[-1]["eval/loss"]
    assert f"| eval/loss | {first:.4g} | {last:.4g} |" in card
    losses = history.values("loss")
    assert f"| loss | {losses[0]:.4g} | `{sparkline(losses)}` | {losses[-1]:.4g} |" in card
    options = json.loads(card.partition("```json\n")[2].partition("```")[0])
    assert options["config"]["optim"]["learning_rate"] == 1e-2
    assert "3 steps on 4 rows" in card


def test_the_card_of_an_adapter_lies_beside_it(tmp_path):
    tiny_qwen2().save_pretrained(tmp_path / "base")
    sft = SFT(model=str(tmp_path / "base"), lora={"r": 2}, batch_size=4)
    sft.train(ROWS, num_steps=1, output_dir=tmp_path / "run")
    card = (tmp_path / "run" / "final" / "adapter" / "README.md").read_text(encoding="utf-8")
    assert " of them trained, from " in card
    assert card.startswith("---\nlibrary_name: peft\ntags: [strop, sft, lora]\n---\n")
    assert "base_model" not in card  # a folder of this machine is no name of the Hub
    assert not (tmp_path / "run" / "final" / "README.md").exists()


def test_the_card_of_an_adapter_names_a_base_of_the_hub(tmp_path):
    """As a loaded model's config has it: the name it was asked for by."""
    model = tiny_qwen2()
    model.config._name_or_path = "org/base"
    SFT(model=model, lora={"r": 2}, batch_size=4).train(ROWS, num_steps=1, output_dir=tmp_path / "run")
    card = (tmp_path / "run" / "final" / "adapter" / "README.md").read_text(encoding="utf-8")
    head = card.split("---")[1]
    assert 'base_model: "org/base"' in head
    assert "library_name: peft" in head


@pytest.mark.parametrize(
    ("values", "drawn"),
    [([0.0, 1.0], "▁█"), ([3.0, 3.0], "▁▁"), ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"), ([1.0] * 600 + [2.0] * 600, "▁" * 30 + "█" * 30)],
)  # fmt: skip
def test_curves_in_characters(values, drawn):
    assert sparkline(values) == drawn


class Hub:
    """In place of huggingface_hub.HfApi: what it is asked."""

    asked = ()

    def create_repo(self, repo_id, private, exist_ok):
        self.asked.append((repo_id, private, exist_ok))
        return f"https://example.test/{repo_id}"

    def upload_folder(self, repo_id, folder_path, commit_message):
        from pathlib import Path

        self.asked.append((repo_id, sorted(path.name for path in Path(folder_path).iterdir()), commit_message))


def test_push_to_hub(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "asked", [])
    sft = SFT(model=tiny_moe())
    assert sft.push_to_hub("me/mine") == "https://example.test/me/mine"
    made, uploaded = Hub.asked
    assert made == ("me/mine", True, True)
    assert {"config.json", "model.safetensors"} <= set(uploaded[1])
    (tmp_path / "README.md").touch()
    sft.push_to_hub("me/mine", private=False, folder=tmp_path)
    assert Hub.asked[2:] == [("me/mine", False, True), ("me/mine", ["README.md"], "SFT by strop")]
