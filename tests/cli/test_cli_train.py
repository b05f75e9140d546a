"""`strop train` and `strop generate` as a user calls them, in this process: torch is loaded once."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
from tiny_qwen2 import tiny_qwen2

from strop.cli import generate, main
from strop.cli.job import JobConfig, load_data, load_function, load_rewards, shaped
from strop.cli.options import described, options_of, parse_settings, parse_value, read_config
from strop.cli.train import ALGORITHMS, algorithm_class, gather
from strop.config import OptimConfig
from strop.distributed import World
from strop.report.runs import load_run
from strop.tasks import load_task

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = ["--model", "moe:tiny", "--set", "model_options.hidden_dim=16", "--set", "model_options.num_layers=1", "--task", "addition",
        "--set", "task_options.digits=1", "--set", "model_options.max_seq_len=16", "--batch-size", "4", "--num-rows", "40"]  # fmt: skip
GENERATING = ["--max-new-tokens", "3", "--group-size", "2", "--num-eval-rows", "4"]
pytestmark = pytest.mark.usefixtures("elsewhere")


def metrics(folder):
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def write_rows(name, rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def trained(strop):
    """Run `strop train` with a command line in words, which must succeed, and return the metrics of its run."""

    def run(words, *options, output="run"):
        code, _, err = strop("train", *words.split(), *options, "--output", output)
        assert code == 0, err
        return metrics(output)

    return run


def failed(found, says):
    """Hold what a command returned: it ended with 1, and says this."""
    code, _, err = found
    assert code == 1
    assert says in err


# ---- options ----


def test_options_are_the_fields_of_the_config():
    config = algorithm_class("grpo").Config
    options = {option.flag: option for option in options_of(config, "GRPO")}
    named = "--group-size --learning-rate --max-new-tokens --loss-type --lora-r --mask-truncated"
    assert set(named.split()) <= options.keys()
    assert options["--learning-rate"].default == config().optim.learning_rate
    assert options["--lora-r"].path == "lora.r"
    assert options["--mask-truncated"].is_switch
    assert "completions sampled for each prompt" in options["--group-size"].help
    assert "--optim" not in options


def test_help_of_fields_is_read_from_the_docstring():
    told = described(JobConfig)
    assert told["eval_split"] == "which split of a task or dataset is held out"
    optim = described(OptimConfig)
    assert optim["betas"] == optim["eps"] == "AdamW's own; sgd and adafactor have none"
    assert told["reward"].startswith("file.py:function or package.module:function;")
    assert set(told) == set(JobConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("1e-4", 1e-4), ("none", None), ("true", True), ("0.2,0.28", [0.2, 0.28]), ("[1, 2]", [1, 2]), ("cosine", "cosine"), ("a, b", "a, b"),
     (" 1 ", " 1 "), ("1_000", "1_000"), ("١", "١"), ("1,1_0", [1, "1_0"]), ("nan", "nan")],
)  # fmt: skip
def test_values_from_text(text, value):
    assert parse_value(text) == value


def test_options_of_text_stay_text():
    options = options_of(algorithm_class("grpo").Config, "")
    settings = parse_settings(["advantage_scale=none", "optim.eps=1e-6", "clip-eps=0.1,0.3", "autocast=none"], options)
    assert settings == {"advantage_scale": "none", "optim.eps": 1e-6, "clip_eps": [0.1, 0.3], "autocast": None}


def test_file_then_settings_then_command_line(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(
        "model: moe:tiny\nlearning_rate: 1e-3\noptim: {weight_decay: 0.5}\nrun:\n  batch_size: 3\ntask_options: {digits: 1}\n"
    )
    config_class = algorithm_class("sft").Config
    job, config = gather(config_class, path, ["weight_decay=0.25", "task_options.x=2"], {"batch_size": 7})
    assert (job.model, job.task_options) == ("moe:tiny", {"digits": 1, "x": 2})
    assert (config.optim.learning_rate, config.optim.weight_decay, config.run.batch_size) == (1e-3, 0.25, 7)


def test_a_file_may_merge_what_it_has_elsewhere(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("optim: &o {learning_rate: 0.5, eps: 0.25}\nrun: {seed: 3}\nmodel_options: {<<: *o, eps: 1}\n")
    job, _ = gather(algorithm_class("sft").Config, path)
    assert job.model_options == {"learning_rate": 0.5, "eps": 1}


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("lerning_rate: 1", ValueError, r"a\.yaml: 'lerning_rate' is no option of SFT; did you mean 'learning_rate'\?"),
        ("optim: {lr: 1}", ValueError, r"a\.yaml: 'optim\.lr' is no option"),
        ("batch_size: many", TypeError, r"a\.yaml: run\.batch_size must be a whole number in plain .*'many'"),
        ("modle: x", ValueError, r"a\.yaml: 'modle' is no option of SFT; did you mean 'model'\?"),
        ("model: x\nmodel: y", ValueError, r"a\.yaml, line 2: 'model' is there twice"),
        ("run:\n  seed: 1\n  seed: 2", ValueError, r"a\.yaml, line 3: 'seed' is there twice"),
        ("a: [1", ValueError, r"a\.yaml, line 1: not YAML"),
        ("- 1", ValueError, r"a\.yaml must hold options \(name: value\), found list"),
        ("", ValueError, "found nothing"),
        ("model: \udcff", ValueError, r"a\.yaml must be UTF-8 text"),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path, text, error, match):
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(error, match=match):
        gather(algorithm_class("sft").Config, path)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_example_is_understood(path, monkeypatch):
    monkeypatch.chdir(EXAMPLES.parent)
    told = path.read_text()
    command = re.search(rf"strop train ([\w-]+) --config examples/{path.name}", told)[1]
    assert command in ALGORITHMS
    job, config = gather(algorithm_class(command).Config, path)
    assert job.output == f"runs/{path.stem}"
    assert job.data is None or Path(job.data).is_file()
    if job.environment is None:
        load_rewards(job, None)
    assert f"strop train {command} --config examples/{path.name}" in told
    assert config.to_dict() == algorithm_class(command).Config.from_options(config.to_dict()).to_dict()
    assert read_config(path)


# ---- parts ----


def test_columns_get_new_names_and_a_template_needs_no_prompt():
    rows = [{"question": "1+1", "label": "2", "id": 7}]
    assert shaped(rows, JobConfig(map="prompt=question, answer=label")) == [{"prompt": "1+1", "answer": "2", "id": 7}]
    assert shaped(rows, JobConfig(map=("prompt=question", "answer=label")))[0]["answer"] == "2"
    assert shaped(rows, JobConfig(template="Q: {question}"))[0] == {**rows[0], "prompt": "Q: 1+1"}
    swapped = shaped([{"prompt": "a", "answer": "b"}], JobConfig(map="prompt=answer,answer=prompt"))
    assert swapped == [{"prompt": "b", "answer": "a"}]
    for given, match in [
        ("prompt=questoin", r"^map: rows\[0\] has no column 'questoin', found question, label, id$"),
        ("label=question", r"^map: rows\[0\] has a column 'label' already"),
        ("question", "^map must be new=old.*found 'question'$"),
        ("a=question,a=label", "^map must be new=old, each new name once"),
    ]:
        with pytest.raises(ValueError, match=match):
            shaped(rows, JobConfig(map=given))
    with pytest.raises(
        ValueError, match=r"^template '\{prompt\}' must use the columns question, label, id, found 'prompt'$"
    ):
        shaped(rows, JobConfig(template="{prompt}"))


def test_loggers_are_closed_after_the_run(strop, monkeypatch):
    told = []
    fake = types.ModuleType("trackio")
    fake.init = lambda **options: told.append("began")
    fake.log = lambda metrics, step: told.append(step)
    fake.finish = lambda: told.append("finished")
    monkeypatch.setitem(sys.modules, "trackio", fake)
    code, _, err = strop("train", "sft", "--model", "moe:tiny", "--task", "addition", "--num-rows", 8, "--log", "trackio",
                         "--num-eval-rows", 0, "--num-steps", 2, "--output", "run")  # fmt: skip
    assert code == 0, err
    assert told == ["began", 1, 2, "finished"]


def test_a_hub_that_cannot_be_reached_costs_no_run(strop, monkeypatch):
    def unreachable(self, *_, **__):
        raise ConnectionError("Name or service\nnot known")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", unreachable)
    code, out, err = strop("train", "sft", "--model", "moe:tiny", "--task", "addition", "--num-rows", 8,
                           "--num-eval-rows", 0, "--num-steps", 1, "--output", "run", "--push-to-hub", "me/mine")  # fmt: skip
    assert (code, out) == (1, "run\n")
    assert err.splitlines()[-1] == (
        "strop: RuntimeError: the run is complete and its model is in run/final, but me/mine could not be uploaded: "
        "Name or service not known. To try again: hf upload me/mine run/final"
    )
    assert Path("run/final/model.safetensors").exists()


def test_streamed_data_trains_to_the_same_weights(strop, trained):
    """As rows of a CSV file that are read at once; the columns have other names."""
    rows = [{"question": f"{i}+{i}=", "label": str(2 * i)} for i in range(12)]
    write_rows("rows.jsonl", rows)
    Path("rows.csv").write_text("question,label\n" + "".join(f"{i}+{i}=,{2 * i}\n" for i in range(12)))
    words = "sft --model moe:tiny --task addition --map prompt=question,completion=label --num-steps 3 --batch-size 5"
    trained(words, "--data", "rows.csv", output="kept")
    assert json.loads(Path("kept/run.json").read_text())["num_rows"] == 12
    trained(words, "--data", "rows.jsonl", "--stream", output="streamed")
    assert Path("kept/final/model.safetensors").read_bytes() == Path("streamed/final/model.safetensors").read_bytes()
    failed(strop("train", "sft", *TINY, "--stream"), "stream needs data, found none")


@pytest.mark.parametrize("command", ["sft", "grpo"])
def test_a_dry_run_takes_a_step_and_writes_nothing(command, strop):
    sampling = ["--max-new-tokens", 4, "--group-size", 2] if command == "grpo" else []
    code, out, err = strop("train", command, "--model", "moe:tiny", "--task", "addition", "--batch-size", 4, "--num-rows", 40,
                           "--num-eval-rows", 5, "--num-epochs", 3, "--output", "run", "--dry-run", *sampling)  # fmt: skip
    assert code == 0, err
    assert f"{command}: 40 rows, MoEForCausalLM of " in out
    assert "a step: " in out
    assert "30 steps: about 0:0" in out
    assert re.search(r"memory at its peak: \d+\.\d\d GB", out)
    assert re.search(r"held out: 5 rows; of a batch eval/\w+", out)
    assert out.endswith("nothing was written\n")
    assert list(Path().iterdir()) == []


def test_only_the_first_process_reports_a_dry_run(strop, monkeypatch):
    monkeypatch.setattr("strop.training.trainer.world", lambda: World(rank=1))
    code, out, err = strop("train", "sft", *TINY, "--num-steps", 1, "--num-eval-rows", 0, "--dry-run")
    assert (code, out) == (0, ""), err


def test_only_the_first_process_reads_standard_input(monkeypatch):
    """They have one between them, and the others are told what it held."""

    class Other(World):
        def from_first(self, call):
            return [{"prompt": "told", "completion": "by the first"}]

    monkeypatch.setattr("strop.distributed.world", Other)
    monkeypatch.setattr(sys, "stdin", None)
    assert load_data(JobConfig(data="-"), None) == [{"prompt": "told", "completion": "by the first"}]


def test_the_best_is_kept_and_a_run_without_progress_ends(strop):
    options = ["sft", *TINY, "--learning-rate", "0", "--eval-every", "1"]
    best = ["--num-eval-rows", "4", "--num-steps", "9", "--output", "run", "--best", "eval/loss", "--patience", "2"]
    code, _, err = strop("train", *options, *best)
    assert code == 0, err
    assert "stopped: eval/loss has not improved on" in err
    assert [row["step"] for row in metrics("run") if "loss" in row] == [1, 2]
    assert Path("run/checkpoints/best.safetensors").exists()
    failed(strop("train", *options, "--num-eval-rows", 0, "--best", "eval/loss"), "best needs held-out rows")
    failed(strop("train", *options, "--patience", 2), "patience needs best")


def test_overwrite(strop):
    """It removes an earlier run, its TensorBoard file too; a run then goes on with the same rows."""
    command = ["train", "sft", *TINY, "--num-eval-rows", "0", "--output", "run"]
    for steps in (3, 2):
        code, _, err = strop(*command, "--num-steps", steps, "--overwrite", "--log", "tensorboard")
        assert code == 0, err
        assert len(list(Path("run/tensorboard").iterdir())) == 1
        assert len(metrics("run")) == steps
    failed(strop(*command, "--num-steps", 2), "--resume goes on with it, --overwrite removes it")
    failed(strop(*command, "--num-steps", 2, "--overwrite", "--resume"), "give one of them")
    assert strop(*command, "--num-steps", 3, "--resume")[0] == 0


def test_prompts_through_template_and_chat():
    job = JobConfig(template="What is {prompt} ({level})?", chat=True)
    (row,) = shaped([{"prompt": "1+1", "completion": "2", "level": 3}], job)
    assert row["prompt"] == [{"role": "user", "content": "What is 1+1 (3)?"}]
    assert row["completion"] == [{"role": "assistant", "content": "2"}]
    with pytest.raises(ValueError, match="must use the columns prompt, found 'level'"):
        shaped([{"prompt": "x"}], job)
    for row, found in [
        ({"prompt": None}, "None"),
        ({"prompt": [{"role": "user", "content": "x"}]}, r"\[{'role': 'user', 'content': 'x'}\]"),
        ({"prompt": [1, 2]}, r"\[1, 2\]"),
    ]:
        with pytest.raises(ValueError, match=rf"^template needs a text in rows\[0\]\['prompt'\], found {found}$"):
            shaped([row], job)
    with pytest.raises(ValueError, match=r"^chat needs a text in rows\[0\]\['prompt'\], found \[{'role': .*\]$"):
        shaped([{"prompt": [{"role": "user", "content": "x"}]}], JobConfig(chat=True))


def test_functions_by_name(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("LIMIT = 3\ndef good(completions):\n    return [LIMIT for _ in completions]\n")
    assert load_function(f"{path}:good", "reward")(["a", "b"]) == [3, 3]
    assert load_function("math:floor", "reward")(2.5) == 2
    for name, error, match in [
        (f"{path}:god", ValueError, "has no function 'god'; did you mean 'good'"),
        (f"{path}:LIMIT", TypeError, "must be a function, found int"),
        ("nowhere.py:f", FileNotFoundError, "no such file for reward: nowhere.py"),
        ("nowhere:f", ValueError, r"no module 'nowhere' .*nowhere\.py"),
        ("f", ValueError, r"must be file\.py:function"),
    ]:
        with pytest.raises(error, match=match):
            load_function(name, "reward")


@pytest.fixture
def reward_file(tmp_path, monkeypatch):
    """Writes a reward file into a folder of its own, with modules beside it; what they import is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(text, **beside):
        folder = tmp_path / "rewards"
        folder.mkdir(exist_ok=True)
        for name, content in {"mine": text, **beside}.items():
            (folder / f"{name}.py").write_text(content)
        return folder / "mine.py"

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_reward_file_imports_modules_beside_it(reward_file, monkeypatch):
    """Also later, from within the function. They do not come before installed ones then."""
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    path = reward_file(
        "import strop_beside\n"
        "def good(completions):\n"
        "    import strop_later, colorsys\n"
        "    return [strop_beside.VALUE + strop_later.VALUE + colorsys.ONE_THIRD for _ in completions]\n",
        strop_beside="VALUE = 1\n", strop_later="VALUE = 20\n", colorsys="ONE_THIRD = None\n",
    )  # fmt: skip
    good = load_function(f"{path}:good", "reward")
    assert good(["a", "b"]) == [21 + 1 / 3] * 2
    assert sys.path[-1] == str(path.parent)
    load_function(f"{path}:good", "reward")
    assert sys.path.count(str(path.parent)) == 1


@pytest.mark.parametrize(
    ("text", "beside", "says"),
    [
        ("x = 1\nimport no_such_module\n", {}, "mine.py, line 2: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def f(:\n", {}, "mine.py, line 1: SyntaxError: invalid syntax"),
        ("\n\n1 / 0\n", {}, "mine.py, line 3: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)\n", {}, "mine.py, line 2: SystemExit: 3"),
        ("import strop_beside\n", {"strop_beside": "a = 1\nb = a.c\n"},
         "strop_beside.py, line 2: AttributeError: 'int' object has no attribute 'c'"),
        ("import strop_beside\n", {"strop_beside": "(\n"}, "strop_beside.py, line 1: SyntaxError: '(' was never closed"),
    ],
)  # fmt: skip
def test_a_reward_file_that_fails_is_named_with_the_line(reward_file, text, beside, says):
    path = reward_file(text, **beside)
    with pytest.raises(ImportError) as caught:
        load_function(f"{path}:f", "reward")
    assert str(caught.value) == f"reward: {path} cannot be imported: {says}"
    assert str(path.parent) not in sys.path


def test_a_module_that_fails_is_told_from_one_that_is_not_there(reward_file, monkeypatch):
    monkeypatch.syspath_prepend(reward_file("import no_such_module\n").parent)
    says = r"reward: mine cannot be imported: mine\.py, line 1: ModuleNotFoundError: No module named 'no_such_module'"
    with pytest.raises(ImportError, match=says):
        load_function("mine:f", "reward")


def test_example_rewards_by_hand():
    right = load_function(f"{EXAMPLES / 'rewards' / 'arithmetic.py'}:right_number", "reward")
    only = load_function(f"{EXAMPLES / 'rewards' / 'arithmetic.py'}:nothing_else", "reward")
    texts = ["1+2 = 3", "3", "4", "three", "3 or 4"]
    assert right(texts, ["3"] * 5) == [1, 1, 0, 0, 0]
    assert only(texts) == [0, 1, 1, 0, 0]


# ---- runs ----


def test_sft_then_grpo_then_generate_then_report(strop):
    code, out, err = strop(
        "train", "sft", *TINY, "--num-steps", 3, "--learning-rate", "1e-2", "--num-eval-rows", 4, "--output", "runs/a"
    )
    assert (code, out) == (0, "runs/a\n"), err
    assert "strop report runs/a" in err
    assert [m["step"] for m in metrics("runs/a") if "loss" in m] == [1, 2, 3]
    assert json.loads(Path("runs/a/run.json").read_text())["config"]["optim"]["learning_rate"] == 1e-2

    task = ["--task", "addition", "--set", "task_options.digits=1"]
    code, _, err = strop("train", "grpo", "--model", "runs/a/final", *task, *GENERATING, "--batch-size", 4, "--num-steps", 2,
                         "--samples-every", 1, "--output", "runs/b", "--quiet")  # fmt: skip
    assert (code, err) == (0, "")
    assert all("reward/mean" in m for m in metrics("runs/b") if "loss" in m)

    code, out, err = strop("generate", "--model", "runs/b/final", "--prompt", "1+2=", "--json")
    assert code == 0, err
    assert json.loads(out)["prompt"] == "1+2="
    code, out, err = strop("generate", "--model", "runs/b/final", *task, "--num-rows", 2, "--best-of", 4, "--json")
    answers = [json.loads(line) for line in out.splitlines()]
    assert [a["reward"] for a in answers] == [max(a["rewards"]) for a in answers]
    assert all(len(a["rewards"]) == 4 for a in answers)

    code, out, err = strop("report", "runs/a", "runs/b", "--output", "both.html")
    assert (code, out) == (0, "both.html\n"), err
    assert "Loss, GRPO" in Path("both.html").read_text(encoding="utf-8")
    code, out, _ = strop("report", "runs/b")
    assert (code, out) == (0, "runs/b/report.html\n")


def test_generate_takes_any_character_where_the_terminal_knows_ascii_alone(monkeypatch):
    """Lines of standard input are UTF-8 as files are, and JSON stays JSON."""
    given, answer, out = "2×3 größer\n5\n", {"prompt": "größer", "completion": "×"}, io.BytesIO()
    stdin = io.TextIOWrapper(io.BytesIO(given.encode("utf-8")), encoding="ascii", errors="surrogateescape")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert generate._lines_of_stdin() == ["2×3 größer", "5"]
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii", write_through=True))
    generate._show(answer, as_json=True, alone=True)
    assert json.loads(out.getvalue()) == answer


PAIRS = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "9", "margin": 0.5} for i in range(8)]


def test_dpo_from_a_file(trained):
    write_rows("pairs.jsonl", PAIRS)
    found = trained("dpo --data pairs.jsonl --num-steps 2 --beta 0.5", *TINY)
    assert found[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert json.loads(Path("run/run.json").read_text())["config"]["loss"]["beta"] == 0.5


def test_kto_from_a_file(trained):
    write_rows("labels.jsonl", [{"prompt": f"{i}+1=", "completion": "9", "label": False} for i in range(8)])
    found = trained("kto --data labels.jsonl --undesirable-weight 2 --num-steps 2", *TINY)
    assert found[0]["loss"] == pytest.approx(2 * 0.5, abs=1e-3)


@pytest.fixture
def causal():
    """A folder with a causal LM and a tokenizer, and one with a critic."""
    tokenizer = load_task("addition").tokenizer
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "vocab_size": len(tokenizer)}
    critic = tiny_qwen2("ForSequenceClassification", num_labels=1, **ids)
    for folder, model in (("causal", tiny_qwen2(**ids)), ("critic", critic)):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return "--model causal --device cpu --batch-size 4 --num-steps 2 --quiet"


def test_reward_from_a_file_and_then_grpo(trained, causal):
    """A causal LM's folder becomes a reward model, and that a reward."""
    write_rows("pairs.jsonl", PAIRS)
    assert "preference/accuracy" in trained(f"reward {causal} --data pairs.jsonl", output="runs/r")[0]
    rewarded = "--task addition --reward model:runs/r/final --max-new-tokens 3 --num-eval-rows 0"
    (first, *_) = trained(f"grpo {causal} {rewarded}", output="runs/g")
    assert first["reward/reward_model"] == first["reward/mean"] != 0


def test_ppo_and_distill_by_folders(strop, trained, causal):
    """A value head, then a critic of its own; a teacher as --ref-model."""
    shared = f"{causal} --task addition --max-new-tokens 3 --num-rows 8 --num-eval-rows 0"
    for name, more in (("head", ""), ("own", "--critic critic")):
        assert "value/explained_variance" in trained(f"ppo {shared} {more}", output=name)[1]
    found = trained(f"distill {shared} --ref-model causal --divergence jsd")
    assert found[0]["distill/divergence"] == pytest.approx(0, abs=1e-5)  # the student is the teacher
    failed(strop("train", "distill", *shared.split(), "--output", "none"), "Distill needs a teacher")


def test_online_dpo_with_a_reward(trained):
    Path("short.py").write_text("def short(completions):\n    return [-len(c) for c in completions]\n")
    words = "online-dpo --reward short.py:short --num-steps 1 --max-new-tokens 3 --num-eval-rows 0"
    assert "preference/tied_fraction" in trained(words, *TINY)[0]


def test_several_rewards_with_weights(trained):
    for name, value in (("one", 1.0), ("ten", 10.0)):
        Path(f"{name}.py").write_text(f"def {name}(completions):\n    return [{value}] * len(completions)\n")
    Path("more.py").write_text("def more(completions):\n    return {'two': [2] * len(completions)}\n")
    words = "grpo --reward one.py:one --reward ten.py:ten --reward-weights 1,0.5 --metrics more.py:more --num-steps 1"
    first = trained(words, *TINY, *GENERATING[:-2], "--num-eval-rows", 0)[0]
    assert (first["reward/mean"], first["reward/one"], first["reward/ten"]) == (6.0, 1.0, 10.0)
    assert first["metrics/two"] == 2


def test_ctrl_c_writes_a_checkpoint_and_resume_goes_on(strop, tmp_path):
    (tmp_path / "stop.py").write_text(
        "import os, signal\ncalls = []\n\ndef stop(completions):\n    calls.append(1)\n"
        f"    if len(calls) == 2 and os.environ.get('STOP'):\n        os.kill({os.getpid()}, signal.SIGINT)\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    more = ["--num-eval-rows", "0", "--reward", "stop.py:stop", "--num-steps", "4", "--output", "runs/i"]
    command = ["train", "grpo", *TINY, *GENERATING, *more]
    handler = signal.getsignal(signal.SIGINT)
    os.environ["STOP"] = "1"
    try:
        code, _, err = strop(*command)
    finally:
        del os.environ["STOP"]
    assert code == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert "--resume goes on from there" in err
    assert [p.name for p in Path("runs/i/checkpoints").iterdir()] == ["step-00000002.safetensors"]
    code, _, err = strop(*command)
    assert (code, err) == (
        1,
        "strop: ValueError: runs/i holds a run already: --resume goes on with it, --overwrite removes it, "
        "--output names another folder\n",
    )
    code, _, err = strop(*command, "--resume")
    assert code == 0, err
    assert [m["step"] for m in metrics("runs/i")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["grpo", "--lerning-rate", "1"], 2, "--learning-rate"),
        (["grpo", "--set", "grup_size=1"], 1, "--set 'grup_size' is no option of GRPO; did you mean 'group_size'?"),
        (["grpo", "--config", "no.yaml"], 1, "no such config file: no.yaml"),
        (["grpo", *TINY[:-4], "--batch-size", "0"], 1, "batch_size must be at least 1, found 0"),
        (["grpo", "--task", "addition"], 1, "model must be given"),
        (["grpo", "--model", "moe:tiny"], 1, "data or a task must be given"),
        (["grpo", "--model", "moe:tiny", "--data", "no.jsonl"], 1, "no such file: no.jsonl"),
        (["sft", *TINY, "--eval-data", "no.jsonl", "--num-eval-rows", "0"], 1, "no such file: no.jsonl"),
        (["sft", *TINY, "--num-eval-rows", "-1"], 1, "num_eval_rows must be at least 0, found -1"),
        (["sft", *TINY, "--num-steps", "1_000"], 1, "run.num_steps must be a whole number in plain decimal digits"),
        (["sft", *TINY, "--learning-rate", " 1"], 1, "optim.learning_rate must be a number in plain decimal digits"),
        (["sft", *TINY, "--seed", 2**70], 1, "seed must be at least 0 and below 2**63, found 1180591620717411303424"),
        (["sft", *TINY, "--num-rows", "0"], 1, "num_rows must be at least 1, found 0"),
        (["grpo", "--task", "adition"], 1, "did you mean 'addition'"),
        (["sft", *TINY, "--reward", "a.py:b"], 1, "reward must not be given: sft has none"),
        (["grpo", *TINY, "--critic", "runs/reward/final"], 1, "critic must not be given: grpo has none"),
        (["grpo", *TINY, "--resume"], 1, "--resume needs --output"),
        (["sft", *TINY, "--output", __file__], 1, "output must be a folder, found the file"),
        (["sft", *TINY, "--device", "cuda"], 1, "device must be cpu for a MoEForCausalLM, found 'cuda'"),
        (["sft", *TINY, "--set", "model_options.hiden_dim=3"], 1, "did you mean 'hidden_dim'"),
        (["nonsense"], 2, "No such command 'nonsense'"),
    ],
)
def test_mistakes_are_one_line(strop, arguments, code, says):
    found, out, err = strop("train", *arguments)
    assert (found, out) == (code, "")
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("cuda", "device must be cpu: torch finds no CUDA device here, found 'cuda'"),
        ("gpu", "device must be cpu, cuda, cuda:N, mps or xpu, found 'gpu'"),
    ],
)
def test_a_device_that_is_not_there_is_one_line(strop, monkeypatch, device, says):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    data = ["--model", "org/name", "--task", "addition", "--num-rows", "8", "--device", device]
    for command in (["train", "sft"], ["train", "grpo"], ["generate"]):
        assert strop(*command, *data) == (1, "", f"strop: ValueError: {says}\n")


def test_a_warning_is_one_line(strop):
    strop("report", "nowhere")
    assert warnings.formatwarning("careful", UserWarning, "file.py", 3) == "strop: warning: careful\n"


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["strop", "train", "grpo", "--config", "no.yaml", "--debug"])
    with pytest.raises(FileNotFoundError, match="no such config file"):
        main()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prompt", "x", "--best-of", "2"], "--best-of needs a reward"),
        ([], "give a prompt: --prompt TEXT"),
        (["--prompt", "x", "--data", "y"], "give --prompt or --data, found both"),
        (["--prompt", "x"], "has no tokenizer: give one"),
    ],
)
def test_generate_mistakes(strop, arguments, says):
    code, _, err = strop("generate", "--model", "moe:tiny", *arguments)
    assert code == 1
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("generate", "--seed", "1_000"),
        ("generate", "--num-rows", " 1"),
        ("generate", "--temperature", "1_0"),
        ("generate", "--top-p", "1.5"),
        ("generate", "--best-of", "0"),
        ("demo", "--steps", "1_0"),
        ("demo", "--seed", "-1"),
        ("bench", "--rounds", "٣"),
    ],
)
def test_numbers_of_the_other_commands_are_read_by_the_same_rule(strop, command, flag, value):
    given = {"generate": ["--model", "moe:tiny", "--prompt", "x"], "bench": ["primitives"]}.get(command, [])
    code, out, err = strop(command, *given, flag, value)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert flag in err


def test_numbers_in_a_file_are_read_by_the_same_rule(tmp_path):
    """YAML 1.1 would read 1_000, the octal 010 and 1:30, which is 90."""
    path = tmp_path / "numbers.yaml"
    path.write_text("a: 12\nb: -1.5\nc: 010\nd: 1_000\ne: 1:30\nf: .inf\ng: '7'\nh: 1e-4\ni: [3, 0x10]\n")
    assert read_config(path) == {
        "a": 12, "b": -1.5, "c": 10, "d": "1_000", "e": "1:30", "f": ".inf", "g": "7", "h": "1e-4", "i": [3, "0x10"],
    }  # fmt: skip


def test_report_mistakes(strop, tmp_path):
    code, _, err = strop("report", "nowhere")
    assert (code, err) == (1, "strop: FileNotFoundError: no such run folder: nowhere\n")
    code, _, err = strop("report", tmp_path)
    assert (code, err.count("\n")) == (1, 1)
    assert "is no run: it must hold metrics.jsonl, found nothing" in err


def test_help_lists_the_algorithms_without_torch(strop):
    code, out, _ = strop("train", "--help")
    assert code == 0
    assert all(command in out for command in ALGORITHMS)


def test_out_of_memory_is_one_line_that_says_what_to_lower(strop, monkeypatch):
    import torch

    from strop.rollout.generate import Sampler

    sample, calls = Sampler.__call__, []

    def hungry(*arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity")
        return sample(*arguments, **options)

    monkeypatch.setattr(Sampler, "__call__", hungry)
    command = ["train", "grpo", *TINY, "--max-new-tokens", "3", "--group-size", "2", "--num-steps", "4",
               "--num-eval-rows", "0", "--output", "run"]  # fmt: skip
    code, _, err = strop(*command, "--quiet")
    assert code == 1
    assert err.splitlines() == [
        "strop: OutOfMemoryError: out of memory in sampling completions, step 3 (time/generate): 2.50 GiB asked for; lower "
        "batch_size=4 or group_size=2 or max_new_tokens=3; the run up to step 2 is in "
        f"{Path.cwd()}/"
        "run/checkpoints/step-00000002.safetensors; --resume goes on from there"
    ]
    assert Path("run/checkpoints/step-00000002.safetensors").exists()
    code, out, _ = strop(*command, "--quiet", "--resume")
    assert (code, out.strip()) == (0, "run")
    assert [line["step"] for line in metrics("run") if "loss" in line] == [1, 2, 3, 4]


# ---- runs that must not end in silence ----


@pytest.mark.parametrize("place", ["top", "function"])
def test_a_reward_that_ends_the_program_is_one_line_and_no_success(place, strop, tmp_path):
    exits = "import sys\nsys.exit(0)\n" if place == "top" else ""
    inner = "import sys; sys.exit(0)" if place == "function" else "return [0.0 for c in completions]"
    Path("mine.py").write_text(f"{exits}def reward(completions):\n    {inner}\n")
    code, out, err = strop(
        "train", "grpo", *TINY, *GENERATING, "--reward", "mine.py:reward", "--num-steps", 2, "--output", "run"
    )
    assert code == 1
    assert out == ""
    assert err.strip().splitlines()[-1].startswith("strop: ")
    assert "mine.py, line 2" in err
    assert "exit" in err.lower()
    assert not Path("run", "final").exists()


@pytest.mark.parametrize(("status", "code"), [(0, 1), (3, 3)])
def test_a_reward_that_ends_the_process_is_no_success(status, code):
    """os._exit leaves no chance to any cleanup; the report says that the run is not finished."""
    Path("mine.py").write_text(
        "import os\nsteps = []\ndef reward(completions):\n    steps.append(1)\n    if len(steps) == 3:\n"
        f"        os._exit({status})\n    return [float(len(c)) for c in completions]\n"
    )
    command = ["train", "grpo", *TINY, *GENERATING, "--reward", "mine.py:reward", "--num-steps", 4, "--output", "run"]
    done = subprocess.run([sys.executable, "-m", "strop", *map(str, command)], capture_output=True, text=True)
    assert done.returncode == code
    assert done.stdout == ""
    assert ("os._exit(0) was called at" in done.stderr and "mine.py, line 6" in done.stderr) == (status == 0)
    assert not Path("run", "final").exists()
    assert load_run("run").notes == ["it is not finished: step 1 of 4 is the last one logged"]


def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_loaded(strop):
    code, _, err = strop("train", "sft", "--model", "no/such/model", "--task", "addition", "--output", "/proc/x/y")
    assert code == 1
    assert err.startswith("strop: OSError: output must be a folder that can be written to, found /proc/x/y")
    assert len(err.splitlines()) == 1
    code, _, err = strop("train", "sft", "--model", "/no/such/model", "--task", "addition", "--output", "a/b")
    assert "found no folder /no/such/model" in err
    assert not Path("a").exists()


def test_a_run_in_use_is_refused_in_one_line(strop):
    from strop.training.lock import locked

    command = ["train", "sft", *TINY, "--num-eval-rows", 0, "--num-steps", 1, "--output", "run"]
    assert strop(*command)[0] == 0
    with locked(Path("run")):
        code, _, err = strop(*command[:-4], "--num-steps", 2, "--output", "run", "--resume")
    assert code == 1
    assert len(err.splitlines()) == 1
    assert f"process {os.getpid()} on" in err


def test_allow_changes(strop):
    command = ["train", "grpo", *TINY, *GENERATING, "--output", "run", "--reward", "mine.py:reward"]
    for factor in (1.0, 2.0):
        Path("mine.py").write_text(f"def reward(completions): return [{factor} * len(c) for c in completions]\n")
        if factor == 1.0:
            assert strop(*command, "--num-steps", 1)[0] == 0
    code, _, err = strop(*command, "--num-steps", 2, "--resume")
    assert code == 1
    assert "was begun with another function reward" in err
    assert "--allow-changes goes on" in err
    assert strop(*command, "--num-steps", 2, "--resume", "--allow-changes")[0] == 0
    assert [entry["step"] for entry in metrics("run") if "loss" in entry] == [1, 2]
