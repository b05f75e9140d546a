"""The commands as a user runs them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import strop
from strop.cli import doctor


def run(*args, **environment):
    command = [sys.executable, "-m", "strop", *args]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


def test_version_and_help():
    assert run("--version").stdout == f"strop {strop.__version__}\n"
    text = run("--help").stdout
    assert all(command in text for command in ("demo", "bench", "doctor"))


def test_doctor_is_content_here_and_without_the_compiled_module():
    assert run("doctor").returncode == 0
    found = run("doctor", STROP_NATIVE="0", COLUMNS="200")
    assert found.returncode == 0
    assert "switched off by STROP_NATIVE=0; the primitives run in NumPy" in found.stdout


def test_doctor_fails_for_what_is_broken():
    found = run("doctor", STROP_BACKEND="tritno", COLUMNS="200")
    assert found.returncode == 1
    assert "STROP_BACKEND asks for 'tritno'; there are triton, torch" in found.stdout
    assert "broken: operator grpo_loss" in found.stdout
    assert "operator logp" in found.stdout.splitlines()[-1]
    found = run("doctor", STROP_BACKEND="nope=torch", COLUMNS="200")
    assert found.returncode == 1
    assert "unknown operator 'nope'" in found.stdout


def test_doctor_reports_a_wrong_setting():
    if doctor._compiled.native is None:
        pytest.skip("needs the compiled module")
    found = run("doctor", STROP_ISA="mmx", COLUMNS="200")
    assert found.returncode == 1
    assert "STROP_ISA must be one of" in found.stdout


def test_doctor_tells_a_broken_module_from_an_absent_one(tmp_path):
    """A copy of the package, without its compiled module and with something else in its place."""
    source = Path(strop.__file__).parent
    shutil.copytree(source, tmp_path / "strop", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    program = "import sys; sys.meta_path = [f for f in sys.meta_path if 'Redirect' not in type(f).__name__]; sys.path.insert(0, '.');"
    command = [sys.executable, "-c", program + "from strop.cli import main; sys.argv = ['strop', 'doctor']; main()"]

    def doctor_there():
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}
        )

    absent = doctor_there()
    assert absent.returncode == 0, absent.stderr
    assert "not built" in absent.stdout
    (tmp_path / "strop" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"not a library")
    broken = doctor_there()
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


def test_doctor_notices_a_package_that_does_not_import(monkeypatch):
    def fail(name):
        raise OSError("undefined symbol")

    monkeypatch.setattr(doctor.importlib, "import_module", fail)
    found = {f.part: f for f in doctor.packages()}
    assert found["torch"].status == "broken"
    assert "does not import: undefined symbol" in found["torch"].detail


def test_errors_are_one_line():
    found = run("bench", "nope")
    assert found.returncode == 1
    assert (
        found.stderr
        == "strop: ValueError: unknown suite 'nope'; there are primitives, engines, convergence, losses, step, demo, learning\n"
    )
    assert "Traceback" in run("--debug", "bench", "nope").stderr
    assert (
        run("bench", "primitives", "--rounds", "1").stderr
        == "strop: ValueError: rounds must be at least 3 for an interval, found 1\n"
    )
    assert run("bench", "primitives", "--only", "zebra").stderr.startswith(
        "strop: ValueError: no case of primitives contains 'zebra'"
    )
    assert run("nope").returncode == 2


def test_bench_writes_its_result(tmp_path):
    path = tmp_path / "found.json"
    program = (
        "import sys; from strop.bench.suites import primitives as p; from strop.cli import main;"
        "p.ADVANTAGE_SHAPES = p.ADVANTAGE_SHAPES[:1]; p.KL_SHAPES = []; p._packing = lambda *a: [];"
        f"sys.argv = ['strop', 'bench', 'primitives', '--rounds', '3', '--output', {str(path)!r}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert [c["work"] for c in found["cases"]] == ["advantages 16×4"] * 2
    assert all(len(c["contenders"]["strop"]["samples_ns"]) == 3 for c in found["cases"])


def test_bench_of_curves(tmp_path):
    """A suite without timings has a table of its own."""
    path = tmp_path / "found.json"
    program = (
        "import sys; from strop.bench.suites import convergence as c; from strop.cli import main; from dataclasses import replace;"
        "from strop.bench.moe_contenders import StropContender; c.contenders = lambda: [StropContender('numpy')];"
        "c.MEMORISE, c.LANGUAGE = (replace(s, batch=2, seq_len=4, num_steps=10) for s in (c.MEMORISE, c.LANGUAGE));"
        f"sys.argv = ['strop', 'bench', 'convergence', '--output', {str(path)!r}]; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "largest difference" in done.stdout
    assert [c["work"] for c in json.loads(path.read_text())["cases"]] == ["memorise: numpy", "language: numpy"]
    assert '"losses": [' in path.read_text()
    assert max(map(len, path.read_text().splitlines())) > 80  # on one line


def test_bench_does_not_start_what_it_could_not_write(tmp_path):
    found = run("bench", "primitives", "--output", str(tmp_path))
    assert found.returncode == 1
    assert found.stderr == f"strop: IsADirectoryError: --output must be a file, found the folder {tmp_path}\n"


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


def test_bench_of_some_cases_writes_nothing(tmp_path):
    found = subprocess.run(
        [sys.executable, "-m", "strop", "bench", "primitives", "--only", "advantages 16", "--rounds", "3"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "advantages 16×4" in found.stdout
    assert list(tmp_path.iterdir()) == []
