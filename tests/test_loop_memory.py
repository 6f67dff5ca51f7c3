"""benchmarks/loop_memory.py: its arithmetic beside models that exist."""

import sys
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
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
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("model", [*MODELS.values(), SMALL])
def test_parameters(model):
    with torch.device("meta"):
        real = sum(p.numel() for p in llama(model).parameters())
    assert model.parameters == pytest.approx(real, rel=0.01 if model is SMALL else 0.001)


def test_the_cache_is_that_of_the_script():
    model, tokens = llama(SMALL).eval(), 50
    batch = [loop_ppo.Trajectory(0, ids=list(range(n))) for n in (tokens, tokens, tokens)]
    cache = loop_ppo.Memory(model, batch)
    real = sum(store.nbytes for store in cache.stored.values())
    told = memory(SMALL, Args(rollouts=3, context=tokens, lora_rank=0))
    assert real == pytest.approx(told["cache"] * GB, rel=0.03), "with its quarter of room"


def test_what_a_layer_keeps_for_its_backward_pass():
    model, tokens, kept = llama(SMALL), 400, {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    real = sum(size for place, size in kept.items() if place not in parameters)
    told = memory(SMALL, Args(context=tokens, lora_rank=0))
    assert output is not None and real / SMALL.layers == pytest.approx(told["inside a layer"] * GB, rel=0.1)
