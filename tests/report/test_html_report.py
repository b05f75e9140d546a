"""The page of a run: what is on it, what is said about broken runs, and that a real browser takes it without a word."""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from html.parser import HTMLParser

import pytest

from strop.report import Tile, bar_section, build_report, draw_figure, load_run, load_runs, sample_section, write_report
from strop.report.alarms import alarms_of
from strop.report.curves import (
    duration,
    linear_axis,
    log_axis,
    short,
    smooth,
    smoothing_window,
    thin,
    tick_label,
    value_axis,
)
from strop.report.metrics import METRICS, Metric
from strop.report.page import summary_tiles
from strop.report.svg import Chart, Curve, line_chart, step_axis
from strop.report.watch import Answers, Watch, version_of


def make_run(folder, num_steps=60, algorithm="grpo", header=True, tail="", **changes):
    folder.mkdir(parents=True, exist_ok=True)
    if header:
        config = {"group_size": 8, "optim": {"learning_rate": 1e-4}, **changes.pop("config", {})}
        (folder / "run.json").write_text(
            json.dumps({"algorithm": algorithm, "config": config, "versions": {"strop": "0"}})
        )
    lines = []
    for step in range(1, num_steps + 1):
        done = step / num_steps
        row = {"step": step, "time": 0.5 * step, "loss": 1 - done, "reward/mean": done, "kl": 0.1 * done, "entropy": 1 - done / 2,
               "completion/length": 8.0, "grad_norm": 1.0, "learning_rate": 1e-4, "time/generate": 0.3, "time/backward": 0.1}  # fmt: skip
        if step % 20 == 0:
            row["eval/accuracy"] = done
        row |= {name: value(step) if callable(value) else value for name, value in changes.items()}
        lines.append(json.dumps(row))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n" + tail)
    samples = [
        {"step": s, "prompt": "1+1=", "completion": "3" if s == 1 else "2", "reward": float(s > 1)}
        for s in (1, num_steps)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    return folder


class Page(HTMLParser):
    """Tags, texts, and whether every tag that opens is closed."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.texts, self.addresses = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" not in self.open and "style" not in self.open:
            self.texts.append(data)

    def headings(self, level):
        return re.findall(f"<h{level}>(.*?)</h{level}>", self.rawdata_text)


def parse(text):
    page = Page(text)
    page.rawdata_text = text
    assert page.open == []
    return page


def polylines(text, kind="line"):
    return [
        [tuple(map(float, pair.split(","))) for pair in points.split()]
        for points in re.findall(f'<polyline class="{kind}" points="([^"]*)"', text)
    ]


def test_a_run_has_every_section_and_curve(tmp_path):
    text = build_report([make_run(tmp_path / "run")])
    page = parse(text)
    assert page.headings(1) == ["run"]
    assert page.headings(2) == [
        "What it learned", "How the policy moved", "Optimisation and speed", "Where the time goes", "Samples", "Configuration",
    ]  # fmt: skip
    assert page.headings(3)[:7] == [
        "Accuracy, held out", "Reward", "Loss", "KL to the reference", "Entropy", "Completion length", "Gradient norm",
    ]  # fmt: skip
    assert len(polylines(text)) == 8 + 2  # of the phases
    assert "60 steps in 30" in text
    assert "GRPO" in text


@pytest.mark.parametrize(
    ("given", "charts", "tiles"),
    [
        ({"entropy": None, "entropy_estimate": 0.7}, ["Entropy, estimated"], ["Entropy, estimated"]),
        ({"entropy": 0.6, "entropy_estimate": 0.7}, ["Entropy", "Entropy, estimated"], ["Entropy"]),
        ({"entropy": 0.6}, ["Entropy"], ["Entropy"]),  # as older runs have it
    ],
)
def test_entropy_and_its_estimate(tmp_path, given, charts, tiles):
    """Both are drawn where both are there; the exact one is the main number."""
    folder = make_run(tmp_path / "run", num_steps=3)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{name: value for name, value in (row | given).items() if value is not None} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [title for title in parse(build_report([folder])).headings(3) if "Entropy" in title] == charts
    found = summary_tiles(load_runs([folder])[0])
    assert [tile.label for tile in found if "Entropy" in tile.label] == tiles


def test_points_lie_where_their_values_are(tmp_path):
    """Accuracy of 1/3, 2/3 and 1 at steps 20, 40 and 60, on a scale from 0 to 1 and from step 20 to 60."""
    text = build_report([make_run(tmp_path / "run")])
    (x0, y0), (x1, y1), (x2, y2) = polylines(text)[0]
    assert (x0, x1, x2) == pytest.approx((46, 46 + 362 / 2, 408))
    assert (y0, y1, y2) == pytest.approx((200 - 190 / 3, 200 - 380 / 3, 10), abs=0.06)


def test_the_page_loads_nothing_from_elsewhere(tmp_path):
    text = build_report([make_run(tmp_path / "run")])
    assert parse(text).addresses == ["data:,"]
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "url(" not in text
    assert "@import" not in text


def test_several_runs_are_overlaid(tmp_path):
    runs = [make_run(tmp_path / n, config={"kl_coef": k}) for n, k in (("a", 0.1), ("b", 0.2))]
    text = build_report(runs)
    page = parse(text)
    assert page.headings(2)[0] == "Runs"
    assert len(polylines(text)) == 2 * (8 + 2)
    assert text.count('class="legend runs"') == 1
    differing = re.findall(r'<tr class="differs"><th>(.*?)</th><td>(.*?)</td><td>(.*?)</td>', text)
    assert differing == [("kl_coef", "0.1", "0.2")]
    assert "that are the same" in text


def test_the_loss_of_different_algorithms_is_not_in_one_chart(tmp_path):
    text = build_report([make_run(tmp_path / "a"), make_run(tmp_path / "b", algorithm="sft")])
    assert {"Loss, GRPO", "Loss, SFT"} <= set(parse(text).headings(3))


def test_a_folder_of_runs_stands_for_all_of_them(tmp_path):
    make_run(tmp_path / "x" / "seed0")
    make_run(tmp_path / "y" / "seed0")
    assert [r.name for r in load_runs([tmp_path / "x", tmp_path / "y"])] == ["x/seed0", "y/seed0"]
    make_run(tmp_path / "z")  # whose own name is enough, whatever the others need
    assert [r.name for r in load_runs([tmp_path / "z", tmp_path / "x", tmp_path / "y"])] == ["z", "x/seed0", "y/seed0"]
    assert len(load_runs([tmp_path / "x", tmp_path / "x" / "seed0"])) == 1


def test_a_run_that_has_logged_nothing_is_left_out_with_a_warning(tmp_path):
    """As a kill in the first step leaves one. Where nothing is left to show it is an error."""
    make_run(tmp_path / "runs" / "a")
    for name in ("killed", "early"):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    (tmp_path / "runs" / "early" / "metrics.jsonl").write_text('{"step": ')  # cut off while it was written
    with pytest.warns(UserWarning, match="it is left out") as told:
        found = load_runs([tmp_path / "runs"])
    assert [run.name for run in found] == ["a"]
    assert [str(warning.message).partition(" has logged")[0] for warning in told] == [
        str(tmp_path / "runs" / "early"),
        str(tmp_path / "runs" / "killed"),
    ]
    shutil.rmtree(tmp_path / "runs" / "a")
    with pytest.raises(ValueError, match=r"early has logged no step yet: .*; nor has .*killed$"):
        build_report([tmp_path / "runs"])


def test_samples_are_shown_before_and_after_and_escaped(tmp_path):
    folder = make_run(tmp_path / "run")
    evil = '</pre><script>alert(1)</script>\x00\ud800 & "more"'
    lines = [{"step": s, "prompt": "<b>", "completion": evil if s == 1 else "fine", "reward": s - 1} for s in (1, 2)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = write_report([folder], tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    page = parse(text)
    assert "<script>alert" not in text
    assert sum(tag == "script" for tag, _ in page.tags) == 2
    assert "&lt;/pre&gt;&lt;script&gt;alert(1)&lt;/script&gt;␀? &amp; &quot;more&quot;" in text
    assert text.index("step 1<") < text.index("step 2<")
    assert '<span class="reward down">reward 0</span>' in text
    assert '<span class="reward up">reward 1</span>' in text


def test_samples_of_different_prompts_stand_side_by_side(tmp_path):
    folder = make_run(tmp_path / "run")
    lines = [
        {"step": s, "prompt": f"{s}+{i}=", "completion": "x" * 5000 if i else "y", "reward": None}
        for s in (1, 9)
        for i in (0, 1)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = build_report([folder])
    assert "The first sampled step beside the last." in "".join(parse(text).texts)
    assert text.count("4,300 more characters") == 4  # side by side, and among all samples
    assert "reward" not in re.findall(r'<div class="when">.*?</div>', text)[0]


def test_every_sampled_step_is_there_with_each_score_and_its_turns(tmp_path):
    folder = make_run(tmp_path / "run")
    turns = [
        {"role": "assistant", "content": "look", "tool_calls": [{"name": "search<b>"}]},
        {"role": "tool", "content": "3"},
    ]
    lines = [
        {"step": step, "prompt": "q", "completion": turns if step == 20 else "c", "reward": 1.5, "reward/right": 1.0,
         "reward/short": 0.5}
        for step in (10, 20, 30)
    ]  # fmt: skip
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = parse(build_report([folder]))
    texts = " ".join(page.texts)
    assert [attrs["data-step"] for tag, attrs in page.tags if "data-step" in attrs] == ["10", "20", "30"]
    assert [attrs["value"] for tag, attrs in page.tags if tag == "option"][:3] == ["10", "20", "30"]
    assert texts.count("right 1") == texts.count("short 0.5") == 5  # the pair and the three steps
    assert ' [{"name": "search<b>"}] ' in texts
    assert "All samples of 3 steps" in texts


def test_many_sampled_steps_stay_few(tmp_path):
    folder = make_run(tmp_path / "run")
    lines = [{"step": step, "prompt": "q", "completion": "c", "reward": 1.0} for step in range(1, 1001)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = [int(attrs["data-step"]) for _, attrs in parse(build_report([folder])).tags if "data-step" in attrs]
    assert len(steps) == 40
    assert (steps[0], steps[-1]) == (1, 1000)


@pytest.mark.parametrize(
    ("changes", "alarm"),
    [
        ({"kl": lambda step: 0.01 * step}, "The KL to the reference runs away"),
        ({"entropy": lambda step: 2.0 if step < 30 else 0.1}, "The entropy collapses"),
        ({"reward/zero_std_fraction": 0.9}, "Most groups have no signal"),
        ({"mismatch_kl": 0.2}, "Sampling and training disagree"),
        ({"completion/truncated_fraction": lambda step: step / 60}, "Most completions are cut off"),
        ({"eval/loss": lambda step: 1 + step / 60}, "The held-out loss rises"),
        ({"loss": lambda step: None if step > 57 else 1.0}, "A value is not finite"),
    ],
)
def test_alarms(changes, alarm, tmp_path):
    assert alarms_of(load_run(make_run(tmp_path / "calm"))) == []
    assert alarms_of(load_run(make_run(tmp_path / "short", num_steps=4, mismatch_kl=9.0))) == []
    run = make_run(tmp_path / "run", **changes)
    ((title, numbers, advice),) = alarms_of(load_run(run))
    assert title == alarm
    assert "→" in numbers or "3 steps, the first 58" in numbers
    text = build_report([run])
    assert parse(text).headings(2)[0] == "Alarms"
    assert advice in "".join(parse(text).texts)


def test_command_data_and_rewards_of_a_run_are_shown(tmp_path):
    folder = make_run(tmp_path / "run")
    header = json.loads((folder / "run.json").read_text()) | {
        "command": "strop train grpo", "data": "rows.csv", "job": {"template": "Q: {question}"},
        "model": {"class": "LlamaForCausalLM", "name": "org/name", "num_parameters": 1000},
        "rewards": [{"name": "right", "file": "rewards.py", "sha256": "abc" * 20}],
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(header))
    texts = "".join(parse(build_report([folder])).texts)
    for shown in (
        "strop train grpo",
        "rows.csv",
        "Q: {question}",
        "org/name",
        "right of rewards.py, sha256 abcabcabcabc",
    ):
        assert shown in texts


def test_titles_are_distinct():
    titles = [metric.title for metric in METRICS.values()]
    assert len(set(titles)) == len(titles)


def test_values_that_are_no_numbers_are_marked_and_leave_a_gap(tmp_path):
    folder = make_run(tmp_path / "run", kl=lambda step: math.nan if 20 <= step < 25 else 0.1, entropy=None)
    text = build_report([folder])
    assert text.count('class="broken"') == 5 + 60
    assert "× 5 values of run are not finite" in text
    assert "no finite value" in text
    chart = text[text.index("<h3>KL to the reference") :]
    assert len(polylines(chart[: chart.index("</svg>")])) == 2


def test_one_step(tmp_path):
    text = build_report([make_run(tmp_path / "run", num_steps=1)])
    assert polylines(text) == []
    assert text.count("<circle") == 8 + 2 - 1  # no evaluation yet
    assert "1 step in 0.5" in text


def test_ten_thousand_steps_stay_small_and_keep_their_spikes(tmp_path):
    folder = make_run(tmp_path / "run", num_steps=10_000, grad_norm=lambda step: 15.0 if step == 7_777 else 1.0)
    text = build_report([folder])
    assert len(text) < 400_000
    chart = text[text.index("<h3>Gradient norm") :]
    raw = polylines(chart[: chart.index("</svg>")], "raw")[0]
    assert len(raw) <= 320
    heights = [y for _, y in raw]
    assert min(heights) == pytest.approx(10)  # 15 is the top tick of 0 to 15
    assert sorted(heights)[1] > 180


def test_an_interrupted_last_line_is_left_out_and_said(tmp_path):
    run = load_run(make_run(tmp_path / "run", tail='{"step": 61, "lo'))
    assert run.num_steps == 60
    assert "the last line of metrics.jsonl was cut off and is left out" in build_report([run])


def test_lines_written_twice_count_once(tmp_path):
    run = load_run(make_run(tmp_path / "run", num_steps=3, tail='{"step": 3, "loss": 9.0}\n'))
    assert (run.series("loss").steps.tolist(), run.series("loss").values[-1]) == ([1, 2, 3], 9.0)


def test_a_single_reward_is_drawn_once(tmp_path):
    alone = make_run(
        tmp_path / "alone", **{"reward/exact": lambda step: step / 60, "mean_reward": lambda step: step / 60}
    )
    assert "Reward: exact" not in build_report([alone])
    both = make_run(tmp_path / "both", **{"reward/exact": lambda step: step / 90})
    assert "Reward: exact" in build_report([both])


def test_time_outside_of_phases_is_shown(tmp_path):
    text = build_report([make_run(tmp_path / "run", **{"time/step": 0.5})])
    rows = re.findall(r"<tr><td>(\w+)</td><td class=\"number\">([\d.]+) s</td>", text)
    assert rows == [("generate", "0.3"), ("backward", "0.1"), ("other", "0.1")]


def test_without_a_header(tmp_path):
    text = build_report([make_run(tmp_path / "run", header=False)])
    assert "there is no run.json" in text
    assert "Configuration" not in parse(text).headings(2)


@pytest.mark.parametrize(
    ("prepare", "error", "match"),
    [
        (lambda f: None, FileNotFoundError, "no such run folder"),
        (lambda f: f.write_text("x"), NotADirectoryError, "a run must be a folder, found the file"),
        (lambda f: f.mkdir(), ValueError, r"is no run: it must hold metrics\.jsonl, found nothing"),
        (lambda f: (f.mkdir(), (f / "a.txt").write_text("")), ValueError, r"found a\.txt"),
        (lambda f: (f.mkdir(), (f / "run.json").write_text("{}")), ValueError, "has logged no step yet"),
        (lambda f: (make_run(f), (f / "run.json").write_text("{")), ValueError, r"run\.json is broken"),
        (lambda f: make_run(f, tail='oops\n{"step": 61}\n'), ValueError, r"metrics\.jsonl, line 61 is broken"),
        (
            lambda f: make_run(f, tail='{"loss": 1}\n'),
            ValueError,
            r"metrics\.jsonl, line 61 must have a whole number 'step', found None",
        ),
    ],
)
def test_invalid_run_folders_are_refused(tmp_path, prepare, error, match):
    prepare(tmp_path / "run")
    with pytest.raises(error, match=match):
        build_report([tmp_path / "run"])


def test_nothing_to_report(tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        build_report([])
    with pytest.raises(IsADirectoryError, match="must be a file"):
        write_report([make_run(tmp_path / "run")], tmp_path)


def test_extra_sections_and_a_headline(tmp_path):
    bars = bar_section("Held out", {"greedy": {"before": 0.25, "after": 1.0}}, under="Of 100.")
    samples = sample_section(
        "Pairs", [{"prompt": "1+1=", "before": "3", "after": "2", "reward_before": 0, "reward_after": 1}]
    )
    headline = [Tile("Accuracy", "100 %", "25 %")]
    text = build_report([make_run(tmp_path / "run")], extra_sections=[bars, samples], headline=headline, title="Demo")
    page = parse(text)
    assert page.headings(1) == ["Demo"]
    assert page.headings(2)[:2] == ["Held out", "Pairs"]
    assert re.findall(r'style="width:([\d.]+)%"', text) == ["25.00", "100.00"]
    assert text.count('class="tile"') == 1


def test_the_figure(tmp_path):
    runs = load_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b")])
    pytest.importorskip("matplotlib")
    path = draw_figure(runs, tmp_path / "figure.png", bars=("Accuracy", {"greedy": {"before": 0.2, "after": 0.9}}))
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (tmp_path / "a" / "metrics.jsonl").write_text('{"step": 1, "speed": 2.0}\n')
    with pytest.raises(ValueError, match=r"hold none of eval/accuracy, .*; found speed"):
        draw_figure(load_runs([tmp_path / "a"]), path)


def in_chromium(address, folder, *options):
    """The page's DOM after its scripts have run, and what the browser said."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=2000", *options, "--dump-dom", address]
    home = {"HOME": str(folder), "LC_ALL": "C.UTF-8"}  # a browser needs one, and text
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, env=os.environ | home)
    return done.stdout, done.stderr


needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")


@needs_chromium
def test_a_browser_logs_no_messages(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", kl=math.nan)]
    path = write_report(runs, tmp_path / "report.html")
    page, said = in_chromium(path.as_uri(), tmp_path)
    assert "CONSOLE" not in said
    assert page.count('class="tip"') == page.count("data-chart=") == 8 + 2  # the script ran to its end


LOOKS = """<script>
const part = document.querySelector(".all-samples"), [step, order] = part.querySelectorAll("select");
const shown = () => [...part.querySelectorAll(".of-step:not([hidden]) pre:not(.prompt)")].map(p => p.textContent).join("");
const found = [document.documentElement.scrollWidth <= window.innerWidth, window.innerWidth];
part.open = true; found.push(shown());
const set = (box, value) => { box.value = value; box.dispatchEvent(new Event("change")); found.push(shown()); };
set(order, "best first"); set(order, "worst first"); set(step, "1"); set(order, "as drawn");
const unnamed = [...document.querySelectorAll("select")].filter(box => !box.labels.length || !box.labels[0].textContent.trim());
const unspoken = [...document.querySelectorAll("svg")].filter(svg => !svg.getAttribute("aria-label"));
const takes = one => { one.focus(); return document.activeElement === one || !one.offsetParent; };
const reached = [...document.querySelectorAll("select, summary")].every(takes);
found.push(unnamed.length + unspoken.length, reached);
document.title = JSON.stringify(found);
</script></body>"""


FRAMED = "document.title = this.contentDocument.title"


@needs_chromium
@pytest.mark.parametrize("width", [1280, 400])
def test_samples_by_step_in_a_browser(width, tmp_path):
    """No sideways scrolling, orders that order, names for a screen reader, controls that a keyboard reaches."""
    folder = make_run(tmp_path / "run")
    lines = [{"step": s, "prompt": "q" * 300, "completion": c, "reward": r} for s in (1, 9)
             for c, r in (("a", 0.5), ("b", -1.0), ("c", None), ("d", 2.0))]  # fmt: skip
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "report.html").write_text(build_report([folder]).replace("</body>", LOOKS), encoding="utf-8")
    frame = f'<iframe style="width:{width}px;height:900px;border:0" src="report.html" onload="{FRAMED}"></iframe>'
    (tmp_path / "frame.html").write_text(
        f"<!doctype html><title></title>{frame}", encoding="utf-8"
    )  # a window has at least 500 pixels
    page, _ = in_chromium((tmp_path / "frame.html").as_uri(), tmp_path, "--allow-file-access-from-files")
    found = json.loads(re.search("<title>(.*?)</title>", page)[1].replace("&quot;", '"'))
    assert found[:2] == [True, width]
    assert found[2:7] == ["abcd", "dabc", "badc", "badc", "abcd"]
    assert found[7:] == [0, True]


# ---- following a run ----


@pytest.fixture
def watched(tmp_path):
    """A run, the server that follows it, and its address."""
    folder = make_run(tmp_path / "run", num_steps=10)
    with Watch([folder], lambda version: build_report([folder], version=version)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield folder, server
        server.shutdown()
        thread.join()


def get(address, host=None):
    request = urllib.request.Request(address, headers={} if host is None else {"Host": host})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read().decode()


def log_step(folder, step):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time": 1.0 * step, "loss": 0.5, "reward/mean": 0.9}) + "\n")


def test_a_page_that_follows_its_run(watched):
    folder, server = watched
    page, version = get(server.address), get(server.address + "version")
    assert "10 steps in" in page
    assert f'data-version="{version}"' in page
    assert "connect-src 'self'" in page
    assert get(server.address + "version") == version
    log_step(folder, 11)
    assert get(server.address + "version") != version
    assert "11 steps in" in get(server.address)
    assert "connect-src" not in build_report([folder])  # a file asks nobody


@pytest.mark.parametrize(
    ("path", "host", "code"), [("run.json", None, 404), ("../run.json", None, 404), ("", "evil.test", 403)]
)
def test_the_server_serves_the_page_alone(path, host, code, watched):
    with pytest.raises(urllib.error.HTTPError, match=str(code)) as caught:
        get(watched[1].address + path, host)
    caught.value.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HT"])
def test_a_connection_that_asks_nothing_is_closed(sent, watched, monkeypatch):
    assert Answers.timeout == 30
    monkeypatch.setattr(Answers, "timeout", 0.2)
    with socket.create_connection(watched[1].server_address, timeout=20) as client:
        client.sendall(sent)
        assert client.recv(100) == b""


def test_a_run_that_has_not_begun_is_waited_for(watched):
    folder, server = watched
    (folder / "metrics.jsonl").write_text("")
    assert "No step has been logged yet" in get(server.address)


@needs_chromium
def test_a_browser_follows_the_run(watched, tmp_path, monkeypatch):
    """While the page is open, a step is logged at its second look: what it shows is the newer run."""
    folder, server = watched
    looks = []

    def version_and_step(folders):
        looks.append(1)
        if len(looks) == 3:  # of the page itself, and two of its script
            log_step(folder, 11)
        return version_of(folders)

    monkeypatch.setattr("strop.report.watch.version_of", version_and_step)
    page, said = in_chromium(server.address, tmp_path, "--virtual-time-budget=9000")
    assert "11 steps in" in page
    assert 'role="status">Following the run; last look' in page
    assert page.count('class="tip"') == page.count("data-chart=")
    assert "Uncaught" not in said


class TestNumbers:
    def test_smoothing_by_hand(self):
        assert smooth([1.0, 2.0, 6.0, 3.0], 3) == pytest.approx([1.5, 3.0, 11 / 3, 4.5])
        assert smooth([1.0, 2.0], 1).tolist() == [1.0, 2.0]
        assert [smoothing_window(n) for n in (19, 20, 90, 900)] == [1, 3, 9, 63]

    def test_thinning_keeps_ends_lowest_and_highest(self):
        steps = list(range(1000))
        values = [0.0] * 1000
        values[333], values[666] = 9.0, -9.0
        thinned = dict(zip(*thin(steps, values, 50), strict=True))
        assert len(thinned) <= 50
        assert (thinned[333], thinned[666], thinned[0], thinned[999]) == (9.0, -9.0, 0.0, 0.0)

    @pytest.mark.parametrize(
        ("low", "high", "ticks"),
        [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (-3, 7, [-4, -2, 0, 2, 4, 6, 8]), (2, 2, [1.8, 1.9, 2.0, 2.1, 2.2])],
    )
    def test_ticks_are_round(self, low, high, ticks):
        assert linear_axis(low, high).ticks == pytest.approx(ticks)

    @pytest.mark.parametrize(("low", "high"), [(0, 3), (0, 12), (5, 20), (0, 20), (1, 10_000)])
    def test_steps_are_whole(self, low, high):
        ticks = step_axis([low, high]).ticks
        assert len(ticks) >= 2
        assert all(tick == int(tick) for tick in ticks)

    def test_ranges_of_axes_by_hand(self):
        assert value_axis([0.3, 0.9]).low == 0
        assert value_axis([0.8, 0.9]).low > 0.7
        assert (value_axis([0.5, 0.6], fraction=True).low, value_axis([0.5], fraction=True).high) == (0, 1)
        assert value_axis([0.01, 0.02], fraction=True).high == pytest.approx(0.02)
        assert value_axis([1.0] * 99 + [1000.0]).logarithmic
        assert not value_axis([-1.0] * 99 + [1000.0]).logarithmic
        assert log_axis(0.5, 50).place(5) == pytest.approx((math.log10(5) + 1) / 3)

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0, "0"), (0.12345, "0.123"), (-1234.5, "−1,234"), (123456, "123k"), (2.5e6, "2.5M"), (1e-5, "1e−5"), (math.inf, "not finite"), (None, "–")],
    )  # fmt: skip
    def test_short_numbers(self, value, text):
        assert short(value) == text

    def test_labels_tell_ticks_apart(self):
        for low, high in ((0, 1), (0.25, 1), (1e-5, 9e-5), (0, 3e6), (1.001, 1.002), (0.99991, 0.99999)):
            axis = linear_axis(low, high)
            labels = [tick_label(t, axis) for t in axis.ticks]
            assert len(set(labels)) == len(labels), labels

    def test_durations(self):
        assert [duration(s).replace("\u00a0", " ") for s in (2.5, 75, 7300)] == ["2.5 s", "1 min 15 s", "2 h 2 min"]


def test_long_numbers_on_an_axis_stay_inside_the_card():
    """0.0000005 apart: nine characters, more than there is room for at the left."""
    narrow, _ = line_chart(Chart(Metric("Largest ratio"), [Curve("a", [1, 2], [1.000001, 1.0000035])]))
    labels = re.findall(r'class="end"( textLength="40"[^>]*)?>([^<]*)<', narrow)
    assert [len(label) for fitted, label in labels if fitted]
    assert all(fitted for fitted, label in labels if len(label) > 7)
    plain, _ = line_chart(Chart(Metric("Loss"), [Curve("a", [1, 2], [1.0, 2.0])]))
    assert "textLength" not in plain
