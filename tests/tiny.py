"""A tiny checkpoint with random weights, and tiny data of the guide, for tests that need some."""

from pathlib import Path

import envs


def make_checkpoint(world: str, folder: Path) -> Path:
    """A tiny Llama with random weights, and a tokenizer for what is said in a world, as sft.py saves them."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [
        text for d in envs.make(world).demonstrations(8, 0) for text in (d["observations"][-1], *d["actions"])
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = "<|endoftext|>"
    options = {"special_tokens": [special], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, **options)
    tokenizer.train_from_iterator(texts, trainer)
    ends = {"eos_token": special, "pad_token": special}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes |= {"max_position_embeddings": 4096, "tie_word_embeddings": True}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes, **ids))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_rambler(base: Path, folder: Path) -> Path:
    """A model with the tokenizer of `base` and 128 tokens of context that never writes the end token."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    sizes = {"n_positions": 128, "n_embd": 32, "n_layer": 1, "n_head": 1, "tie_word_embeddings": False}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(tokenizer), **sizes, **ids))
    body = model.transformer
    torch.nn.init.zeros_(body.ln_f.weight)
    torch.nn.init.ones_(body.ln_f.bias)  # the hidden state, whatever was read
    torch.nn.init.zeros_(model.lm_head.weight)
    torch.nn.init.constant_(model.lm_head.weight[tokenizer.eos_token_id], -100.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_looker_ahead(base: Path, folder: Path) -> Path:
    """A model with the tokenizer of `base` in which every token sees those that follow it: a BERT."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.BertConfig(vocab_size=len(tokenizer), initializer_range=0.5, **sizes)
    torch.manual_seed(0)
    transformers.BertLMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def guide_options(folder: Path) -> list[str]:
    """Options of guide_simcse.py that name small files of data, made in `folder`."""
    from test_guide_simcse import to_file, toy_eval, toy_records

    folder.mkdir(exist_ok=True)
    train = to_file(folder / "guide_train_20_3.jsonl.gz", toy_records())
    return ["--train-data", train, "--eval-data", to_file(folder / "guide_dev_1.jsonl.gz", toy_eval())]
