"""Which architectures the scripts take: the table of docs/models.md, a row for each that transformers has.

    python benchmarks/models.py               # all, in minutes
    python benchmarks/models.py llama mpt     # these
    python benchmarks/models.py --tokenizers  # which tokenizers
    python benchmarks/models.py --templates   # which chat templates: pip install --no-deps trl==1.16.0

Each architecture is built tiny, with random weights, and read by the scripts as `models.load` gives it to
them. Shown is the largest difference between the log-probs there and those of the model's own forward pass in
nats, or "no" where it is refused, and why, if it was named. Architectures that do not build from a small
configuration are listed below.
"""

import argparse
import contextlib
import importlib.util
import io
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parents[1]))  # the scripts, from wherever this is called

import archer
import archer_offline_iql
import loop_ppo
import sft
from envs import models

# What makes a configuration small, by the names that architectures have for it.
SMALL = {
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "word_embed_proj_dim": 32, "embedding_size": 32,
    "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "inner_dim": 48, "d_ff": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 2, "n_head": 2, "n_heads": 2, "num_heads": 2, "decoder_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 16,
    "attention_head_size": 16,
    "max_position_embeddings": 256, "n_positions": 256, "max_seq_len": 256,
    "sliding_window": 64, "attention_window_size": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1,
    "initializer_range": 0.5, "init_std": 0.5,
}  # fmt: skip
LARGEST = 15_000_000  # parameters; what is larger has parts that go by other names
# What some need beside that, or in the place of it.
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
OWN = {
    "codegen": {"num_attention_heads": 4, "n_head": 4},
    "granite": {"logits_scaling": 4.0},  # as the published ones have one
    "lfm2": {"layer_types": ["conv", "full_attention"]},  # as the published ones have it
    "opt": {"word_embed_proj_dim": 16},  # as OPT-350m, whose hidden states leave it narrower than they are
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "bamba": {"mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 16, "attn_layer_indices": [1]},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 258, "hidden_size_per_layer_input": 16,
        "activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8,
    },
    "gemma4_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 258, "hidden_size_per_layer_input": 16,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 64},
    "granitemoehybrid": {
        "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 16, "layer_types": ["mamba", "attention"],
    },
    "hunyuan_v1_dense": {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "hunyuan_v1_moe": {
        "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "moe_topk": 2,
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "mamba_d_state": 8,
        "expert_layer_period": 2, "use_mamba_kernels": False,
    },
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"], "num_experts_per_token": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {
        "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 1,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "xlm": {"emb_dim": 32},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
OWN |= {"gemma3n": OWN["gemma3n_text"], "gemma4": OWN["gemma4_text"]}
OWN |= dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"), HYBRID)
WITH_EYES = {
    "gemma3": {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14,
        },
        "mm_tokens_per_image": 4, "image_token_id": 255, "boi_token_id": 254, "eoi_token_id": 253,
    },
}  # fmt: skip


def make_tokenizer(special: Iterable[str] = (), template: str | None = None, bos=False, eos="</s>"):
    """A tokenizer of bytes with these control tokens; with `bos` it puts <s> before every text."""
    control = ["</s>", "<s>", *special]
    names = dict.fromkeys([*control, eos, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    tokenizer = Tokenizer(BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(control)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    known = {"bos_token": "<s>", "eos_token": eos, "pad_token": eos}
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **known)
    made.chat_template = template
    return made


def make_config(kind: str, tokenizer):
    """The configuration of a tiny model; of what also sees the part that reads, but for WITH_EYES."""
    config = transformers.AutoConfig.for_model(kind).get_text_config()
    written = config.to_dict()
    known = {name: value for name, value in SMALL.items() if written.get(name) is not None}
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0}
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        known["layer_types"] = ["sliding_attention", "full_attention"]
    config = type(config)(**known | ids | OWN.get(kind, {}))
    if kind in WITH_EYES:
        config = transformers.AutoConfig.for_model(kind, text_config=config.to_dict(), **WITH_EYES[kind])
    return config


def make_model(kind: str, folder: Path, tokenizer=None, more_rows: int = 0) -> Path:
    """A tiny model of an architecture, with random weights, in a folder with a tokenizer.

    `more_rows` has its vocabulary beside those that the tokenizer knows.
    """
    tokenizer = tokenizer or make_tokenizer()
    config = make_config(kind, tokenizer)
    config.get_text_config().vocab_size += more_rows
    with torch.device("meta"):
        size = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
    if size > LARGEST:
        raise ValueError(f"{kind} cannot be made small: {size} parameters")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model(input_ids=torch.arange(64)[None])  # what is too small fails here
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def dialogue_of(model) -> dict:
    """A dialogue of two actions that a model can just read, the utterances behind it included."""
    room = 40
    begun = "".join(chr(97 + i * i % 26) for i in range(min(model.context, 256) - room))
    return {"observations": [begun, f"{begun}a no\n", f"{begun}a no\nb yes\n"], "actions": ["a", "b"]}


@torch.no_grad()
def own_logps(model, row: list[int], number: int) -> torch.Tensor:
    """What a model itself says of the last tokens of a row."""
    logits_TV = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1].float()
    return logits_TV.log_softmax(-1).gather(-1, torch.tensor(row)[1:, None])[-number:, 0]


def archer_gap(model) -> float:
    """Of what archer.py samples in a dialogue, and of how it scores that, in nats."""

    def write(row, start_S, args, streams):
        rows = {0: row}
        utterances, logps = archer.generate(archer.Memory(model, rows), rows, [start_S], args, streams)
        return utterances, [sum(own) for own in logps]

    return gap_of_forks(model, archer, write)


def offline_gap(model) -> float:
    """The same of archer_offline_iql.py, which has no memory."""

    def write(row, start_S, args, streams):
        return archer_offline_iql.write_utterances(model, [row], [start_S], args, streams)

    return gap_of_forks(model, archer_offline_iql, write)


@torch.no_grad()
def gap_of_forks(model, script, write) -> float:
    """Of utterances that `write` has sampled in the states of a dialogue, and of how a script scores them."""
    models.probe(model)
    dialogue, args = dialogue_of(model), script.Args(max_action_tokens=4)
    (row,), spans, _ = script.lay_out([dialogue], model.tokenizer)
    start_S = [span.start for span in spans]
    fresh, totals = write(row, start_S, args, models.streams(range(len(start_S))))
    logits_MV, token_M, _, owner_M = script.score(model, [dialogue], fresh, 1.0, "float32")
    scored_M = logits_MV.log_softmax(-1).gather(-1, token_M[:, None])[:, 0]
    gaps = []
    for n, (start, ids) in enumerate(zip(start_S, fresh, strict=True)):
        own = own_logps(model, row[:start] + ids, len(ids))
        gaps += [abs(own.sum().item() - totals[n]), (own - scored_M[owner_M == n]).abs().max().item()]
    return max(gaps)


@torch.no_grad()
def loop_gap(model) -> float:
    """Of what loop_ppo.py samples and scores: two turns with a reply between them."""
    loop_ppo.probe_cache(model)
    dialogue, args = dialogue_of(model), loop_ppo.Args()
    (row,), spans, _ = archer.lay_out([dialogue], model.tokenizer)
    turns = [range(span.start, span.stop) for span in spans]
    t = loop_ppo.Trajectory(0, ids=row[: turns[0].start], turns=turns)
    memory = loop_ppo.Memory(model, [t])
    sampled = []
    for column in range(turns[0].start, turns[-1].stop):
        logp_V = models.logits_of(model, memory.hidden_BH)[0].log_softmax(-1)
        sampled += [logp_V[row[column]]] * any(column in turn for turn in turns)
        t.ids = row[: column + 1]
        memory.read([t])
    t.logps, t.ids = torch.stack(sampled).tolist(), row
    ((_, scored_M),) = next(iter(loop_ppo.score(model, [t], args)))
    own = own_logps(model, row, len(row) - 1)
    own_M = torch.cat([own[turn.start - 1 : turn.stop - 1] for turn in turns])
    return max((own_M - scored_M).abs().max().item(), (own_M - torch.tensor(t.logps)).abs().max().item())


@torch.no_grad()
def sft_gap(model) -> float:
    """Of how sft.py scores a dialogue."""
    sft.probe_score(model)
    (row,) = sft.rows_of(dialogue_of(model), model.tokenizer, model.context)
    scored_M, _ = sft.score(model, [row])
    own = own_logps(model, row[:, 0].tolist(), len(row) - 1)
    return (own[row[1:, 1] != sft.CONTEXT] - scored_M).abs().max().item()


GAPS = {
    "archer.py": archer_gap,
    "archer_offline_iql.py": offline_gap,
    "loop_ppo.py": loop_gap,
    "sft.py": sft_gap,
}


def outcomes(kind: str, **options) -> dict[str, float | str]:
    """By script, how far its log-probs are from the model's own, or in one line why it is refused."""
    args = SimpleNamespace(device="cpu", world="", env="")
    found = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        make_model(kind, folder, **options)
        for script, gap in GAPS.items():
            try:
                found[script] = gap(models.load(transformers.AutoModelForCausalLM, folder, args))
            except ValueError as error:
                found[script] = str(error).replace(folder, "FOLDER")
    return found


def cells_of(found: dict[str, float | str], with_reasons: bool) -> str:
    """Outcomes as the cells of a row."""
    cells = []
    for outcome in found.values():
        said = f"no: {outcome}" if with_reasons else "no"
        cells.append(said if isinstance(outcome, str) else f"{outcome:.0e}")
    return " | ".join(cells)


def kinds_of_tokenizers() -> dict[str, dict]:
    """Options of `make_model` by what is special about a tokenizer."""
    pads = make_tokenizer(["<pad>"])
    pads.pad_token = "<pad>"
    never_pads = make_tokenizer()
    never_pads.pad_token = None
    endless = make_tokenizer()
    endless.eos_token = None
    return {
        "pads with its end token": {"tokenizer": make_tokenizer()},
        "pads with a token of its own": {"tokenizer": pads},
        "has no token that pads": {"tokenizer": never_pads},
        "puts a token before every text (BOS)": {"tokenizer": make_tokenizer(bos=True)},
        "has no end token (EOS)": {"tokenizer": endless},
        "knows fewer tokens than the model has": {"tokenizer": make_tokenizer(), "more_rows": 64},
    }


def published() -> dict[str, str]:
    """The templates that the package trl carries, by the names of its files; none without it."""
    found = importlib.util.find_spec("trl")
    files = Path(found.origin).parent.glob("chat_templates/*.jinja") if found else ()
    return {path.stem: path.read_text("utf-8") for path in sorted(files) if "training" not in path.stem}


def origins() -> dict[str, str]:
    """Where they are from, as trl's own list of them says: the family, and a model and its commit."""
    page = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates/README.md"
    found = {}
    for heading, text in re.findall(r"^### (.*)\n\n(.*)", page.read_text("utf-8"), re.M):
        family = re.match(r"(?:Original |Later revision of the )?(.*?) chat template", text)
        model = re.search(r"shipped by (`[\w-]+/[^`]+`)", text)
        commit = re.search(r"(?:at|since) \[(\w+)\]", text)
        parts = [family[1] if family else "", model[1] if model else "", commit[1] if commit else ""]
        for name in re.findall(r"`([\w-]+)\.jinja`", heading):
            found[name] = ", ".join(filter(None, parts))
    return found


def control_tokens(template: str) -> list[str]:
    """What looks like a control token in a template."""
    return sorted(set(re.findall(r"<\|?[\w▁｜]+\|?>|\[gMASK\]", template)) - {"<think>", "</think>"})


def followed(template: str) -> str:
    """Whether a dialogue of ours is what a template writes."""
    try:
        pieces = models.chat_pieces(make_tokenizer(control_tokens(template), template))
    except ValueError:
        return "refused"
    thought = ", with an empty thought in the history"
    return "followed" + thought * bool(models.EMPTY_THOUGHT.search(pieces.to_reply))


def main() -> None:
    parser = argparse.ArgumentParser(description="Which architectures the scripts take.")
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help="types of models; none: all of transformers'"
    )
    parser.add_argument("--templates", action="store_true", help="those that the package trl carries instead")
    parser.add_argument("--tokenizers", action="store_true", help="what is special about tokenizers instead")
    args = parser.parse_args()
    wanted = args.kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.templates:
        print("| template | | of |\n|---|---|---|")
        for name, template in published().items():
            print(f"| `{name}` | {followed(template)} | {origins()[name]} |")
        return
    columns = f"{' | '.join(GAPS)} |\n|---|{'---|' * len(GAPS)}"
    if args.tokenizers:
        print(f"| a tokenizer that | {columns}")
        for name, options in kinds_of_tokenizers().items():
            print(f"| {name} | {cells_of(outcomes('llama', **options), False)} |")
        return
    print(f"| model | {columns}")
    left_out = []
    for kind in wanted:
        try:
            with tempfile.TemporaryDirectory() as folder:
                make_model(kind, folder)
        except Exception:  # each has its own reasons
            left_out.append(f"`{kind}`")
            continue
        print(f"| `{kind}` | {cells_of(outcomes(kind), bool(args.kinds))} |", flush=True)
    print(f"\nNot built: {', '.join(left_out) or 'none'}.")


if __name__ == "__main__":
    main()
