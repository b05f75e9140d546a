"""The tests in other environments: what holds on one machine must not hang on its CPU, threads, locale or home folder.

python tests/portable.py            each of ENVIRONMENTS by itself, over FOLDERS: `make test-portable`
python tests/portable.py --short    two passes that hold them all: `make check`
python tests/portable.py NAME ...   those whose name contains one of the words
"""

import os
import subprocess
import sys
import tempfile
import time

# a sum in another order, with other vectors or in other parts, is another sum: each has some of those
ARITHMETIC = {
    "torch without vectors": {"ATEN_CPU_CAPABILITY": "default"},
    "torch with AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "MKL with AVX2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "oneDNN with AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "OpenBLAS with AVX2": {"OPENBLAS_CORETYPE": "Haswell"},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "four threads": {"OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "PASSIVE"},
    "strop without vectors": {"STROP_ISA": "baseline"},
    "strop with AVX2": {"STROP_ISA": "avx2"},
}
# files, text and time, and what one test leaves to the next
SURROUNDINGS = {
    "another hash seed": {"PYTHONHASHSEED": "20011"},
    "another locale and time zone": {"LC_ALL": "de_DE.ISO-8859-1", "TZ": "XXX-13:45"},  # C, where it is not installed
    "a home that cannot be written": {"HOME": "/dev/null/home"},  # below a file: not even by root
    "a bare container": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "HOME": "/nowhere"},
    "the last test first": {"PYTEST_ADDOPTS": "--reverse"},
}
ENVIRONMENTS = ARITHMETIC | SURROUNDINGS
FOLDERS = ["ops", "losses", "algorithms", "rollout", "test_models.py", "test_checkpoint.py"]
OF_ARITHMETIC = ["moe"]
OF_SURROUNDINGS = ["cli", "report", "data", "tasks", "test_logging.py", "test_callbacks.py"]

# the two passes: what computes, writes or reads by itself, once; the others compute by way of these
PASSES = [
    "ops/test_every_operator.py", "ops/test_rows.py", "ops/test_logp.py", "losses", "moe/test_moe_native.py",
    "moe/test_moe_logps.py", "moe/test_moe_mixtral.py", "moe/test_torch.py", "test_models.py",
    "algorithms/test_recorded_runs.py", "algorithms/test_offline_runs.py", "algorithms/test_every_algorithm.py",
    "algorithms/test_grpo.py", "rollout/test_rollout.py", "rollout/test_decoding.py",
    "algorithms/test_runs.py", "algorithms/test_resume.py", "test_checkpoint.py", "test_logging.py", "test_callbacks.py",
    "rollout/test_client.py", "report/test_html_report.py", "cli/test_cli_train.py", "cli/test_data.py", "data", "tasks",
]  # fmt: skip
# not in these passes: graphs that are compiled, processes that are killed, and browsers are the same everywhere
ONCE = [
    "rollout/test_decoding.py::test_a_compiled_model_has_compiled_steps",
    "test_models.py::test_compiled_model_has_the_same_log_probs",
    "algorithms/test_resume.py::test_ten_kills",
    "report/test_html_report.py::test_a_browser_logs_no_messages",
    "report/test_html_report.py::test_samples_by_step_in_a_browser",
    "report/test_html_report.py::test_a_browser_follows_the_run",
]
# of the second pass: requests between threads have no sums of their own, and the first pass has them in a bare container
SERVERS = ["rollout/test_client.py"]
# what does not exclude one another, together
SHORT = {
    "as little as can be": [
        "torch without vectors", "OpenBLAS with AVX2", "one thread", "strop without vectors", "another hash seed",
        "a bare container", "the last test first",
    ],
    "AVX2 and four threads": [
        "torch with AVX2", "MKL with AVX2", "oneDNN with AVX2", "four threads", "strop with AVX2",
        "another locale and time zone", "a home that cannot be written",
    ],
}  # fmt: skip
JOBS = os.environ.get("PYTEST_JOBS", str(os.cpu_count()))


def run(name, environment, *arguments):
    """Whether the tests pass there. The last line of pytest tells, and everything where they do not."""
    command = [sys.executable, "-m", "pytest", "-n", JOBS, "--dist", "worksteal", *arguments]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:  # torch's compiler would take kernels made for another instruction set
        own = os.environ | environment | {"TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = done.stdout.decode("utf-8", "replace").splitlines() or ["nothing was told"]
    if done.returncode:
        print(*lines, sep="\n")
    print(f"{name:<32} {time.perf_counter() - start:6.0f} s   {lines[-1]}", flush=True)
    return done.returncode == 0


def paths(*names):
    return [os.path.join("tests", name) for name in names]


# Triton's interpreter computes with NumPy alone, which has another BLAS in the first pass and nothing else in the second
MORE = {
    "AVX2 and four threads": ["-k", "not triton and not kernels", *(f"--ignore={path}" for path in paths(*SERVERS))]
}


def main():
    if sys.argv[1:] == ["--short"]:
        assert {name for names in SHORT.values() for name in names} == set(ENVIRONMENTS)
        merged = {
            title: {k: v for name in names for k, v in ENVIRONMENTS[name].items()} for title, names in SHORT.items()
        }
        missing = [name for name in (*PASSES, *ONCE, *SERVERS) if not os.path.exists(*paths(name.partition("::")[0]))]
        assert not missing, f"tests/ has no {missing}"
        chosen = [*paths(*PASSES), *(f"--deselect={path}" for path in paths(*ONCE))]
        passed = [run(title, merged[title], *chosen, *MORE.get(title, ())) for title in merged]
    else:
        wanted = [name for name in ENVIRONMENTS if not sys.argv[1:] or any(word in name for word in sys.argv[1:])]
        more = {name: OF_ARITHMETIC if name in ARITHMETIC else OF_SURROUNDINGS for name in wanted}
        passed = [run(name, ENVIRONMENTS[name], *paths(*FOLDERS, *more[name])) for name in wanted]
    sys.exit(not passed or not all(passed))


if __name__ == "__main__":
    main()
