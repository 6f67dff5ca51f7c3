"""What holds for every script and for README. A new script is tested here by lying where SCRIPTS looks."""

import ast
import fnmatch
import importlib.util
import io
import json
import os
import random
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
from contextlib import redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from tiny import guide_options, make_checkpoint, make_looker_ahead, make_rambler

import envs
from benchmarks import models as table
from envs import runs

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("*.py"), *ROOT.glob("baselines/*.py")])
# Language models speak in these; for several devices they are read as in the sibling.
NO_SPEAKERS = ("guide_simcse", "lge_drrn", "archer_multigpu", "loop_ppo_multigpu")
SPEAKERS = [path for path in SCRIPTS if path.stem not in NO_SPEAKERS]
SOURCES = [*SCRIPTS, *sorted(ROOT.glob("envs/**/*.py")), *sorted(ROOT.glob("benchmarks/*.py"))]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), ROOT / "checkpoints/README.md"]

# The measure of a script: squeezing raises the first two, growing the last.
MAX_MEAN = 10.0  # tokens of Python a code line
WIDE = 20  # tokens: a line with as many is wide
MAX_WIDE = 0.08  # share of code lines that are
MAX_FUNCTION, MAX_MAIN = 45, 80  # lines
BUDGETS = {  # tokens of a script by its name, else by its folder
    "archer": 5200,
    "archer_offline_iql": 4900,
    "loop_ppo": 5600,
    "lge_drrn": 5200,
    "guide_simcse": 4400,
    "sft": 4000,
    "baselines": 3600,
}
MULTIGPU = 1000  # that SCRIPT_multigpu.py may have beyond SCRIPT.py

MAX_COLUMNS = 110
MIN_COMMENTS = 0.10
OPTIONAL = ["peft"]  # imported where a switch asks for them; a script says in one line if they are missing
RUNS_CODE = ["sandbox_child.py"]  # that of agents, which is what it is for; tests/sandbox/test_sandbox.py
BROUGHT_ALONG = ["tokenizers"]  # packages that a listed one is of no use without: transformers
SECTIONS = [
    "arguments",
    "data: turns, trajectories, replay",
    "the maths: pure functions",
    "models",
    "rollouts",
    "updates",
    "evaluation",
    "training",
]
RUN_FILES = ["args.json", "metrics.jsonl", "summary.json", "checkpoint.pt"]
COST = "iteration seconds cpu_seconds peak_memory_mb seed commit"
SUMMARY = f"warm_start_return eval_return eval_return_greedy eval_success episodes {COST}"

# What is another in a script: its world, what its summary has, where it shows what it does.
LGE = ("guide_simcse", "lge_drrn")
WORLD = defaultdict(lambda: "twenty-questions-subset", dict.fromkeys(LGE, "school") | {"loop_ppo": "apps"})
GUIDE_SUMMARY = (
    "eval_rsr50 eval_rsr20 eval_rsr10 eval_map eval_gar eval_gar_percent eval_garr warm_start_rsr50 pairs"
)
LGE_SUMMARY = " ".join(
    f"eval_{x}_{name}" for x in ("dev", "test") for name in ("score", "success", "failure")
)
SUMMARIES = defaultdict(
    lambda: SUMMARY,
    {
        "archer_offline_iql": f"{SUMMARY} best_return",
        "chai": SUMMARY.replace("eval_return_greedy ", ""),  # it has no greedy play
        "guide_simcse": f"{GUIDE_SUMMARY} {COST}",
        "lge_drrn": f"{LGE_SUMMARY} area first_success successes episodes updates steps {COST}",
    },
)
SAMPLES = defaultdict(lambda: "rollouts.jsonl", {"guide_simcse": "rankings.jsonl"})

# What makes a run small: each script gets those that it has, and behind them its own, so that all is logged.
TINY = {
    "iterations": 2,
    "rollouts": 4,
    "tasks": 2,
    "dataset_size": 32,
    "demonstrations": 8,
    "drills": 4,
    "epochs": 2,
    "critic_updates": 2,
    "critic_batch": 4,
    "critic_pool": 8,
    "actor_updates": 1,
    "actor_batch": 4,
    "warmup": 0,
    "batch": 4,
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
    "save_every": 2,
    "vocabulary_steps": 2,
}
OWN = defaultdict(dict)
OWN["ppo"] = {"kl": 0.1, "minibatch": 2}
OWN["loop_ppo"] = {"worlds": 8, "kl": 0.1, "min_advantage": 0, "epochs": 1, "eval_episodes": 9}

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
each_source = pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))


def kind_of(script: Path) -> str:
    """The name of a script; of one for several devices its sibling's: both do the same."""
    return script.stem.removesuffix("_multigpu")


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def comments_of(path: Path) -> list[tuple[int, str]]:
    """(line, text) of every comment."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def args_of(path: Path) -> dict[str, str | None]:
    """The fields of the script's class Args, with the text below each or the comment behind it: its help."""
    body = next(
        node for node in tree_of(path).body if isinstance(node, ast.ClassDef) and node.name == "Args"
    ).body
    behind = {line: text.lstrip("# ") for line, text in comments_of(path)}
    fields = {}
    for node, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            fields[node.target.id] = below.value.value if is_text else behind.get(node.end_lineno)
    return fields


def metrics_of(script: Path) -> dict[str, str]:
    """The rows of the metrics table on the script's page: what a tag means."""
    page = (ROOT / "docs" / f"{kind_of(script)}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+/\w+)` \| (.+) \|$", page, re.M)
    assert len(rows) == len(dict(rows)), "a tag is explained twice"
    return dict(rows)


def tiny(script: Path, model: Path | None = None) -> list[str]:
    """Arguments that make a run small, and the checkpoint that it starts from, if the script takes one."""
    known = args_of(script)
    options = {name: value for name, value in (TINY | OWN[kind_of(script)]).items() if name in known}
    for name in {"actor", "model"} & set(known) if model else ():
        options[name] = model
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def data_of(script: Path, folder: Path) -> list[str]:
    """Options for a script that learns from files of its own: small ones, in `folder`."""
    return guide_options(folder) if script.stem == "guide_simcse" else []


def skip_without_world(script: Path) -> None:
    """A world may need a package or a file that this machine lacks."""
    if problem := envs.missing(WORLD[kind_of(script)]):
        pytest.skip(problem)


def command_of(script: Path) -> list[str | Path]:
    """How it is started."""
    if script.parent != ROOT:
        return [sys.executable, "-m", f"{script.parent.name}.{script.stem}"]
    return [sys.executable, script]


def call(script: Path, *options) -> tuple[int, str, str]:
    """The script as `run` would run it, but in this process, for speed: exit code, stdout, stderr."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads, code, out, err = torch.get_num_threads(), 0, io.StringIO(), io.StringIO()
    try:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", [str(script), *map(str, options)])
            patch.setenv("HF_HUB_OFFLINE", "1")
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    finally:
        torch.set_num_threads(threads)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code, out.getvalue(), err.getvalue()


# No network; one thread, so that tests and trainings get along.
QUIET = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
QUIET |= {"PYTHON": sys.executable, "LIMIT": "100"}  # for benchmarks/gpu.sh


def run(*command, cwd: Path = ROOT, stdin: str = "", timeout: int = 240) -> subprocess.CompletedProcess:
    """A command as a process of its own."""
    return subprocess.run(
        list(map(str, command)),
        input=stdin,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | QUIET,
        timeout=timeout,
        check=False,
    )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """script -> the folder of a tiny checkpoint for its world; None where it needs none."""
    made = {}

    def folder_of(script: Path) -> Path | None:
        if script.stem in LGE:
            return None
        world = WORLD[kind_of(script)]
        if world not in made:
            made[world] = make_checkpoint(world, tmp_path_factory.mktemp("checkpoint") / world)
        return made[world]

    return folder_of


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, checkpoint):
    """script -> folder of its run of two iterations, which is made once."""
    finished = {}

    def folder_of(script: Path) -> Path:
        skip_without_world(script)
        if script not in finished:
            place = tmp_path_factory.mktemp("runs")
            options = ["--env", WORLD[kind_of(script)], "--seed", "3", "--runs", place]
            options += tiny(script, checkpoint(script)) + data_of(script, tmp_path_factory.mktemp("data"))
            finished[script] = place, call(script, *options)
        place, (code, _, err) = finished[script]
        assert (code, err) == (0, "")
        (folder,) = place.iterdir()
        return folder

    return folder_of


def test_there_are_scripts():
    assert ROOT / "archer.py" in SCRIPTS


# --------------------------------------------------------------------------------------- the text


def of_tests(kind: str) -> list[str]:
    """Of a script's own test file the functions; of one for several scripts those with its name in theirs."""
    own = [path for path in ROOT.glob("tests/algorithms/test_*.py") if path.stem.startswith(f"test_{kind}")]
    shared = [] if own else [ROOT / "tests/algorithms/test_baselines.py"]
    found = []
    for path in own + shared:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (own or kind.split("_")[0] in node.name):
                found.append(ast.get_source_segment(text, node))
    return found


@each_script
def test_equations_and_deviations_stand_where_they_must(script):
    """E in the docstring, at its code and in a test of the script; D in the docstring and at its code."""
    tree = tree_of(script)
    declared = set(re.findall(r"\b[ED]\d+\b", ast.get_docstring(tree)))
    marked = set(re.findall(r"\b[ED]\d+\b", " ".join(text for _, text in comments_of(script))))
    tests = " ".join(of_tests(kind_of(script)))
    assert any(id.startswith("E") for id in declared)
    assert declared - marked == set(), "in the docstring, but not in a comment at the code"
    assert marked - declared == set(), "in a comment, but not in the docstring"
    assert {
        id for id in declared if id[0] == "E" and not re.search(rf"(?<![A-Za-z0-9]){id}(?!\d)", tests)
    } == set(), "in no test"


@each_script
def test_weight_decay_is_said_where_there_is_an_adamw(script):
    """Its default is 0.01: what is forgotten would decay."""
    calls = [node for node in ast.walk(tree_of(script)) if isinstance(node, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func) == "torch.optim.AdamW"]
    decaying = ("loop_ppo", "guide_simcse", "sft", "archer_offline_iql")
    usual = {0.0, 0.01} if kind_of(script) in decaying else {0.0}
    for call in calls:
        (decay,) = [keyword.value.value for keyword in call.keywords if keyword.arg == "weight_decay"]
        assert decay in usual


@each_script
def test_sections_have_the_usual_titles_in_the_usual_order(script):
    banners = [re.fullmatch(r"# -{10,} (\d)\. (.+)", text) for _, text in comments_of(script)]
    found = [(int(banner[1]), banner[2]) for banner in banners if banner]
    assert found and found == [(n, title) for n, title in enumerate(SECTIONS, 1) if (n, title) in found]


def tokens_of(source: str) -> dict[int, int]:
    """How many tokens of Python each code line has; docstrings and comments are none."""
    texts = set()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            texts |= set(range(node.lineno, node.end_lineno + 1))
    free = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines = []
    inside = 0  # of how many f-strings: from Python 3.12 on they come in parts, and count as one token
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        inside += tokenize.tok_name[token.type] == "FSTRING_START"
        if not inside and token.type not in free | {tokenize.ENDMARKER}:
            lines.append(token.start[0])
        inside -= tokenize.tok_name[token.type] == "FSTRING_END"
        if not inside and tokenize.tok_name[token.type] == "FSTRING_END":
            lines.append(token.start[0])
    return Counter(line for line in lines if line not in texts)


def squeezed(source: str) -> list[int]:
    """Lines with a condition in a call's arguments or in another, and the second of two `x |= {...}`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        inside = []
        if isinstance(node, ast.Call):
            inside = [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.IfExp):
            inside = [node.test, node.body, node.orelse]
        found += [inner.lineno for inner in inside if isinstance(inner, ast.IfExp)]
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            if isinstance(statements, list):
                for first, second in pairwise(statements):
                    found += [second.lineno] if merged(first) and merged(first) == merged(second) else []
    return sorted(found)


def merged(node: ast.AST) -> str | None:
    """The x of `x |= {...}`."""
    is_or = isinstance(node, ast.AugAssign) and isinstance(node.op, ast.BitOr)
    return ast.unparse(node.target) if is_or and isinstance(node.value, ast.Dict | ast.DictComp) else None


def beyond_measure(source: str, budget: int) -> list[str]:
    """What is too much in a script."""
    lines = tokens_of(source)
    total, wide = sum(lines.values()), sum(count >= WIDE for count in lines.values())
    problems = []
    if total > budget:
        problems.append(f"{total} tokens, more than {budget}")
    if total > MAX_MEAN * len(lines):
        problems.append(f"{total / len(lines):.2f} tokens a code line, more than {MAX_MEAN}")
    if wide > MAX_WIDE * len(lines):
        problems.append(f"{wide / len(lines):.1%} of the code lines have {WIDE} tokens or more")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > (MAX_MAIN if node.name == "main" else MAX_FUNCTION):
                problems.append(f"{node.name} has {length} lines")
    return problems + [f"line {line} is squeezed" for line in squeezed(source)]


def budget_of(script: Path) -> int:
    """How many tokens a script may have; one for many devices is measured by its sibling."""
    more = MULTIGPU if kind_of(script) != script.stem else 0
    return (BUDGETS.get(kind_of(script)) or BUDGETS[script.parent.name]) + more


@each_script
def test_one_thought_a_line(script):
    assert beyond_measure(script.read_text(encoding="utf-8"), budget_of(script)) == []


def function(name: str, lines: int) -> str:
    return f"def {name}():\n" + "    x = 1\n" * (lines - 1)


PLAIN = "x = f(1)\n" * 92  # 6 tokens a line


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (PLAIN + "x = f(1, 2, 3, 4, 5, 6, 7, 8)  # 20\n" * 8, []),
        (
            PLAIN[: -len("x = f(1)\n")] + "x = f(1, 2, 3, 4, 5, 6, 7, 8)\n" * 9,
            ["9.0% of the code lines have 20"],
        ),
        ("x = f(1, 2, 3)\n" * 80, []),
        ("x = f(1, 2, 3)\n" * 79 + "x = f(1, 2, 3, 4)\n", ["10.03 tokens a code line, more than 10.0"]),
        (PLAIN * 2, ["1104 tokens, more than 1000"]),
        ('"""Text.\n\n' + "is free. " * 2000 + '"""\n# as is this\n\nx = 1  # and this\n', []),
        (function("f", 45) + function("main", 80), []),
        (function("f", 46), ["f has 46 lines"]),
        (function("main", 81), ["main has 81 lines"]),
        (
            "class A:\n" + "".join(f"    {line}\n" for line in function("g", 46).splitlines()),
            ["g has 46 lines"],
        ),
        ("x = 1 if a else 2\nf(a, [1 if a else 2])\n", []),
        ("f(1 if a else 2)\n", ["line 1 is squeezed"]),
        ("\nf(x=1 if a else 2)\n", ["line 2 is squeezed"]),
        ("x = 1 if a else 2 if b else 3\n" + PLAIN, ["line 1 is squeezed"]),
        ("x |= {}\ny |= {}\nx |= f()\n", []),
        ("if a:\n    x |= {}\n    x |= {}\n", ["line 3 is squeezed"]),
    ],
)
def test_the_measure_sees_what_it_should(source, said):
    problems = beyond_measure(source, budget=1000)
    assert len(problems) == len(said)
    assert all(problem.startswith(start) for problem, start in zip(problems, said, strict=True))


def test_a_script_for_many_devices_is_measured_by_its_sibling():
    assert budget_of(ROOT / "archer.py") == 5200 and budget_of(ROOT / "archer_multigpu.py") == 6200
    assert budget_of(ROOT / "baselines/ppo.py") == 3600
    assert budget_of(ROOT / "baselines/ppo_multigpu.py") == 4600
    with pytest.raises(KeyError):
        budget_of(ROOT / "new.py")


@each_source
def test_width(source):
    lines = source.read_text(encoding="utf-8").splitlines()
    assert [n for n, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS] == []


@each_script
def test_share_of_comments(script):
    lines = script.read_text(encoding="utf-8").splitlines()
    explained = {line for line, _ in comments_of(script)}
    for node in ast.walk(tree_of(script)):
        if isinstance(node, ast.Expr) and isinstance(
            node.value, ast.Constant
        ):  # docstrings and helps of arguments
            explained |= set(range(node.lineno, node.end_lineno + 1))
    assert len(explained) >= MIN_COMMENTS * len(lines)


@each_source
def test_nothing_is_left_undone_and_nothing_runs_foreign_code(source):
    text = source.read_text(encoding="utf-8")
    forbidden = (
        r"\b(TODO|FIXME|XXX|NotImplementedError|pickle|cPickle|dill|joblib)\b|trust_remote_code\s*=\s*True"
    )
    assert re.findall(forbidden, text) == []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert options.get("weights_only") == "True", (
                f"line {node.lineno}: torch.load without weights_only=True"
            )
        runs_code = isinstance(node, ast.Call) and ast.unparse(node.func) in ("eval", "exec", "compile")
        assert not runs_code or source.name in RUNS_CODE


def is_false(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def careless_loads(tree: ast.Module) -> list[int]:
    """Lines that call from_pretrained without trust_remote_code=False, there or in a dict handed on."""
    safe = set()  # names of dicts
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            items = zip(node.value.keys, node.value.values, strict=True)
            if any(
                isinstance(k, ast.Constant) and k.value == "trust_remote_code" and is_false(v)
                for k, v in items
            ):
                safe |= {ast.unparse(target) for target in node.targets}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
            options = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
            handed_on = {ast.unparse(keyword.value) for keyword in node.keywords if not keyword.arg}
            if not (is_false(options.get("trust_remote_code")) or handed_on & safe):
                found.append(node.lineno)
    return found


@each_source
def test_no_model_brings_code_of_its_own(source):
    assert careless_loads(tree_of(source)) == []


def test_a_careless_load_is_seen():
    said = "o = {'trust_remote_code': False}\nA.from_pretrained(x, **o)\n"
    said += "A.from_pretrained(x, trust_remote_code=False)"
    assert careless_loads(ast.parse(said)) == []
    assert careless_loads(ast.parse(said.replace("False", "True"))) == [2, 3]
    assert careless_loads(ast.parse("A.from_pretrained(x)\nA.from_pretrained(x, **o)")) == [1, 2]


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
def test_importing_does_nothing(script, tmp_path, monkeypatch, capfd):
    for node in tree_of(script).body:
        is_main = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        kinds = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)
        assert is_main or is_text or isinstance(node, kinds), (
            f"line {node.lineno} does something when imported"
        )
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name=script.stem)  # its packages, which take seconds
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 2)  # to see it if the script sets another number
        before, began = state_of_the_process(), time.process_time()
        module = runpy.run_path(str(script), run_name=script.stem)
        assert time.process_time() - began < 1
        assert state_of_the_process() == before
    finally:
        torch.set_num_threads(threads)
    assert callable(module["main"]) and module["Args"]()
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def state_of_the_process() -> list:
    """What an import could change for others."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    generators = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    return [torch.get_num_threads(), dtype, grad, handlers, generators, dict(os.environ), list(sys.path)]


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
    """What is wrong with the copies: a difference without a waiver, or a waiver without a difference."""
    copies = defaultdict(dict)
    for script, tree in scripts.items():
        for name, syntax in functions_of(tree).items():
            copies[name][script] = syntax

    problems = []
    for name, by_script in copies.items():
        for script in [script for script in by_script if script.endswith("_multigpu.py")]:
            sibling = script.replace("_multigpu", "")
            is_waived = script in waivers.get(name, {}).get("scripts", [])
            if sibling not in by_script or is_waived:
                continue
            if by_script.pop(script) != by_script[sibling]:
                problems.append(f"{name} differs between {sibling}, {script}")
    for name, by_script in copies.items():
        waived = set(waivers.get(name, {}).get("scripts", []))
        usual = {script: syntax for script, syntax in by_script.items() if script not in waived}
        if len(set(usual.values())) > 1:
            problems.append(f"{name} differs between {', '.join(usual)}")
    for name, waiver in waivers.items():
        by_script = copies.get(name, {})
        if not waiver.get("reason", "").strip():
            problems.append(f"the waiver of {name} gives no reason")
        same = waiver.get("same", [])
        if len({by_script.get(script) for script in same}) > 1:
            problems.append(f"{name} differs between {', '.join(same)}")
        for script in waiver["scripts"]:
            alike = same if script in same else [script]
            others = {syntax for other, syntax in by_script.items() if other not in alike}
            if not others or script not in by_script or by_script[script] in others:
                problems.append(f"the waiver of {name} in {script} is not needed")
    return problems


def test_functions_of_one_name_are_one_function():
    waivers = tomllib.loads((ROOT / "tests/waivers.toml").read_text(encoding="utf-8"))
    assert unwaived({str(path.relative_to(ROOT)): tree_of(path) for path in SCRIPTS}, waivers) == []


def test_the_comparison_of_copies_sees_what_it_should():
    parse = ast.parse
    one = "def f(x):\n    return x  # a comment is free"
    scripts = {
        "a.py": parse(one),
        "b.py": parse("def f(x):\n  return x"),
        "c.py": parse("def f(x):\n  return -x"),
    }
    waiver = {"f": {"scripts": ["c.py"], "reason": "the sign is the algorithm"}}
    assert unwaived(scripts, {}) == ["f differs between a.py, b.py, c.py"]
    assert unwaived(scripts, waiver) == []
    assert unwaived(scripts, {"f": {"scripts": ["c.py"]}}) == ["the waiver of f gives no reason"]
    assert unwaived({"a.py": scripts["a.py"], "c.py": scripts["a.py"]}, waiver) == [
        "the waiver of f in c.py is not needed"
    ]
    two = scripts | {"d.py": scripts["c.py"]}
    waiver_of_two = {"f": {"scripts": ["c.py", "d.py"], "reason": "the sign is the algorithm"}}
    assert len(unwaived(two, waiver_of_two)) == 2, "which of them is one function with the other?"
    waiver_of_two["f"]["same"] = ["c.py", "d.py"]
    assert unwaived(two, waiver_of_two) == []
    two["d.py"] = parse("def f(x): return 3 * x")
    assert unwaived(two, waiver_of_two) == ["f differs between c.py, d.py"]
    two["d.py"] = two["c.py"] = scripts["a.py"]
    assert len(unwaived(two, waiver_of_two)) == 2, "neither is needed"
    scripts |= {"a_multigpu.py": scripts["a.py"], "c_multigpu.py": scripts["c.py"]}
    assert unwaived(scripts, waiver) == []
    scripts["c_multigpu.py"] = scripts["a.py"]
    assert unwaived(scripts, waiver) == ["f differs between c.py, c_multigpu.py"]
    scripts["c_multigpu.py"] = parse("def f(x): return 2 * x")
    both = {"f": {"scripts": ["c.py", "c_multigpu.py"], "reason": "the sign, and twice"}}
    assert unwaived(scripts, both) == []
    methods = {
        "a.py": parse("class C:\n  def f(self): return 1"),
        "b.py": parse("class C:\n  def f(self): return 2"),
    }
    assert unwaived(methods, {}) == ["C.f differs between a.py, b.py"]


# ---------------------------------------------------------------------------------- the command line


@each_script
def test_help_explains_every_argument(script):
    fields = args_of(script)
    assert [name for name, text in fields.items() if not (text and text.strip())] == []
    code, out, err = call(script, "--help")
    assert (code, err) == (0, "")
    # Lines are broken anywhere, in a box or in none.
    said = re.sub(r"[│|\s]+", "", out)
    for name, text in fields.items():
        assert re.search(rf"--{name.replace('_', '-')}[ ,]", out), name
        assert re.sub(r"\s+", "", text) in said, name


@each_script
def test_a_run_of_two_iterations(script, tiny_run):
    folder = tiny_run(script)
    assert re.fullmatch(rf"{WORLD[kind_of(script)]}__{script.stem}__3__\w[\w-]*", folder.name)
    assert [name for name in [*RUN_FILES, SAMPLES[kind_of(script)]] if not (folder / name).exists()] == []
    assert list(folder.glob("events.out.tfevents.*"))

    arguments = json.loads((folder / "args.json").read_text())
    assert set(arguments) == set(args_of(script)) and arguments["seed"] == 3
    summary = json.loads((folder / "summary.json").read_text())
    keys = set(SUMMARIES[kind_of(script)].split())
    assert keys - set(summary) == set()
    beyond = {key for key in set(summary) - keys if not key.startswith(("warm_start_", "eval_", "test_"))}
    assert beyond == set()
    figures = [summary[key] for key in set(summary) - {"commit"}]
    assert all(isinstance(figure, int | float) and abs(figure) < 1e9 for figure in figures)
    assert summary["seed"] == 3 and isinstance(summary["commit"], str)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) >= 2
    assert [json.loads(line) for line in (folder / SAMPLES[kind_of(script)]).read_text().splitlines()]


@each_script
def test_the_metrics_table_of_the_page_has_what_is_logged_and_nothing_else(script, tiny_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, metrics = tiny_run(script), metrics_of(script)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = {tag for row in rows for tag in row} - {"iteration"}
    tags = EventAccumulator(str(folder)).Reload().Tags()
    assert logged - set(metrics) == set(), "logged, but not on the page"
    assert set(metrics) - logged == set(), "on the page, but not logged"
    assert set(tags["scalars"]) == logged, "TensorBoard has the same"
    assert tags["tensors"] == ["args/text_summary"], "with which arguments it ran stands beside its curves"
    assert [tag for tag, meaning in metrics.items() if len(meaning) < 10] == []


def test_every_tag_of_the_page_for_runs_that_fail_is_logged():
    """The scripts' pages have what is logged, by the test above."""
    page = (ROOT / "docs/it_does_not_learn.md").read_text(encoding="utf-8")
    tags = {tag for script in SCRIPTS for tag in metrics_of(script)}
    groups = {tag.partition("/")[0] for tag in tags}
    named = {tag for tag in re.findall(r"\b\w+/\w+\b(?![\w/.])", page) if tag.partition("/")[0] in groups}
    assert len(named) > 10 and named - tags == set()


@pytest.mark.parametrize("script", SPEAKERS, ids=lambda path: path.stem)
def test_rambling_is_charged_for(script, checkpoint, tmp_path):
    """Who never ends a turn fills the context early, and yet returns what all 20 questions cost."""
    rambler = make_rambler(checkpoint(ROOT / "archer.py"), tmp_path / "rambler")
    options = ["--env", WORLD["archer"], "--runs", tmp_path / "runs", *tiny(script, rambler)]
    code, _, err = call(script, *options, *(["--iterations", "0"] if script.stem != "sft" else []))
    assert (code, err) == (0, "")
    (folder,) = (tmp_path / "runs").iterdir()
    start = figures_of(folder)[0]
    of_play = {tag for tag in start if tag in ("eval/return", "eval/return_greedy")}
    assert of_play and {start[tag] for tag in of_play} == {-20.0}
    cut = {tag.replace("return", "cut") for tag in of_play}
    assert {start[tag] for tag in cut} == {1.0} and start["eval/success"] == 0.0


# ----------------------------------------------------------------------------------------- README

# (start of a command, arguments that make it small, what is typed); the first that fits is taken
HOW_TO_RUN = [
    ("bash benchmarks/gpu.sh", "cpu", ""),
    ("python benchmarks/apps.py", "--turns 20 --worlds 1", ""),
    ("python benchmarks/multigpu.py --time", "--repeats 1 --iterations 1", ""),
    ("python benchmarks/compare.py", "--quick --worlds twenty-questions-subset", ""),
    ("python benchmarks/variants.py", "--iterations 1 --rollouts 4 --critic-updates 1 --eval-episodes 2", ""),
    ("python benchmarks/loop_speed.py", "--repeats 1 --widths 32 --vocabularies 512 --turns 2", ""),
    ("python benchmarks/loop_table.py", "--quick", ""),
    ("python benchmarks/table1.py", "--quick --seeds 1", ""),
    ("python benchmarks/theory_fpe.py", "--quick", ""),
    ("python benchmarks/lge.py", "--quick --tasks T12", ""),
    ("python benchmarks/scienceworld_speed.py", "--worlds 1 --steps 2 --warm-up 2", ""),
    ("python benchmarks/speed.py", "--repeats 1 --rollouts 4 --max-action-tokens 4", ""),
    ("python benchmarks/start.py", "--episodes 4 --max-action-tokens 4", ""),
    ("python benchmarks/knowledge.py", "--states 4", ""),
    ("python benchmarks/order.py", "--dialogues 4 --updates 1 --critic-batch 2", ""),
    ("python -m envs.play twenty-questions --agent", "", "No.\nc\n"),
    ("python -m envs.play", "--index 11", "Is it a dog?\n"),
    ("python -m pytest", "--collect-only -q tests/worlds/test_apps.py", ""),
    ("python ", "", ""),  # a script is made small by TINY
    ("torchrun ", "", ""),
    ("tensorboard", "--inspect", ""),
    ("mkdir", "", ""),
    ("cp", "", ""),
]
NOT_HERE = {  # part of a command: what it needs that no test has
    "appworld": "AppWorld's own virtual environment and data",
    "detective": "a copy of detective.z5",
    "bert-base-uncased": "the weights of BERT",
    "openenv": "an OpenEnv server",
    "--authors": "the repository of ArCHer's authors",
    "smollm2.sh": "SmolLM2's weights; tests/tools/test_smollm2.py runs it with a tiny model",
    "--train-variations 0": "all of ScienceWorld's variations, which take hours to make",
}
if not importlib.util.find_spec("textarena"):
    NOT_HERE["textarena"] = "the package textarena"
# What installs needs the network, and the test of that is .ci/run. train-scienceworld.py is the authors'.
PROGRAMS = re.compile(r"python (?!-c|train-scienceworld)|torchrun |bash |tensorboard |mkdir |cp ")


def commands_of(page: Path) -> list[str]:
    """Every command of a page's sh blocks, in order: lines (a backslash joins two), split at "&&"."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    commands = [part.strip() for line in lines for part in line.split(" && ")]
    return list(dict.fromkeys(command for command in commands if PROGRAMS.match(command)))


README = commands_of(ROOT / "README.md")
DOCS = [
    pytest.param(command, id=f"{page.name}-{command}", marks=pytest.mark.slow)
    for page in PAGES
    for command in commands_of(page)
    if command not in README
]


@pytest.fixture(scope="session")
def clone(tmp_path_factory, tiny_run, checkpoint):
    """A copy of the repository with a finished run, runs/RUN, and small models where the README has names.

    The ready-made checkpoints are tiny ones, too.
    """
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaModel

    folder = tmp_path_factory.mktemp("clone") / "turnrl"
    ignored = shutil.ignore_patterns(".*", "runs", "__pycache__", "venv")
    shutil.copytree(ROOT, folder, ignore=ignored)
    for world in ("twenty-questions", "guess-my-city", "mini-detective", "webshop", "apps"):
        shutil.rmtree(folder / "checkpoints" / world, ignore_errors=True)
        make_checkpoint(world, folder / "checkpoints" / world)
    run_folder = tiny_run(ROOT / "archer.py")
    shutil.copytree(run_folder, folder / "runs" / "RUN")
    shutil.copy(run_folder / "rollouts.jsonl", folder / "data.jsonl")
    guide_folder = tiny_run(ROOT / "guide_simcse.py")
    shutil.copytree(guide_folder, folder / "runs" / guide_folder.name)
    example = re.search(r"```python\n(.*?)```", (ROOT / "docs/your_world.md").read_text(), re.S)[1]
    (folder / "mine").mkdir()
    (folder / "mine/my_world.py").write_text(example)
    _, _, _, ranked = data_of(ROOT / "guide_simcse.py", folder / "data")
    from test_guide_simcse import to_file, toy_eval

    named = {"task2": "find-plant"}  # which a command of README asks for
    to_file(Path(ranked), [row | {"task": named.get(row["task"], row["task"])} for row in toy_eval()])

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(run_folder / "actor")
    sizes = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2Config(n_positions=1024, n_embd=16, n_layer=1, n_head=2, **sizes)
    sizes |= {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    roberta = RobertaConfig(max_position_embeddings=514, **sizes)
    for name, model in {"gpt2": GPT2LMHeadModel(gpt2), "roberta-base": RobertaModel(roberta)}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def run_small(command: str, clone: Path, tiny_run) -> None:
    """Runs a printed command in the clone, made small; it must end well."""
    ways = [(extra, typed) for start, extra, typed in HOW_TO_RUN if command.startswith(start)]
    assert ways, f"say in HOW_TO_RUN how to make {command!r} small"
    extra, typed = ways[0]
    guides = [str(path) for path in clone.glob("runs/*guide_simcse*/guide")]
    command = command.replace("SEED", "1").replace("GUIDE", (guides or ["none"])[0])
    words = shlex.split(command, comments=True)
    is_java = re.search("benchmarks/lge|guide_rank|scienceworld", command)
    if problem := envs.missing("scienceworld") if is_java else None:
        pytest.skip(problem)
    script = ROOT / words[1]
    if words[1] == "-m":
        script = ROOT / f"{words[2].replace('.', '/')}.py"
    if words[0] == "torchrun":
        script = ROOT / next(word for word in words if word.endswith(".py"))
    is_small = script in SCRIPTS and not {"--help", "--resume"} & set(words)
    words += tiny(script) if is_small else shlex.split(extra)
    if "--resume" in words and script.name != "archer.py":
        own = clone / "runs" / script.name  # RUN is one of archer.py
        shutil.copytree(tiny_run(script), own, dirs_exist_ok=True)
        words[words.index("--resume") + 1] = str(own)
    if "cuda" in words and not torch.cuda.is_available():
        words += ["--device", "cpu"]
    beside = Path(sys.executable).parent / words[0]
    words[0] = sys.executable if words[0] == "python" else str(beside) if beside.exists() else words[0]
    if words[0].endswith("cp"):  # the command before it may have run in another worker, in another clone
        (clone / words[-1]).mkdir(exist_ok=True)
    result = run(*words, cwd=clone, stdin=typed)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("command", README)
def test_every_command_of_the_readme_runs(command, clone, tiny_run):
    run_small(command, clone, tiny_run)


@pytest.mark.parametrize("command", DOCS)
def test_every_command_of_the_pages_runs(command, clone, tiny_run):
    for start, reason in NOT_HERE.items():
        if start in command:
            pytest.skip(f"it needs {reason}")
    run_small(command, clone, tiny_run)


def test_the_map_of_the_files_is_true():
    """docs/files.md names every source file but tests, and no file that is not there."""
    text = (ROOT / "docs/files.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w*-]+\.(?:py|toml|html|md|jsonl|svg)\b", text))
    written = {"test_SCRIPT*.py", "test_WORLD.py"}  # for many
    folders = [ROOT / name for name in ("baselines", "envs", "tests", "benchmarks", "docs", "checkpoints")]
    there = [path.name for path in ROOT.iterdir()]
    there += [path.name for folder in folders for path in folder.rglob("*")]
    assert [name for name in named - written if not fnmatch.filter(there, name)] == []
    sources = {path.name for path in SOURCES} | {path.name for path in ROOT.glob("docs/**/*.md")}
    assert sources - named == set()


def test_every_world_has_a_page():
    index = (ROOT / "docs/worlds/README.md").read_text(encoding="utf-8")
    for id in envs.ENVS:
        assert f"`{id}`" in index, id
        page = ROOT / f"docs/worlds/{id.removesuffix('-train').removesuffix('-subset')}.md"
        assert page.exists() and f"]({page.name})" in index, id
        assert f"`{id}`" in page.read_text(encoding="utf-8") or page.stem == id, id


def test_the_readmes_python_runs(clone):
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S
    )
    (clone / "snippet.py").write_text(code)
    result = run(sys.executable, "snippet.py", cwd=clone)
    assert result.returncode == 0 and result.stdout.startswith("Questions:\n"), result.stderr[-2000:]


def test_the_readme_counts_the_lines_of_every_script():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[`(\w+\.py)`\].*?\| (\d+) \|", readme, re.M)
    counted = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name, _ in rows}
    assert len(rows) == 6 and {name: int(number) for name, number in rows} == counted
    (few, many) = re.search(r"^\| \[`baselines/`\].*?\| (\d+) to (\d+) \|", readme, re.M).groups()
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob("baselines/[a-z]*.py")]
    assert (int(few), int(many)) == (min(lines), max(lines))


def test_the_readme_has_the_two_commands_on_one_line_each():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    first, second = [line for line in lines if line.startswith("python3 -m venv")]
    assert first.endswith(" && python archer.py --env twenty-questions") and second.endswith(
        " && python -m pytest"
    )
    assert first.rpartition(" && ")[0] == second.rpartition(" && ")[0], "both install the same"


def anchors_of(page: Path) -> set[str]:
    """What can stand behind "#" in a link to a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    """Links to other files, and names of pages in text, of this and of the sources."""
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", text):
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors_of(there), f"{target}#{anchor}"


@each_source
def test_every_page_that_a_source_names_is_there(source):
    named = re.findall(
        r"\b(?:docs|envs|tests|benchmarks)/[\w/.-]+\.\w+\b", source.read_text(encoding="utf-8")
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_entry_of_the_log_has_a_date_and_a_verdict():
    titles = re.findall(r"^## (.*)$", (ROOT / "docs/log.md").read_text(encoding="utf-8"), re.M)
    assert titles == sorted(titles, key=lambda title: title[:10], reverse=True), "newest first"
    assert [title for title in titles if not re.fullmatch(r"\d{4}-\d\d-\d\d, .+ \([a-z ]+\)", title)] == []


def test_no_number_is_left_open():
    assert [page.name for page in PAGES if "@@" in page.read_text(encoding="utf-8")] == []


def test_the_lock_pins_what_is_required():
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lock if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    names = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}
    assert {name.lower() for name in listed_packages()} <= names


# ----------------------------------------------------------------------------- killed, stopped, gone on with


def long_run(script: Path, model: Path | None, folder: Path, lines: int, every: int) -> list[str]:
    """Options of a run that is tiny but for the number of lines of metrics that it will write.

    A checkpoint comes with `every` of them.
    """
    options = ["--env", WORLD[kind_of(script)], "--runs", folder, *tiny(script, model)]
    options += data_of(script, folder.parent / "data")
    known = args_of(script)
    if "iterations" in known:
        sizes = {
            "iterations": lines,
            "save-every": every,
            "eval-every": lines if "save_every" in known else every,
        }
    elif "steps" in known:  # a line of each, an evaluation and a checkpoint of some
        sizes = {"steps": lines, "log-every": 1, "eval-every": every}
    else:  # two updates an epoch; it writes a line with every checkpoint
        sizes = {"epochs": lines, "save-every": 2}
    sizes = {name: value for name, value in sizes.items() if name.replace("-", "_") in known}
    return [*options, *(word for name, value in sizes.items() for word in (f"--{name}", value))]


START = '{"iteration": 0,'  # of the line that some scripts write of the evaluation before the first iteration


def wait_for_lines(place: Path, n: int, process) -> Path:
    """The run's folder, once its metrics have lines of `n` iterations."""
    deadline = time.time() + 300  # a world of Java processes starts slowly where others work, too
    while time.time() < deadline and process.poll() is None:
        found = list(place.glob("*/metrics.jsonl"))
        lines = found[0].read_text().splitlines() if found else []
        if len([line for line in lines if not line.startswith(START)]) >= n:
            return found[0].parent
        time.sleep(0.005)
    raise AssertionError(f"no {n} lines; exit code {process.poll()}, {process.stderr.read()[-2000:]}")


def figures_of(run: Path) -> list[dict]:
    """What the run has logged, but for what a clock measured."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{tag: value for tag, value in row.items() if not tag.startswith("time/")} for row in rows]


def killed(script: Path):
    """All write checkpoints in the same way: one is among the quick tests, the others are slow."""
    marks = [] if script.stem == "archer" else [pytest.mark.slow]
    return pytest.param(script, id=script.stem, marks=marks)


@pytest.mark.parametrize("script", [killed(script) for script in SCRIPTS])
def test_killed_and_resumed_to_the_bit(script, checkpoint, tmp_path):
    """SIGKILL some iterations behind a checkpoint: what came after that is done again, to the bit."""
    if script.stem in ("sft", "guide_simcse"):
        pytest.skip(f"tests/algorithms/test_{script.stem}.py kills and resumes it, at moments that suit it")
    skip_without_world(script)
    # Where checkpoints come with evaluations, behind which all worlds begin anew, both runs have the same.
    every = 6 if "save_every" in args_of(script) else 3
    options = long_run(script, checkpoint(script), tmp_path / "killed", 6, 3)
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    words = list(map(str, [*command_of(script), *options]))
    process = subprocess.Popen(words, cwd=ROOT, env=os.environ | QUIET, **pipes)
    folder = wait_for_lines(tmp_path / "killed", 4, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (folder / "summary.json").exists()
    (folder / "checkpoint.tmp").write_bytes(b"half")  # as if it had been writing one
    if script.stem not in LGE:
        (folder / "actor.tmp").mkdir(exist_ok=True)
    code, _, err = call(script, "--resume", folder)
    assert (code, err) == (0, "")
    options = long_run(script, checkpoint(script), tmp_path / "whole", 6, every)
    assert call(script, *options)[0] == 0
    (other,) = (tmp_path / "whole").iterdir()
    assert figures_of(folder) == figures_of(other)
    assert len([row for row in figures_of(folder) if row["iteration"] > 0]) == 6
    name = SAMPLES[kind_of(script)]
    assert (folder / name).read_text() == (other / name).read_text()
    assert not list(folder.rglob("*.tmp"))


def one_line(script: Path, *options) -> str:
    """What the command line says when it refuses to run: a line, and exit code 2."""
    code, _, err = call(script, *options)
    (said,) = err.splitlines()
    assert code == 2 and said.startswith(f"{script.name}: ")
    return said


@each_script
def test_a_resumed_run_keeps_its_arguments(script, tiny_run, tmp_path):
    """Those of its own args.json hold, but for what is given anew."""
    folder = shutil.copytree(tiny_run(script), tmp_path / "again")
    kept = json.loads((folder / "args.json").read_text())
    more = next(name for name in ("iterations", "steps", "epochs") if name in args_of(script))
    number = kept[more] + TINY["log_every"]
    code, _, err = call(script, "--resume", folder, f"--{more}", number)
    assert (code, err) == (0, "")
    arguments = json.loads((folder / "args.json").read_text())
    assert arguments == kept | {more: number}
    last = figures_of(folder)[-1]["iteration"]
    assert last > figures_of(tiny_run(script))[-1]["iteration"]


@each_script
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--env nowhere", "nowhere"),
        ("--world flavour=salt", ""),
        ("--world salt", ""),
        ("--lr -1", ""),
        ("--actor-lr -1", ""),
        ("--device moon", "--device moon: not here, take cpu"),
        ("--resume nowhere", "there is no folder nowhere"),
    ],
)
def test_a_bad_argument_is_one_line(script, wrong, said, checkpoint, tmp_path):
    """What else envs/runs.py refuses, of every script, tests/tools/test_runs.py has."""
    skip_without_world(script)
    flag, value = wrong.split()
    if flag.removeprefix("--").replace("-", "_") not in args_of(script):
        pytest.skip(f"{script.name} has no {flag}")
    options = [
        "--env",
        WORLD[kind_of(script)],
        "--runs",
        tmp_path / "runs",
        *tiny(script, checkpoint(script)),
    ]
    options += data_of(script, tmp_path / "data")
    assert said in one_line(script, *options, flag, value)
    assert not (tmp_path / "runs").exists(), "nothing is half-written"


@each_script
def test_weights_that_are_missing_are_not_drawn_at_random(script, checkpoint, tiny_run, tmp_path):
    """In the model that a run starts from; for lge_drrn.py in its guide."""
    skip_without_world(script)
    flag = {"lge_drrn": "guide", "guide_simcse": "encoder"}.get(script.stem)
    flag = flag or next(name for name in ("actor", "model") if name in args_of(script))
    source = tiny_run(ROOT / "guide_simcse.py") / "guide" if script.stem in LGE else checkpoint(script)
    folder = shutil.copytree(source, tmp_path / "model")
    options = ["--env", WORLD[kind_of(script)], "--runs", tmp_path / "runs", *tiny(script)]
    options += [*data_of(script, tmp_path / "data"), f"--{flag}", folder]
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors[sorted(name for name in tensors if "pooler" not in name)[-1]]
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "no weights for" in one_line(script, *options)
    assert not (tmp_path / "runs").exists()
    shutil.rmtree(folder)
    assert str(folder) in one_line(script, *options)


@pytest.mark.parametrize("script", SPEAKERS, ids=lambda path: path.stem)
def test_a_model_that_is_read_otherwise_than_by_itself_is_refused(script, checkpoint, tmp_path):
    """Before anything is learned; else a run would end with exit code 0 and wrong numbers."""
    folder = make_looker_ahead(checkpoint(ROOT / "archer.py"), tmp_path / "model")
    options = ["--env", WORLD["archer"], "--runs", tmp_path / "runs", *tiny(script, folder)]
    said = one_line(script, *options)
    reason = "what it says of a token depends on those that follow"
    assert said == f"{script.name}: a model of type bert cannot be used: {reason}"
    assert not (tmp_path / "runs").exists()


SHAPES = [("gemma3", name) for name in ("archer", "loop_ppo", "sft")]
SHAPES += [("opt", path.stem) for path in SPEAKERS if path.stem not in ("sft", "filtered_bc")]


@pytest.mark.parametrize(("kind", "name"), SHAPES)
def test_a_model_of_another_shape(kind, name, checkpoint, tmp_path, monkeypatch):
    """OPT-350m's states leave it narrower than they are; Gemma 3's sizes stand in a part of its own."""
    monkeypatch.setitem(table.SMALL, "max_position_embeddings", 2048)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint(ROOT / "archer.py"))
    folder = table.make_model(kind, tmp_path / "model", tokenizer)
    (script,) = (path for path in SPEAKERS if path.stem == name)
    options = ["--env", WORLD["archer"], "--runs", tmp_path / "runs", *tiny(script, folder)]
    assert call(script, *options)[::2] == (0, "")


@each_script
def test_stopped_by_a_signal(script, checkpoint, tmp_path, monkeypatch):
    """The iteration it falls into is finished and saved; the program ends as if that had been the last."""
    skip_without_world(script)
    number = (signal.SIGINT, signal.SIGTERM)[SCRIPTS.index(script) % 2]  # envs/runs.py knows both
    log = runs.Run.log

    def log_and_ask(run, *given):
        log(run, *given)
        if run.iteration > 0 and not run.stopped:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(runs.Run, "log", log_and_ask)
    options = long_run(script, checkpoint(script), tmp_path / "runs", 5000, 5000)
    code, out, err = call(script, *options)
    assert (code, err) == (0, "") and "stopping after this iteration" in out
    (folder,) = (tmp_path / "runs").iterdir()
    last = figures_of(folder)[-1]["iteration"]
    assert 1 <= last < 5000 and json.loads((folder / "summary.json").read_text())["iteration"] == last
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["iteration"] == last
