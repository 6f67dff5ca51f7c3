"""archer.py with one part exchanged for which it has no switch. Results: docs/compare.md, docs/archer.md.

    python benchmarks/variants.py D4 --env twenty-questions-subset
    python benchmarks/variants.py D7 --resume runs/...

The first word names the part, the others are archer.py's. D2, D4, D7, D8 and D9 undo what its head says under
that number. The run's folder does not say so: give it a --name.
  D2      The critic is an encoder: a small BERT with random weights, as a better one would be a download.
  random  The critic is a decoder as usual, with random weights: what D2 is to be compared with.
  D4      All heads start near zero.
  D7      Every update of the critic has utterances of its own. Together with --critic-pool 10000, which is as
          good as the whole buffer, it undoes D7.
  D8      With --baseline --fresh: E4's baseline is a network of its own and makes 60 updates an iteration,
          or the next smaller multiple of --actor-updates, on the actor's batches; the last update of each
          batch is archer.py's, of the head alone. Not without --fresh: the network would learn by heart the
          advantages of what was played, and nothing would be left for E5.
  D9      Q has networks of its own instead of V plus a linear function.
  mc      Q and V learn the Monte-Carlo returns (App. D.1).
  iql     V learns an upper expectile of Q over the data instead of E2 (E6: Eq. 6, App. D.2). As Q is V plus
          something (D9), the loss of Q still moves V, too.
  gae     The advantage is not E3's but GAE over utterances, with the critic's V and a lambda of 0.95.
  td      The same with a lambda of 0: r + gamma V(s') - V(s). V is the mean of the twins, not of their slow
          copies.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
import transformers
import tyro
from tokenizers.processors import TemplateProcessing

sys.path.insert(0, str(Path(__file__).parent.parent))
import archer
import envs
from baselines import ppo
from envs import models, runs

BASELINE_UPDATES = 60  # in an iteration (paper, Table 3)
EXPECTILE = 0.9  # of E6; our copy of App. D.2 has lost the paper's number
LAMBDAS = {"gae": 0.95, "td": 0.0}  # of GAE


# ---------------------------------------------------------- D2, random
def arguments(words: list[str]) -> archer.Args:
    """What a command line says, and for the rest the run that it resumes."""
    args = tyro.cli(archer.Args, args=words)
    if args.resume:
        saved = runs.saved_args(archer.Args, Path(args.resume))
        args = tyro.cli(archer.Args, args=words, default=saved)
    return args


def random_encoder(source: str, folder: str) -> None:
    """Saves a BERT of the actor's size that reads the actor's tokens behind its end token, as the [CLS]."""
    actor = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{end[0]} $A", special_tokens=[end])
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=actor.hidden_size,
        num_hidden_layers=actor.num_hidden_layers,
        num_attention_heads=actor.num_attention_heads,
        intermediate_size=actor.intermediate_size,
        max_position_embeddings=actor.max_position_embeddings + 2,
        initializer_range=actor.initializer_range,
        pad_token_id=None,  # the end token pads, and it is the [CLS], which must learn
    )
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def random_decoder(source: str, folder: str) -> None:
    """Saves a model like the actor with random weights."""
    config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(folder)


# ---------------------------------------------------------- D4
def mlp_from_zero(mlp):
    """archer.mlp, but its output starts near zero, whatever it is told."""
    return lambda inputs, width, value: mlp(inputs, width, 0.0)


# ---------------------------------------------------------- D7, iql
def with_own_samples(update):
    """archer.actor_update, which with --fresh samples by archer.with_fresh as it is now."""
    sample = archer.with_fresh

    def actor_update(*given):
        with patch.object(archer, "with_fresh", sample):
            return update(*given)

    return actor_update


class FreshAtEveryUpdate:
    """archer.with_fresh only remembers what it needs; archer.critic_update then samples for its batch."""

    def __init__(self):
        self.sample = archer.with_fresh
        self.update = archer.critic_update

    def with_fresh(self, dialogues, actor, args, rng):
        self.actor = actor
        self.rng = rng
        return dialogues

    def critic_update(self, critic, target_critic, optimizer, dialogues, args):
        dialogues = self.sample(dialogues, self.actor, args, self.rng)
        return self.update(critic, target_critic, optimizer, dialogues, args)


# ---------------------------------------------------------- D8
class OwnBaseline:
    """E4's baseline reads with a copy of the first actor, which learns, and not with the actor.

    Its head is archer.py's. Before each update of the actor both make some steps on utterances of their own,
    in the same states; the last step is that of archer.actor_update itself, which moves the head alone.
    """

    def __init__(self):
        self.run_start = runs.Run.start
        self.score = archer.score
        self.update = archer.actor_update

    def start(self, run, modules, **state):
        """runs.Run.start with the network among the modules, so that a run can be resumed."""
        self.network = copy.deepcopy(modules["actor"])  # which is as it was at first, in a resumed run, too
        parameters = [*self.network.parameters(), *modules["baseline"].parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=run.args.critic_lr, weight_decay=0.0)
        own = {"network": self.network, "network_optimizer": self.optimizer}
        self.run_start(run, modules | own, **state)

    def score_with_own(self, actor, dialogues, utterances, temperature, dtype):
        """archer.score, but the hidden states are those of the network."""
        logits_MV, token_M, _, owner_M = self.score(actor, dialogues, utterances, temperature, dtype)
        _, _, hidden_MH, _ = self.score(self.network, dialogues, utterances, temperature, dtype)
        return logits_MV, token_M, hidden_MH, owner_M

    def actor_update(self, actor, ref_model, critic, baseline, optimizer, dialogues, args, rng):
        """archer.actor_update behind updates of network and head."""
        learned = archer.with_fresh(dialogues, actor, args, rng)
        ids = archer.flat(learned, "ids")
        with torch.no_grad():
            v_N2, q_N2 = critic(dialogues, archer.flat(learned, "fresh"))
        advantage_N = archer.advantages(q_N2, v_N2)
        if args.center:
            advantage_N = advantage_N - advantage_N.mean()
        for _ in range(BASELINE_UPDATES // args.actor_updates - 1):
            scored = self.score(self.network, dialogues, ids, args.temperature, args.dtype)
            _, _, hidden_MH, owner_M = scored
            loss = archer.baseline_loss(baseline(hidden_MH)[:, 0], advantage_N, owner_M)  # E4
            self.optimizer.zero_grad()
            loss.backward()
            both = torch.nn.ModuleList([self.network, baseline])
            models.clipped_step(self.optimizer, both, args.max_grad_norm, "baseline")
        return self.update(actor, ref_model, critic, baseline, optimizer, dialogues, args, rng)


# ---------------------------------------------------------- mc, iql
def monte_carlo_targets(target_critic, dialogues, gamma):
    """The targets of Q and of V [N, 2]: the return that followed."""
    returns = []
    for dialogue in dialogues:
        returns += archer.mc_returns(dialogue["rewards"], gamma)
    return_N = torch.tensor(returns, device=target_critic.body.device)
    return_N2 = return_N[:, None].expand(-1, 2)
    return return_N2, return_N2


def expectile_loss(v_N2, q_N2):
    """E6: V tends to the best Q of the data."""
    gap_N2 = q_N2 - v_N2
    is_below_N2 = (gap_N2 < 0).to(gap_N2)
    weight_N2 = (EXPECTILE - is_below_N2).abs()
    return (weight_N2 * gap_N2**2).sum(-1).mean()


# ---------------------------------------------------------- D9
class CriticWithTwinQ(archer.Critic):
    """archer.Critic, but Q is a network on the hidden state, as V is, and not V plus something."""

    def __init__(self, body, value, dtype):
        super().__init__(body, value, dtype)
        width = models.width_of(body)
        inputs = 2 * width if self.is_encoder else width
        self.a_heads = archer.Twins(archer.mlp(inputs, width, value) for _ in range(2))

    def forward(self, dialogues, texts=None):
        v_N2, sum_N2 = super().forward(dialogues, texts)
        return v_N2, sum_N2 - v_N2


def without_fresh(dialogues, actor, args, rng):
    """archer.with_fresh, but what was said stands for what would be said: a ~ data."""
    return [dialogue | {"fresh": dialogue["actions"]} for dialogue in dialogues]


# ---------------------------------------------------------- gae, td
class ByGae:
    """The actor's updates have the advantages of what was played from rewards and V, and not from Q."""

    def __init__(self, lam: float):
        self.lam = lam
        self.update = archer.actor_update

    @torch.no_grad()
    def advantages(self, dialogues, critic, gamma):
        """GAE of all the dialogues' utterances [N]."""
        v_N2, _ = critic(dialogues)
        left = v_N2.mean(-1).tolist()
        found = []
        for dialogue in dialogues:
            rewards = dialogue["rewards"]
            values, left = left[: len(rewards)], left[len(rewards) :]
            discounts = [gamma] * len(rewards)  # what comes behind the last one is 0 anyway
            found += ppo.gae(rewards, discounts, values, self.lam)
        return v_N2.new_tensor(found)

    def actor_update(self, actor, ref_model, critic, baseline, optimizer, dialogues, args, rng):
        """archer.actor_update with these advantages, micro-batch by micro-batch."""
        parts = models.micro_batches(dialogues, args.micro_batch)
        queue = iter([self.advantages(part, critic, args.gamma) for part in parts])
        with patch.object(archer, "advantages", lambda q_N2, v_N2: next(queue)):
            return self.update(actor, ref_model, critic, baseline, optimizer, dialogues, args, rng)


# ---------------------------------------------------------- the command
@contextmanager
def exchanged(variant: str) -> Iterator[None]:
    """archer.py has the variant's part as long as the context lasts."""
    with ExitStack() as stack:

        def put(owner, name: str, part) -> None:
            stack.enter_context(patch.object(owner, name, part))

        if variant == "D4":
            put(archer, "mlp", mlp_from_zero(archer.mlp))
        if variant == "D7":
            fresh = FreshAtEveryUpdate()
            put(archer, "actor_update", with_own_samples(archer.actor_update))
            put(archer, "with_fresh", fresh.with_fresh)
            put(archer, "critic_update", fresh.critic_update)
        if variant == "D8":
            own = OwnBaseline()
            put(runs.Run, "start", lambda run, modules, **state: own.start(run, modules, **state))
            put(archer, "score", own.score_with_own)
            put(archer, "actor_update", own.actor_update)
        if variant == "D9":
            put(archer, "Critic", CriticWithTwinQ)
        if variant == "mc":
            put(archer, "actor_update", with_own_samples(archer.actor_update))
            put(archer, "with_fresh", without_fresh)  # these targets need none
            put(archer, "critic_targets", monte_carlo_targets)
        if variant == "iql":
            put(archer, "actor_update", with_own_samples(archer.actor_update))
            put(archer, "with_fresh", without_fresh)
            put(archer, "value_loss", expectile_loss)
        if variant in LAMBDAS:
            put(archer, "actor_update", ByGae(LAMBDAS[variant]).actor_update)
        yield


CRITICS = {"D2": random_encoder, "random": random_decoder}
VARIANTS = ("D2", "random", "D4", "D7", "D8", "D9", "mc", "iql", *LAMBDAS)


def main() -> None:
    """Runs archer.py with the variant that the first word of the command line names."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        return
    if len(sys.argv) < 2 or sys.argv[1] not in VARIANTS:
        runs.stop(f"the first word must be one of {', '.join(VARIANTS)}; see the head of the file")
    variant, words = sys.argv[1], sys.argv[2:]
    transformers.logging.disable_progress_bar()
    with TemporaryDirectory() as folder, exchanged(variant):
        try:
            args = arguments(words)
            if variant == "D8" and not (args.baseline and args.fresh):
                runs.stop("D8 is about the baseline, and of new utterances: give --baseline and --fresh")
            if variant in LAMBDAS and args.fresh:
                runs.stop(f"{variant} is about what was played: leave --fresh out")
            if variant in CRITICS:
                world = envs.make(args.env, **envs.options(args.world))
                torch.manual_seed(args.seed)
                CRITICS[variant](args.actor or models.checkpoint_of(world), folder)
                words = [*words, "--critic", folder]
        except (ValueError, OSError) as error:
            runs.stop(str(error))
        sys.argv = [sys.argv[0], *words]
        runs.cli(archer.Args, archer.main)


if __name__ == "__main__":
    main()
