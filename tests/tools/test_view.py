"""The page of envs/view.py: what it holds, and what a browser makes of it."""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import envs
from envs import runs, view

ROOT = Path(__file__).parents[2]
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def show(*arguments) -> subprocess.CompletedProcess:
    """The program, as from a command line."""
    words = [sys.executable, "-m", "envs.view", *map(str, arguments)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 1,000 dialogues; one of them tries to end the page's script."""
    folder = tmp_path_factory.mktemp("runs") / "RUN"
    folder.mkdir()
    dialogues = envs.make("twenty-questions").demonstrations(1000, 0)
    dialogues[7]["answer"] = "</script><b id=escaped>&"
    values = [{"Q": [-2.0] * len(d["actions"]), "V": [-3.0] * len(d["actions"])} for d in dialogues]
    records = [
        {"iteration": i // 100} | d | v for i, (d, v) in enumerate(zip(dialogues, values, strict=True))
    ]
    runs.write_json(folder / "args.json", {"seed": 1})
    runs.write_jsonl(folder / "rollouts.jsonl", records)
    metrics = [{"iteration": i, "rollout/return": -10.0 - i, "actor/kl": 0.1} for i in range(10)]
    runs.write_jsonl(folder / "metrics.jsonl", metrics)
    return folder


def test_the_page_holds_the_run_and_nothing_from_outside(run):
    assert show(run).stdout.strip() == str(run / "view.html")
    page = (run / "view.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    data = json.loads(data)
    assert len(data["runs"][0]["dialogues"]) == 1000
    turn = data["runs"][0]["dialogues"][0]["turns"][0]
    assert turn["A"] == 1 and turn["reply"].strip() in ("Yes.", "No.", "Invalid Question.")
    assert "mean" in data["meanings"]["rollout/length"]
    assert not re.search(r"(src|href)=|https?:|@import|url\(", page.replace(html.escape(str(run)), ""))


@pytest.mark.parametrize(
    ("script", "own"),
    [("archer", "E2, mean square"), ("chai", "E2, likewise"), ("archer_multigpu", "E2, mean")],
)
def test_a_metric_is_explained_by_the_page_of_its_script(script, own):
    """Two pages may have the same tag."""
    path = Path("runs", f"twenty-questions__{script}__1__20260101-000000-000000")
    found = view.meanings([path])
    assert found["critic/v_loss"].startswith(own)
    assert all(re.fullmatch(r"\w+/\w+", tag) for tag in found if "/" in tag)
    assert view.meanings([path, Path("runs/RUN")])["critic/v_loss"] == found["critic/v_loss"]


def test_every_script_s_dialogues_are_understood():
    turn = {"action": "x", "reply": "\n=> 1\n", "reward": 0.5, "log-prob": -0.25}
    loop = {"iteration": 1, "return": 0.5, "fate": "ended", "text": "Task\nx\n=> 1\n", "turns": [turn]}
    lge = {
        "variation": 3,
        "score": 1.0,
        "turns": [{"action": "look", "reply": "a room", "reward": 0, "Q": 1.5}],
    }
    assert view.turns_of(loop) == [{"action": "", "reply": "Task\n"}, turn]
    assert view.turns_of(lge)[0]["Q"] == 1.5
    broken = loop | {"text": loop["text"] + "time-out", "fate": "broken"}
    assert view.turns_of(broken) == [*view.turns_of(loop), {"action": "", "reply": "time-out"}]
    unspoken = loop | {"text": "Task\n", "turns": []}
    assert view.turns_of(unspoken) == [{"action": "", "reply": "Task\n"}]


def test_what_is_no_run_is_one_line(tmp_path):
    result = show(tmp_path)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2 and str(tmp_path) in line


def test_a_folder_that_does_not_exist_is_called_that(tmp_path):
    assert show(tmp_path / "no").stderr == f"envs.view: there is no folder {tmp_path}/no\n"


def test_a_figure_that_is_no_number_is_none_to_the_browser(tmp_path):
    """Python writes NaN into JSON, which no browser reads: the whole page would stay empty."""
    runs.write_json(tmp_path / "args.json", {"max_grad_norm": float("inf")})
    runs.write_jsonl(
        tmp_path / "metrics.jsonl", [{"iteration": 1, "critic/bias": float("nan"), "time/x": 1.5}]
    )
    assert view.read(tmp_path)["args"] == {"max_grad_norm": None}
    (row,) = view.read(tmp_path)["metrics"]
    assert row == {"iteration": 1, "critic/bias": None, "time/x": 1.5}


@pytest.mark.external
@pytest.mark.skipif(not BROWSER, reason="there is no chromium: apt-get install chromium")
@pytest.mark.parametrize(
    "search, number", [("", 1000), ("iteration=3", 100), ("least=1", 0), ("text=escaped", 1)]
)
def test_a_browser_opens_it(run, search, number, tmp_path):
    """Headless: all is drawn, the filters work, the console stays empty."""
    show(run)
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    words += ["--enable-logging=stderr", "--v=0", "--virtual-time-budget=2000", "--dump-dom"]
    result = subprocess.run(
        [*words, f"file://{run}/view.html#{search}"], capture_output=True, text=True, timeout=120, check=True
    )
    assert f">{number} dialogues</output>" in result.stdout and result.stdout.count("<details>") == number
    assert result.stdout.count("</figure>") == 2 and "<b id=" not in result.stdout.partition("</form>")[2]
    assert "CONSOLE" not in result.stderr
