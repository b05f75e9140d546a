"""Reports of long runs and of very many: time, memory, what is kept, and that a growing file is read once."""

import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import numpy as np
import pytest

from strop.report import build_report, load_run, load_runs
from strop.report.curves import value_axis
from strop.report.lines import BLOCK, Columns, LineReader
from strop.report.page import MAX_DRAWN, drawn
from strop.report.runs import MANY_RUNS, RunReader
from strop.report.svg import escape
from strop.report.watch import Watch

NAMES = [f"metric/{i}" for i in range(20)]


def write(folder, rows, samples=(), **header):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"algorithm": "grpo", "config": {}, **header}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return folder


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def measured(folder, tmp_path):
    """CPU seconds, peak MB and the page of a report made in a process of its own."""
    program = (
        "import resource, sys\nfrom strop.report import load_runs, write_report\n"
        "path = write_report(load_runs([sys.argv[1]]), sys.argv[2])\nused = resource.getrusage(resource.RUSAGE_SELF)\n"
        "status = open('/proc/self/status').read()\n"  # ru_maxrss would count the process that started this one
        "print(used.ru_utime + used.ru_stime, int(status.split('VmHWM:')[1].split()[0]) / 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder), str(tmp_path / "report.html")], capture_output=True, encoding="utf-8",
        timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True,
    )  # fmt: skip
    seconds, megabytes = map(float, done.stdout.split())
    return seconds, megabytes, (tmp_path / "report.html").read_text(encoding="utf-8")


@needs_proc
def test_a_hundred_thousand_steps(tmp_path):
    """50 MB of metrics: bounds of a quarter of those for 200 MB, and the start of Python; the spike is on the page."""
    rng = np.random.default_rng(0)
    values = rng.random((100_000, len(NAMES)))
    values[77_777, 0] = 15.0
    folder = write(tmp_path / "run", [])
    template = '{"step": %d, "time": %d, ' + ", ".join(f'"{name}": %.9g' for name in NAMES) + "}\n"
    with (folder / "metrics.jsonl").open("w") as file:
        for i, row in enumerate(values):
            file.write(template % (i + 1, i, *row))
    seconds, megabytes, text = measured(folder, tmp_path)
    assert seconds < 10  # about 2 on a quiet core
    assert megabytes < 200
    assert len(text) < 1_000_000
    assert "100,000 steps in" in text
    series = load_run(folder).series("metric/0")
    np.testing.assert_allclose(series.values, values[:, 0], rtol=1e-8)
    chart = text[text.index("<h3>metric/0") :]
    raw = chart[chart.index('class="raw" points="') :].split('"')[3]
    assert min(float(pair.split(",")[1]) for pair in raw.split()) == pytest.approx(10)  # the top tick, 15


@needs_proc
def test_a_thousand_runs(tmp_path):
    names = ("loss", "reward/mean", "kl", "time/generate")
    for i in range(1000):
        rows = [{"step": s, "time": 1.0 * s, **dict.fromkeys(names, i / 1000)} for s in range(1, 31)]
        samples = [{"step": 10, "prompt": "q", "completion": f"of run {i}.", "reward": 1.0}]
        write(tmp_path / "runs" / f"r{i:04d}", rows, samples, config={"seed": i, "same": 1}, command=f"c{i}")
    seconds, megabytes, text = measured(tmp_path / "runs", tmp_path)
    assert seconds < 20  # about 3 on a quiet core
    assert megabytes < 300
    assert len(text) < 3_000_000
    table = text[text.index('<table class="stack sortable">') :]
    table = table[: table.index("</table>")]
    assert table.count("<tr>") == 1001
    assert table.index("r0999") < table.index("r0998") < table.index("r0000")  # the best reward first
    assert text.count("<polyline") <= MAX_DRAWN * (len(names) + 2)
    assert f"those of {MAX_DRAWN} runs: the best by Reward" in text
    assert text.count("of run 999.") >= 1
    assert "of run 500." not in text
    options = text[text.index("Options that differ, for 1,000 runs") :]
    assert "<th>run</th><th>seed</th></tr>" in options


def test_the_runs_drawn_are_the_best_and_the_spread():
    class Ranked:
        def __init__(self, value):
            columns = Columns()
            columns.add([json.dumps({"step": 1, "loss": value}).encode()], 1, None)
            self.names, self.series, self.name = ["loss"], load_series(columns), str(value)

    def load_series(columns):
        from strop.report.runs import Run

        return Run("x", columns).series

    runs = [Ranked(float(v)) for v in np.random.default_rng(0).permutation(100)]
    chosen = [float(run.name) for run in drawn(runs)]
    assert chosen[:12] == [float(v) for v in range(12)]  # the lowest losses
    assert chosen[12] == 12.0
    assert chosen[-1] == 99.0
    assert drawn(runs[:MAX_DRAWN]) == runs[:MAX_DRAWN]


def test_long_runs_among_very_many_are_condensed_to_means(tmp_path):
    for i in range(MANY_RUNS + 1):
        write(tmp_path / f"r{i:02d}", [{"step": s, "loss": float(s)} for s in range(1, 2001 if i == 0 else 3)])
    run = load_runs([tmp_path])[0]
    series = run.series("loss")
    assert len(series) == 1000
    assert series.steps[[0, -1]].tolist() == [2, 2000]
    assert series.values[[0, -1]].tolist() == [1.5, 1999.5]
    assert run.notes == ["its values are means of neighbouring steps, 1,000 in all"]


# ---- lines ----


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 3, "a": 1.5, "b": -2e-07}',
        '{"step":3,"a":1,"b":2}',
        '{"a": 1.5, "b": 2, "step": 3}',
        '  {"step": 3, "a": null, "b": NaN}  ',
        '{"step": 3, "a": Infinity, "b": "text"}',
        '{"step": 3, "a": true, "b": [1, 2]}',
        '{"step": 3, "\\u0061": 1, "b\\"": 2}',
        '{"step": 3, "ü": 1, "b": 123456789012345678901234567890}',
        '{"step": 3, "a": 1, "a": 2}',
        '{"step": 9007199254740991, "a": 0.1, "b": 0.30000000000000004}',
    ],
)
def test_lines_are_read_as_json_reads_them(line):
    columns = Columns()
    columns.add([line.encode(), b"", line.encode()], 1, "file")
    row = json.loads(line)
    for name, value in row.items():
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            _, values = columns.series(name)
            np.testing.assert_array_equal(values, [np.nan if value is None else float(value)])
    numbers = [k for k, v in row.items() if v is None or (isinstance(v, (int, float)) and not isinstance(v, bool))]
    assert columns.names == [name for name in numbers if name != "step"]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ('{"step": 1, "a": 1', "line 3 is broken"),
        ('{"step": 1, "a": 1-2}', "line 3 is broken"),
        ('{"step": 1, "a": }', "line 3 is broken"),
        ('{"step": 1, "a": 1}{"step": 2, "a": 2}', "line 3 is broken"),
        ('{"step": 1, "a": 1}, {"step": 2, "a": 2}', "line 3 is broken"),
        ('{"step": 1.5, "a": 1}', "whole number 'step', found 1.5"),
        ('{"step": -1, "a": 1}', "whole number 'step', found -1"),
        ('{"step": 9007199254740992, "a": 1}', "whole number 'step', found 9007199254740992"),
        ('{"a": 1, "b": 1}', "whole number 'step', found None"),
        ("[1, 2]", "must be an object, found list"),
    ],
)
def test_a_broken_line_is_named_and_nothing_is_added(line, match):
    columns = Columns()
    good = b'{"step": 1, "a": 1}'
    with pytest.raises(ValueError, match=match):
        columns.add([good, good, line.encode()], 1, "file")
    assert columns.names == []


def test_the_last_line_of_a_step_counts():
    lines = [{"step": 1, "a": 1}, {"step": 2, "a": 2, "b": 5}, {"step": 1, "a": 3, "b": 6}, {"step": 2, "a": None}]
    columns = Columns()
    columns.add([json.dumps(line).encode() for line in lines], 1, "file")
    steps, values = columns.series("a")
    assert steps.tolist() == [1, 2]
    np.testing.assert_array_equal(values, [3, np.nan])


# ---- a file that grows ----


def log(folder, steps, loss=0.5):
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": s, "time": 1.0 * s, "loss": loss}) + "\n" for s in steps)


def test_a_growing_file_is_read_once(tmp_path):
    folder = write(tmp_path / "run", [], [{"step": 1, "prompt": "q", "completion": "one"}])
    log(folder, range(1, 40_001))
    assert (folder / "metrics.jsonl").stat().st_size > 1.5 * BLOCK
    reader = RunReader(folder)
    assert reader.read().num_steps == 40_000
    reads = []
    original = Columns.add
    Columns.add = lambda self, lines, first, path: (
        reads.append((first, len(lines))),
        original(self, lines, first, path),
    )
    try:
        log(folder, [40_001])
        with (folder / "samples.jsonl").open("a") as file:
            file.write(json.dumps({"step": 2, "prompt": "q", "completion": "two"}) + "\n")
        run = reader.read()
        assert reads == [(40_001, 1)]
        assert run.num_steps == 40_001
        assert [sample["completion"] for sample in run.samples] == ["one", "two"]
        reader.read()
        assert len(reads) == 1
    finally:
        Columns.add = original


def test_a_line_that_is_being_written_comes_when_it_is_complete(tmp_path):
    folder = write(tmp_path / "run", [])
    log(folder, [1, 2])
    reader = RunReader(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        for part, steps, is_cut_off in (('{"step": 3', 2, True), (', "loss": 1}', 2, True), ("\n", 3, False)):
            file.write(part)
            file.flush()
            run = reader.read()
            assert (run.num_steps, bool(run.notes)) == (steps, is_cut_off)
    log(folder, [4])
    assert reader.read().series("loss").steps.tolist() == [1, 2, 3, 4]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("oops\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 5 is broken"):
        reader.read()


@pytest.mark.parametrize("how", ["replaced", "shorter", "rewritten"])
def test_a_file_that_was_written_anew_is_read_anew(how, tmp_path):
    folder = write(tmp_path / "run", [])
    log(folder, range(1, 11))
    reader = RunReader(folder)
    assert reader.read().series("loss").values[0] == 0.5
    if how == "replaced":  # as a resumed run cuts it back
        (folder / "new").write_text((folder / "metrics.jsonl").read_text().replace("0.5", "0.7"))
        (folder / "new").replace(folder / "metrics.jsonl")
    else:
        (folder / "metrics.jsonl").write_text("")
        log(folder, range(1, 3 if how == "shorter" else 21), loss=0.7)
    assert set(reader.read().series("loss").values) == {0.7}


def test_samples_are_chosen_without_keeping_all(tmp_path):
    """Of 1,000 sampled steps 40, evenly; and the first and the last of prompts that came again."""
    samples = [{"step": s, "prompt": f"p{s % 700}", "completion": f"c{s}"} for s in range(1, 1001)]
    run = load_run(write(tmp_path / "run", [{"step": 1, "loss": 1.0}], samples))
    assert len(run.sampled_steps) == 40
    assert (run.sampled_steps[0], run.sampled_steps[-1]) == (1, 1000)
    assert {1, 701, 6, 706} <= {sample["step"] for sample in run.samples}
    assert len(run.samples) <= 40 + 12


# ---- watching ----


@pytest.fixture
def watched(tmp_path):
    folder, readers = write(tmp_path / "run", [{"step": 1, "loss": 1.0}]), {}
    with Watch([folder], lambda version: build_report(load_runs([folder], readers), version=version)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield folder, server.address
        server.shutdown()
        thread.join()


def status_of(address):
    try:
        with urllib.request.urlopen(address, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize(
    ("name", "broken", "told"),
    [
        ("metrics.jsonl", '{"step": 1, "loss": 1.0}\n<b>oops\n', "metrics.jsonl, line 2 is broken"),
        ("run.json", "{", "run.json is broken"),
        ("run.json", '{"rewards": 5, "config": {}}', "The report cannot be made"),
        ("samples.jsonl", "oops\n", "samples.jsonl, line 1 is broken"),
    ],
)
def test_read_errors_are_shown_until_they_are_fixed(name, broken, told, watched):
    folder, address = watched
    assert status_of(address)[0] == 200
    good = (folder / name).read_text()
    (folder / name).write_text(broken)
    status, text = status_of(address)
    assert status == 500
    assert '<p class="problem">The report cannot be made: ' in text
    assert told in text
    assert "<b>" not in text
    (folder / name).write_text(good)
    assert status_of(address)[0] == 200


# ---- what the page says ----


def test_sft_has_no_section_on_a_policy_that_moved(tmp_path):
    model = {"class": "LlamaForCausalLM", "name": "org/small", "num_parameters": 1000}
    rows = [{"step": s, "loss": 1.0, "completion/length": 5.0} for s in (1, 2)]
    text = build_report([write(tmp_path / "sft", rows, algorithm="sft", model=model)])
    assert "How the policy moved" not in text
    assert "<h3>Completion length" in text
    assert "SFT, org/small (LlamaForCausalLM of 1,000 parameters), 2 steps" in text


def test_ratios_are_drawn_around_one_or_on_a_logarithmic_scale(tmp_path):
    near = value_axis([1.0001, 1.02], ratio=True)
    assert (near.low, near.logarithmic) == (1.0, False)
    assert near.high < 1.1
    assert value_axis([0.97, 0.99], ratio=True).high == pytest.approx(1.0)
    far = value_axis([1.2, 40.0], ratio=True)
    assert (far.logarithmic, far.low, far.high) == (True, 0, 2)
    text = build_report([write(tmp_path / "run", [{"step": s, "ratio/max": 30.0 * s} for s in (1, 2)])])
    chart = text[text.index("<h3>Largest ratio") :]
    assert "logarithmic scale" in chart[: chart.index("</div></div>")]


def test_control_characters_are_shown_by_their_numbers():
    assert escape("a\x1b[2J\x9b\u202eb\x7f\n\t<") == "a␛[2J\\x9b\\u202eb\\x7f\n\t&lt;"
    assert escape("👩\u200d🔬 ü") == "👩\u200d🔬 ü"


def test_html_in_names_and_headers_is_text(tmp_path):
    evil = "<img src=x onerror=alert(1)>"
    header = {"model": {"class": evil, "name": evil}, "config": {evil: evil}, "versions": {evil: evil}, "command": evil,
              "rewards": [{"name": evil, "file": evil}], "job": {evil: evil}, "started": evil, "algorithm": evil}  # fmt: skip
    rows = [{"step": s, f"reward/{evil}": 1.0, f"time/{evil}": 1.0, evil: float("nan"), "loss": 1.0} for s in range(30)]
    samples = [{"step": 1, "prompt": evil, "completion": [{"role": evil, "content": evil, "tool_calls": [evil]}], "reward": 1.0,
                f"reward/{evil}": 2.0}]  # fmt: skip
    folders = [write(tmp_path / name / evil.replace("/", "|"), rows, samples, **header) for name in "ab"]
    for text in (build_report(folders[:1]), build_report(folders), build_report(folders, title=evil)):
        assert "<img" not in text
        assert "onerror" in text


def test_a_reader_of_a_file_that_is_not_there_has_nothing(tmp_path):
    reader = LineReader(tmp_path / "none")
    assert (list(reader.blocks()), reader.was_replaced()) == ([], False)
