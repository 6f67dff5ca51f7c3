"""The games for one player of TextArena, a package of its own (pip install textarena): docs/your_world.md.

python sft.py --env envs.worlds.textarena:TextArena --demonstrations 2000

To take it alone, copy envs/__init__.py, envs/adapt.py, envs/datasets.py and envs/worlds/textarena.py, each to
the same place. It needs gymnasium and textarena.
"""

import random
import re
from itertools import permutations
from threading import Lock

GAME = -1  # the number of the game itself as a speaker
INVALID = "Invalid Move: "  # begins the reason why a second invalid move in a row ends a game
ONE_AT_A_TIME = Lock()  # worlds step in threads, and the global `random` is there once


class TextArena:
    """A game. Its end has the reward, 1 for a win and less for a part of it; of one invalid move it warns."""

    def __init__(self, game: str = "Mastermind-v0-raw"):
        if not game.endswith("-raw"):  # what the others say comes through wrappers, in another form
            raise ValueError(f"game={game}: take an id of TextArena that ends in -raw, as Mastermind-v0-raw")
        import textarena  # here, so that whoever has no such package can read this file

        self.game = textarena.make(game)
        self.players = {"scripted": mastermind} if game == "Mastermind-v0-raw" else {}

    def reset(self, seed: int, options: dict) -> tuple[str, dict]:
        self.random = random.Random(seed)
        self.call(self.game.reset, num_players=1, seed=seed)
        return self.news(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        if not self.call(self.game.step, action)[0]:
            return self.news(), 0.0, False, False, {}
        rewards, about = self.game.close()
        reward, reason = rewards[0], about[0]["reason"]
        if isinstance(reward, str):  # Countdown, Cryptarithm and Slitherlink exchange the two
            reward, reason = float(reason.removeprefix(INVALID)), INVALID + reward
        return reason, float(reward), True, False, {"result": {"success": reward >= 1}}

    def news(self) -> str:
        """What the game has said since the last turn, without the player's own words.

        Their speaker is the player's number or, in Countdown, Cryptarithm and Slitherlink, something else.
        """
        return "\n".join(text for speaker, text, _ in self.game.get_observation()[1] if speaker == GAME)

    def call(self, method, *args, **kwargs):
        """The games draw from the global `random`: it gets the state of this one, and then its old one."""
        with ONE_AT_A_TIME:
            before = random.getstate()
            random.setstate(self.random.getstate())
            try:
                return method(*args, **kwargs)
            finally:
                self.random.setstate(random.getstate())
                random.setstate(before)


def mastermind(dialogue: str, rng: random.Random) -> str:
    """A code that agrees with the answers so far, [1 2 3 4] say; but each is forgotten one time in five."""
    codes = list(permutations("123456", 4))
    for guess, black, white in re.findall(r"\[([\d ]+)\]. Feedback: (\d) black .*?(\d) white", dialogue):
        guess, pegs = tuple(guess.split()), (int(black), int(black) + int(white))
        if rng.random() < 0.8:
            codes = [c for c in codes if (sum(map(str.__eq__, c, guess)), len({*c} & {*guess})) == pegs]
    return f"[{' '.join(rng.choice(codes))}]"
