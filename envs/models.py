"""What the scripts share of language models: loading, tokens, masks, logits, sampling, and a probe.

docs/models.md says which models there are, and what the probe holds them to; docs/scaling.md, how large.
"""

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from datetime import date
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from envs import runs

# torch and transformers are imported where they are used, as in envs/runs.py.


# ---------------------------------------------------------- 1. loading
def checkpoint_of(world) -> str:
    """The folder of the small model that was made for a world; variants of a world share one."""
    return str(Path(__file__).parent.parent / "checkpoints" / world.demonstration_env)


def guide_of(env: str, folder: str) -> str:
    """LGE's guide for a world: the newest in a folder of runs, else the ready-made one, else "none"."""
    made = Path(folder).glob(f"{env}__guide_simcse__*/guide")
    ready = Path(__file__).parent.parent / "checkpoints" / f"{env}-guide"
    default = ready if ready.exists() else "none"
    return str(max(made, key=lambda path: path.stat().st_mtime, default=default))


LIMITS = ("max_position_embeddings", "max_seq_len")  # names in configurations


def load(auto, source: str, args):
    """A model without dropout, in float32, on args.device.

    It has two more attributes: its `tokenizer`, and its `context`, the number of tokens that it can read.

    `auto` is a class of transformers such as AutoModelForCausalLM, `source` a folder or a Hugging Face name;
    an adapter of PEFT is merged into its model. The tokenizer's eos_token is what ends a turn.
    Raises ValueError, in one line, for what is no whole model, cannot learn, or speaks as no dialogue does.
    """
    import torch
    import transformers

    options = {"dtype": torch.float32, "trust_remote_code": False, "output_loading_info": True}
    try:
        if Path(source, "adapter_config.json").exists() and not find_spec("peft"):
            raise ValueError("it is an adapter, which needs the package peft: pip install peft")
        model, report = auto.from_pretrained(source, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        if missing := [name for name in report["missing_keys"] if "pooler" not in name]:
            raise ValueError(f"no weights for {missing[0]}")  # else they would be drawn at random
        is_adapter = has_adapters(model)
        if is_adapter:
            merge_adapter(model)
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("none of its parameters can be trained")
        if tokenizer.chat_template:
            tokenizer.eos_token = chat_pieces(tokenizer).end
        if auto is transformers.AutoModelForCausalLM:
            if not has_end(tokenizer):
                raise ValueError(NO_END)
            if model.base_model is model:  # as of Llama 4, whose class names another one
                raise ValueError(f"a {type(model).__name__} does not say where its head begins")
    except Exception as error:  # a damaged folder can raise anything
        why = why_not_loaded(source, error, args)
        raise ValueError(f"no model in {source}: {why}") from error
    print(f"model: {source}" + is_adapter * f", an adapter, merged into {model.config.name_or_path}")
    model.tokenizer = tokenizer
    model.context = context_of(model)
    return model.to(args.device).eval()


NO_END = "its tokenizer has no token that ends a turn"


def has_end(tokenizer) -> bool:
    """Whether it has a token that can end a turn."""
    return "eos_token" in tokenizer.special_tokens_map


def context_of(model) -> int:
    """The number of tokens that a model can read."""
    text_config = model.config.get_text_config()
    limits = [getattr(text_config, name, None) or 0 for name in LIMITS]
    limits = [limit for limit in limits if limit > 0] + [sys.maxsize]  # XLNet says -1 where it has none
    for name, table in model.named_modules():
        # RoBERTa's positions begin behind the number of its padding.
        if name.endswith("position_embeddings") and getattr(table, "padding_idx", None) is not None:
            limits.append(table.num_embeddings - table.padding_idx - 1)
    return min(limits)


def merge_adapter(model) -> None:
    """Adds the low-rank matrices of an adapter to those of the model, and drops them; all can be trained."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            model.set_submodule(name, module.get_base_layer())
    del model.peft_config
    model.had_adapters = True
    model._hf_peft_config_loaded = False  # else only an adapter would be saved
    vars(model).pop("_weight_conversions", None)  # the adapter's, by which all weights would be renamed
    model.requires_grad_(True)


def load_actor(source: str, args):
    """The causal model that learns, probed; with what --lora and --gradient-checkpointing ask for.

    With --lora its own weights are frozen in --dtype, and low-rank adapters learn in float32.
    Raises ValueError for one that --max-action-tokens would fill.
    """
    import transformers

    auto = transformers.AutoModelForCausalLM
    if args.lora:
        model = load(auto, source, replace(args, device="cpu"))  # in float32 it may not fit on the device
        prepare(model, args)
    else:
        model = load(auto, source, args)
        if args.gradient_checkpointing:
            checkpoint_activations(model)
    probe(model)
    if args.max_action_tokens >= model.context:
        raise ValueError(
            f"--max-action-tokens {args.max_action_tokens}: {source} reads only {model.context} tokens"
        )
    return model


def load_critic(source: str, actor, args):
    """The body of a critic, which learns in float32: `source` or, where that is "", as the actor's is now."""
    import transformers

    if source:
        body = load(transformers.AutoModel, source, args)
        probe_critic(body, actor)
        if args.gradient_checkpointing:
            checkpoint_activations(body)
        return body
    if has_adapters(actor):
        raise ValueError(
            "--lora: a critic learns whole, so it needs a smaller model of its own: give --critic"
        )
    body = deepcopy(actor.base_model)
    body.tokenizer = actor.tokenizer
    return body


def has_adapters(model) -> bool:
    """Whether low-rank adapters are all that learns of a model."""
    return bool(getattr(model, "peft_config", None))


def add_adapters(model, rank: int) -> None:
    """Low-rank adapters, which are all that is trained from now on: on all linear layers but the head."""
    if getattr(model, "had_adapters", False):  # what is saved would name the model without them
        raise ValueError(
            "--lora begins with a whole model, not with an adapter: give the merged one, which is actor/ "
            "in runs of sft.py and archer.py"
        )
    try:
        from peft import LoraConfig
    except ModuleNotFoundError as error:
        raise ValueError("--lora needs the package peft: pip install peft") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of GPT-2: that it has seen how its weights lie
        model.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()  # in bfloat16 a step of 5e-5 would vanish


def prepare(model, args) -> None:
    """Makes a model what --dtype, --lora, --gradient-checkpointing and --device say, to be trained."""
    import torch

    dtype = getattr(torch, args.dtype)
    for p in model.parameters():  # not the buffers: in bfloat16 the angles of far positions are radians off
        p.data = p.data.to(args.device, dtype, copy=True)
    model.to(args.device)
    if args.lora:
        add_adapters(model, args.lora_rank)
    if args.gradient_checkpointing:
        checkpoint_activations(model)


def learned(model):
    """What a checkpoint has to have of a model: of one with adapters these alone."""
    from torch.nn import ParameterList

    if not has_adapters(model):
        return model
    return ParameterList(p for p in model.parameters() if p.requires_grad)


def reference_of(model):
    """What stays as a model is now: a copy of it; of one with adapters itself, read `without_adapters`."""
    if has_adapters(model):
        return model
    return deepcopy(model).requires_grad_(False)


@contextmanager
def without_adapters(model) -> Iterator[None]:
    """In this context a model is as it was before it had adapters, if it has any."""
    if has_adapters(model):
        model.disable_adapters()
    yield
    if has_adapters(model):
        model.enable_adapters()


def to_save(name: str, model) -> dict:
    """The models to be saved for one, by name: of one with adapters these, and a merged copy in float32.

    The copy is made on the CPU, as there may be no room for two on the device; of several processes the
    first one, which writes, makes it.
    """
    if runs.rank() > 0:
        return {}
    if not has_adapters(model):
        return {name: model}
    device = model.device
    merged = deepcopy(model.cpu()).float()
    model.to(device)
    merge_adapter(merged)
    return {name: merged, f"{name}_adapter": model}


def checkpoint_activations(model) -> None:
    """A pass with gradients keeps little of what layers compute: the backward pass computes it again.

    Layers do so in training mode only, in which they have no cache. So they are in it where gradients are
    asked for. The modules inside of a layer stay in eval mode: there is no dropout.
    """
    import torch

    def set_mode(body, inputs):
        for module in body.modules():
            module.training = torch.is_grad_enabled() and getattr(module, "gradient_checkpointing", False)

    model.activation_checkpointing_enable()
    model.base_model.register_forward_pre_hook(set_mode)


def why_not_loaded(source: str, error: Exception, args=None) -> str:
    """Why there is no model in a folder, or of a name, which may have been meant for a folder.

    With the arguments of a script, a folder that none of them names is its own choice: it is one in
    checkpoints/ that this world does not have, and `sft.py` makes another.
    """
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip()
    if Path(source, "actor").is_dir():
        return f"it is the folder of a run; its model is in {Path(source, 'actor')}"
    if Path(source, "args.json").exists():
        return "it is the folder of a run that has saved no model yet"
    if Path(source).exists():
        return " ".join(str(error).split())[:300] if reason.endswith(":") else reason
    if args is not None and source not in vars(args).values():
        flag = "--actor" if hasattr(args, "actor") else "--model"
        world = f" --world {args.world}" if args.world else ""
        sft = f"python sft.py --env {args.env}{world} makes a model in a folder that it prints"
        return f"there is no such folder; {sft}: then {flag} FOLDER/actor"
    is_name = source.count("/") <= 1 and source[:1] not in (".", "/", "~")
    return f"there is no such folder; as a name: {reason}" if is_name else "there is no such folder"


# ---------------------------------------------------------- 2. dialogues as tokens
class ChatPieces(NamedTuple):
    """What stands around the texts of a dialogue: head prompt to_reply reply end to_prompt prompt ..."""

    head: str
    to_reply: str
    end: str | None  # a token
    to_prompt: str


# What a template may ask for beside the dialogue: a date, which must not change, and no thoughts.
DAY = date(2024, 7, 26)
FIXED = {"enable_thinking": False, "date_string": DAY.strftime("%d %b %Y")}
NOW = re.compile(r"""strftime_now\((["'])(.*?)\1\)""")  # a call in a template
EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")


@lru_cache(maxsize=8)
def chat_pieces(tokenizer) -> ChatPieces:
    """The pieces of a chat template; without one all but the end are empty.

    A template may leave an empty thought out of the history: ours keeps it, as it stood before the reply.
    Raises ValueError for one that otherwise writes history in another way than the prompt of a reply, and
    for an end that is no control token, as nobody could sample it.
    """
    if not tokenizer.chat_template:
        return ChatPieces("", "", tokenizer.eos_token, "")
    chat = [{"role": ("user", "assistant")[i % 2], "content": f"<{i}>"} for i in range(5)]
    try:
        template = NOW.sub(lambda call: repr(DAY.strftime(call[2])), tokenizer.get_chat_template())
        options = {"chat_template": template, "add_generation_prompt": True} | FIXED
        whole = tokenizer.apply_chat_template(chat, tokenize=False, **options)
    except Exception as error:  # a template can raise anything
        raise ValueError(f"its chat template writes no dialogue: {error}") from error
    parts = re.split("<[0-4]>", whole)
    if len(parts) != 6:
        raise ValueError("its chat template does not write every text of a dialogue once")
    head, to_first, between, to_second, between_again, to_reply = parts
    known = (to_reply, EMPTY_THOUGHT.sub("", to_reply))
    if to_first not in known or (to_second, between_again) != (to_first, between):
        shown = whole.removeprefix(head)
        raise ValueError(f"its chat template writes history otherwise than the prompt of a reply: {shown!r}")
    ends = [token for token in control_tokens(tokenizer) if between.startswith(token)]
    if not ends:
        raise ValueError(f"its chat template ends a turn with no control token: {between!r}")
    return ChatPieces(head, to_reply, ends[0], between.removeprefix(ends[0]))


@lru_cache(maxsize=8)
def control_tokens(tokenizer) -> list[str]:
    """The special tokens of a tokenizer, the longest first."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted(special, key=len, reverse=True)


@lru_cache(maxsize=100_000)  # worlds repeat themselves
def encode(tokenizer, text: str) -> list[int]:
    """Token ids of text, in which control tokens are spelled. The list is shared: do not change it."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@lru_cache(maxsize=100_000)
def encode_prompt(tokenizer, text: str) -> list[int]:
    """Token ids of the first text of a dialogue, up to the reply. The list is shared: do not change it."""
    if tokenizer.chat_template:
        pieces = chat_pieces(tokenizer)
        return encode_between(tokenizer, pieces.head, text, pieces.to_reply)
    begun = tokenizer("a")["input_ids"]  # a base model may know no text without a token before it
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    return begun[: begun.index(bare[0])] + encode(tokenizer, text)


@lru_cache(maxsize=100_000)
def encode_reply(tokenizer, text: str) -> list[int]:
    """Token ids from behind the end of a turn up to the next one. The list is shared: do not change it."""
    pieces = chat_pieces(tokenizer)
    return encode_between(tokenizer, pieces.to_prompt, text, pieces.to_reply)


def words_of(tokenizer) -> list[int]:
    """Ids of the tokens that begin with the mark of a word, SentencePiece's or GPT-2's."""
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    is_word = re.compile(r"[\u2581\u0120]\w+").fullmatch
    return [i for i, name in enumerate(names) if is_word(name)]


def encode_between(tokenizer, before: str, text: str, after: str) -> list[int]:
    """Token ids of a text between two pieces of a template: together, as the model knows it, if that is safe.

    Where the text spells a control token, the pieces are encoded apart.
    """
    if not (before or after):
        return encode(tokenizer, text)

    def with_control(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    if any(token in text for token in control_tokens(tokenizer)):
        return with_control(before) + encode(tokenizer, text) + with_control(after)
    return with_control(before + text + after)


# ---------------------------------------------------------- 3. reading
def hidden_states(body, dtype: str, **inputs):
    """The last hidden states of a model without head, computed in `dtype`; of bfloat16 as float32."""
    import torch

    on_device = {name: x.to(body.device) if torch.is_tensor(x) else x for name, x in inputs.items()}
    if dtype != "bfloat16":
        return body(**on_device).last_hidden_state
    with torch.autocast(body.device.type, torch.bfloat16):
        return body(**on_device).last_hidden_state.float()


def cls_vectors(body, texts: list[str], dtype: str):
    """An encoder's [CLS] vectors [N, H]; a text that is too long loses its beginning."""
    body.tokenizer.truncation_side = "left"
    inputs = body.tokenizer(
        texts,
        padding=True,
        truncation=True,
        max_length=body.context,
        split_special_tokens=True,  # "[SEP]" is text, too
        return_tensors="pt",
    )
    return hidden_states(body, dtype, **inputs)[:, 0]


def masked_states(body, ids_BT, position_BT, visible_BTC, dtype: str, cache=None):
    """The same [B, T, H] of a decoder in which a token sees the `visible` ones of C columns."""
    return hidden_states(
        body,
        dtype,
        input_ids=ids_BT,
        position_ids=position_BT,
        attention_mask=mask_of(body, visible_BTC[:, None]),  # of four axes: is taken as it is
        past_key_values=cache,
        use_cache=cache is not None,
    )


def width_of(model) -> int:
    """The width of the hidden states that a body gives: in some it is not the one of the configuration."""
    import torch

    with torch.no_grad():
        ids_11 = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        return model.base_model(input_ids=ids_11).last_hidden_state.shape[-1]


def is_encoder(body) -> bool:
    """Whether a model reads texts apart, and all of a text at once."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

    return body.config.model_type in ENCODERS


def mask_of(model, visible):
    """What a decoder takes for a mask, on its device, if a token sees the `visible` ones [..., T, C].

    With PyTorch's attention that is the same. Any other adds it to its scores, and gets the lowest number for
    what is not visible, and 0 for what is; to the bit the outcome is one, but that number takes longer.

    A layer with a window sees the last ones of these. Where only some layers have one, each kind of layer has
    a mask by its name.
    """
    import torch

    config = model.config.get_text_config()
    visible = visible.to(model.device)

    def bias(seen):
        if config._attn_implementation == "sdpa":
            return seen
        lowest = torch.finfo(torch.bfloat16).min  # float32's lowest would be -inf in bfloat16
        return torch.zeros(seen.shape, dtype=model.dtype, device=seen.device).masked_fill_(~seen, lowest)

    window = getattr(config, "sliding_window", None)
    if not window or visible.shape[-1] <= window:
        return bias(visible)
    from_here_on = visible.flip(-1).cumsum(-1).flip(-1)  # so many are visible, this one included
    recent = bias(visible & (from_here_on <= window))
    if getattr(config, "layer_types", None):
        return {"full_attention": bias(visible), "sliding_attention": recent}
    return recent


class Answer:
    """Stands where a body or a part of it stood, and answers all calls with the same hidden states.

    It is its own output, too: item 0 and `last_hidden_state` are the states. All else it has of the body.
    """

    def __init__(self, body, hidden):
        self.body = body
        self.last_hidden_state = hidden

    def __call__(self, *args, **options):
        return self

    def __getitem__(self, index: int):
        return self.last_hidden_state

    def __getattr__(self, name: str):
        if name.startswith("__"):  # torch asks for such
            raise AttributeError(name)
        found = getattr(self.body, name, self)
        return self if hasattr(found, "forward") else found


def logits_of(model, hidden):
    """Logits of hidden states [..., H] by all that a model does behind its body: head, scale, cap.

    It is the model's own forward pass, with a body that answers with these states. What a model in bfloat16
    gives comes as float32: log-probs in bfloat16 would be too coarse.
    """
    import torch

    body = model.base_model
    name = next(name for name, module in model.named_children() if module is body)
    hidden_1NH = hidden.reshape(1, -1, hidden.shape[-1]).to(model.dtype)
    size = hidden_1NH.shape[:2]
    ids_1N = torch.zeros(size, dtype=torch.long, device=hidden.device)  # Gemma 4 asks how many
    model._modules[name] = Answer(body, hidden_1NH)
    try:
        logits = model(input_ids=ids_1N, use_cache=False).logits
    finally:
        model._modules[name] = body
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    return logits.reshape(*hidden.shape[:-1], logits.shape[-1])


# ---------------------------------------------------------- 4. a step, in parts
def micro_batches(dialogues, size: int) -> list:
    """A batch in parts of `size`, of which one is in memory at a time; the last one may be smaller."""
    if size < 1:
        raise ValueError(f"--micro-batch {size}: it must be at least 1")
    return [dialogues[i : i + size] for i in range(0, len(dialogues), size)]


def clipped_step(optimizer, model, max_norm: float, what: str) -> float:
    """One step of an optimiser; the gradients of `model` are clipped. Returns their norm before that."""
    import torch

    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if not torch.isfinite(norm):
        raise ArithmeticError(f"the {what} diverged (gradient {norm.item()}): lower its rate")
    optimizer.step()
    return norm.item()


# ---------------------------------------------------------- 5. random numbers and sampling
def streams(seeds) -> list:
    """A generator of random numbers for each seed: one that no world has, not even with the same seed.

    numpy's, as its numbers are the same on every device.
    """
    from numpy.random import SeedSequence, default_rng

    # Not [seed, 0], which is as good as `seed` alone; and a world may spawn some of its own.
    return [default_rng(SeedSequence(int(seed), spawn_key=(2**31,))) for seed in seeds]


def uniform(streams: list, number: int):
    """The next numbers of each stream [N, number], at least 0 and below 1.

    All that an utterance may need, so that how long others are does not change what comes next.
    """
    import numpy
    import torch

    # float32, not rounded to it: that could be 1
    rows = [stream.random(number, dtype=numpy.float32) for stream in streams]
    return torch.from_numpy(numpy.stack(rows))


def sample_tokens(logits_NV, u_N, greedy: bool) -> tuple:
    """Tokens drawn from the softmax of each row by numbers of `uniform`, or the likeliest; their log-probs.

    Returns ids [N] and log-probs [N].
    """
    import torch

    logp_NV = logits_NV.log_softmax(-1)
    if greedy:
        token_N1 = logp_NV.argmax(-1, keepdim=True)
    else:  # the first token at which the cumulative probability exceeds u
        total_NV = logp_NV.exp().cumsum(-1)
        mark_N1 = u_N[:, None] * total_NV[:, -1:]
        token_N1 = torch.searchsorted(total_NV, mark_N1, right=True)
        token_N1 = token_N1.clamp(max=logp_NV.shape[-1] - 1)  # u * total may be rounded up to total
    logp_N1 = logp_NV.gather(-1, token_N1)
    return token_N1[:, 0], logp_N1[:, 0]


# ---------------------------------------------------------- 6. the probe
PROBED = 512  # tokens of the row with which a model is probed, at most
FORK = 4  # of these, tokens of another utterance than the row's
WINDOW = 16  # of a sliding window, while a model is probed
GAP = {"float32": 0.01, "bfloat16": 0.1}  # nats that log-probs of the same tokens may be apart (`gap_of`)


def probe(model) -> None:
    """Raises ValueError for a model that does not score and write here as it does by itself.

    A row of random tokens with a fork in its middle is read in one
    pass, as where utterances are scored, and token by token behind what was read before, as where they are
    written. All in float32: what a model does is the same in bfloat16, and there the rounding would hide it.
    """
    import torch
    import transformers

    inputs, forked_BT = forked_row(model)
    ids_BT, position_BT, visible_BTT = inputs
    T = ids_BT.shape[1] - FORK

    def score():
        return masked_states(model.base_model, *inputs, "float32")[0, T:]

    def write():
        cache = transformers.DynamicCache()
        states = []
        for columns in (slice(0, T), *(slice(i, i + 1) for i in range(T, T + FORK))):
            visible = visible_BTT[:, columns, : columns.stop]
            position = position_BT[:, columns]
            ids = ids_BT[:, columns]
            states.append(masked_states(model.base_model, ids, position, visible, "float32", cache))
        return torch.cat(states[1:], 1)[0]

    compare(model, forked_BT, score, "what is scored")
    compare(model, forked_BT, write, "what is written")


def probe_critic(body, actor) -> None:
    """Raises ValueError for a critic of its own that does not read here as it does by itself.

    A decoder reads whole dialogues, and so its context limits these, too. As it may spell them with more
    tokens than the actor does, it also looks at what it is given from now on.
    """
    import torch

    refused = f"a critic of type {body.config.model_type} cannot be used"
    if body.config.is_encoder_decoder:
        raise ValueError(f"{refused}: one part of it reads and another one writes")
    if not (is_encoder(body) or has_end(body.tokenizer)):
        raise ValueError(f"{refused}: {NO_END}")
    try:
        with torch.no_grad(), narrowed(body):
            if is_encoder(body):
                found_NH, own_NH = beside_a_longer_text(body)
            else:
                inputs, forked_BT = forked_row(body)
                found_NH = masked_states(body, *inputs, "float32")[0, -FORK:]
                own_NH = body(input_ids=forked_BT).last_hidden_state[0, -FORK:]
    except Exception as error:  # each kind of model has its own
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{refused}: its forward pass fails here, {why}") from error
    if not (found_NH - own_NH).norm() <= 0.01 * own_NH.norm():
        raise ValueError(f"{refused}: it reads a text here otherwise than by itself")
    if not is_encoder(body):
        actor.context = min(actor.context, body.context)
        body.register_forward_pre_hook(partial(check_length, body.context), with_kwargs=True)


def beside_a_longer_text(body) -> tuple:
    """An encoder's vector [1, H] of a text that is padded, and of the same text alone."""
    limit = min(body.context, PROBED)
    options = {"truncation": True, "max_length": limit, "return_tensors": "pt"}
    padded = body.tokenizer(["a", "a " * limit], padding=True, **options).to(body.device)
    alone = body.tokenizer("a", **options).to(body.device)
    return body(**padded).last_hidden_state[:1, 0], body(**alone).last_hidden_state[:, 0]


def check_length(context: int, body, args: tuple, inputs: dict) -> None:
    """Raises ValueError for rows that are longer than a critic can read."""
    position_BT = inputs.get("position_ids")
    if position_BT is not None and position_BT.max() >= context:
        T = int(position_BT.max()) + 1
        raise ValueError(
            f"--critic: it spells a dialogue with {T} tokens and reads {context}: take another one"
        )


def forked_row(model) -> tuple:
    """A row of random tokens with a fork in its middle: as masked_states takes it, and the fork's own row."""
    import torch

    ids_BT = probe_ids(model).cpu()
    T = ids_BT.shape[1] - FORK
    start = T // 2
    position_BT = torch.cat([torch.arange(T), torch.arange(start, start + FORK)])[None]
    visible_BTT = torch.ones(1, T + FORK, T + FORK, dtype=torch.bool).tril()
    visible_BTT[:, T:, start:T] = False
    forked_BT = torch.cat([ids_BT[:, :start], ids_BT[:, T:]], 1).to(model.device)
    return (ids_BT, position_BT, visible_BTT), forked_BT


def probe_ids(model):
    """Random tokens [1, T], as many as a model can read or PROBED."""
    import torch

    number = len(model.tokenizer)
    rows = model.get_input_embeddings().weight.shape[0]
    if number > rows:
        raise ValueError(f"a tokenizer of {number} tokens, but the model has vectors for {rows}: resize them")
    generator = torch.Generator("cpu").manual_seed(0)
    T = min(model.context, PROBED)
    return torch.randint(number, (1, T), generator=generator, device="cpu").to(model.device)


@contextmanager
def narrowed(model) -> Iterator[None]:
    """In this context sliding windows are at most WINDOW tokens wide, so that probes look over their edge.

    And float32 is float32: on a GPU it may be TF32 otherwise, whose rounding would hide what a model does.
    """
    import torch

    matmul = torch.backends.cuda.matmul
    had_tf32, matmul.allow_tf32 = matmul.allow_tf32, False
    found = [module.config for module in model.modules() if hasattr(module, "config")]
    configs = {id(config): config for config in (*found, model.config.get_text_config())}
    wide = {key: getattr(config, "sliding_window", None) for key, config in configs.items()}
    try:
        for key, window in wide.items():
            if window:
                configs[key].sliding_window = min(window, WINDOW)
        yield
    finally:
        matmul.allow_tf32 = had_tf32
        for key, window in wide.items():
            if window:
                configs[key].sliding_window = window


def compare(model, ids_BT, states: Callable, what: str) -> None:
    """Raises ValueError if hidden states give other log-probs than a model itself does, or if it looks ahead.

    `states()` are those [N, H] of the last N tokens of a row [1, T]. Compared are the likeliest tokens.
    """
    import torch

    refused = f"a model of type {model.config.model_type} cannot be used"
    try:
        with torch.no_grad(), narrowed(model):
            hidden_NH = states()
            found_NV = logits_of(model, hidden_NH)
            own_TV = model(input_ids=ids_BT, use_cache=False).logits[0]
            earlier_TV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits[0]
    except Exception as error:  # each kind of model has its own
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{refused}: its forward pass fails here, {why}") from error
    dtype = str(model.dtype).removeprefix("torch.")
    if not distance(own_TV[:-1], earlier_TV, dtype) <= GAP[dtype]:
        raise ValueError(f"{refused}: what it says of a token depends on those that follow")
    gap = distance(own_TV[-len(hidden_NH) :], found_NV, dtype)
    if not gap <= GAP[dtype]:
        raise ValueError(f"{refused}: {what} is {gap:.2g} nats from what it says by itself")


def distance(logits, others, dtype: str) -> float:
    """How far apart log-probs are, of the ten tokens that are the likeliest by the first."""
    logp = logits.float().log_softmax(-1)
    top = logp.topk(10)
    return gap_of(top.values - others.float().log_softmax(-1).gather(-1, top.indices), dtype)


def gap_of(differences, dtype: str) -> float:
    """The largest difference between log-probs, in nats; in bfloat16, which rounds single ones, the mean."""
    sizes = differences.abs()
    return sizes.mean().item() if dtype == "bfloat16" else sizes.max().item()


def check_gap(gap: float, dtype: str) -> None:
    """Raises ArithmeticError where log-probs of tokens were others at sampling than they are at scoring."""
    if gap > GAP[dtype]:  # of nan the step will say more
        raise ArithmeticError(f"log-probs of sampled and of scored tokens are {gap:.2g} nats apart")
