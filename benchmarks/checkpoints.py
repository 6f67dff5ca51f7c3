"""The ready-made models: runs the command of each world, and copies what it made to checkpoints/.

    python benchmarks/checkpoints.py                      # all of them, one after the other
    python benchmarks/checkpoints.py --worlds apps        # one of them
    python benchmarks/checkpoints.py --worlds school-guide  # the guide of LGE
    python benchmarks/checkpoints.py --worlds             # none: only writes checkpoints/README.md again

A checkpoint is a Hugging Face folder with its tokenizer, and made.json, from which the table of the page is
made. Its weights are rounded to bfloat16, which takes half the space. It lies where the other scripts look:
under the name of the world that the demonstrations are of, so that webshop's, which are of webshop-train,
serve both. A guide, which is no agent, has a name of its own.
"""

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))
import envs

ROOT = Path(__file__).parent.parent

MUON = "--optimizer muon --lr 4e-3"
COMMANDS = {
    "twenty-questions": f"python sft.py --env twenty-questions {MUON} --batch 32 --demonstrations 50000"
    " --fresh --epochs 5 --vocabulary 1500 --reply-weight 5 --width 96 --layers 4 --inner 256"
    " --context 512 --max-action-tokens 16 --threads 2 --save-every 250",
    "guess-my-city": f"python sft.py --env guess-my-city {MUON} --batch 32 --demonstrations 40000"
    " --fresh --epochs 5 --vocabulary 1500 --reply-weight 5 --width 96 --layers 4 --inner 256"
    " --context 768 --max-action-tokens 16 --save-every 250",
    "mini-detective": "python sft.py --env mini-detective --vocabulary 1500 --phrases 200"
    f" --demonstrations 4000 --epochs 2 --batch 64 {MUON}",
    "webshop": "python sft.py --env webshop --vocabulary 1500 --phrases 100 --width 64 --inner 128"
    f" --demonstrations 16000 --epochs 4 --batch 32 {MUON}",
    "apps": "python sft.py --env apps --world split=dev --layers 2 --init 0.02 --reply-weight 0"
    " --drills 9600 --demonstrations 32000 --exchanged 0.4 --epochs 5 --vocabulary 3200 --save-every 100",
}
OTHERS = {  # a question is one token, and the player that was imitated narrows down: for comparisons
    "twenty-questions-phrases": f"python sft.py --env twenty-questions {MUON} --batch 32"
    " --demonstrations 50000 --fresh --epochs 10 --vocabulary 700 --phrases 400 --reply-weight 5"
    " --layers 4 --inner 256 --context 512 --max-action-tokens 16 --save-every 500",
}
GUIDES = {"school-guide": "python guide_simcse.py --env school --threads 1"}
MEGABYTES, ALL_MEGABYTES = 2, 10  # of the weights of one, and of all the folders together


@dataclass
class Args:
    worlds: list[str] = field(default_factory=lambda: [*COMMANDS, *OTHERS, *GUIDES])  # whose models are made
    out: Path = ROOT / "checkpoints"  # folder of the models


def size_of(path: Path) -> float:
    """Megabytes of a file, or of all files below a folder."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def digest(folder: Path) -> str:
    """SHA-256 of the weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def make(world: str, out: Path, extra: str = "") -> Path:
    """Trains the model of a world, or a guide, by its command; returns its folder in `out`."""
    is_guide = world in GUIDES
    command = " ".join([(COMMANDS | OTHERS | GUIDES)[world], extra]).strip()
    auto, options = transformers.AutoModelForCausalLM, {}
    if is_guide:  # without BERT's layer behind [CLS], which it does not have
        auto, options = transformers.AutoModel, {"add_pooling_layer": False}
    with tempfile.TemporaryDirectory() as runs:
        words = [sys.executable, *shlex.split(command)[1:], "--runs", runs]
        subprocess.run(words, cwd=ROOT, check=True)
        (run,) = Path(runs).iterdir()
        model = run / ("guide" if is_guide else "actor")
        folder = out / (envs.make(world).demonstration_env if world in COMMANDS else world)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("README.md"))
        halved = auto.from_pretrained(model, dtype=torch.bfloat16, trust_remote_code=False, **options)
        halved.save_pretrained(folder)
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    made = {"world": world, "command": command, "sha256": digest(folder)}
    made |= {"minutes": summary["cpu_seconds"] / 60, "commit": summary["commit"]}
    if is_guide:
        made |= {"rsr50": summary["eval_rsr50"], "map": summary["eval_map"]}
    else:
        made |= {"sampled": summary["eval_return"], "greedy": summary["eval_return_greedy"]}
    (folder / "made.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    return folder


ABOUT = """\
Each command trains the model in the folder beside it. Minutes are for one CPU core. "sampled" and
"greedy" are mean returns over all tasks of the world, each played once, before the weights were rounded
to bfloat16. At its commit a command makes the same digest again on a processor of the same kind;
another may round differently.
"""


def readme(out: Path) -> str:
    """The page of checkpoints/, from the files made.json."""
    lines = ["# Ready-made models\n", "Written by `python benchmarks/checkpoints.py`; do not edit.\n"]
    lines += [ABOUT]
    lines += table(out, "sampled", "greedy")
    lines += ["\nGuides of LGE, with their ranking of development variations (docs/guide_simcse.md):\n"]
    lines += table(out, "rsr50", "map")
    return "\n".join(lines) + "\n"


def table(out: Path, first: str, second: str) -> list[str]:
    """A table of the models whose made.json has these two figures."""
    figures = f"minutes | {first} | {second} | megabytes"
    lines = [f"| folder | command | commit | {figures} | sha256 of model.safetensors |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for path in sorted(out.glob("*/made.json")):
        made = json.loads(path.read_text(encoding="utf-8"))
        if first in made:
            minutes = f"{made['minutes']:.0f}" if made["minutes"] >= 1 else "<1"
            figures = f"{minutes} | {made[first]:.2f} | {made[second]:.2f}"
            size = size_of(path.parent / "model.safetensors")
            about = f"`{made['command']}` | {made['commit']} | {figures} | {size:.1f}"
            lines.append(f"| {path.parent.name} | {about} | `{made['sha256']}` |")
    return lines


def main(args: Args) -> None:
    """Makes the models that are asked for, and the page."""
    args.out.mkdir(exist_ok=True)
    for world in args.worlds:
        folder = make(world, args.out)
        if (size := size_of(folder / "model.safetensors")) > MEGABYTES:
            print(f"{folder} has weights of {size:.1f} megabytes, more than {MEGABYTES}", file=sys.stderr)
    (args.out / "README.md").write_text(readme(args.out), encoding="utf-8")


if __name__ == "__main__":
    main(tyro.cli(Args))
