"""Other people's models: their templates, their tokenizers, and whether the scripts score what they say."""

import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from tokenizers import normalizers

import archer
import envs
import sft
from baselines import ppo
from benchmarks import models as table
from envs import models, runs

ROOT = Path(__file__).parents[2]
EXACT = 1e-4  # nats

# Of each way in which architectures differ one, and which scripts must refuse it.
FORKED = ["archer.py", "archer_offline_iql.py"]  # utterances fork off a dialogue
CACHED = [*FORKED, "loop_ppo.py"]  # and keys and values are kept
ALL = [*CACHED, "sft.py"]
KINDS = {
    "llama": [],
    "gpt2": [],  # a table of positions
    "granite": [],  # a scale behind the head
    "gemma2": [],  # a cap behind the head, a window
    "mistral": [],  # a window
    "gemma3": [],  # a window in some layers, and eyes
    "gptj": [],  # eager attention, to which a mask is added
    "opt": [],  # hidden states that leave the body narrower than they are
    "llama4_text": ALL,  # a body that its class gives another name
    "mpt": FORKED,  # biases by distance in the row, which is none from a fork
    "mamba": CACHED,  # no attention
    "falcon_h1": CACHED,  # attention and a recurrence
    "bert": ALL,  # looks ahead
}

# A template as most are: the prompt of a reply is written as the history is.
USUAL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = USUAL.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}",
)
DATED = "{{ strftime_now('%d %B %Y') }}{{ date_string }}\n" + USUAL
REFUSED = {  # template: what is said of it
    USUAL.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"): "writes history otherwise",
    USUAL.replace("<|im_end|>\n{% endfor", "\n{% endfor"): "ends a turn with no control token",
    USUAL.replace("{{ m.content }}", "{{ m.content[0].text }}"): "does not write every text",
    "{{ raise_exception('no') }}": "writes no dialogue: no",
}
DIALOGUE = {
    "observations": ["Hi: ", "Hi: a no\n", "Hi: a no\nb yes\n"],
    "actions": ["a", "b"],
    "rewards": [-1.0, -1.0],
    "ids": None,
}


def make_llama(tokenizer, folder: Path) -> Path:
    """A tiny model with random weights, and this tokenizer, in a folder."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(tokenizer, folder: Path):
    args = SimpleNamespace(device="cpu", world="", env="x")
    return models.load(transformers.AutoModelForCausalLM, str(make_llama(tokenizer, folder)), args)


def spelled(dialogue: dict, tokenizer) -> list[list[int]]:
    """The prompt of the next action as each of the scripts spells it."""
    end = tokenizer.eos_token_id
    ids = [[*tokenizer(action, add_special_tokens=False)["input_ids"], end] for action in dialogue["actions"]]
    _, _, (prompt,) = archer.lay_out([dialogue], tokenizer)
    _, _, (sampled,) = ppo.lay_out([dialogue | {"ids": ids}], tokenizer)
    (row,) = sft.rows_of(dialogue, tokenizer, 10_000)
    return [prompt, sampled, row[:, 0].tolist()]


def chat_of(dialogue: dict) -> list[dict]:
    """A dialogue as the messages of a chat."""
    replies = envs.replies(dialogue["observations"], dialogue["actions"])
    texts = [dialogue["observations"][0]]
    for action, reply in zip(dialogue["actions"], replies, strict=True):
        texts += [action, reply]
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


# ------------------------------------------------------------------------------------------ templates
def test_the_end_of_a_turn_is_the_template_s(tmp_path):
    """Not eos_token, which in many families ends a document and not a turn."""
    model = load(table.make_tokenizer(["<|im_start|>", "<|im_end|>"], USUAL), tmp_path)
    assert model.tokenizer.eos_token == "<|im_end|>"
    whole = model.tokenizer.apply_chat_template(chat_of(DIALOGUE), add_generation_prompt=True)["input_ids"]
    assert spelled(DIALOGUE, model.tokenizer) == [whole] * 3
    model.tokenizer.save_pretrained(tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|im_end|>"


def test_a_model_that_can_think_is_asked_not_to(tmp_path):
    """Else the world gets "<think>", the first line of every reply. The history keeps the empty thought."""
    tokenizer = load(table.make_tokenizer(["<|im_start|>", "<|im_end|>"], THINKS), tmp_path).tokenizer
    asked = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    for ids in spelled(DIALOGUE, tokenizer):
        text = tokenizer.decode(ids)
        assert text.endswith(asked) and text.count(asked) == 3


def test_a_template_s_date_is_always_the_same(tmp_path):
    tokenizer = load(table.make_tokenizer(["<|im_start|>", "<|im_end|>"], DATED), tmp_path).tokenizer
    for ids in spelled(DIALOGUE, tokenizer):
        assert tokenizer.decode(ids).startswith("26 July 202426 Jul 2024\n")


@pytest.mark.parametrize("template", REFUSED, ids=REFUSED.values())
def test_a_template_that_cannot_be_followed_is_refused_in_one_line(tmp_path, template):
    with pytest.raises(ValueError, match=f"^no model in .*: its chat template {REFUSED[template]}") as error:
        load(table.make_tokenizer(["<|im_start|>", "<|im_end|>"], template), tmp_path)
    assert "\n" not in str(error.value)


def templates_of_the_page() -> dict[str, str]:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (followed.*|refused) \| (.+) \|$", page, re.M)
    assert all(origin for _, _, origin in rows)
    return {name: said for name, said, _ in rows}


@pytest.mark.external
@pytest.mark.parametrize("name", sorted(templates_of_the_page()))
def test_a_published_template_is_followed_to_the_token_or_refused(name, tmp_path):
    """Of Llama, Qwen, Gemma, Phi, Cohere, DeepSeek, LFM, GLM, gpt-oss, Nemotron and others."""
    pytest.importorskip("trl", reason="pip install --no-deps trl==1.16.0")
    template, said = table.published()[name], templates_of_the_page()[name]
    tokenizer = table.make_tokenizer(table.control_tokens(template), template, eos="<|endoftext|>")
    if said == "refused":
        with pytest.raises(ValueError, match=r"^no model in .*: its chat template [^\n]*$"):
            load(tokenizer, tmp_path)
        return
    tokenizer = load(tokenizer, tmp_path).tokenizer
    bare = DIALOGUE | {"observations": ["Hi:", "Hi:a,no.", "Hi:a,no.b,yes."]}  # some strip what is said
    whole = tokenizer.apply_chat_template(
        chat_of(bare), tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    whole = re.sub(r"Date: \d+ \w+ 2026", "Date: 26 Jul 2024", whole)
    for ids in spelled(bare, tokenizer):
        text = tokenizer.decode(ids)
        if said != "followed":
            text, whole = (re.sub(r"<think>\s*</think>\s*", "", x) for x in (text, whole))
        assert text == whole


# ----------------------------------------------------------------------------------------- tokenizers
def test_a_base_model_gets_the_token_before_every_text(tmp_path):
    """As README's snippet for loading gives it."""
    tokenizer = load(table.make_tokenizer([], bos=True), tmp_path).tokenizer
    for ids in spelled(DIALOGUE, tokenizer):
        assert ids[:5] == tokenizer("Hi: ")["input_ids"] and ids.count(tokenizer.bos_token_id) == 1


def test_a_tokenizer_without_an_end_is_refused_in_one_line(tmp_path):
    tokenizer = table.make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"^no model in .*: its tokenizer has no token that ends a turn$"):
        load(tokenizer, tmp_path)


@pytest.mark.parametrize("template", [None, USUAL], ids=["base", "chat"])
def test_a_control_token_that_is_spelled_is_text(tmp_path, template):
    """In what the world says and in what an agent is said to have said: else it would end a turn."""
    tokenizer = load(table.make_tokenizer(["<|im_start|>", "<|im_end|>"], template), tmp_path).tokenizer
    end = tokenizer.eos_token
    odd = {"observations": [f"Hi{end}: "], "actions": [f"a{end}", "b"], "rewards": [-1.0, -1.0]}
    for action, reply in zip(odd["actions"], (f" no{end}<|im_start|>\n", " yes\n"), strict=True):
        odd["observations"].append(odd["observations"][-1] + action + reply)
    usual = spelled(DIALOGUE, tokenizer)[0]
    for ids in spelled(odd, tokenizer)[::2]:  # not of ppo.py, which has the tokens that were sampled
        for token in tokenizer.all_special_ids:
            assert ids.count(token) == usual.count(token)
        assert tokenizer.decode(ids).count(end) == usual.count(tokenizer.eos_token_id) + 3


@pytest.mark.parametrize("name", [name for name in envs.ENVS if (ROOT / "checkpoints" / name).is_dir()])
def test_the_ready_made_checkpoints_read_as_they_did(name):
    """Their tokens of whole lines are added ones, and no control tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(ROOT / "checkpoints" / name)
    world = envs.make(name)
    for dialogue in world.demonstrations(20, 0):
        texts = [*dialogue["observations"][:1], *dialogue["actions"]]
        for text in texts + envs.replies(dialogue["observations"], dialogue["actions"]):
            plain = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert models.encode(tokenizer, text) == plain
            assert models.encode_prompt(tokenizer, text) == models.encode_reply(tokenizer, text) == plain


def rows_of_tokenizers() -> dict[str, list[str]]:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([a-z][^|`]+) \| ((?:no|\de.\d\d)(?: \| (?:no|\de.\d\d)){3}) \|$", page, re.M)
    return {name: cells.split(" | ") for name, cells in rows}


@pytest.mark.parametrize("name", table.kinds_of_tokenizers())
def test_a_tokenizer_of_the_page_is_one_of_a_model_s_own_log_probs_or_is_refused(name):
    refused = held_to(table.outcomes("llama", **table.kinds_of_tokenizers()[name]))
    assert refused == refused_by(rows_of_tokenizers()[name])
    assert (refused == ALL) == ("no end" in name)


# -------------------------------------------------------------------------------------- architectures
def held_to(found: dict[str, float | str]) -> list[str]:
    """The scripts that refuse a model; a third outcome beside that and its own log-probs there is none."""
    for outcome in found.values():
        if isinstance(outcome, str):
            assert "cannot be used: " in outcome or outcome.startswith("no model in "), outcome
            assert len(outcome.splitlines()) == 1
        else:
            assert outcome < EXACT
    return [script for script, outcome in found.items() if isinstance(outcome, str)]


def kinds() -> list:
    """All; the one that takes a quarter of a minute is slow."""
    return [pytest.param(kind, marks=[pytest.mark.slow] if kind == "falcon_h1" else []) for kind in KINDS]


@pytest.mark.parametrize("kind", kinds())
def test_a_model_says_here_what_it_says_by_itself_or_is_refused(kind):
    assert held_to(table.outcomes(kind)) == KINDS[kind]


@pytest.mark.parametrize("kind", ["mistral", "gemma2"])
def test_a_row_may_be_longer_than_a_window(kind, monkeypatch):
    """The mask of every layer is the model's own, beyond the window of 64 tokens, too."""
    monkeypatch.setitem(table.SMALL, "initializer_range", 1.0)
    args = SimpleNamespace(device="cpu", world="", env="")
    with tempfile.TemporaryDirectory() as folder:
        table.make_model(kind, folder)
        model = models.load(transformers.AutoModelForCausalLM, folder, args)
    assert model.context == 256 and model.config.sliding_window == 64
    models.probe(model)
    assert model.config.sliding_window == 64  # the probe has one of its own
    assert table.archer_gap(model) < EXACT and table.loop_gap(model) < EXACT
    monkeypatch.setattr(models, "mask_of", lambda model, visible: torch.where(visible, 0.0, -1e30))
    with pytest.raises(ValueError, match=r"what is scored is .* nats from what it says by itself"):
        models.probe(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_multiplies_exactly_unless_told_bfloat16_and_in_probes_always(dtype, tmp_path):
    """TF32 has three digits: where all else is bfloat16 that does, but a probe would pass for it."""
    matmul, model = torch.backends.cuda.matmul, load(table.make_tokenizer(), tmp_path)
    matmul.allow_tf32 = dtype == "float32"  # as something else may have left it
    runs.Run(archer.Args(dtype=dtype, runs=str(tmp_path)), "archer")
    found = [matmul.allow_tf32]
    with models.narrowed(model):
        found.append(matmul.allow_tf32)
    found.append(matmul.allow_tf32)
    matmul.allow_tf32 = False
    assert found == [dtype == "bfloat16", False, dtype == "bfloat16"]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "gemma3", "gemma2", "gptj"])
def test_what_is_visible_is_the_same_mask_to_the_bit(kind, monkeypatch):
    """As what is added to scores: states and gradients. Where it would be added as it is, it is a number."""
    args, mask_of, kinds = SimpleNamespace(device="cpu", world="", env=""), models.mask_of, set()
    with tempfile.TemporaryDirectory() as folder:
        table.make_model(kind, folder)
        model = models.load(transformers.AutoModelForCausalLM, folder, args)
    inputs, _ = models.forked_row(model)

    def as_number(mask):
        kinds.add(mask.dtype)
        lowest = torch.finfo(torch.bfloat16).min
        return torch.zeros(mask.shape).masked_fill(~mask, lowest) if mask.dtype == torch.bool else mask

    def as_numbers(model, visible):
        mask = mask_of(model, visible)
        return {key: as_number(m) for key, m in mask.items()} if isinstance(mask, dict) else as_number(mask)

    def states_and_gradient(dtype):
        states = models.masked_states(model.base_model, *inputs, dtype)
        return states, torch.autograd.grad(states.square().sum(), model.get_input_embeddings().weight)[0]

    for dtype in ("float32", "bfloat16"):
        found = states_and_gradient(dtype)
        with monkeypatch.context() as patch:
            patch.setattr(models, "mask_of", as_numbers)
            expected = states_and_gradient(dtype)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert kinds == {torch.float32 if kind in ("gemma2", "gptj") else torch.bool}


def test_an_encoder_that_also_writes_is_refused_in_one_line(tmp_path):
    """T5: it is no causal language model."""
    config = transformers.T5Config(vocab_size=300, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    table.make_tokenizer().save_pretrained(tmp_path)
    args = SimpleNamespace(device="cpu", world="", env="")
    with pytest.raises(ValueError, match=r"^no model in .*T5Config.*AutoModelForCausalLM[^\n]*$"):
        models.load(transformers.AutoModelForCausalLM, str(tmp_path), args)


def rows_of_the_page() -> dict[str, list[str]]:
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| ((?:no|\de.\d\d)(?: \| (?:no|\de.\d\d)){3}) \|$", page, re.M)
    return {kind: cells.split(" | ") for kind, cells in rows}


def refused_by(cells: list[str]) -> list[str]:
    return [script for script, cell in zip(ALL, cells, strict=True) if cell == "no"]


def test_the_page_has_the_models_of_the_quick_test():
    rows = rows_of_the_page()
    assert len(rows) >= 40
    for kind, refused in KINDS.items():
        assert refused_by(rows[kind]) == refused


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(rows_of_the_page()))
def test_the_page_is_true(kind):
    refused = held_to(table.outcomes(kind))
    assert refused == [
        script for script, cell in zip(ALL, rows_of_the_page()[kind], strict=True) if cell == "no"
    ]


# -------------------------------------------------------------------------------------------- critics
def make_critic(config, folder: Path, tokenizer=None) -> str:
    """A tiny body with random weights in a folder."""
    torch.manual_seed(0)
    tokenizer = tokenizer or table.make_tokenizer()
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def of_type(kind: str, **sizes):
    """A tiny configuration."""
    usual = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.AutoConfig.for_model(
        kind, vocab_size=300, initializer_range=0.5, **usual | ids | sizes
    )


def run_with_critic(folder: str, tmp_path: Path, **changes) -> dict:
    """An iteration of archer.py with this critic, whose actor is a Llama that reads 4096 tokens."""
    table_of_sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    tokenizer = table.make_tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), num_attention_heads=1, max_position_embeddings=4096, **table_of_sizes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "actor")
    tokenizer.save_pretrained(tmp_path / "actor")
    sizes = {"iterations": 1, "rollouts": 2, "critic_updates": 1, "critic_batch": 2, "critic_pool": 2}
    sizes |= {"warmup": 0, "actor_updates": 1, "actor_batch": 2, "eval_episodes": 2, "max_action_tokens": 4}
    places = {"actor": str(tmp_path / "actor"), "critic": folder, "runs": str(tmp_path / "runs")}
    return archer.main(archer.Args(env="twenty-questions-subset", **sizes | places | changes))


OTHERWISE = "it reads a text here otherwise than by itself"
FAILS = "its forward pass fails here, "
TWO_PARTS = "one part of it reads and another one writes"
REFUSED_CRITICS = {
    "gpt_neo": OTHERWISE,  # a window that is in no mask
    "lfm2": OTHERWISE,  # a recurrence
    "mamba": FAILS,
    "bloom": FAILS,  # biases by distance, which are none from a fork
    "fnet": OTHERWISE,  # takes no mask, so that padding is read
    "t5": TWO_PARTS,
    "bart": TWO_PARTS,
}


@pytest.mark.parametrize("kind", REFUSED_CRITICS)
def test_a_critic_that_reads_otherwise_than_by_itself_is_refused(kind, tmp_path):
    """In one line, and before anything is played."""
    is_reader = kind in ("fnet", "t5")
    config = of_type(kind) if is_reader else table.make_config(kind, table.make_tokenizer())
    folder = make_critic(config, tmp_path / "critic")
    reason = f"^a critic of type {kind} cannot be used: {REFUSED_CRITICS[kind]}"
    with pytest.raises(ValueError, match=reason) as error:
        run_with_critic(folder, tmp_path)
    assert "\n" not in str(error.value) and not (tmp_path / "runs").exists()


def test_a_decoder_as_critic_needs_an_end_of_a_turn(tmp_path):
    tokenizer = table.make_tokenizer()
    tokenizer.eos_token = None
    folder = make_critic(table.make_config("llama", tokenizer), tmp_path / "critic", tokenizer)
    with pytest.raises(
        ValueError, match=r"^a critic of type llama cannot be used: its tokenizer has no token"
    ):
        run_with_critic(folder, tmp_path)


@pytest.mark.parametrize(("positions", "cut"), [(4096, 0.0), (128, 1.0)])
def test_dialogues_are_cut_at_the_context_of_a_shorter_critic(positions, cut, tmp_path):
    """It has a table of positions, behind whose end there is none."""
    config = table.make_config("gpt2", table.make_tokenizer())
    config.n_positions = positions
    summary = run_with_critic(make_critic(config, tmp_path / "critic"), tmp_path)
    assert summary["eval_cut"] == summary["eval_cut_greedy"] == cut


def test_a_critic_that_spells_a_dialogue_too_long_for_it_says_so(tmp_path):
    """Its tokenizer is another one: here every o is nine."""
    tokenizer = table.make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("o", 9 * "o")
    folder = make_critic(table.make_config("gpt2", tokenizer), tmp_path / "critic", tokenizer)
    said = r"^--critic: it spells a dialogue with \d+ tokens and reads 256: take another one$"
    with pytest.raises(ValueError, match=said):
        run_with_critic(folder, tmp_path)


@pytest.mark.parametrize("kind", ["roberta", "bert"])
def test_an_encoder_s_positions_begin_where_they_do(kind, tmp_path):
    """RoBERTa's behind the number of the padding, whichever that is; all others are for a text."""
    tokenizer = table.make_tokenizer(["<pad>", "<mask>"])
    tokenizer.pad_token = "<mask>"
    config = of_type(kind, max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id)
    folder = make_critic(config, tmp_path / "critic", tokenizer)
    body = models.load(transformers.AutoModel, folder, archer.Args())
    assert tokenizer.pad_token_id == 3 and body.context == (60 if kind == "roberta" else 64)
    critic = archer.Critic(body, 0.0, "float32")
    cls = models.cls_vectors(critic.body, ["a" * 200, "b"], "float32")
    assert cls.shape == (2, 32)  # one more would be beyond the table


# ------------------------------------------------------------------------------------------- random numbers
def test_streams_differ_from_each_other_and_from_those_of_worlds():
    """A world may have the same seed, and may spawn streams of its own; [s, 0] would be as good as s."""
    seeds = [0, 1, 2, 2**31 - 1, 2**62]
    found = [tuple(row.tolist()) for row in models.uniform(models.streams(seeds), 4)]
    assert found == [tuple(row.tolist()) for row in models.uniform(models.streams(np.array(seeds)), 4)]
    worlds = [np.random.default_rng(seed) for seed in seeds]
    spawned = [child for world in worlds for child in world.spawn(5)]
    others = [np.random.default_rng([seed, k]) for seed in seeds for k in range(3)]
    theirs = [tuple(rng.random(4, dtype=np.float32).tolist()) for rng in [*worlds, *spawned, *others]]
    assert len(set(found)) == len(seeds) and not set(found) & set(theirs)


def test_streams_go_on_and_are_uniform():
    """In float32, and below 1 even where a float64 would be rounded up to it."""
    streams = models.streams(range(100))
    first, second = models.uniform(streams, 500), models.uniform(streams, 500)
    assert torch.equal(torch.cat([first, second], 1), models.uniform(models.streams(range(100)), 1000))
    assert first.dtype == torch.float32 and first.min() >= 0 and first.max() < 1
    counts = torch.histc(first, 20, 0, 1)
    assert ((counts - 2500) ** 2 / 2500).sum() < 36, "chi-square of 19 degrees: 1 in 100"
