"""benchmarks/memory.py: its arithmetic and its measurements beside models that exist, in small sizes."""

import copy
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import memory
from memory import GB, Setup

import archer
from envs import models

PAGE = Path(__file__).parents[2] / "docs/scaling.md"
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 4000}
GPT2 = transformers.GPT2Config(n_embd=32, n_layer=4, n_head=2, vocab_size=4000)
LLAMA = transformers.LlamaConfig(num_hidden_layers=4, **SIZES)
BERT = transformers.BertConfig(num_hidden_layers=4, max_position_embeddings=514, **SIZES)
SETUPS = {
    "as the actor": Setup(GPT2, None),
    "encoder": Setup(GPT2, BERT),
    "lora": Setup(GPT2, BERT, lora_rank=4, dtype="bfloat16"),
}


def bytes_of(model, optimizer) -> int:
    """Of parameters, gradients and moments behind a step."""
    learning = [p for p in model.parameters() if p.requires_grad]
    for p in learning:
        p.grad = torch.ones_like(p)
    optimizer.step()
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return sum(x.nbytes for x in [*model.parameters(), *(p.grad for p in learning), *moments])


@pytest.mark.parametrize("name", SETUPS)
def test_what_stays_is_what_the_models_of_a_run_have(name):
    """Made as in archer.py's `main`, behind a step of both optimisers."""
    setup = SETUPS[name]
    if setup.lora_rank:
        pytest.importorskip("peft", reason="needs the package peft")
    actor = memory.make_actor(setup.actor, setup.lora_rank, setup.dtype)
    critic, baseline = memory.make_critic(setup.body), archer.mlp(32, 32, 0.0)
    both = torch.nn.ModuleList([actor, baseline])
    found = memory.static(setup)
    assert found["actor"] == bytes_of(both, torch.optim.AdamW(both.parameters()))
    assert found["critic"] == bytes_of(critic, torch.optim.AdamW(critic.parameters()))
    ref_model, target = models.reference_of(actor), copy.deepcopy(critic)
    of_reference = 0 if ref_model is actor else sum(p.nbytes for p in ref_model.parameters())
    assert found["its reference"] == of_reference
    assert found["its target"] == sum(p.nbytes for p in target.parameters())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["actor, gpt2", "actor, llama", "critic, decoder", "critic, encoder"])
def test_layers_are_alike(name, checkpointing):
    """What is continued from one and two layers is what four keep."""
    setup = Setup(LLAMA if "llama" in name else GPT2, BERT if "encoder" in name else None)
    keeps = memory.actor_keeps if "actor" in name else memory.critic_keeps
    config = setup.actor if "actor" in name else setup.body
    whole, real = keeps(config, setup, False), keeps(config, setup, checkpointing)
    layer = (whole - keeps(memory.with_layers(config, 1), setup, False)) / 3
    expected = real + layer if checkpointing else real
    assert memory.activations(keeps, config, setup)[checkpointing] == pytest.approx(expected, rel=0.01)
    assert not checkpointing or real < 0.7 * whole


def test_every_dialogue_adds_as_much():
    """So a micro-batch of two keeps twice what one keeps; parameters do not count."""
    decoder, encoder = memory.make_tokenizers()
    critic, dialogue = memory.make_critic(BERT, encoder), memory.dialogue_of(decoder)
    one, two = (memory.kept_by(lambda n=n: critic([dialogue] * n), critic) for n in (1, 2))
    assert two == pytest.approx(2 * one, rel=0.02) and len(dialogue["actions"]) == 20
    assert memory.kept_by(lambda: critic.v_heads[0][0].weight * critic.v_heads[1][0].weight, critic) == 0


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=lambda config: config.model_type)
def test_keys_and_values_are_those_of_a_memory(config):
    model = memory.make_actor(config, 0, "float32")
    read = archer.Memory(model, range(3))
    read.read({name: list(range(50)) for name in range(3)}, "float32")
    real = sum(layer.keys.nbytes + layer.values.nbytes for layer in read.cache.layers)
    assert memory.keys_and_values(Setup(config, None), 3, 50) == real


def test_sums_are_of_what_stays_and_the_larger_update():
    setup = SETUPS["encoder"]
    told = memory.memory(setup)
    stays = sum(memory.static(setup).values()) / GB
    for how in ("", " with `--gradient-checkpointing`"):
        parts = [told[f"a dialogue in the {whose}'s update{how}"] for whose in ("actor", "critic")]
        for size in (16, 4, 1):
            assert told[f"**`--micro-batch {size}`{how}**"] == pytest.approx(stays + size * max(parts))
    assert told["**all that stays**"] == pytest.approx(stays)


def test_the_page_has_what_stays():
    """The rows of arithmetic; those that are measured take minutes."""
    page = PAGE.read_text(encoding="utf-8")
    names = re.search(r"^\| GB \| (.+) \|$", page, re.M)[1].split(" | ")
    assert names == list(memory.SETUPS)
    columns = [memory.static(setup) for setup in memory.SETUPS.values()]
    for part in columns[0]:
        expected = " | ".join(f"{column[part] / GB:.2f}" for column in columns)
        assert f"| {part} | {expected} |" in page


def test_the_models_that_are_made_are_taken(tmp_path, monkeypatch):
    """In small sizes; the actor does write something that the world takes."""
    monkeypatch.setattr(memory, "GPT2", GPT2)
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 514, **SIZES}
    monkeypatch.setattr(memory, "ROBERTA", transformers.RobertaConfig(**sizes))
    memory.main(memory.Args(make=str(tmp_path)))
    args = archer.Args(actor=str(tmp_path / "actor"), critic=str(tmp_path / "critic"), eval_episodes=2)
    actor = models.load_actor(args.actor, args)
    body = models.load_critic(args.critic, actor, args)
    assert models.is_encoder(body) and body.context == 512
    for dialogue in archer.play_tasks(actor, args, greedy=False):
        assert any(dialogue["actions"])
