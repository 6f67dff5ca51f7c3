"""Twenty Questions: find a hidden word by asking yes/no questions.

    world = TwentyQuestions()
    observation, info = world.reset(seed=0)                         # "Questions:\n"
    observation, reward, terminated, truncated, info = world.step("Is it an animal?")
                                                                    # "Questions:\nIs it an animal? No.\n"

The game of LMRL Gym (Abdulhai et al. 2023, arXiv:2311.18232) as ArCHer plays it (Zhou et al. 2024,
arXiv:2402.19446): 157 words, 20 questions, reward -1 a question and 0 for the right
guess. The answers are "Yes.", "No." and "Invalid Question."

  D1  The answers come from a table of facts (twenty_questions.toml) instead of a flan-t5-small, so
      that the game needs no model and its best return is known. `oracle=<folder>` brings the model back.
  D2  A guess is right when the whole question names the word. In the authors' code it is when the
      oracle says Yes and the last word of the question is a name: "Is it made of metal, drill?" wins
      on drill, and a word of two words, such as "golf ball", never. `matching="paper"` restores that.

To take it alone, copy envs/__init__.py, envs/datasets.py, envs/worlds/twenty_questions.py and
envs/worlds/twenty_questions.toml, each to the same place. It needs gymnasium and nothing else.
"""

import random
import re
import tomllib
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import gymnasium

from envs import AnyText, read_action, task_index
from envs.datasets import dialogue

YES, NO, INVALID = "Yes.", "No.", "Invalid Question."
START = "Questions:\n"

# ------------------------------------------------------------------------------ 1. the facts
# A set of words is an int whose bit 1 << i stands for WORDS[i]. The players below intersect some two
# hundred sets a turn, and with ints that takes microseconds.

FACTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ENTRIES = {word: entry for category in FACTS["words"].values() for word, entry in category.items()}
WORDS = tuple(ENTRIES)
SUBSET = tuple(FACTS["subset"])
BIT = {word: 1 << i for i, word in enumerate(WORDS)}
ALL = (1 << len(WORDS)) - 1
SIZES = {word: entry["size"] for word, entry in ENTRIES.items()}


def as_bits(names: Iterable[str]) -> int:
    """The set that a list of words describes; "@animals" is a whole category, "-cat" takes a word out again.

    >>> as_bits(["@animals", "-cat", "kite"]) == as_bits(["@animals"]) - BIT["cat"] + BIT["kite"]
    True
    """
    bits = 0
    for name in names:
        if name.startswith("@"):
            bits |= sum(BIT[word] for word in FACTS["words"][name[1:]])
        elif name.startswith("-"):
            bits &= ~BIT[name[1:]]
        else:
            bits |= BIT[name]
    return bits


def of_size(smallest: float, largest: float) -> int:
    """The words whose size lies in [smallest, largest]."""
    return sum(BIT[word] for word, size in SIZES.items() if smallest <= size <= largest)


def guess_of(word: str) -> str:
    """The question that guesses `word`.

    >>> guess_of("dog"), guess_of("apple"), guess_of("pants")
    ('Is it a dog?', 'Is it an apple?', 'Is it pants?')
    """
    article = ENTRIES[word].get("article", "an" if word[0] in "aeiou" else "a")
    return f"Is it {article} {word}?" if article else f"Is it {word}?"


QUESTIONS = {row["ask"]: as_bits(row["yes"]) for row in FACTS["kinds"] + FACTS["traits"]}
QUESTIONS |= {row["ask"]: of_size(*row["size"]) for row in FACTS["sizes"]}

# --------------------------------------------------------------------- 2. reading a question
# The parser is generous: it takes any question in which it recognises something it has facts on.
# Its input is short (`max_action_chars`) and no pattern nests one repetition in another, so that
# the most hostile string costs about a millisecond.


class Question(NamedTuple):
    """What a question says: the set of words it is true of, and the word it guesses, if it is a guess."""

    yes: int
    guess: str | None = None


def names_of(word: str) -> list[str]:
    """All names under which a guess of `word` is understood."""
    names = [word, *ENTRIES[word].get("names", []), *ENTRIES[word].get("also", [])]
    return names + [name + "s" for name in names] + [name + "es" for name in names]


NAMES = {name: word for word in WORDS for name in names_of(word)}

OPENING = re.compile(r"(is|are|was|does|do|did|can|could|will|would|has|have|should|might)\b")
NEGATION = re.compile(
    r"n't\b|\b(not|no|non|none|never|neither|nor|cannot|unable|without|lacks?|lacking|except|"
    r"instead|rather than"
    r"|(other|else|different) (than|from)|anything but|inanimate|unlike)\b"
)
SUBJECT = re.compile(
    r"(is|are|was|might|could|can|would) "
    r"(it|they|this|that|you thinking of|the object in question|"
    r"the (hidden |secret )?(object|thing|word|item|answer))"
    r"( be| possibly| perhaps| maybe)?"
    r"( a (pair|piece|type|kind|sort|set|form|member) of| some (type|kind|sort) of| (type|kind|one) of)?"
    r"( a| an| the| some| any| your)? "
)

THING = r"(?:an? |the |your |that of an? )?([a-z ]+)$"
# (pattern that ends in a thing, low, high): Yes for sizes from that of the thing + low to + high
COMPARISONS = [
    (re.compile(r"\b(?:bigger|larger|taller|greater in size) than " + THING), +0.1, +9),
    (re.compile(r"\b(?:smaller|shorter) than " + THING), -9, -0.1),
    (re.compile(r"\bas (?:big|large) as " + THING), 0, +9),
    (
        re.compile(
            r"\b(?:fits?|held|hold|holding|carry|carried|put)\b.* (?:in|inside|into|with) .*?([a-z]+)$"
        ),
        -9,
        0,
    ),
]
SIZE_WORDS = [
    (re.compile(r"\bhand ?held\b|^(\S+ ){0,3}(small|tiny|little)$"), of_size(1, 2)),
    (
        re.compile(r"\bportable\b|\b(carry|carried|lift|lifted|picked up)( it)?( around| easily)?$"),
        of_size(1, 3),
    ),
    (re.compile(r"^(\S+ ){0,3}(big|large|huge)$"), of_size(4, 6)),
]

KINDS = [(re.compile(rf"\b(?:{row['match']})\b"), row["ask"]) for row in FACTS["kinds"]]
TRAITS = [(re.compile(rf"\b(?:{row['match']})\b"), row["ask"]) for row in FACTS["traits"]]


PREY = re.compile(  # what it lives on, which is not what it is
    r"\b(eats?|hunts?|chases?|kills?|catch(es)?|food for) (an? |other |small |some |wild )?"
    r"(animals?|mammals?|creatures?|people|humans?|fruits?|vegetables?|plants?|trees?)\b"
)


@lru_cache(maxsize=100_000)
def parse(question: str) -> Question | None:
    """Reads an English question; None if it is no yes/no question or is about nothing in the table.

    >>> parse("Is it a dog?").guess, parse("Is the object a pair of trousers?").guess
    ('dog', 'pants')
    >>> words_in(parse("Can you sit on it?").yes)
    ['chair', 'couch']
    >>> parse("What is it?") is parse("a dog it is?") is None
    True
    """
    text = " ".join(re.sub(r"[^a-z0-9' ]", " ", question.lower()).split())
    if not OPENING.match(text) or NEGATION.search(text) or len(text.split()) > 24:
        return None
    subject = SUBJECT.match(text)
    rest = text[subject.end() :] if subject else text

    # "Is it orange?" asks for the colour, "Is it an orange?" for the fruit.
    is_colour = rest == "orange" and text.split()[-2] not in ("a", "an", "the")
    if subject and rest in NAMES and not is_colour:
        return Question(BIT[NAMES[rest]], guess=NAMES[rest])

    for pattern, low, high in COMPARISONS:
        if (found := pattern.search(text)) and (size := size_of(found[1])) is not None:
            return Question(of_size(size + low, size + high))
    for pattern, words in SIZE_WORDS:
        if pattern.search(rest):
            return Question(words)
    ask = longest_match(TRAITS, rest) or longest_match(KINDS, PREY.sub("", rest))
    return Question(QUESTIONS[ask]) if ask else None


def size_of(thing: str) -> float | None:
    """The size of a word of the table or of one of its references."""
    return FACTS["references"].get(thing, SIZES.get(NAMES.get(thing)))


def longest_match(rows: list[tuple[re.Pattern, str]], text: str) -> str | None:
    """The question of the row whose pattern covers most of the text at one place; the first of equals."""
    lengths = [max((len(match[0]) for match in pattern.finditer(text)), default=0) for pattern, _ in rows]
    longest = max(lengths)
    return rows[lengths.index(longest)][1] if longest else None


# ------------------------------------------------------------------------------ 3. the oracles


def table_oracle(word: str, question: str) -> str:
    """The answer of the table."""
    parsed = parse(question)
    if parsed is None:
        return INVALID
    return YES if parsed.yes & BIT[word] else NO


@lru_cache(maxsize=2)  # one copy of the model for all worlds of a process
def model_oracle(folder: str) -> Callable[[str, str], str]:
    """An oracle like the authors' (a fine-tuned flan-t5-small) from a local Hugging Face seq2seq checkpoint.

    Theirs is published as a state dict: load it into a flan-t5-small and `save_pretrained` that.
    Raises FileNotFoundError without a checkpoint, ImportError without torch and transformers.
    """
    advice = "give the folder of a Hugging Face seq2seq checkpoint and its tokenizer"
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"the oracle {folder} does not exist; {advice}")
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        options = {"local_files_only": True, "trust_remote_code": False, "output_loading_info": True}
        model, found = AutoModelForSeq2SeqLM.from_pretrained(folder, **options)
        if found["missing_keys"]:
            # else they would be drawn at random
            raise ValueError(f"no weights for {min(found['missing_keys'])}")
    except Exception as error:  # what a folder can hold has no end, nor have the errors
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise FileNotFoundError(f"the oracle {folder} cannot be loaded ({reason}); {advice}") from error
    model.eval()

    @lru_cache(maxsize=100_000)
    def answer(word: str, question: str) -> str:
        prompt = f"The object is {word}.{question}"
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=8, do_sample=False, num_beams=1)
        return normalise(tokenizer.decode(output[0], skip_special_tokens=True))

    return answer


def normalise(text: str) -> str:
    """One of the three answers, from whatever an oracle wrote."""
    words = re.findall("[a-z]+", text.lower())
    return YES if "yes" in words else NO if "no" in words else INVALID


# ------------------------------------------------------------------------------- 4. right or not


def is_right_strict(word: str, question: str, answer: str) -> bool:
    """The question guesses the word and nothing besides, whatever the oracle says."""
    parsed = parse(question)
    return parsed is not None and parsed.guess == word


def is_right_paper(word: str, question: str, answer: str) -> bool:
    """The oracle says Yes, and the last word of the question is a name of the word: the authors' code."""
    last = re.sub(r"[^a-z]+$", "", question.lower()).split(" ")[-1]
    return answer == YES and last in [word, *ENTRIES[word].get("names", [])]


MATCHING = {"strict": is_right_strict, "paper": is_right_paper}

# --------------------------------------------------------------------------------- 5. the world


class TwentyQuestions(gymnasium.Env):
    """The world. An observation is the whole dialogue so far, an action is one question.

    An action is cut at its first newline, stripped of blanks at both ends and then cut to
    `max_action_chars`; `info["action"]` is what remains. Always:

        next_observation == observation + info["action"] + " " + answer + "\\n"

    An empty action, too, is a question, and an invalid one.

    Options: `oracle`, the folder of a seq2seq checkpoint that answers instead of the table;
    `matching`, "strict" or "paper", when a guess is right (D2).
    """

    rules = (
        "A thing is hidden. Ask questions that Yes or No answers; to guess it, ask whether it is that thing. "
        "A question costs 1, the right guess nothing."
    )
    id = "twenty-questions"
    words = WORDS
    num_tasks = len(WORDS)
    max_turns = 20
    max_action_chars = 200
    append_only = True
    demonstration_env = "twenty-questions"
    # Mean returns over the words, with strict matching. `best_return` is a bound: what the best player
    # would reach if it might ask any yes/no question at all. The player `expert` has the table's only.
    best_return = -1064 / 157
    expert_return = -1077 / 157

    def __init__(self, oracle: str | None = None, matching: str = "strict"):
        if matching not in MATCHING:
            raise ValueError(f"matching: {matching!r} is none of {', '.join(MATCHING)}")
        self.options = {"oracle": oracle, "matching": matching}
        self.is_right = MATCHING[matching]
        self.oracle = table_oracle if oracle is None else model_oracle(str(oracle))
        self.observation_space = AnyText(
            len(START) + self.max_turns * (self.max_action_chars + len(INVALID) + 2)
        )
        self.action_space = AnyText(self.max_action_chars)
        self.over = True  # until the first reset

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Starts with the word `options["index"]`, or one drawn by the world's own generator.

        `info["answer"]` is the hidden word.
        """
        super().reset(seed=seed)
        index = task_index(options, self.num_tasks, self.np_random)
        self.word = self.words[index]
        self.observation, self.turns, self.total, self.over = START, 0, 0.0, False
        return self.observation, {"answer": self.word}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Asks one question; see the class for what becomes of the text."""
        if self.over:
            raise gymnasium.error.ResetNeeded("the episode is over or was never begun: call reset()")
        question = read_action(action, self.max_action_chars)

        answer = self.oracle(self.word, question)
        terminated = self.is_right(self.word, question, answer)
        if terminated:
            answer = YES
        reward = 0.0 if terminated else -1.0
        self.observation += f"{question} {answer}\n"
        self.turns += 1
        self.total += reward
        truncated = not terminated and self.turns == self.max_turns
        self.over = terminated or truncated

        info = {"action": question}
        if self.over:
            info["result"] = {"return": self.total, "length": self.turns, "success": terminated}
        return self.observation, reward, terminated, truncated, info

    @property
    def players(self) -> dict[str, Callable[[str, random.Random], str]]:
        """Scripted players of this world's words by name; `player(observation, rng)` is an action."""
        words = as_bits(self.words)
        players = {"scripted": scripted, "expert": expert, "random": random_player, "forgetful": forgetful}
        players |= {"mistaken": mistaken, "hasty": hasty}
        return {name: partial(player, words=words) for name, player in players.items()}

    def demonstrations(self, n: int, seed: int) -> list[dict]:
        """`n` dialogues to learn the game from, about words drawn evenly; "imitate" says what to do likewise.

        Two fifths are of the player `hasty`, who is imitated: it plays badly, as most data does, so that
        there is something to learn. The other players narrow the words down, then guess the last ones, some
        of them again and again what was wrong: who never saw a bad guess does not know what follows it.
        Imitated is what they do with at most sixteen words left, unless it is a mistake; all else is there
        for the replies. All 157 words occur, as in the paper, also in the world of ten.
        """
        world, rng = TwentyQuestions(**self.options), random.Random(seed)
        return [lesson(world, rng) for _ in range(n)]


class TwentyQuestionsSubset(TwentyQuestions):
    """The same with ten words, for quick experiments; also from ArCHer."""

    id = "twenty-questions-subset"
    words = SUBSET
    num_tasks = len(SUBSET)
    best_return = -2.8  # here the bound is reached
    expert_return = -2.8


# ------------------------------------------------------------------------------- 6. the players
# A player is a function of the observation and a random.Random. It keeps nothing in memory, as all
# that it needs to know stands in the dialogue: the words that agree with the answers so far.


def answers(observation: str) -> list[int]:
    """The words that each answer of a dialogue leaves, as sets."""
    sets = []
    for line in observation.split("\n")[1:-1]:
        question, _, answer = line.rpartition(" ")
        asked = parse(question) if answer in (YES, NO) else None
        if asked:
            # A guess that has not ended the game was wrong, whatever a model may have answered.
            sets.append(asked.yes if answer == YES and asked.guess is None else ~asked.yes)
    return sets


def candidates(observation: str, words: int = ALL) -> int:
    """The set of `words` that agree with all answers of the dialogue."""
    left = words
    for agreeing in answers(observation):
        left &= agreeing
    # A model may also contradict the table until nothing is left; then everything is possible again.
    return left or words


def excluded_once(observation: str, words: int = ALL) -> int:
    """The set of `words` that agree with all answers of the dialogue but one."""
    left, once = words, 0
    for agreeing in answers(observation):
        once = once & agreeing | left & ~agreeing
        left &= agreeing
    return once


def words_in(bits: int) -> list[str]:
    """The words of a set, in the order of the table."""
    return [word for word in WORDS if bits & BIT[word]]


def scripted(
    observation: str,
    rng: random.Random,
    words: int = ALL,
    broad: int = 25,
    guess: float = 0.6,
    garbled: float = 0.04,
) -> str:
    """Asks without a plan and guesses too early, yet never what it could know:
    the player of the demonstrations.

    It returns -14.2 and finds 75 % of the words (with guess=0: -9.6 and 99 %), which leaves a learner room.

    Draws any question whose answer is still open and that is true of at least `broad` words of the table, or
    guesses any word still possible: with the probability `guess`, and always when at most two are left or no
    question is. The share `garbled` of its questions comes out wrong, so that a learner sees how a dialogue
    goes on after "Invalid Question."
    """
    left = candidates(observation, words)
    open_questions = [ask for ask, yes in broad_questions(broad) if 0 < left & yes < left]
    if left.bit_count() <= 2 or not open_questions or rng.random() < guess:
        question = guess_of(rng.choice(words_in(left)))
    else:
        question = rng.choice(open_questions)
    return garble(question, rng) if rng.random() < garbled else question


def forgetful(observation: str, rng: random.Random, words: int = ALL, **knobs) -> str:
    """Plays every turn as `scripted` plays the first: what it asks is sensible,
    were it not for what it knows."""
    return scripted(START, rng, words, **knobs)


def mistaken(observation: str, rng: random.Random, words: int = ALL, mistakes: float = 0.2, **knobs) -> str:
    """Plays as `scripted`, but for a share of turns that are `off_script`."""
    wrong = off_script(observation, rng, words) if rng.random() < mistakes else None
    return wrong or scripted(observation, rng, words, **knobs)


def off_script(
    observation: str,
    rng: random.Random,
    words: int = ALL,
    kinds: tuple = ("guess again", "guess again", "again", "excluded", "excluded", "known", "garbled"),
) -> str | None:
    """What no player says of its own accord, of a kind drawn from `kinds`; None if there is no such thing.

    Most tell nothing new: an utterance of before, an excluded guess, a question whose answer is known or that
    is none. "possible" is a guess that may be right, whatever its place in the table.
    """
    left = candidates(observation, words)
    said = [line.rpartition(" ")[0] for line in observation.split("\n")[1:-1]]
    guesses = [question for question in said if (asked := parse(question)) and asked.guess]
    kind = rng.choice(kinds)
    if kind == "guess again":
        return rng.choice(guesses) if guesses else None
    if kind == "again":
        return rng.choice(said) if said else None
    if kind == "garbled":
        return garble(rng.choice(tuple(QUESTIONS)), rng)
    if kind == "possible":
        return guess_of(rng.choice(words_in(left)))
    if kind in ("excluded", "excluded once"):
        excluded = words & ~left
        if kind == "excluded once":  # by a single answer: not seen at once
            excluded = excluded_once(observation, words) or excluded
        return guess_of(rng.choice(words_in(excluded))) if excluded else None
    ask = rng.choice(tuple(QUESTIONS))
    return ask if left & QUESTIONS[ask] in (0, left) else None


def narrowing(
    observation: str, rng: random.Random, words: int = ALL, look: int = 4, few: int = 5, broad: int = 1
) -> str:
    """Asks the best of `look` open questions until at most `few` words are left, and then guesses these.

    Its questions are true of at least `broad` words of the table. It guesses in the order of the table.
    """
    left = candidates(observation, words)
    asks = [(ask, left & yes) for ask, yes in broad_questions(broad) if 0 < left & yes < left]
    if left.bit_count() <= few or not asks:
        return guess_of(words_in(left)[0])
    asks = rng.sample(asks, min(look, len(asks)))
    return min(asks, key=lambda ask: abs(2 * ask[1].bit_count() - left.bit_count()))[0]


def hasty(
    observation: str,
    rng: random.Random,
    words: int = ALL,
    guess: float = 0.12,
    broad: float = 0.06,
    wise: float = 0.08,
) -> str:
    """Guesses early, and asks narrow questions by the alphabet: the player that is imitated.

    In a share `wise` of its turns it plays as `narrowing`. Of the others a share `guess` are guesses, in
    the order of the table, and all when at most two words are possible. A share `broad` of its
    questions are true of at least 25 words of the table, the others of fewer. Of those whose answer is open
    the first of the alphabet is asked twice as often as the second, three times as often as the third, and
    so on: it has habits, but never repeats itself.
    """
    if rng.random() < wise:
        return narrowing(observation, rng, words, look=8, few=4, broad=25)
    left = candidates(observation, words)
    kinds = [narrow_questions(24), broad_questions(25)]
    if rng.random() < broad:
        kinds.reverse()
    is_open = [sorted(ask for ask, yes in asks if 0 < left & yes < left) for asks in kinds]
    asks = is_open[0] or is_open[1]
    if rng.random() < guess or left.bit_count() <= 2 or not asks:
        return guess_of(words_in(left)[0])
    return rng.choices(asks, [1 / rank for rank in range(1, len(asks) + 1)])[0]


def lesson(world: TwentyQuestions, rng: random.Random) -> dict:
    """A dialogue of `demonstrations`."""
    part = rng.random()
    good = partial(narrowing, look=rng.choice((2, 4, 8)), few=rng.randint(2, 5))
    if part < 0.4:
        player, mistakes = hasty, 0.0
    elif part < 0.65:  # to guess what is possible, and no word twice
        player, mistakes = good, rng.uniform(-0.2, 0.6)  # below 0: a quarter of these games has none
    else:  # what follows if one does: what was said long ago, too, gets the same answer again
        player, mistakes = rng.choice((hasty, good)), rng.uniform(0.4, 1.0)
    kinds = ("possible", "guess again", "guess again", "again", "excluded once", "excluded once") * 3
    kinds += ("known", "known", "garbled")
    imitate = []

    def play(observation: str, rng: random.Random) -> str:
        is_late = candidates(observation).bit_count() <= 16
        share = mistakes if is_late else mistakes / 2  # most has to be known late in a dialogue
        slip = off_script(observation, rng, kinds=kinds) if rng.random() < share else None
        imitate.append(slip is None and (player is hasty or is_late))
        return slip or player(observation, rng)

    return dialogue(world, play, rng, rng.randrange(world.num_tasks)) | {"imitate": imitate}


@lru_cache(maxsize=32)
def broad_questions(least: int) -> list[tuple[str, int]]:
    """The questions that are true of at least so many words of the table, and of which."""
    return [(ask, yes) for ask, yes in QUESTIONS.items() if yes.bit_count() >= least]


@lru_cache(maxsize=32)
def narrow_questions(most: int) -> list[tuple[str, int]]:
    """The questions that are true of at most so many words of the table, and of which."""
    return [(ask, yes) for ask, yes in QUESTIONS.items() if yes.bit_count() <= most]


def garble(question: str, rng: random.Random) -> str:
    """The question with words swapped, dropped, doubled or cut off, such that it is no longer one."""
    for _ in range(20):
        words = question.split()
        i, j = rng.randrange(len(words)), rng.randrange(len(words))
        slip = rng.randrange(4)
        if slip == 0:
            words[i], words[j] = words[j], words[i]
        elif slip == 1:
            del words[i]
        elif slip == 2:
            words.insert(i, words[i])
        else:
            del words[i:]
        if words and parse(" ".join(words)) is None:
            return " ".join(words)
    return question.split(" ", 1)[1]  # without its verb no question is valid


def expert(observation: str, rng: random.Random | None = None, words: int = ALL) -> str:
    """Asks what comes nearest to halving the words still possible, and guesses from three on;
    `rng` is not used."""
    return best_question(candidates(observation, words))


@lru_cache(maxsize=10_000)
def best_question(left: int) -> str:
    """The question that comes nearest to halving the set `left`, or a guess."""
    n = left.bit_count()
    ask = min(QUESTIONS, key=lambda ask: abs((left & QUESTIONS[ask]).bit_count() - n / 2))
    if n <= 3 or left & QUESTIONS[ask] in (0, left):
        return guess_of(words_in(left)[0])
    return ask


def random_player(observation: str, rng: random.Random, words: int = ALL) -> str:
    """Any question of the table or a guess of any word, one as likely as the other, without memory."""
    return guess_of(rng.choice(words_in(words))) if rng.random() < 0.5 else rng.choice(tuple(QUESTIONS))
