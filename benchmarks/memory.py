"""How much memory archer.py needs: the tables of docs/scaling.md.

    python benchmarks/memory.py                  # for models of four sizes; needs peft; two minutes, 4 GB
    python benchmarks/memory.py --make FOLDER    # FOLDER/actor and FOLDER/critic, to run archer.py with

What stays is arithmetic: the numbers of parameters, and for each that learns its gradient and Adam's two
moments. What a dialogue of an update adds is measured: the bytes that its forward pass keeps for the backward
pass, in archer.py's own functions, on the CPU. It is measured with one and with two layers and continued to
all of them, as layers are alike. Only one of the two, actor or critic, is in an update at a time, and there
are no updates while dialogues are played. Temporary results and what torch itself takes come on top.
"""

import contextlib
import copy
import gc
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
import tyro
from tokenizers.processors import TemplateProcessing

sys.path.insert(0, str(Path(__file__).parents[1]))  # the scripts, from wherever this is called

import archer
import envs
from envs import models

GB = 1e9
WORLD = "twenty-questions"
BYTES = {"float32": 4, "bfloat16": 2}
LEARNING = 16  # bytes of a number that learns: itself, its gradient, two moments, in float32

GPT2 = transformers.GPT2Config()
GPT2_XL = transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25)
QWEN_7B = transformers.Qwen2Config(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
)
ROBERTA = transformers.RobertaConfig(
    vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, layer_norm_eps=1e-5
)


@dataclass
class Setup:
    """Sizes of the models of a run."""

    actor: transformers.PretrainedConfig
    critic: transformers.PretrainedConfig | None  # None: as the actor (D2)
    lora_rank: int = 0  # 0: all of the actor learns
    dtype: str = "float32"

    @property
    def body(self) -> transformers.PretrainedConfig:
        return self.critic or self.actor


SETUPS = {
    "GPT-2, critic as the actor": Setup(GPT2, None),
    "GPT-2, RoBERTa-base": Setup(GPT2, ROBERTA),
    "GPT-2 XL (1.5B), RoBERTa-base": Setup(GPT2_XL, ROBERTA),
    "Qwen2.5-7B with LoRA, bfloat16, RoBERTa-base": Setup(QWEN_7B, ROBERTA, 16, "bfloat16"),
}


@dataclass
class Args:
    make: str = ""  # a folder, in which models are made; no table then


# ---------------------------------------------------------- 1. what stays
def numel(module) -> int:
    return sum(p.numel() for p in module.parameters())


def make_actor(config, rank: int, dtype: str, device: str = "cpu"):
    """A causal model with random weights and, if asked for, adapters."""
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    if rank:
        models.add_adapters(model, rank)
    return model


def make_critic(config, tokenizer=None, device: str = "cpu") -> archer.Critic:
    with torch.device(device):
        body = transformers.AutoModel.from_config(config).eval()
        body.tokenizer = tokenizer
        body.context = models.context_of(body)
        return archer.Critic(body, 0.0, "float32")


def adapters(model, rank: int) -> int:
    """Numbers in adapters on all linear layers but the head; of GPT-2 these are no nn.Linear."""
    linear = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    body = [module for module in model.base_model.modules() if isinstance(module, linear)]
    return rank * sum(sum(module.weight.shape) for module in body)


def static(setup: Setup) -> dict[str, int]:
    """Bytes by what takes them, from the first update on; no weight is made for this."""
    actor = make_actor(setup.actor, 0, "float32", device="meta")
    width = models.width_of(actor)
    with torch.device("meta"):
        baseline = archer.mlp(width, width, 0.0)
    critic = numel(make_critic(setup.body, device="meta"))
    found = {"actor": LEARNING * numel(actor), "its reference": BYTES["float32"] * numel(actor)}
    if setup.lora_rank:
        learning = LEARNING * adapters(actor, setup.lora_rank)
        found = {"actor": BYTES[setup.dtype] * numel(actor) + learning, "its reference": 0}
    found["actor"] += LEARNING * numel(baseline)
    return found | {"critic": LEARNING * critic, "its target": BYTES["float32"] * critic}


# ---------------------------------------------------------- 2. what a dialogue adds
def dialogue_of(tokenizer) -> dict:
    """The longest of some demonstrations, with its own utterances in the place of fresh ones."""
    made = envs.make(WORLD).demonstrations(100, 0)
    longest = max(made, key=lambda dialogue: len(dialogue["observations"][-1]))
    ids = [[*models.encode(tokenizer, action), tokenizer.eos_token_id] for action in longest["actions"]]
    logps = [[0.0] * len(own) for own in ids]
    return longest | {"ids": ids, "logps": logps, "fresh": longest["actions"]}


def make_tokenizers() -> tuple:
    """Of the ready-made checkpoint; for an encoder with the end token in the place of [CLS]."""
    source = models.checkpoint_of(envs.make(WORLD))
    decoder = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    encoder = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    end = (encoder.eos_token, encoder.eos_token_id)
    encoder.backend_tokenizer.post_processor = TemplateProcessing(f"{end[0]} $A", special_tokens=[end])
    return decoder, encoder


def kept_by(step, *modules) -> int:
    """Bytes that a step keeps for its backward pass, without those of parameters."""
    kept = {}

    def keep(tensor):
        tensor = tensor.detach()  # or the graph would hold itself for good
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, or its place would be used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = step()
    for module in modules:
        for p in module.parameters():
            kept.pop(p.untyped_storage().data_ptr(), None)
    assert result is not None  # it lived as long as this
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def with_layers(config, number: int):
    config = copy.deepcopy(config)
    config.num_hidden_layers = number
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:number]
    return config


def actor_keeps(config, setup: Setup, checkpointing: bool) -> int:
    """Bytes that an actor's update keeps of a dialogue."""
    tokenizer, _ = make_tokenizers()
    model = make_actor(config, setup.lora_rank, setup.dtype)
    model.tokenizer = tokenizer
    if checkpointing:
        models.checkpoint_activations(model)
    dialogue = dialogue_of(tokenizer)
    width = models.width_of(model)
    baseline = archer.mlp(width, width, 0.0)
    advantage_N = torch.zeros(len(dialogue["actions"]))
    args = archer.Args(dtype=setup.dtype)
    step = lambda: archer.actor_losses(model, model, baseline, [dialogue], advantage_N, args)  # noqa: E731
    return kept_by(step, model, baseline)


def critic_keeps(config, setup: Setup, checkpointing: bool) -> int:
    """Bytes that a critic's update keeps of a dialogue; an encoder's go with the square of its turns."""
    decoder, encoder = make_tokenizers()
    critic = make_critic(config, encoder if setup.critic else decoder)
    critic.dtype = setup.dtype
    if checkpointing:
        models.checkpoint_activations(critic.body)
    dialogue = dialogue_of(decoder)
    return kept_by(lambda: critic([dialogue]), critic)


def activations(keeps, config, setup: Setup) -> tuple[int, int]:
    """Bytes that a dialogue keeps with all layers; and if these compute again, with all of one at a time."""
    sizes = []
    for checkpointing in (False, True):
        for number in (1, 2):
            sizes.append(keeps(with_layers(config, number), setup, checkpointing))
            gc.collect()  # models are in cycles, and large
    one, two, smaller_one, smaller_two = sizes
    others = config.num_hidden_layers - 1
    layer = two - one
    return one + others * layer, smaller_one + others * (smaller_two - smaller_one) + layer


def keys_and_values(setup: Setup, dialogues: int, tokens: int) -> int:
    """Bytes of what rollouts keep of dialogues of a length, in --dtype."""
    config = setup.actor
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    of_token = 2 * heads * config.hidden_size // config.num_attention_heads
    return dialogues * tokens * config.num_hidden_layers * of_token * BYTES[setup.dtype]


def memory(setup: Setup) -> dict[str, float]:
    """GB by what takes them: what stays, what a dialogue adds, and sums for some --micro-batch."""
    stays = static(setup)
    found = stays | {"**all that stays**": sum(stays.values())}
    of_actor = activations(actor_keeps, setup.actor, setup)
    of_critic = activations(critic_keeps, setup.body, setup)
    hows = ("", " with `--gradient-checkpointing`")
    for how, actor, critic in zip(hows, of_actor, of_critic, strict=True):
        found |= {f"a dialogue in the actor's update{how}": actor}
        found |= {f"a dialogue in the critic's update{how}": critic}
        for size in (16, 4, 1):
            sums = sum(stays.values()) + size * max(actor, critic)
            found[f"**`--micro-batch {size}`{how}**"] = sums
    decoder, _ = make_tokenizers()
    (row,), _, _ = archer.lay_out([dialogue_of(decoder)], decoder)
    for dialogues, what in ((32, "a rollout"), (314, "an evaluation")):
        found[f"keys and values of {what}, {dialogues} dialogues"] = keys_and_values(
            setup, dialogues, len(row)
        )
    return {name: size / GB for name, size in found.items()}


# ---------------------------------------------------------- 3. models to run
def make(folder: Path) -> None:
    """A GPT-2 and a RoBERTa-base with random weights; the actor writes hardly a token that is no word."""
    decoder, encoder = make_tokenizers()
    torch.manual_seed(0)
    config = copy.deepcopy(GPT2)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = decoder.eos_token_id
    actor = transformers.GPT2LMHeadModel(config)
    body = actor.transformer
    body.ln_f.bias.data[0] = 8.0
    body.wte.weight.data[:, 0] = torch.arange(actor.config.vocab_size) < len(decoder)
    actor.save_pretrained(folder / "actor")
    decoder.save_pretrained(folder / "actor")
    transformers.RobertaModel(ROBERTA, add_pooling_layer=False).save_pretrained(folder / "critic")
    encoder.save_pretrained(folder / "critic")


def main(args: Args) -> str:
    """Makes the models or prints the table as markdown; returns what it prints."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if args.make:
        make(Path(args.make))
        return ""
    with contextlib.redirect_stdout(sys.stderr):
        columns = {name: memory(setup) for name, setup in SETUPS.items()}
    lines = [f"| GB | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for part in next(iter(columns.values())):
        cells = [f"{column[part]:.2f}" for column in columns.values()]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    print("\n".join(lines))
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Args, description=(__doc__ or "").split("\n")[0]))
