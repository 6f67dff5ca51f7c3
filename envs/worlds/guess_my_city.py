"""Guess My City: find out which city someone is from by asking about it.

    world = GuessMyCity()
    observation, info = world.reset(seed=0)                         # "Questions:\n"
    observation, reward, terminated, truncated, info = world.step("Is your city in Asia?")
                                                        # "Questions:\nIs your city in Asia? No.\n"

The game of LMRL Gym (Abdulhai et al. 2023, arXiv:2311.18232) as ArCHer plays it (Zhou et al. 2024,
arXiv:2402.19446): 100 cities, 20 questions, reward -1 a question and 0 for the right guess. Unlike in Twenty
Questions any question may be asked, "What do people eat there?" too. An answer that names the city becomes "I
cannot answer that question."

  D1  The answers come from a table of facts (guess_my_city.toml) instead of a flan-t5-small, so that the game
      needs no model. `oracle=<folder>` brings the model back.
  D2  The table answers yes/no questions with "Yes." and "No.", and open ones in a sentence that at least
      three cities share: the authors' model names sights and rivers, and then one question is enough.
  D3  A guess is right when the whole question names the city. The authors' code looks for the name anywhere
      in the question, so that "What is the climate like?" wins Lima. `matching="paper"` restores that.
  D4  What is no question at all is answered "Invalid Question.", as in Twenty Questions.

To take it alone, copy envs/__init__.py, envs/datasets.py, envs/worlds/guess_my_city.py and
envs/worlds/guess_my_city.toml, each to the same place. It needs gymnasium and nothing else.
"""

import operator
import random
import re
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import NamedTuple

import gymnasium

from envs import AnyText, read_action, task_index
from envs.datasets import dialogue

YES, NO, INVALID = "Yes.", "No.", "Invalid Question."
REFUSED = "I cannot answer that question."
START = "Questions:\n"

# ------------------------------------------------------------------------------ 1. the facts
# A set of cities is an int whose bit 1 << i stands for CITIES[i], as in Twenty Questions.


def fold(text: str) -> str:
    """Small letters without accents and digits; an apostrophe vanishes, everything else becomes one blank.

    >>> fold("Is it  Xi'an, or SÃO PAULO?")
    'is it xian or sao paulo'
    """
    plain = (
        unicodedata.normalize("NFKD", text[:400]).encode("ascii", "ignore").decode().lower().replace("'", "")
    )
    return " ".join(re.sub(r"[^a-z0-9.]|\.(?!\d)", " ", plain).split())


FACTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
COUNTRIES = FACTS["countries"]
# A city has what its country has, except other names, regions and borders: the country's are not its own.
ENTRIES = {
    city: {
        key: COUNTRIES[entry["country"]][key]
        for key in ("continents", "languages", "religions", "cooking", "dishes")
    }
    | entry
    for city, entry in FACTS["cities"].items()
}
CITIES = tuple(ENTRIES)
BIT = {city: 1 << i for i, city in enumerate(CITIES)}
ALL = (1 << len(CITIES)) - 1


def names_of(city: str) -> list[str]:
    """All names under which a guess of `city` is understood, folded."""
    return [fold(name) for name in [city, *ENTRIES[city].get("also", [])]]


def listed(city: str) -> str:
    """City and country as the paper's list has them."""
    return ENTRIES[city].get("paper", f"{city}, {ENTRIES[city]['country']}")


def places_of(city: str) -> list[str]:
    """What `city` is in, folded: continents, its country by all its names, regions large and small."""
    entry = ENTRIES[city]
    country = COUNTRIES[entry["country"]]
    places = [*entry["continents"], entry["country"], *country.get("also", []), *country.get("regions", [])]
    return [fold(place) for place in [*places, *entry.get("regions", [])]]


def traits_of(city: str) -> set[str]:
    """What is true of `city` in one word: what stands under `is`, and what follows from seas and rivers."""
    entry = ENTRIES[city]
    follow = {"coastal": "seas", "river": "rivers"}
    return {*entry.get("is", []), *(trait for trait, key in follow.items() if key in entry)}


def part_of(city: str) -> str:
    return ENTRIES[city].get("part", "")


def where(is_true: Callable[[str], bool]) -> int:
    """The cities of which something is true."""
    return sum(BIT[city] for city in CITIES if is_true(city))


def index(phrases_of: Callable[[str], Iterable[str]]) -> dict[str, int]:
    """Of which cities each phrase is true, from the phrases of each city."""
    table: dict[str, int] = {}
    for city in CITIES:
        for phrase in phrases_of(city):
            table[phrase] = table.get(phrase, 0) | BIT[city]
    return table


def in_words(names: list[str]) -> str:
    """A list as a sentence has it.

    >>> in_words(["Malay"]), in_words(["Arabic", "Berber", "French"])
    ('Malay', 'Arabic, Berber and French')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


# ------------------------------------------------------------------------- 2. answers to open questions
# What a sentence gives away is bounded here and nowhere else: whatever the facts say, an answer is given
# to at least `least_shared` cities or to none.

MILLIONS = {2.5: "Fewer than 2.5 million people", 4: "2.5 to 4 million people", 7: "4 to 7 million people"}
LANDSCAPES = {
    (True, True): "high in the mountains",
    (True, False): "high above the sea",
    (False, True): "close to mountains",
    (False, False): "in flat land",
}


def fact_on(topic: str, city: str) -> str:
    """What the sentence of a topic says of `city`; nothing where the sentence has no gap
    or the facts none."""
    entry, traits = ENTRIES[city], traits_of(city)
    match topic:
        case "language":
            return in_words(entry["languages"])
        case "religion":
            return "".join(entry["religions"][:1])
        case "population":
            return next(
                (say for most, say in MILLIONS.items() if entry["millions"] < most),
                "More than 7 million people",
            )
        case "river":
            return "A river" if "river" in traits else "No large river"
        case "coast":
            return "on the coast" if "coastal" in traits else "inland"
        case "landscape":
            return LANDSCAPES["high" in traits, "mountains" in traits]
        case "part":
            return part_of(city).replace("central", "center")
        case "continent":
            return in_words(entry["continents"])
    return entry.get(topic, "")


def answers_on(topic: str, sentence: str) -> dict[str, str]:
    """city -> the answer to the open question on `topic`."""
    if "{}" not in sentence:
        return dict.fromkeys(CITIES, sentence)
    facts = {city: fact_on(topic, city) for city in CITIES}
    answers = {city: sentence.format(fact) if fact else REFUSED for city, fact in facts.items()}
    while True:
        shared = Counter(answers.values())
        rare = {answer for answer, n in shared.items() if n < FACTS["least_shared"]}
        if rare == {REFUSED}:  # to be refused must not give a city away either
            rare = {min(sorted(set(shared) - {REFUSED}), key=lambda answer: shared[answer])}
        if not rare:
            return answers
        answers = {city: REFUSED if answer in rare else answer for city, answer in answers.items()}


ANSWERS = {name: answers_on(name, row["answer"]) for name, row in FACTS["topics"].items()}
SAID_OF = {name: index(lambda city, name=name: [ANSWERS[name][city]]) for name in ANSWERS}  # answer -> cities

# --------------------------------------------------------------------- 3. reading a question
# A yes/no question is read by taking out of it whatever the table knows: "on the coast", "the north",
# "China". The answer is Yes where all of that is true. What is left is looked up among the words for
# which the cities are known. The text is short (`max_action_chars`) and no pattern backtracks far: the most
# hostile string costs a few milliseconds.


def whole(pattern: str) -> re.Pattern:
    """The pattern as whole words."""
    return re.compile(rf"\b(?:{pattern})(?!\w)")


class Question(NamedTuple):
    """What a question says: the cities of which it is true, the city it guesses,
    or the topic of an open question.

    The topic "unknown" stands for a good question on which the table has nothing.
    """

    yes: int = 0
    guess: str | None = None
    topic: str | None = None


UNKNOWN = Question(topic="unknown")
TOPICS = [(name, whole(row["match"])) for name, row in FACTS["topics"].items()]
NAMES = {name: city for city in CITIES for name in names_of(city)}
LITTLE = set(FACTS["words"]["little"].split())


def stem(word: str) -> str:
    """
    >>> stem("beaches") == stem("beach"), stem("cities") == stem("city")
    (True, True)
    """
    return re.sub(r"(ies|es|s|y|e|al|ic|ing)$", "", word)[:7] if len(word) > 3 else word


EVERYWHERE = {stem(word) for word in FACTS["words"]["everywhere"].split()}


@lru_cache
def trait_bits(name: str, said: str = "") -> int:
    """The cities that have a trait, or have it not: "-island"; what was said of it does not matter."""
    return (
        ALL & ~trait_bits(name[1:]) if name.startswith("-") else where(lambda city: name in traits_of(city))
    )


def one_of(phrases: Iterable[str]) -> re.Pattern:
    """Any of the phrases as whole words, the longest that fits."""
    return whole("|".join(sorted(map(re.escape, phrases), key=len, reverse=True)))


# Phrases and the cities of which they are true. Those of no city are here so that they are not taken for
# others: the Black Sea is no coast in general.
PLACES = index(places_of)
for place in [
    place for place in PLACES if place.split()[0] in ("north", "south", "east", "west", "southeast")
]:
    PLACES[place.replace(" ", "ern ", 1)] = PLACES[place]  # "western africa"
PLACES |= dict.fromkeys(["antarctica", "scandinavia", "central africa", "southern africa"], 0) | PLACES
PARTS = {"central": where(lambda city: part_of(city) == "central")}
PARTS |= dict.fromkeys(["middle", "center", "centre", "heart"], PARTS["central"])
for name in ("north", "south", "east", "west"):
    PARTS[name] = PARTS[f"{name}ern"] = where(lambda city, name=name: name in part_of(city))
for first in ("north", "south"):
    for second in ("east", "west"):
        bits = where(lambda city, name=first + second: part_of(city) == name)
        PARTS |= {f"{first}{blank}{second}{ern}": bits for blank in ("", " ") for ern in ("", "ern")}
SEAS = index(lambda city: map(fold, ENTRIES[city].get("seas", [])))
SEAS |= {sea.removesuffix(" ocean"): bits for sea, bits in SEAS.items() if sea.endswith(" ocean")}
SEAS |= {f"mediterranean {word}": SEAS["mediterranean sea"] for word in ("coast", "sea", "coastline")}
SEAS |= dict.fromkeys(
    ["indian ocean", "black sea", "red sea", "caspian sea", "north sea", "adriatic sea", "persian gulf"], 0
)
LANGUAGES = index(lambda city: map(fold, ENTRIES[city]["languages"]))
LANGUAGES |= {"farsi": LANGUAGES["persian"], "tagalog": LANGUAGES["filipino"]}
RELIGIONS = index(lambda city: map(fold, ENTRIES[city]["religions"]))
RELIGIONS |= dict.fromkeys(("christian", "christians"), RELIGIONS["christianity"])
RELIGIONS |= {
    "muslim": RELIGIONS["islam"],
    "hindu": RELIGIONS["hinduism"],
    "catholic": RELIGIONS["catholicism"],
}
RELIGIONS |= {"buddhist": RELIGIONS["buddhism"], "judaism": 0, "jewish": 0}
CLIMATES = index(lambda city: FACTS["climates"][ENTRIES[city]["climate"]])

BIT_OF = {name: BIT[city] for name, city in NAMES.items()}

WEATHER = (
    "climate|weather|season|winter|summer|snow|rain|^(is|does) (it|your city|your hometown)( get)?( "
    "very)? [a-z]+$"
)

# (what the question must also say for these to be meant, a pattern, of which cities its match is true), in
# the order in which they are taken out of the question
GROUPS = [
    ("", one_of(SEAS), SEAS.get),
    ("", one_of(PLACES), PLACES.get),
    *(("", whole(row["match"]), partial(trait_bits, row["is"])) for row in FACTS["traits"]),
    ("spoken|speak|language", one_of(LANGUAGES), LANGUAGES.get),
    ("religio|faith|population|people|predominant", one_of(RELIGIONS), RELIGIONS.get),
    (WEATHER, one_of(CLIMATES), CLIMATES.get),
    (
        r"^(?!.*\b(near|close|vicinity|north|south|east|west)\b).*\b(in|region|area|province)\b",
        one_of(BIT_OF),
        BIT_OF.get,
    ),
    (
        r"\b(parts?|regions?|side|half|located|situated|lies?|in the|coast|country)\b",
        one_of(PARTS),
        PARTS.get,
    ),
]
REGIONS = one_of(fold(region) for city in CITIES for region in ENTRIES[city].get("regions", []))
BORDERS = index(
    lambda city: [
        fold(x)
        for name in COUNTRIES[ENTRIES[city]["country"]].get("borders", [])
        for x in [name, *COUNTRIES.get(name, {}).get("also", [])]
    ]
)


def words_of(city: str) -> set[str]:
    """The stems of all the words in which something is said of `city`."""
    entry = ENTRIES[city]
    texts = [entry["cooking"], *entry["sights"], *entry["known"], *entry["dishes"]]
    texts += [*entry.get("rivers", []), *entry.get("seas", [])]
    return {stem(word) for word in fold(" ".join(texts)).split() if word not in LITTLE} - EVERYWHERE


WORDS = index(words_of)

# What chat models put before a question; "can you tell me if" leaves a yes/no question: "your city is in
# Asia".
PREAMBLE = re.compile(
    r"(?:based on .*?(?= (?:can you|what|is your|is the city|does your|are there) ) )?"
    r"(?:(?:next |my |final )*question )?(?:\d+ )?"
    r"(?:(?:can|could) you (?:please )?(?:tell me|confirm) (?:if|whether) )?"
)
CLOSED = re.compile(r"(is|are|was|were|does|do|did|has|have|can|could|would|will|might|should|your|you|it)\b")
OPEN = re.compile(
    r"(in |on |at |from |to )?(what|whats|which|where|how|who|when|why|tell|describe|name)\b"
    r"|(can|could|would|will) (you|i)\b|do you (know|have)\b"
    r"|.*\b(or inland|inland or)\b"
)
# "is it ...", "is the city you are from ...": what stands behind it may be a name.
SUBJECT = re.compile(
    r"(?:(?:is|are|was|could|might|would|do|did) )?"
    r"(?:it|this|(?:the name of )?(?:your|the|this) (?:city|hometown|home town|town|place|answer)(?: "
    r"name)?|you)"
    r"(?: (?:where|you|youre|are|were|be|called|named|perhaps|the city of"
    r"|(?:from|live|lived|come|came|born|grew up)(?: in)?))*"
    r" (?:located )?(.+)"
)
SPELLING = re.compile(r"\b(names?|letters?|rhymes?|vowels?|spell|spelled|spelling|syllables?)\b")
NEGATION = re.compile(r"\b(not|isnt|arent|doesnt|dont|hasnt|cant|never)\b(?<!or not)")
# A question without these is about where the city lies or what it is called: unknown words in it are other
# places.
KNOWN_FOR = re.compile(
    r"\b(known|famous|famed|renowned|popular|home|has|have|there|host|hosts|hosting|associated|one)\b"
)
NUMBER = re.compile(r"(\d+(?:\.\d+)?) million")
FEWER = re.compile(r"\b(less|fewer|under|below|smaller)\b")
LARGEST = re.compile(
    r"\b(one of the )?(second |third )?(most populous|largest|biggest)( city| cities)?( in population)?\b"
)
# Provinces, states and islands that are not in the table: "the province of Henan", "Hyogo Prefecture".
UNIT = (
    "state|province|prefecture|department|governorate|county|region|district|"
    "islands?|peninsula|republic|delta"
)
ELSEWHERE = re.compile(
    rf"\b(?:{UNIT}) of (?:the )?([a-z]+)"
    rf"|\b(?!(?:the|a|an|its|this|same|your|certain)\b)([a-z]+) (?!state|republic)(?:{UNIT})\b"
)


def rank(city: str) -> int:
    """1 for the largest of the cities of its country that are in the table."""
    mine = ENTRIES[city]
    return 1 + sum(
        other["country"] == mine["country"] and other["millions"] > mine["millions"]
        for other in ENTRIES.values()
    )


@lru_cache(maxsize=100_000)
def parse(question: str) -> Question | None:
    """Reads a question in English; None if it is none.

    >>> parse("Is your city Lima, Peru?").guess, parse("Is it Lima or Bogota?").guess
    ('Lima', None)
    >>> cities_in(parse("Is your city on the northern coast of South America?").yes)
    ['Salvador', 'Fortaleza']
    >>> parse("What's the weather like?").topic, parse("Lima") is None
    ('climate', True)
    """
    text = fold(question)
    text = text[PREAMBLE.match(text).end() :]
    if OPEN.match(text):
        if len(text.split()) < 3:
            return None
        return next((Question(topic=name) for name, pattern in TOPICS if pattern.search(text)), UNKNOWN)
    if not CLOSED.match(text):
        return None
    guess = guess_in(text)
    if guess:
        return Question(BIT[guess], guess)
    return read_closed(text)


def guess_in(text: str) -> str | None:
    """The city that a folded question guesses: nothing but its name, and where that is,
    stands behind the subject."""
    subject = SUBJECT.match(text)
    words = subject[1].split() if subject else []
    for n in range(min(len(words), 5), 0, -1):
        city = NAMES.get(" ".join(words[:n]))
        if city:
            rest = re.sub(
                rf"\b(?:{'|'.join(sorted(TAILS[city], key=len, reverse=True))})\b", "", " ".join(words[n:])
            )
            return None if rest.strip() else city
    return None


TAILS = {
    city: [
        re.escape(place)
        for place in [*places_of(city), fold(listed(city).split(", ")[1]), "city", "in", "the"]
    ]
    for city in CITIES
}


def read_closed(text: str) -> Question | None:
    """Reads a folded yes/no question that is no guess; None if nothing is said in it."""
    if NEGATION.search(text):
        return None
    if SPELLING.search(text):
        return Question(topic="name")
    bits, read, whole_text = ALL, False, text
    if re.search(r"\bborder(s|ing|ed)?\b", text):
        near = [BORDERS[name] for name in BORDER_NAMES.findall(text)]
        if near:
            return Question(union(near))
    if number := NUMBER.search(text):
        limit, fewer = float(number[1]), FEWER.search(text)
        return Question(where(lambda city: (ENTRIES[city]["millions"] < limit) == bool(fewer)))
    if re.search(r"\bthan\b", text):
        return UNKNOWN
    if (largest := LARGEST.search(text)) and "city" in text:
        want = {"second ": 2, "third ": 3}.get(largest[2], 1)
        bits &= where(lambda city: rank(city) == want or (bool(largest[1]) and rank(city) <= 5))
        text, read = LARGEST.sub(" ", text), True
    if "capital" in text and REGIONS.search(text):
        text = text.replace("capital", "regional capital")
    for needs, pattern, bits_of in GROUPS:
        said = [match[0] for match in pattern.finditer(text)] if re.search(needs, whole_text) else []
        if said:
            # "the Punjab in Pakistan" is both, "China or India" is either.
            bits, read = bits & (union if " or " in text else both)(map(bits_of, said)), True
            text = pattern.sub(" ; ", text)
    if any({*match.groups()} - LITTLE - {None} for match in ELSEWHERE.finditer(text)):
        return Question(0)
    words = [stem(word) for word in text.split() if word not in LITTLE and word != ";"]
    special = [word for word in words if word not in EVERYWHERE]
    known = [WORDS[word] for word in special if word in WORDS]
    if known:
        return Question(bits & union(known))
    named = SUBJECT.match(" ".join(text.split()))
    is_name = named is not None and stem(named[1].split()[0]) in special  # "is it hangzhou ;"
    if special and not KNOWN_FOR.search(text) and (is_name or not read):
        return Question(0)  # a place or a city that is not in the table
    if read:
        return Question(bits)
    if len(special) > len(words) / 2:
        return UNKNOWN
    return Question(ALL) if words else None


def both(sets: Iterable[int]) -> int:
    return reduce(operator.and_, sets, ALL)


def union(sets: Iterable[int]) -> int:
    return reduce(operator.or_, sets, 0)


BORDER_NAMES = one_of(BORDERS)

# ---------------------------------------------------------- 4. what the scripted players ask
# Yes/no questions about what at least `least_shared` cities have in common, and the open ones.


def has(key: str) -> Callable[[str], list[str]]:
    return lambda city: ENTRIES[city].get(key, [])


def named_places(city: str) -> list[str]:
    """As `places_of`, in the spelling of the table, and the country under one name."""
    country = COUNTRIES[ENTRIES[city]["country"]]
    return [
        *has("continents")(city),
        *country.get("regions", []),
        ENTRIES[city]["country"],
        *has("regions")(city),
    ]


WORDINGS = [
    ("Is your city in {}?", named_places),
    (
        "Is your city in the {} of its country?",
        lambda city: re.findall("north|south|east|west", part_of(city)),
    ),
    ("Is your city on the {}?", has("seas")),
    ("Is {} spoken in your city?", has("languages")),
    ("Is {} the main religion of your city?", has("religions")),
    ("Is the climate of your city {}?", lambda city: FACTS["climates"][ENTRIES[city]["climate"]][:3]),
    ("Is your city known for {}?", has("known")),
    (
        "Do more than {} million people live in your city?",
        lambda city: [n for n in "23456" if int(n) < ENTRIES[city]["millions"]],
    ),
]


def groups_of(ask: str) -> list[int]:
    """The sets of cities that get the same answer; those that get Yes come first."""
    asked = parse(ask)
    return [asked.yes, ALL & ~asked.yes] if asked.topic is None else list(SAID_OF[asked.topic].values())


ASKED = [
    wording.format(phrase)
    for wording, phrases_of in WORDINGS
    for phrase, cities in index(phrases_of).items()
    if FACTS["least_shared"] <= cities.bit_count()
]
ASKED += [row["ask"] for row in [*FACTS["traits"], *FACTS["topics"].values()] if "ask" in row]
QUESTIONS = {ask: groups_of(ask) for ask in dict.fromkeys(ASKED)}
# which has one answer for all
QUESTIONS = {ask: groups for ask, groups in QUESTIONS.items() if ALL not in groups}


def is_closed(ask: str) -> bool:
    return parse(ask).topic is None


# ------------------------------------------------------------------------------ 5. the oracles


def table_oracle(city: str, question: str) -> str:
    """The answer of the table."""
    parsed = parse(question)
    if parsed is None:
        return INVALID
    if parsed.topic is not None:
        return ANSWERS[parsed.topic][city] if parsed.topic in ANSWERS else REFUSED
    return YES if parsed.yes & BIT[city] else NO


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
    def answer(city: str, question: str) -> str:
        prompt = f"Your home town is {listed(city)}.{question}"
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=64, do_sample=False, num_beams=1)
        said = tokenizer.decode(output[0], skip_special_tokens=True)
        return " ".join(said.split())[:MAX_ANSWER_CHARS].rstrip() or REFUSED

    return answer


MAX_ANSWER_CHARS = 300  # of a model; the table's sentences are shorter


@lru_cache(maxsize=100_000)
def hide(city: str, answer: str) -> str:
    """The answer, or that there is none if it names the city.

    >>> hide("Bombay", "I live in Mumbai, India."), hide("Lima", "The climate is tropical.")
    ('I cannot answer that question.', 'The climate is tropical.')
    """
    return REFUSED if any(re.search(rf"\b{name}\b", fold(answer)) for name in names_of(city)) else answer


# ------------------------------------------------------------------------------- 6. right or not


def is_right_strict(city: str, question: str) -> bool:
    """The question guesses the city, by any of its names, and nothing besides."""
    parsed = parse(question)
    return parsed is not None and parsed.guess == city


def is_right_paper(city: str, question: str) -> bool:
    """The name of the city, as the paper's list spells it, stands anywhere in the question,
    as in the authors' code."""
    return city.lower() in question.lower()


MATCHING = {"strict": is_right_strict, "paper": is_right_paper}

# --------------------------------------------------------------------------------- 7. the world


class GuessMyCity(gymnasium.Env):
    """The world. An observation is the whole dialogue so far, an action is one question.

    An action is cut at its first newline, stripped of blanks at both ends and then cut to
    `max_action_chars`; `info["action"]` is what remains. Always:

        next_observation == observation + info["action"] + " " + answer + "\\n"

    An empty action, too, is a question, and an invalid one. The answer to the right guess is "Yes."

    Options: `oracle`, the folder of a seq2seq checkpoint that answers instead of the table;
    `matching`, "strict" or "paper", when a guess is right (D3).
    """

    rules = (
        "A city is hidden. Ask about it; to guess it, ask whether it is that city. A question costs 1, the "
        "right guess nothing."
    )
    id = "guess-my-city"
    cities = CITIES
    num_tasks = len(CITIES)
    max_turns = 20
    max_action_chars = 200
    append_only = True
    demonstration_env = "guess-my-city"
    # Mean returns over the cities, with strict matching. `best_return` is a bound: what the best player would
    # reach if every question told apart as many groups of cities as the best does. With yes/no questions
    # alone the bound is -6.08, and the player `closed` reaches it.
    best_return = -196 / 100
    expert_return = -266 / 100

    def __init__(self, oracle: str | None = None, matching: str = "strict"):
        if matching not in MATCHING:
            raise ValueError(f"matching: {matching!r} is none of {', '.join(MATCHING)}")
        self.options = {"oracle": oracle, "matching": matching}
        self.is_right = MATCHING[matching]
        self.oracle = table_oracle if oracle is None else model_oracle(str(oracle))
        self.observation_space = AnyText(
            len(START) + self.max_turns * (self.max_action_chars + MAX_ANSWER_CHARS + 2)
        )
        self.action_space = AnyText(self.max_action_chars)
        self.over = True  # until the first reset

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Starts with the city `options["index"]`, or one drawn by the world's own generator.

        `info["answer"]` is the hidden city.
        """
        super().reset(seed=seed)
        index = task_index(options, self.num_tasks, self.np_random)
        self.city = self.cities[index]
        self.observation, self.turns, self.total, self.over = START, 0, 0.0, False
        return self.observation, {"answer": self.city}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Asks one question; see the class for what becomes of the text."""
        if self.over:
            raise gymnasium.error.ResetNeeded("the episode is over or was never begun: call reset()")
        question = read_action(action, self.max_action_chars)

        terminated = self.is_right(self.city, question)
        answer = YES if terminated else hide(self.city, self.oracle(self.city, question))
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
        """Scripted players by name; `player(observation, rng)` is an action."""
        return {
            "scripted": scripted,
            "hasty": hasty,
            "expert": expert,
            "closed": closed_expert,
            "random": random_player,
            "forgetful": forgetful,
        }

    def demonstrations(self, n: int, seed: int) -> list[dict]:
        """`n` dialogues to learn the game from, about cities drawn evenly; "imitate" says what to imitate.

        Two fifths are of the player `hasty`, who is imitated: it plays badly, as most data does, so that
        there is something to learn. The other players narrow the cities down, then guess the last ones, some
        of them again and again what was wrong: who never saw a bad guess does not know what follows it.
        Imitated is what they do with at most ten cities left, unless it is a mistake; all else is there for
        the replies.
        """
        world, rng = GuessMyCity(**self.options), random.Random(seed)
        return [lesson(world, rng) for _ in range(n)]


# ------------------------------------------------------------------------------- 8. the players
# A player is a function of the observation and a random.Random. It keeps nothing in memory, as all
# that it needs to know stands in the dialogue: the cities that agree with the answers so far.


def answers(observation: str) -> list[int]:
    """The cities that each answer of a dialogue leaves, as sets."""
    sets = []
    for line in observation.split("\n")[1:-1]:
        question, _, answer = line.rpartition("? ")
        asked = parse(question)
        if asked is None:
            continue
        if asked.topic is not None:
            sets.append(SAID_OF.get(asked.topic, {}).get(answer, ALL))
        elif answer in (YES, NO):
            # A guess that has not ended the game was wrong, whatever a model may have answered.
            sets.append(asked.yes if answer == YES and asked.guess is None else ~asked.yes)
    return sets


def candidates(observation: str) -> int:
    """The set of cities that agree with all answers of the dialogue."""
    left = ALL
    for agreeing in answers(observation):
        left &= agreeing
    # A model may also contradict the table until nothing is left; then everything is possible again.
    return left or ALL


def excluded_once(observation: str) -> int:
    """The set of cities that agree with all answers of the dialogue but one."""
    left, once = ALL, 0
    for agreeing in answers(observation):
        once = once & agreeing | left & ~agreeing
        left &= agreeing
    return once


def cities_in(bits: int) -> list[str]:
    """The cities of a set, in the order of the table."""
    return [city for city in CITIES if bits & BIT[city]]


def guess_of(city: str) -> str:
    """The question that guesses `city`."""
    return f"Is your city {city}?"


def scripted(
    observation: str,
    rng: random.Random,
    broad: int = 25,
    guess: float = 0.6,
    open: float = 0.4,
    garbled: float = 0.04,
) -> str:
    """Asks without a plan and guesses too early, yet never what it could know.

    It returns -9.2 and finds 98 % of the cities (with guess=0, open=0: -7.7 and all). Its
    few broad questions are those whose answers a small model can come to know.

    Draws any yes/no question whose answer is still open and that is true of at least `broad` cities, with the
    probability `open` an open question instead, or guesses any city still possible: with the probability
    `guess`, and always when at most two are left or no question is. The share `garbled` of its questions
    comes out wrong, so that a learner sees how a dialogue goes on after "Invalid Question."
    """
    left = candidates(observation)
    undecided = [ask for ask, yes in broad_questions(broad) if 0 < left & yes < left]
    if left.bit_count() <= 2 or not undecided or rng.random() < guess:
        question = guess_of(rng.choice(cities_in(left)))
    else:
        topics = open_questions(left) if rng.random() < open else []
        question = rng.choice(topics or undecided)
    return garble(question, rng) if rng.random() < garbled else question


def narrowing(
    observation: str, rng: random.Random, look: int = 4, few: int = 5, broad: int = 1, open: bool = True
) -> str:
    """Asks the best of `look` undecided questions until at most `few` cities are left, then guesses these.

    Its yes/no questions are true of at least `broad` cities. It guesses in the order of the table.
    """
    left = candidates(observation)
    asks = [ask for ask, yes in broad_questions(broad) if 0 < left & yes < left]
    if open:
        asks += open_questions(left)
    if left.bit_count() <= few or not asks:
        return guess_of(cities_in(left)[0])
    asks = rng.sample(asks, min(look, len(asks)))
    return min(asks, key=lambda ask: left_on_average(left, ask))


def hasty(
    observation: str,
    rng: random.Random,
    guess: float = 0.12,
    open: float = 0.02,
    broad: float = 0.03,
    wise: float = 0.03,
) -> str:
    """Guesses early, and asks narrow questions by the alphabet: the player that is imitated.

    In a share `wise` of its turns it plays as `narrowing`, without open questions. Of the others a share
    `guess` are guesses, in the order of the table, and all when at most two cities are possible. A share
    `open` of its questions are open ones, a share `broad` of the rest true of at least 25 cities, the others
    of at most six. Of those whose answer is undecided the first of the alphabet is asked twice as often as
    the second, three times as often as the third, and so on: it has habits, but never repeats itself.
    """
    if rng.random() < wise:
        return narrowing(observation, rng, look=8, few=4, broad=25, open=False)
    left = candidates(observation)
    topics = open_questions(left) if rng.random() < open else []
    kinds = [narrow_questions(6), broad_questions(25)]
    if rng.random() < broad:
        kinds.reverse()
    undecided = [sorted(ask for ask, yes in asks if 0 < left & yes < left) for asks in kinds]
    asks = undecided[0] or undecided[1]
    if rng.random() < guess or left.bit_count() <= 2 or not asks:
        return guess_of(cities_in(left)[0])
    if topics:
        return rng.choice(topics)
    return rng.choices(asks, [1 / rank for rank in range(1, len(asks) + 1)])[0]


def off_script(observation: str, rng: random.Random) -> str | None:
    """What no player says of its own accord, of a kind drawn at random; None if there is no such thing.

    Most tell nothing new: an utterance of before, a guess that a single answer has excluded, a question whose
    answer is known or that is none. "possible" is a guess that may be right, whatever its place in the table.
    """
    left = candidates(observation)
    said = [f"{ask}?" for ask, mark, _ in (line.rpartition("? ") for line in observation.split("\n")) if mark]
    kind = rng.choice(OFF_SCRIPT)
    if kind == "guess again":
        said = [question for question in said if (asked := parse(question)) and asked.guess]
    if kind in ("again", "guess again"):
        return rng.choice(said) if said else None
    if kind == "garbled":
        return garble(rng.choice(tuple(QUESTIONS)), rng)
    if kind == "possible":
        return guess_of(rng.choice(cities_in(left)))
    if kind == "excluded once":
        excluded = excluded_once(observation) or ALL & ~left
        return guess_of(rng.choice(cities_in(excluded))) if excluded else None
    ask = rng.choice(tuple(QUESTIONS))
    return ask if any(left & group == left for group in QUESTIONS[ask]) else None


OFF_SCRIPT = ("possible", "guess again", "guess again", "again", "excluded once", "excluded once") * 3
OFF_SCRIPT += ("known", "known", "garbled")


def lesson(world: GuessMyCity, rng: random.Random) -> dict:
    """A dialogue of `demonstrations`."""
    part = rng.random()
    good = partial(narrowing, look=rng.choice((2, 4, 8)), few=rng.randint(2, 5))
    if part < 0.4:
        player, mistakes = hasty, 0.0
    elif part < 0.65:  # to guess what is possible, and no city twice
        player, mistakes = good, rng.uniform(-0.2, 0.6)  # below 0: a quarter of these games has none
    else:  # what follows if one does: what was said long ago, too, gets the same answer again
        player, mistakes = rng.choice((hasty, good)), rng.uniform(0.4, 1.0)
    imitate = []

    def play(observation: str, rng: random.Random) -> str:
        is_late = candidates(observation).bit_count() <= 10
        share = mistakes if is_late else mistakes / 2  # most has to be known late in a dialogue
        slip = off_script(observation, rng) if rng.random() < share else None
        imitate.append(slip is None and (player is hasty or is_late))
        return slip or player(observation, rng)

    return dialogue(world, play, rng, rng.randrange(world.num_tasks)) | {"imitate": imitate}


def closed_questions() -> list[tuple[str, int]]:
    """The yes/no questions, and of which cities they are true."""
    return [(ask, groups[0]) for ask, groups in QUESTIONS.items() if is_closed(ask)]


@lru_cache(maxsize=32)
def broad_questions(least: int) -> list[tuple[str, int]]:
    """The yes/no questions that are true of at least so many cities, and of which."""
    return [(ask, yes) for ask, yes in closed_questions() if yes.bit_count() >= least]


@lru_cache(maxsize=32)
def narrow_questions(most: int) -> list[tuple[str, int]]:
    """The yes/no questions that are true of at most so many cities, and of which."""
    return [(ask, yes) for ask, yes in closed_questions() if yes.bit_count() <= most]


def open_questions(left: int) -> list[str]:
    """The open questions that have more than one answer for the cities of a set."""
    return [
        ask
        for ask, groups in QUESTIONS.items()
        if not is_closed(ask) and all(left & group != left for group in groups)
    ]


def forgetful(observation: str, rng: random.Random, **knobs) -> str:
    """Plays every turn as `scripted` plays the first: what it asks is sensible,
    were it not for what it knows."""
    return scripted(START, rng, **knobs)


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
    return question.split(" ", 2)[2]  # without its verb no question is valid


def expert(observation: str, rng: random.Random | None = None) -> str:
    """Asks what leaves the fewest cities on average, open questions too, and guesses from two on;
    `rng` is not used."""
    return best_question(candidates(observation), tuple(QUESTIONS))


def closed_expert(observation: str, rng: random.Random | None = None) -> str:
    """The same with yes/no questions only."""
    return best_question(candidates(observation), tuple(filter(is_closed, QUESTIONS)))


@lru_cache(maxsize=10_000)
def best_question(left: int, questions: tuple[str, ...]) -> str:
    """The question that leaves the fewest of the set `left` on average, or a guess."""
    n = left.bit_count()
    ask = min(questions, key=lambda ask: left_on_average(left, ask))
    is_guess_better = left_on_average(left, ask) >= n - 2 + 2 / n
    return guess_of(cities_in(left)[0]) if n <= 2 or is_guess_better else ask


def left_on_average(left: int, ask: str) -> float:
    """How many cities of the set `left` are still possible after a question, on average over these."""
    return sum((left & group).bit_count() ** 2 for group in QUESTIONS[ask]) / left.bit_count()


def random_player(observation: str, rng: random.Random) -> str:
    """Any question of the table or a guess of any city, one as likely as the other, without memory."""
    return guess_of(rng.choice(CITIES)) if rng.random() < 0.5 else rng.choice(tuple(QUESTIONS))
