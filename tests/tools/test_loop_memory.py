"""benchmarks/loop_memory.py: its arithmetic beside models that exist."""

import sys
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from loop_memory import GB, MODELS, Args, Model, memory

import loop_ppo

SMALL = Model(layers=2, hidden=64, heads=4, kv_heads=2, inner=160, vocabulary=300)


def llama(model: Model) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        intermediate_size=model.inner,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        tie_word_embeddings=False,
    )
    built = transformers.LlamaForCausalLM(config)
    built.context = config.max_position_embeddings
    return built


@pytest.mark.parametrize("model", [*MODELS.values(), SMALL])
def test_parameters(model):
    with torch.device("meta"):
        real = sum(p.numel() for p in llama(model).parameters())
    assert model.parameters == pytest.approx(real, rel=0.01 if model is SMALL else 0.001)


TINY = Model(layers=1, hidden=4, heads=2, kv_heads=1, inner=8, vocabulary=10)


@pytest.mark.parametrize(
    ("model", "args", "rollouts", "updates"),
    [
        # 224 parameters of 16 bytes; keys and values 5/4 x 96, then twice 96; 48 and 864 of a layer; logits
        (TINY, Args(2, 3, lora_rank=0, logit_chunk=1), (3584 + 120 + 192) / GB, (3584 + 48 + 864 + 120) / GB),
        # GB: weights, adapters; cache, expanded layer; inputs, within a layer, converted, logits
        (
            MODELS["Qwen2.5-7B"],
            Args(),
            15.230566 + 0.645923 + 13.762560 + 2.752512,
            15.230566 + 0.645923 + 6.422528 + 7.143424 + 3.506176 + 7.474250,
        ),
        (
            MODELS["Qwen2.5-32B"],
            Args(),
            65.525514 + 2.147484 + 62.914560 + 3.932160,
            65.525514 + 2.147484 + 20.971520 + 10.354688 + 5.046272 + 7.474250,
        ),
    ],
    ids=["tiny", "7B", "32B"],
)
def test_the_sums_by_hand(model, args, rollouts, updates):
    told = memory(model, args)
    assert told["rollouts"] == pytest.approx(rollouts, rel=1e-6)
    assert told["updates"] == pytest.approx(updates, rel=1e-6)


def test_the_cache_is_that_of_the_script():
    model, tokens = llama(SMALL).eval(), 50
    batch = [loop_ppo.Trajectory(0, ids=list(range(n))) for n in (tokens, tokens, tokens)]
    cache = loop_ppo.Memory(model, batch)
    real = sum(store.nbytes for store in cache.stored.values())
    told = memory(SMALL, Args(rollouts=3, context=tokens, lora_rank=0))
    assert real == pytest.approx(told["cache"] * GB, rel=0.03), "with its quarter of room"


def test_rows_leave_the_cache_layer_by_layer():
    """Two whole caches side by side would need twice the memory."""
    model = llama(SMALL).eval()
    cache = loop_ppo.Memory(model, [loop_ppo.Trajectory(0, ids=list(range(50))) for _ in range(3)])
    whole, sizes = cache.stored, []

    class Watched(dict):
        def __setitem__(self, layer, store):
            super().__setitem__(layer, store)
            sizes.append(sum(store.shape[1] for store in self.values()))

    cache.stored = Watched(whole)
    cache.keep([0, 2])
    assert sizes == [5, 4], "of two layers with three rows"


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_what_a_layer_keeps_for_its_backward_pass(lora_rank):
    """In float32, and as with --lora --dtype bfloat16."""
    model, tokens, kept = llama(SMALL), 400, {}
    if lora_rank:
        peft = pytest.importorskip("peft")
        model = model.bfloat16()
        model.add_adapter(peft.LoraConfig(r=lora_rank, target_modules="all-linear"))
        for p in filter(lambda p: p.requires_grad, model.parameters()):
            p.data = p.data.float()

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, or its place would be used again
        return tensor

    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    real = sum(kept[place].untyped_storage().nbytes() for place in kept.keys() - parameters)
    told = memory(SMALL, Args(context=tokens, lora_rank=lora_rank))
    told = told["inside a layer"] + told["inputs of adapters"]
    assert output is not None and real / SMALL.layers == pytest.approx(told * GB, rel=0.1)
