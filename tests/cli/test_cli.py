"""The commands as a user runs them, and in this process where another would only load everything once more."""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
from preloaded import strop as run

import strop
from benchmarks import ROOT
from benchmarks.contenders.moe import StropContender
from benchmarks.suites import convergence
from strop.cli import doctor

# a terminal that knows ASCII alone, and nowhere to keep anything
BARE_CONTAINER = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "HOME": "/nowhere"}
# what the package itself is, without a look at the others: those take many times as long to import
ALONE = "import sys; sys.modules['torch'] = None; sys.argv = ['strop', 'doctor'];"
DOCTOR = "from strop.cli import doctor, main; doctor.OPTIONAL.clear(); doctor.operators = lambda: []; main()"


def run_doctor(before="", cwd=None, **environment):
    command = [sys.executable, "-c", f"{ALONE} {before} {DOCTOR}"]
    environment = os.environ | {"COLUMNS": "200"} | environment
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


def test_version_and_help():
    assert run("--version").stdout == f"strop {strop.__version__}\n"
    text = run("--help").stdout
    assert all(command in text for command in ("demo", "bench", "doctor"))


LOADED = "import atexit, sys; atexit.register(lambda: print('LOADED', *sys.modules, file=sys.stderr)); from strop.cli import main; main()"


def loaded_by(*arguments, **environment):
    """The modules a command imported, and what it printed."""
    command = [sys.executable, "-c", LOADED, *arguments]
    found = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert found.returncode == 0, found.stderr
    return set(found.stderr.partition("LOADED")[2].split()), found.stdout


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_of_a_training_command_needs_no_torch(flag):
    modules, text = loaded_by("train", "grpo", flag)
    assert not {"torch", "transformers"} & modules
    assert "--group-size" in text


def test_doctor_imports_torch_and_no_other_package():
    modules, text = loaded_by("doctor")
    assert "torch" in modules
    assert not {"transformers", "peft", "datasets", "matplotlib", "scipy"} & modules
    assert "peft" in text


def test_tab_completion_knows_the_options():
    words = {"_STROP_COMPLETE": "complete_bash", "COMP_WORDS": "strop train grpo --group", "COMP_CWORD": "3"}
    found = subprocess.run([sys.executable, "-m", "strop"], capture_output=True, text=True, env=os.environ | words)
    assert "--group-size" in found.stdout.split()
    assert "--batch-size" not in found.stdout


def test_doctor_passes_with_and_without_the_compiled_module():
    assert run("doctor").returncode == 0
    found = run_doctor(STROP_NATIVE="0")
    assert found.returncode == 0
    assert "switched off by STROP_NATIVE=0; the primitives run in NumPy" in found.stdout


def test_doctor_fails_for_what_is_broken(strop, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(doctor, "OPTIONAL", {})
    monkeypatch.setenv("STROP_BACKEND", "tritno")
    code, out, _ = strop("doctor")
    assert code == 1
    assert "STROP_BACKEND asks for 'tritno'; there are triton, torch" in out
    assert "broken: operator grpo_loss" in out
    assert "operator logp" in out.splitlines()[-1]
    monkeypatch.setenv("STROP_BACKEND", "nope=torch")
    code, out, _ = strop("doctor")
    assert code == 1
    assert "unknown operator 'nope'" in out


def test_doctor_says_how_a_model_is_read_and_why_not_faster(strop, tmp_path, monkeypatch):
    from transformers import BertConfig, BertLMHeadModel, BloomConfig, BloomForCausalLM

    monkeypatch.setenv("COLUMNS", "400")
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    BloomForCausalLM(BloomConfig(**sizes)).save_pretrained(tmp_path / "bloom")
    code, out, _ = strop("doctor", "--model", tmp_path / "bloom")
    assert code == 0
    assert "padded: its forward takes no position_ids" in out
    assert "transformers' generate" in out
    BertLMHeadModel(BertConfig(**sizes, intermediate_size=16)).save_pretrained(tmp_path / "bert")
    code, out, _ = strop("doctor", "--model", tmp_path / "bert")
    assert code == 1
    assert "model must be causal" in out
    assert "broken: model" in out


def test_doctor_reports_a_wrong_setting():
    if doctor._compiled.native is None:
        pytest.skip("needs the compiled module")
    found = run_doctor(STROP_ISA="mmx")
    assert found.returncode == 1
    assert "STROP_ISA must be one of" in found.stdout


def test_doctor_tells_a_broken_module_from_an_absent_one(tmp_path):
    """A copy of the package, without its compiled module and with something else in its place."""
    source = Path(strop.__file__).parent
    shutil.copytree(source, tmp_path / "strop", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    alone = "sys.meta_path = [f for f in sys.meta_path if 'Redirect' not in type(f).__name__]; sys.path.insert(0, '.');"
    absent = run_doctor(alone, tmp_path)
    assert absent.returncode == 0, absent.stderr
    assert "not built" in absent.stdout
    (tmp_path / "strop" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"not a library")
    broken = run_doctor(alone, tmp_path)
    assert broken.returncode == 1
    assert "does not load" in broken.stdout
    assert "NumPy is used instead" in broken.stderr


def test_doctor_notices_wrong_results(monkeypatch):
    if doctor._compiled.native is None:
        pytest.skip("needs the compiled module")
    assert doctor.compiled_module().status == "ok"
    monkeypatch.setattr(strop, "compute_batch_token_kl", lambda p, q: p.sum(1))
    found = doctor.compiled_module()
    assert (found.status, found.detail) == ("broken", "token KL differs from its NumPy twin")


@pytest.mark.parametrize("deep", [False, True])
def test_doctor_notices_a_package_that_does_not_import(deep, monkeypatch):
    def fail(name):
        raise OSError("undefined symbol")

    monkeypatch.setattr(doctor.importlib, "import_module", fail)
    found = {f.part: f for f in doctor.packages(deep)}
    assert found["torch"].status == "broken"
    assert "does not import: undefined symbol" in found["torch"].detail
    assert found["transformers"].status == ("broken" if deep else "ok")


def test_errors_are_one_line(strop):
    found = run("bench", "nope")
    assert found.returncode == 1
    assert (
        found.stderr
        == "strop: ValueError: unknown suite 'nope'; there are primitives, engines, convergence, losses, generation, "
        "processes, step, demo, algorithms, learning\n"
    )
    assert "Traceback" in run("--debug", "bench", "nope").stderr
    wanted = "strop: ValueError: rounds must be at least 3 for an interval, found 1\n"
    assert strop("bench", "primitives", "--rounds", "1") == (1, "", wanted)
    code, _, err = strop("bench", "primitives", "--only", "zebra")
    assert code == 1
    assert err.startswith("strop: ValueError: no case of primitives contains 'zebra'")
    assert strop("nope")[0] == 2


def test_nothing_in_an_error_or_a_warning_steers_the_terminal(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import warnings\ndef reward(completions):\n    warnings.warn('so \\x1b[31m')\n    raise ValueError('no \\x1b]0;t\\x07')\n"
    )
    command = ["train", "grpo", "--model", "moe:tiny", "--task", "sorting", "--num-steps", "1", "--num-eval-rows", "0"]
    found = run(*command, "--reward", f"{tmp_path}/mine.py:reward", "--output", str(tmp_path / "run"))
    assert found.returncode == 1
    assert "strop: warning: so \\x1b[31m" in found.stderr
    assert "ValueError: no \\x1b]0;t\\x07" in found.stderr
    unknown = run("\x1b[31m").stderr
    assert "\\x1b" in unknown
    assert not set(found.stderr + unknown) & {"\x1b", "\x07"}


@pytest.mark.parametrize("arguments", [("train", "grpo", "--help"), ("doctor", "--help")])
def test_a_closed_pipe_is_no_error(arguments):
    """`strop … | head -1`: what is still to be printed goes nowhere, and nothing is said of it."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "strop", *arguments]
    found = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (found.returncode, found.stderr) == (1, "")


def test_bench_of_curves(strop, tmp_path, monkeypatch):
    """A suite without timings has a table of its own."""
    path = tmp_path / "found.json"
    monkeypatch.setattr(convergence, "contenders", lambda: [StropContender("numpy")])
    for name in ("MEMORISE", "LANGUAGE"):
        small = replace(getattr(convergence, name), batch=2, seq_len=4, num_steps=10)
        monkeypatch.setattr(convergence, name, small)
    code, out, err = strop("bench", "convergence", "--output", path)
    assert code == 0, err
    assert "largest difference" in out
    assert [c["work"] for c in json.loads(path.read_text())["cases"]] == ["memorise: numpy", "language: numpy"]
    assert '"losses": [' in path.read_text()
    assert max(map(len, path.read_text().splitlines())) > 80  # on one line


def test_bench_does_not_start_what_it_could_not_write(strop, tmp_path):
    code, _, err = strop("bench", "primitives", "--output", str(tmp_path))
    assert code == 1
    assert err == f"strop: IsADirectoryError: --output must be a file, found the folder {tmp_path}\n"


def test_bench_can_be_interrupted(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "strop", "bench", "primitives"], cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a shell may have told its background jobs, and with them these tests, to ignore Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    next(line for line in process.stderr if "advantages" in line)  # it has begun with the first case
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted after" in output
    assert list(tmp_path.iterdir()) == []


def test_bench_of_an_installed_package_says_where_the_benchmarks_are(strop, tmp_path, monkeypatch):
    """An installed package has no benchmarks beside it; in the folder of a checkout there are some."""
    monkeypatch.setattr("strop.__file__", str(tmp_path / "lib" / "site-packages" / "strop" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    code, _, error = strop("bench", "primitives")
    assert code == 1
    assert error == (
        "strop: FileNotFoundError: the benchmarks are not installed with strop; clone its repository and run strop bench in "
        "that folder\n"
    )
    monkeypatch.chdir(ROOT)
    assert "unknown suite 'nope'" in strop("bench", "nope")[2]


def test_bench_of_some_cases_writes_nothing_and_characters_a_terminal_lacks_as_escapes(tmp_path):
    found = subprocess.run(
        [sys.executable, "-m", "strop", "bench", "primitives", "--only", "advantages 16", "--rounds", "3"],
        cwd=tmp_path, capture_output=True, text=True, env=os.environ | BARE_CONTAINER,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert r"advantages 16\xd74" in found.stdout
    assert list(tmp_path.iterdir()) == []


def test_bench_of_some_cases_is_written_where_it_is_told(strop, tmp_path):
    code, *_ = strop(
        "bench", "primitives", "--only", "advantages 16", "--rounds", "3", "--output", str(tmp_path / "x.json")
    )
    assert code == 0
    found = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert found["command"] == "strop bench primitives --only 'advantages 16' --rounds 3"
    assert [case["work"] for case in found["cases"]] == ["advantages 16×4"] * 2
    assert all(len(case["contenders"]["strop"]["samples_ns"]) == 3 for case in found["cases"])


def test_the_name_of_a_file_is_printed_as_it_is(tmp_path):
    """Also where the terminal's encoding does not know its characters: a shell may go on with it."""
    name = "größe".encode()
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n', encoding="utf-8")
    command = [sys.executable, "-m", "strop", "report", name]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, env=os.environ | BARE_CONTAINER)
    assert found.returncode == 0, found.stderr
    assert found.stdout.decode("utf-8") == "größe/report.html\n"


def test_files_are_written_and_read_as_utf8():
    """Whatever the locale: every call that opens one as text says so."""
    forgotten = []
    for path in sorted(Path(strop.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            mode = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            is_file = isinstance(node.func, ast.Name) or len(mode) == len(node.args)  # not os.open, nor our own
            opens = name == "open" and is_file and not any("b" in text for text in mode)
            as_text = any(k.arg == "text" for k in node.keywords) and name in ("run", "Popen", "check_output")
            if name in ("read_text", "write_text") or opens or as_text:
                forgotten.append(f"{path.name}:{node.lineno}")
    assert not forgotten


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--num-generations", "is group_size"),
        ("--max-completion-length", "is max_new_tokens"),
        ("--nothing", "--nothing ("),
    ],
)
def test_flags_of_trl_get_a_hint(flag, told, strop):
    code, _, err = strop("train", "grpo", flag, "4")
    assert (code, told in err) == (2, True)


def test_doctor_lists_what_is_used(monkeypatch):
    """Loggers, GGUF and bitsandbytes always, Triton only where torch is built for a GPU."""
    import torch

    monkeypatch.setattr(doctor.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    found = {finding.part: finding for finding in doctor.packages(deep=False)}
    assert {"gguf", "tensorboard", "trackio", "wandb", "bitsandbytes", "uvicorn"} <= found.keys()
    assert "triton" not in found
    assert {finding.part: finding.detail for finding in doctor.operators()}["operator linear_logp"] == "chunked, torch"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "triton" in {finding.part for finding in doctor.packages(deep=False)}

    def absent(name):
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", absent)
    found = {finding.part: finding for finding in doctor.packages(deep=False)}
    assert found["wandb"].detail == "not installed; needed for: --log wandb"
    assert found["bitsandbytes"].detail == "not installed; needed for: --quantize nf4"


def test_doctor_says_that_other_devices_are_not_tested(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    found = {finding.part: finding for finding in doctor.operators()}
    assert found["gpu"].detail == (
        "--device mps: torch's own operators, none of strop's kernels; strop is not tested on it"
    )
