"""A model's folder, or a run's, may come from anyone. Here it brings code along, and whoever is asked on the
terminal says yes: no flag that takes such a folder may run it."""

import importlib
import io
import json
import os
import pickle
import runpy
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from tiny import guide_options

import envs
from envs import models, runs

ROOT = Path(__file__).parents[2]
SMALL = ["--env", "twenty-questions-subset", "--threads", "1"]
MODEL = ROOT / "checkpoints/twenty-questions"
# Each way in: a script or module and its words; FOLDER is the planted one. Of scripts that also have --resume
# the words are those that a resumed run finds in its args.json, too.
FLAGS = {
    "archer --actor": ("archer.py", *SMALL, "--rollouts", "2", "--actor", "FOLDER"),
    "archer --critic": ("archer.py", *SMALL, "--rollouts", "2", "--actor", str(MODEL), "--critic", "FOLDER"),
    "archer_offline_iql --actor": (
        "archer_offline_iql.py",
        *SMALL,
        "--dataset-size",
        "9",
        "--actor",
        "FOLDER",
    ),
    "loop_ppo --model": ("loop_ppo.py", "--worlds", "2", "--threads", "1", "--model", "FOLDER"),
    "sft --model": ("sft.py", *SMALL, "--demonstrations", "2", "--model", "FOLDER"),
    "guide_simcse --encoder": ("guide_simcse.py", "--threads", "1", "--encoder", "FOLDER"),
    "play --agent": ("envs/play.py", "twenty-questions", "--agent", "FOLDER"),
}


class Bomb:
    """Its pickle makes a folder when it is read."""

    def __init__(self, witness: Path):
        self.witness = witness

    def __reduce__(self):
        return os.mkdir, (str(self.witness),)


def plant(folder: Path, kind: str) -> Path:
    """Writes a model's folder that brings code along; returns what is there once the code has run."""
    shutil.copytree(MODEL, folder)
    witness = folder / "witness"
    classes = "\n".join(f"class {name}: ..." for name in ("Model", "Config", "Tokenizer"))
    (folder / "code.py").write_text(f"import os\nos.makedirs({str(witness)!r}, exist_ok=True)\n{classes}\n")
    if kind == "model":
        autos = ("AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
        own = {"auto_map": dict.fromkeys(autos, "code.Model") | {"AutoConfig": "code.Config"}}
        config = json.loads((folder / "config.json").read_text()) | own | {"model_type": "mine"}
        (folder / "config.json").write_text(json.dumps(config))
    elif kind == "tokenizer":
        own = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(own))
    else:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Bomb(witness)}, protocol=2))
    return witness


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs a command in this process, where torch is imported already; it must end with exit code 2."""

    def command(script: str, *words) -> str:
        monkeypatch.setattr(sys, "argv", [script, *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
        with pytest.raises(SystemExit) as error:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        assert error.value.code == 2
        return capsys.readouterr().err

    return command


@pytest.mark.parametrize("kind", ["model", "tokenizer"])
@pytest.mark.parametrize("flag", FLAGS)
def test_code_in_a_models_folder_is_not_run(flag, kind, refused, tmp_path):
    script, *words = FLAGS[flag]
    folder = tmp_path / "planted"
    witness = plant(folder, kind)
    words = [str(folder) if word == "FOLDER" else word for word in words]
    data = guide_options(tmp_path) if script == "guide_simcse.py" else []
    said = refused(script, *words, *data, *(["--runs", tmp_path] if script != "envs/play.py" else []))
    assert not witness.exists() and "planted" in said


@pytest.mark.parametrize("kind", ["model", "tokenizer", "checkpoint"])
@pytest.mark.parametrize("flag", [flag for flag in FLAGS if not flag.startswith("play")])
def test_code_behind_a_runs_folder_is_not_run(flag, kind, refused, tmp_path):
    """Its args.json names the planted folder, or its checkpoint.pt is a pickle that does something."""
    script, *words = FLAGS[flag]
    folder = tmp_path / "planted"
    witness = plant(folder, kind if kind != "checkpoint" else "pickle")
    named = str(MODEL) if kind == "checkpoint" else str(folder)
    words = [named if word == "FOLDER" else word for word in words]
    words += guide_options(tmp_path) if script == "guide_simcse.py" else []
    saved = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    saved = {name: int(value) if value.isdigit() else value for name, value in saved.items()}
    run = tmp_path / "run"
    run.mkdir()
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    (run / "args.json").write_text(json.dumps(asdict(module.Args()) | saved))
    (run / "checkpoint.pt").write_bytes(pickle.dumps({"modules": Bomb(witness)}, protocol=2))
    data = envs.make("twenty-questions").demonstrations(2, 0)  # of the offline script, which reads it first
    runs.write_jsonl(run / "dataset.jsonl", data)
    said = refused(script, "--resume", run)
    assert not witness.exists() and ("planted" in said or "checkpoint.pt" in said)


def test_a_model_that_transformers_knows_is_read_without_its_code(tmp_path):
    """Its config names classes of its own, but its type is a known one: there is nothing to refuse."""
    witness = plant(tmp_path / "planted", "model")
    path = tmp_path / "planted/config.json"
    known = json.loads((MODEL / "config.json").read_text())["model_type"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": known}))
    args = SimpleNamespace(device="cpu")
    model = models.load(transformers.AutoModelForCausalLM, str(tmp_path / "planted"), args)
    assert type(model).__module__.startswith("transformers.") and not witness.exists()


@pytest.mark.parametrize("kind", ["model", "tokenizer"])
def test_code_in_an_oracles_or_a_guides_folder_is_not_run(kind, tmp_path, monkeypatch):
    witness = plant(tmp_path / "planted", kind)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 99))
    for id in ("twenty-questions", "guess-my-city"):
        with pytest.raises(envs.Unavailable, match="planted"):
            envs.make(id, oracle=str(tmp_path / "planted"))
    lge, guide = importlib.import_module("lge_drrn"), str(tmp_path / "planted")
    with pytest.raises(ValueError, match="planted"):
        lge.load_encoder(guide, lge.Args(guide=guide))
    assert not witness.exists()
