"""How much memory loop_ppo.py needs with a large model: arithmetic from its sizes, nothing is loaded.

    python benchmarks/loop_memory.py                          # the paper's 32B model, and one of 7B
    python benchmarks/loop_memory.py --rollouts 2 --context 16000

Rollouts keep the weights, the keys and values of all tokens, with a quarter of room to grow, and for one
layer at a time these expanded to all heads, while replies are read. Updates with --gradient-checkpointing
keep the weights, the adapters with gradient and Adam's two moments in float32, the input of each layer,
and for one layer at a time all that its backward pass reads. Before that, the model is loaded into main
memory in float32. What torch itself takes and its allocator wastes comes on top: add a tenth.
"""

from dataclasses import dataclass

import tyro

GB = 1e9
HALF, SINGLE = 2, 4  # bytes of a number in bfloat16 and in float32


@dataclass
class Model:
    """Sizes of a Llama-like model, as in its config.json; head and embedding are not tied."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the linear maps of a layer: query, key, value, output, gate, up, down."""
        kv = self.hidden // self.heads * self.kv_heads
        square, narrow, wide = (self.hidden, self.hidden), (self.hidden, kv), (self.hidden, self.inner)
        return [square, narrow, narrow, square, wide, wide, (self.inner, self.hidden)]

    @property
    def parameters(self) -> int:
        """All but norms and biases, which are a thousandth."""
        return self.layers * sum(a * b for a, b in self.linears) + 2 * self.vocabulary * self.hidden


MODELS = {
    "Qwen2.5-32B": Model(64, 5120, 40, 8, 27648, 152064),
    "Qwen2.5-7B": Model(28, 3584, 28, 4, 18944, 152064),
}


@dataclass
class Args:
    rollouts: int = 6  # rollouts at a time, --worlds
    context: int = 32_000  # tokens of each
    micro_batch: int = 1  # rollouts in a pass of an update
    lora_rank: int = 16  # of the adapters; 0 trains all weights, in float32
    logit_chunk: int = 4096  # tokens whose logits are made at a time


def memory(model: Model, args: Args) -> dict[str, float]:
    """GB by what takes them, and the sums for rollouts and for updates."""
    weights = model.parameters * (HALF if args.lora_rank else SINGLE)
    adapters = model.layers * sum(args.lora_rank * (a + b) for a, b in model.linears)
    trained = adapters if args.lora_rank else model.parameters
    learning = trained * SINGLE * 4 - (0 if args.lora_rank else weights)  # weight, gradient, two moments

    number = HALF if args.lora_rank else SINGLE
    of_token = 2 * model.hidden // model.heads * model.kv_heads * number  # keys and values of a layer
    tokens = args.rollouts * args.context
    cache = 1.25 * tokens * of_token * model.layers
    expanded = tokens * of_token * model.heads // model.kv_heads

    read = args.micro_batch * args.context
    inputs = read * model.hidden * number * model.layers
    # two norms and their outputs, query, expanded keys and values, attention; gate, up, activation, product
    within = read * (10 * model.hidden + 4 * model.inner) * number
    # as adapters are float32, so are the inputs of the linear maps, which peft converts; measured
    converted = read * (20 * model.hidden + 2 * model.inner) if args.lora_rank else 0
    logits = 3 * args.logit_chunk * model.vocabulary * SINGLE  # themselves, their softmax, its gradient
    parts = {"weights": weights, "cache": cache, "one layer's keys and values": expanded}
    parts |= {"trained, gradient, moments": trained and learning, "inputs of layers": inputs}
    parts |= {"inside a layer": within, "inputs of adapters": converted, "logits": logits}
    parts |= {"main memory, while loading": model.parameters * SINGLE}
    sums = {
        "rollouts": weights + learning + cache + expanded,
        "updates": weights + learning + inputs + within + converted + logits,
    }
    return {name: size / GB for name, size in (parts | sums).items()}


def main(args: Args) -> str:
    """Prints the table as markdown, and returns it."""
    columns = {name: memory(model, args) for name, model in MODELS.items()}
    lines = [f"| GB | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for part in next(iter(columns.values())):
        lines.append(f"| {part} | {' | '.join(f'{column[part]:.1f}' for column in columns.values())} |")
    print("\n".join(lines))
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Args, description=(__doc__ or "").split("\n")[0]))
