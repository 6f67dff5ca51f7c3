"""SCRIPT_multigpu.py takes the steps of SCRIPT.py, shared out among processes; and the turns of an engine.

Two processes meet by gloo, on the CPU. What differs is on docs/multigpu.md, and why.
"""

import importlib.util
import json
import os
import signal
import subprocess
import time
from dataclasses import fields
from pathlib import Path

import pytest
import test_loop_ppo
import torch
from fake_vllm import BASE, FakeVLLM
from test_loop_ppo import Lookup, base, one_thread, plain_logps, skilled, toy  # noqa: F401

import archer
import archer_multigpu
import loop_ppo
import loop_ppo_multigpu
from benchmarks import multigpu
from envs import runs

ROOT = multigpu.ROOT
PAIRS = [(archer, archer_multigpu), (loop_ppo, loop_ppo_multigpu)]
needs_peft = pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the package peft")


# ------------------------------------------------------------------------------------ the same steps
@pytest.mark.parametrize("script", multigpu.SMALL)
def test_by_two_processes_it_is_the_same_run(script, tmp_path):
    first = next(case for case in multigpu.CASES if case[0] == script)
    found = multigpu.equal(tmp_path, {first: multigpu.CASES[first]}, by_three=False)
    assert list(found) == [first] and found[first] < 1e-9


@pytest.mark.slow
def test_so_it_is_in_each_case_and_when_three_go_on(tmp_path):
    has_peft = importlib.util.find_spec("peft")
    cases = {case: words for case, words in multigpu.CASES.items() if "lora" not in words or has_peft}
    found = multigpu.equal(tmp_path, cases)
    assert found.keys() == {*cases, ("loop_ppo", "resumed by three")}
    assert max(found.values()) < 1e-9


def test_what_differs_is_seen(tmp_path):
    """The comparison itself: another seed is another run."""
    found = []
    for seed in (1, 2):
        args = loop_ppo.Args(**multigpu.WORLD | multigpu.SMALL["loop_ppo"] | {"iterations": 1, "seed": seed})
        args.runs = str(tmp_path / str(seed))
        loop_ppo.main(args)
        found.append(multigpu.only(tmp_path / str(seed)))
    assert multigpu.apart(*found) > 1e-4 and multigpu.apart(found[0], found[0]) == 0


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
@pytest.mark.parametrize("number", [0, 1, 4, 10])
def test_a_part_for_each_and_nothing_twice(processes, number, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    items, parts = list(range(number)), []
    for rank in range(processes):
        monkeypatch.setenv("RANK", str(rank))
        parts.append(archer_multigpu.own_part(items))
    assert [item for part in parts for item in part] == items
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


# ------------------------------------------------------------------------------------ the processes
@pytest.mark.slow
def test_a_killed_process_ends_all(tmp_path):
    """With a message, and soon; the first one alone has written."""
    options = {"--env": "twenty-questions-subset", "--runs": tmp_path, "--iterations": 1000, "--tasks": 2}
    options |= {
        "--rollouts": 2,
        "--worlds": 4,
        "--max-action-tokens": 4,
        "--eval-episodes": 2,
        "--threads": 1,
    }
    command = multigpu.command_of(ROOT / "loop_ppo_multigpu.py", 2)
    command += [str(word) for pair in options.items() for word in pair]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes) as process:
        try:
            deadline = time.time() + 240
            while not list(tmp_path.glob("*/metrics.jsonl")) and time.time() < deadline:
                time.sleep(0.1)
            (folder,) = tmp_path.iterdir()
            workers = subprocess.run(
                ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
            )
            first = int((folder / "lock").read_text())
            (other,) = {int(pid) for pid in workers.stdout.split()} - {first}
            began = time.time()
            os.kill(other, signal.SIGKILL)
            out, err = process.communicate(timeout=100)
        finally:
            process.terminate()
    assert process.returncode and "SIGKILL" in err
    assert time.time() - began < 60
    assert [line for line in out.splitlines() if line.startswith(str(tmp_path))] == [str(folder)]
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


@pytest.mark.parametrize("script", ["archer", "loop_ppo", "archer_offline_iql", "ppo"])
def test_a_script_for_one_device_names_its_sibling(script, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = {"archer": "archer_multigpu.py", "loop_ppo": "loop_ppo_multigpu.py"}.get(
        script, "without torchrun"
    )
    with pytest.raises(ValueError, match=f"^torchrun starts 2 processes, .* {said}$"):
        runs.check(archer.Args(), script)
    runs.check(archer.Args(), f"{script}_multigpu")


# ------------------------------------------------------------------------------------ the page
def test_the_page_has_the_differences_as_they_are():
    page = (ROOT / "docs/multigpu.md").read_text(encoding="utf-8")
    assert page == multigpu.renewed(page), "python benchmarks/multigpu.py --out docs/multigpu.md"


@pytest.mark.parametrize("script", multigpu.SCRIPTS)
def test_few_lines_differ(script):
    """Section 3 of the issue: at most 80, without those for --engine."""
    new, *_ = multigpu.page_of(script).split("\n\n")[1].split()
    assert int(new) <= 80


def test_a_difference_without_a_reason_is_seen(tmp_path, monkeypatch):
    for name in ("archer", "archer_multigpu"):
        (tmp_path / f"{name}.py").write_text((ROOT / f"{name}.py").read_text())
    with (tmp_path / "archer_multigpu.py").open("a") as file:
        file.write("x = 1\n")
    found = multigpu.blocks("archer", tmp_path)
    monkeypatch.setattr(multigpu, "blocks", lambda script: found)
    with pytest.raises(ValueError, match=r"has no reason for\n\+x = 1"):
        multigpu.page_of("archer")


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].__name__)
def test_a_run_of_the_sibling_can_be_resumed(pair, tmp_path):
    """Both have the same arguments, and the same defaults, but for --engine; and each reads the other's."""
    one, several = [{field.name: field.default for field in fields(script.Args)} for script in pair]
    assert several == one | ({"engine": ""} if pair[0] is loop_ppo else {})
    for begun, goes_on in (pair, pair[::-1]):
        (tmp_path / "args.json").write_text(json.dumps(vars(begun.Args(seed=7))))
        assert runs.saved_args(goes_on.Args, tmp_path) == goes_on.Args(seed=7)


def test_a_run_with_an_engine_needs_it(tmp_path):
    (tmp_path / "args.json").write_text(json.dumps(vars(loop_ppo_multigpu.Args(engine="http://a:1"))))
    with pytest.raises(ValueError, match="engine is no argument of this script"):
        runs.saved_args(loop_ppo.Args, tmp_path)


# ------------------------------------------------------------------------------------ the engine
def small(**changes) -> loop_ppo_multigpu.Args:
    return loop_ppo_multigpu.Args(**vars(test_loop_ppo.small()) | {"lora": True} | changes)


@pytest.fixture
def served(base):  # noqa: F811
    """A model whose turns a server writes, and that server."""
    with FakeVLLM(base) as server:
        args = small(engine=server.url, lora=False)
        model = loop_ppo_multigpu.make_model(args, base)
        args.lora = True
        model.engine = loop_ppo_multigpu.Engine(args)
        model.engine.name = BASE
        yield model, args, server


def play(served, **options):
    model, args, _ = served
    worlds, tasks, draws = [Lookup() for _ in range(12)], [0] * 4 + [1] * 4 + [2] * 4, list(range(12))
    return loop_ppo_multigpu.rollout(model, worlds, tasks, [0] * 12, draws, args, **options)


def test_an_engine_s_turns_are_as_if_sampled_here(served):
    """Token ids as they were sent, log-probs of the tempered distribution, turns that end as they do here."""
    model, args, server = served
    args.temperature = 0.7
    played = play(served)
    assert len({t.text for t in played}) > 3 and {t.fate for t in played} == {"ended"}
    end = model.tokenizer.eos_token_id
    for pairs in loop_ppo_multigpu.score(model, played, args):
        for t, logp_M in pairs:
            assert torch.allclose(torch.tensor(t.logps), logp_M, atol=1e-4)
    for t in played:
        turns = [t.ids[turn.start : turn.stop] for turn in t.turns]
        assert all(len(turn) == args.max_action_tokens or turn[-1] == end for turn in turns)
        assert all(end not in turn[:-1] for turn in turns)
        assert t.text.startswith(Lookup().reset(options={"index": t.task})[0])
    again = play(served)
    assert [t.ids for t in again] == [t.ids for t in played], "a rollout is that of its seed"
    greedy = play(served, greedy=True)
    assert len({tuple(t.ids) for t in greedy}) == 3
    prompts = [body["prompt"] for path, body in server.asked]
    assert max(map(len, prompts)) > min(map(len, prompts)) > 0


def test_stragglers_are_dropped_with_an_engine_too(served):
    _, args, _ = served
    args.finish_all, args.finish_each = 0.1, 0
    fates = [t.fate for t in play(served, may_drop=True)]
    assert set(fates) == {"ended", "dropped"}


def test_an_engine_that_does_not_do_is_a_sentence(served):
    model, _, server = served
    model.engine.name = "another"
    with pytest.raises(ValueError, match=r"/v1/completions: HTTP Error 404.*`another` does not exist"):
        play(served)
    with pytest.raises(ValueError, match="give --lora"):
        loop_ppo_multigpu.Engine(small(engine=server.url, lora=False))
    nobody = loop_ppo_multigpu.Engine(small(engine="http://127.0.0.1:9"))
    with pytest.raises(ValueError, match=r"^--engine http://127.0.0.1:9/v1/x: .*refused"):
        nobody.post("/v1/x")


class Saved:
    """Stands for a model and for a run: what it has saved last."""

    def __init__(self, folder: Path, like: Path):
        self.folder, self.like = folder, like

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).write_bytes((self.like / name).read_bytes())


def adapters(folder: Path, model, size: float) -> Path:
    """Adapters of one matrix, as PEFT writes them."""
    from safetensors.torch import save_file

    folder.mkdir()
    name, width = "model.layers.0.self_attn.q_proj", model.config.hidden_size
    tensors = {"lora_A": torch.full((1, width), size), "lora_B": torch.ones(width, 1)}
    save_file(
        {f"base_model.model.{name}.{key}.weight": value for key, value in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    (folder / "adapter_config.json").write_text(json.dumps({"r": 1, "lora_alpha": 2}))
    return folder


def test_adapters_are_handed_over_anew_under_a_new_name(served, tmp_path):
    """By the old name the engine would go on with the old ones; one that is gone is unloaded."""
    model, _, server = served
    names = []
    for size in (0.1, 0.2):
        run = Saved(tmp_path, adapters(tmp_path / str(size), model, size))
        if size == 0.1:
            model.engine.name = ""
        model.engine.take(run, run)
        names.append(model.engine.name)
        change = (
            server.known[model.engine.name].model.layers[0].self_attn.q_proj.weight
            - server.base.model.layers[0].self_attn.q_proj.weight
        )
        assert torch.allclose(change, torch.tensor(2 * size), atol=1e-6)
    assert len(set(names)) == 2 and server.loaded == {BASE, names[1]}
    paths = [path for path, _ in server.asked]
    assert paths == ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/load_lora_adapter"]
    assert all(Path(body["lora_path"]).is_absolute() for _, body in server.asked if "lora_path" in body)


@pytest.mark.external
@needs_peft
def test_a_run_whose_turns_an_engine_writes(skilled, tmp_path):  # noqa: F811
    """The probe finds the engine's log-probs to be the model's, iteration by iteration: adapters are new."""
    with FakeVLLM(skilled) as server:
        args = small(engine=server.url, model=skilled, runs=str(tmp_path), iterations=3, lr=1e-2)
        loop_ppo_multigpu.main(args)
        (folder,) = tmp_path.iterdir()
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        gaps = [row["update/sampler_gap"] for row in rows if "update/sampler_gap" in row]
        assert len(gaps) >= 2 and max(gaps) < 1e-3
        assert max(row.get("update/grad_norm", 0) for row in rows) > 0
        loads = [body for path, body in server.asked if path == "/v1/load_lora_adapter"]
        assert len({body["lora_name"] for body in loads}) == len(loads) == 4
        assert len(server.loaded) == 2


@pytest.mark.external
@needs_peft
def test_an_engine_with_other_adapters_ends_the_run(skilled, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(FakeVLLM, "answer", stale(FakeVLLM.answer))
    with FakeVLLM(skilled) as server:
        args = small(engine=server.url, model=skilled, runs=str(tmp_path), iterations=4, lr=0.1)
        with pytest.raises(ArithmeticError, match="nats apart"):
            loop_ppo_multigpu.main(args)


def stale(answer):
    """An engine that goes on with the model without adapters."""

    def changed(self, path, body):
        if path == "/v1/completions":
            body = body | {"model": BASE}
        return answer(self, path, body)

    return changed
