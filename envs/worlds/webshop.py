"""WebShop: buy what an instruction asks for, in a shop that is all text.

    world = WebShop()
    observation, info = world.reset(seed=0)
    observation, reward, terminated, truncated, info = world.step("search[sturdy antique lamp]")

    Instruction: i want sturdy antique lamp, and price lower than 120.00 dollars
    [Search]
    search[sturdy antique lamp]
    [Back to Search] Page 1 (Total results: 50) [Next >]
    [lamp Z] Bexa antique sturdy lamp $435.99
    [lamp 7] Fjord antique sturdy lamp $477.99
    [lamp F] Elm sturdy stylish lamp $355.99

The shop is that of Yao et al. 2022 (arXiv:2207.01206), in the text form of ReAct (Yao et al. 2023,
arXiv:2210.03629) that ArCHer plays (Zhou et al. 2024, arXiv:2402.19446): ten actions, each search[...],
click[...] or think[...], and one reward, for how well what one buys fits the instruction. Rules, players and
scores: docs/worlds/webshop.md.

    a task       an instruction, written for one item; others may fit as well
    the reward   0 until one buys, then between 0 and 1: kind, attributes, options and price
    success      a reward of 1

Differs from what was released:
  D1  1,008 items made up from tables below, with texts that are short. `data=FOLDER` reads the published
      items.
  D2  An option asked for counts once. `matching="paper"` counts as released, where rewards above 1 can be
      had.
  D3  Rules for words find the nouns of a title instead of spaCy: see `nouns`.
  D4  Search is BM25 without stemming, and one can turn the pages of results, which ReAct's wrapper refuses.
  D5  Prices given as a range, and what an instruction allows at most, are drawn with a fixed seed.
  D6  The log of the game only grows, and the instruction stands at its start, as in ReAct.
      `context=CHARACTERS` is ArCHer's form: the instruction at the end, and the oldest pages and actions left
      out until all fits.

To take it alone, copy envs/__init__.py, envs/datasets.py and envs/worlds/webshop.py, each to the same place.
It needs gymnasium, numpy and rapidfuzz.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import gymnasium
import numpy as np
from rapidfuzz import fuzz, utils

from envs import AnyText, read_action, task_index
from envs.datasets import dialogue

INVALID = "Invalid action!"
HITS, PAGE, SHOWN = 50, 10, 3  # items that a search finds at most, that a page stands for, and that it shows
SUBPAGES = ("description", "features", "reviews", "attributes")
SUBPAGE_CHARS = 1000  # what a sub-page shows of them; published descriptions can be pages long

# ------------------------------------------------------------------------------ 1. the shop


class Item(NamedTuple):
    """What the shop sells. Query and category are not shown; they say which items are of one kind."""

    asin: str
    title: str
    price: float
    tag: str  # the price as it is shown
    query: str
    category: str  # a path, "shoes › boots"
    attributes: tuple[str, ...]
    options: dict[str, tuple[str, ...]]  # "color" -> ("black", "navy")
    description: str
    features: tuple[str, ...]


class Goal(NamedTuple):
    """An instruction and what it asks for."""

    item: Item  # which it was written for
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_upper: float


class Shop(NamedTuple):
    """Items by their ids, a search over them, the goals,
    and the numbers of those that are the tasks of `WebShop`."""

    items: dict[str, Item]
    index: "Index"
    goals: list[Goal]
    tasks: range


STOP = set(
    str.split(
        "a an and are as at be but by for from i if in into is it its me my no not of on or so some such "
        "than that the "
        "their then there these they this to up was we will with you your"
    )
)


def words(text: str) -> list[str]:
    """The words of a text in lower case, without those that are everywhere.

    >>> words("A Slim-Fit jacket, in X-large")
    ['slim', 'fit', 'jacket', 'x', 'large']
    """
    return [word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in STOP]


class Index:
    """BM25 (D4) over what was searched: title, description, first feature and options;
    k1 and b as in its engine."""

    def __init__(self, items: dict[str, Item], k1: float = 0.9, b: float = 0.4):
        self.asins, postings, lengths = list(items), {}, []
        for n, item in enumerate(items.values()):
            options = [word for name, values in item.options.items() for word in (name, *values)]
            counts = Counter(words(" ".join([item.title, item.description, *item.features[:1], *options])))
            lengths.append(counts.total())
            for word, count in counts.items():
                postings.setdefault(word, []).append((n, count))
        shrink = k1 * (1 - b + b * np.array(lengths) / np.mean(lengths))
        self.gains = {}  # word -> in which items it is, and what it adds to the score of each
        for word, found in postings.items():
            where, count = np.array(found).T
            idf = np.log(1 + (len(items) - len(found) + 0.5) / (len(found) + 0.5))
            self.gains[word] = where, (idf * count / (count + shrink[where])).astype(np.float32)
        self.search = lru_cache(maxsize=10_000)(self.search)

    def search(self, query: str) -> tuple[str, ...]:
        """The ids of the best HITS items, best first; of equals the first of the catalogue."""
        scores = np.zeros(len(self.asins), np.float32)
        for word in words(query):
            if word in self.gains:
                where, gain = self.gains[word]
                scores[where] += gain
        least = np.partition(scores, -HITS)[-HITS] if len(scores) > HITS else 0.0
        found = np.flatnonzero(scores >= least) if least > 0 else np.flatnonzero(scores)
        best = found[np.argsort(-scores[found], kind="stable")][:HITS]
        return tuple(self.asins[n] for n in best)


def draw_upper(price: float, rng: random.Random) -> tuple[float, str]:
    """The highest price allowed and its words: the higher of two
    of the next four multiples of 10 below 1,000."""
    above = [upper for upper in range(10, 1000, 10) if upper > price][:4]
    upper = max(rng.sample(above, 2)) if len(above) >= 2 else 1_000_000
    return float(upper), f", and price lower than {upper:.2f} dollars" if len(above) >= 2 else ""


# ------------------------------------------------------------------------------ 2. a made-up shop (D1)

COLORS = "black, white, navy, red, green, gray"
DEPARTMENTS = {
    "clothing": {
        "kinds": "coat, shirt, robe, skirt, vest, scarf, tunic",
        "attributes": "airy, warm, light, quilted, striped, fitted, washable, stretchy",
        "options": {"color": COLORS, "size": "small, medium, large, x-large"},
        "prices": (15, 250),
    },
    "shoes": {
        "kinds": "boot, sandal, loafer, clog, pump, mule, sneaker",
        "attributes": "padded, vegan, nonslip, soft, flexible, handmade, studded, lined",
        "options": {"color": COLORS, "size": "6, 7, 8, 9, 10"},
        "prices": (20, 290),
    },
    "grocery": {
        "kinds": "coffee, tea, granola, pasta, jam, rice, soup",
        "attributes": "organic, kosher, roasted, salted, sweet, crunchy, spicy, raw",
        "options": {
            "flavor": "vanilla, cocoa, honey, mint, lemon",
            "size": "pack of 1, pack of 3, pack of 6, pack of 12",
        },
        "prices": (5, 140),
    },
    "home": {
        "kinds": "desk, lamp, rug, shelf, stool, sofa, clock",
        "attributes": "portable, wooden, antique, compact, sturdy, stylish, foldable, glossy",
        "options": {"color": COLORS, "style": "modern, rustic, classic, plain"},
        "prices": (30, 490),
    },
}
BRANDS = ["Avo", "Bexa", "Cira", "Dune", "Elm", "Fjord", "Gale", "Hale"]
MODELS, GOALS_OF_AN_ITEM = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", 6  # a kind has an item of each model
# How often, as in 32 instructions of WebShop's crowd workers, read in the transcripts that ReAct published.
OPENINGS = {"i need": 9, "i would like": 7, "i am looking for": 8, "i want": 5, "find me": 3}
WORDINGS = {
    "color": (" in {}", " in {} color"),
    "size": (", size {}", " in size {}"),
    "flavor": (" in {} flavor", ", {} flavor"),
    "style": (" in {} style", ", {} style"),
}


@lru_cache(maxsize=1)
def made_up() -> Shop:
    """The default shop, always the same.

    A title says half of an item's attributes, so that it pays to look inside.
    """
    rng, made = random.Random(1), []  # with this seed the 100 tasks are about as hard as all goals
    for department, table in DEPARTMENTS.items():
        for kind, model in product(table["kinds"].split(", "), MODELS):
            has = rng.sample(table["attributes"].split(", "), 4)
            options = {}
            for name, values in table["options"].items():
                values = values.split(", ")
                options[name] = tuple(sorted(rng.sample(values, len(values) // 2), key=values.index))
            price = rng.randint(*table["prices"]) + 0.99
            title = f"{rng.choice(BRANDS)} {has[0]} {has[1]} {kind}"
            path, about = f"{department} › {kind}", f"This {kind} is {has[0]}."
            # the second one is not searched
            features = (f"made for your {department} needs", f"{has[2]} {kind}")
            asin = (
                # but for one character, words that are on the page anyway: a small model can copy it
                f"{kind} {model}"
            )
            made.append(
                Item(
                    asin, title, price, f"${price}", kind, path, tuple(sorted(has)), options, about, features
                )
            )
    rng.shuffle(made)
    items = {item.asin: item for item in made}
    goals = [make_goal(item, rng) for item in items.values() for _ in range(GOALS_OF_AN_ITEM)]
    rng.shuffle(goals)
    return Shop(items, Index(items), goals, range(2000, 2100))


def make_goal(item: Item, rng: random.Random) -> Goal:
    """An instruction for an item: one to three of its attributes, most of its options,
    a bound on its price."""
    attributes = rng.sample(item.attributes, rng.choices([1, 2, 3], [3, 4, 3])[0])
    chosen = {name: rng.choice(values) for name, values in item.options.items() if rng.random() < 0.8}
    opening = rng.choices(list(OPENINGS), list(OPENINGS.values()))[0]
    wish = "".join(rng.choice(WORDINGS[name]).format(value) for name, value in chosen.items())
    upper, bound = draw_upper(item.price, rng)
    text = f"{opening} {' '.join(attributes)} {item.query}{wish}{bound}"
    return Goal(item, text, tuple(attributes), tuple(chosen.values()), upper)


# ------------------------------------------------------------------------------ 3. the published shop


@lru_cache(maxsize=1)
def published(folder: str) -> Shop:
    """The shop of items_shuffle*.json, items_ins_v2*.json and items_human_ins.json;
    ArCHer's 100 goals are its tasks.

    Raises FileNotFoundError where one is missing and ValueError where one is malformed.
    """
    catalogue = min(Path(folder).glob("items_shuffle*.json"), default=Path(folder, "items_shuffle.json"))
    names = catalogue.name, catalogue.name.replace("items_shuffle", "items_ins_v2"), "items_human_ins.json"
    texts, items, goals, rng, row = [], {}, [], random.Random(0), {}
    for name in names:
        if not Path(folder, name).is_file():
            raise FileNotFoundError(
                f"{Path(folder, name)} does not exist; setup.sh of WebShop's repository fetches it"
            )
        try:
            texts.append(json.loads(Path(folder, name).read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:  # the second for a file of brackets
            raise ValueError(f"{Path(folder, name)} is not JSON: {error}") from error
    rows, known, human = texts
    try:
        for row in rows:
            if row["asin"] != "nan" and len(row["asin"]) <= 10 and row["asin"] not in items:
                items[row["asin"]] = read_item(row, known.get(row["asin"], {}))
        instructions = [(items[asin], row) for asin in items for row in human.get(asin, [])]
        for item, row in instructions:
            if attributes := texts_of(row["instruction_attributes"]):
                upper, bound = draw_upper(item.price, rng)
                options = row["instruction_options"]
                options = texts_of(options.values() if isinstance(options, dict) else options)
                text = line(row["instruction"].strip(".")) + bound
                goals.append(Goal(item, text, attributes, options, upper))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{folder}: not as published: {error!r} in the record {str(row)[:200]}") from error
    if not goals:
        raise ValueError(f"{folder}: no instruction of {names[2]} is about an item of {names[0]}")
    random.Random(233).shuffle(goals)  # as published
    return Shop(items, Index(items), goals, range(2000, 2100) if len(goals) >= 2100 else range(len(goals)))


def read_item(row: dict, known: dict) -> Item:
    """A published record; `known` has its attributes."""
    prices = [float(n.replace(",", "")) for n in re.findall(r"\$(\d[\d,.]*)", row["pricing"] or "")] or [
        100.0
    ]
    price = random.Random(row["asin"]).uniform(*prices[:2]) if len(prices) > 1 else prices[0]  # D5
    features = row["small_description"] or []
    options = {
        name.lower(): tuple(line(value["value"]).replace("/", " | ").lower() for value in values)
        for name, values in (row["customization_options"] or {}).items()
        if values is not None
    }
    return Item(
        row["asin"],
        line(row["name"]),
        price,
        " to ".join(f"${price}" for price in prices[:2]),
        line(row["query"]).lower(),
        line(row["product_category"]),
        texts_of(known.get("attributes") or ["DUMMY_ATTR"]),
        options,
        line(row["full_description"]),
        tuple(map(line, features if isinstance(features, list) else [features])),
    )


def texts_of(values: Iterable) -> tuple[str, ...]:
    """These texts. Raises TypeError if one is none: a file may hold anything."""
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"a {type(value).__name__} where a text should be")
    return tuple(values)


def line(text: str | None) -> str:
    """A text on one line; "" for none."""
    return " ".join((text or "").split())


# ------------------------------------------------------------------------------ 4. the reward

# In this order, as released: an option's colour is the first of these that stands anywhere in it.
NORMAL_COLORS = str.split("""
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel
camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry
cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green
grey heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot
midnight mint mocha multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple
rainbow red rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan
taupe teal tiger turquoise violet walnut wheat white wine yellow
""")
NOT_NOUNS = STOP | set(
    str.split(
        "adjustable airy all antique best big casual classic comfortable compact compatible crunchy cute "
        "easy elegant "
        "extra fashion flexible foldable full glossy good great handmade heavy high kosher large light "
        "long loose low "
        "mini more natural new non nonslip old organic perfect portable premium pure raw short slim small "
        "soft solid "
        "spicy stretchy sturdy stylish super sweet thick thin vegan warm washable waterproof wide without "
        "wooden"
    )
)


def nouns(title: str) -> list[str]:
    """What counts as the nouns of a title (D3): the first word, mostly a brand, and every other that begins
    with a letter, but for NOT_NOUNS and those that end in "ed" or "ly".

    >>> nouns("Ahmed's 2 Pack Fleece-Lined Jacket for Women")
    ["ahmed's", 'pack', 'fleece', 'jacket', 'women']
    """
    found = [word.rstrip(".") for word in re.findall(r"\b[a-z][a-z'.]+", title.lower())]
    return found[:1] + [
        word for word in found[1:] if word not in NOT_NOUNS and not word.endswith(("ed", "ly"))
    ]


def type_reward(bought: Item, wanted: Item) -> float:
    """1, 0.5, 0.1 or 0: how far the kinds of two items agree by query, category and title."""
    paths = [{part.strip() for part in item.category.split("›")} for item in (bought, wanted)]
    desired = nouns(wanted.title)
    title = len(set(nouns(bought.title)) & set(desired)) / len(desired) if desired else 0.2
    if title == 0:
        return 0.0
    if title < 0.1:
        return 0.1
    return 1.0 if bought.query == wanted.query or len(paths[0] & paths[1]) >= 2 or title > 0.2 else 0.5


def alike(one: str, other: str) -> bool:
    """Fuzzy equality of two phrases, in any order of words; thefuzz, which was used,
    rounds before it compares."""
    return round(fuzz.token_set_ratio(one, other, processor=utils.default_process)) > 85


def normal_color(value: str) -> str:
    """The colour in a value, or the value itself.

    >>> normal_color("a2 - navy blue"), normal_color("x-large")
    ('blue', 'x-large')
    """
    return next((color for color in NORMAL_COLORS if color in value), value)


def reward(bought: Item, chosen: dict[str, str], goal: Goal, matching: str = "strict") -> float:
    """Eq. 1 of WebShop: type * (attributes + options + price that fit) / (attributes + options + 1 asked)."""
    texts = [bought.title.lower(), " ".join(bought.features).lower(), bought.description.lower()]
    attributes = sum(
        any(alike(own, asked) for own in bought.attributes) or any(asked in text for text in texts)
        for asked in goal.attributes
    )
    values = {name: normal_color(value) for name, value in chosen.items()}
    asked_for = [normal_color(value) for value in goal.options]

    def fits(name: str, asked: str) -> bool:
        return values[name] == asked if name.lower() == "size" else alike(asked, values[name])

    if matching == "strict":  # D2: of those asked for, how many were chosen
        options = sum(any(fits(name, asked) for name in values) for asked in asked_for)
    else:  # of those chosen, how many were asked for or merely stand in the item's texts
        options = sum(
            any(fits(name, asked) for asked in asked_for) or any(value in text for text in texts)
            for name, value in values.items()
        )
    fitting = attributes + options + (bought.price <= goal.price_upper)
    return type_reward(bought, goal.item) * fitting / (len(goal.attributes) + len(goal.options) + 1)


# ------------------------------------------------------------------------------ 5. the world


class WebShop(gymnasium.Env):
    """The world. An observation is the log of the game: pages, and between them what was done and remarked.

    An action is cut at its first newline, stripped of blanks at both ends and then cut to `max_action_chars`;
    `info["action"]` is what remains. It is search[words], click[what stands in brackets on the page] or
    think[anything], in capitals or not. Whatever else, or elsewhere, is answered "Invalid action!", changes
    nothing and costs a turn. Always, without `context`:

        next_observation == observation + info["action"] + "\\n" + page or remark + "\\n"

    Options: `data`, a folder with the published files; `matching`, "strict" or "paper", how options count
    (D2); `context`, how many characters an observation may have (D6), 0 for no bound; by default 3,000 with
    `data`, else 0.
    """

    rules = (
        "Buy what the instruction asks for: search[words], then click[what stands in brackets]. The better "
        "it fits, the more points, 1 at most."
    )
    id = "webshop"
    is_test = True
    max_turns = 10
    max_action_chars = 200
    demonstration_env = "webshop-train"
    best_return, expert_return = 1.0, 0.9975  # in the made-up shop

    def __init__(self, data: str | None = None, matching: str = "strict", context: int | None = None):
        if matching not in ("strict", "paper"):
            raise ValueError(f"matching: {matching!r} is none of strict, paper")
        if context is not None and context < 0:
            raise ValueError(f"context: {context} is no number of characters; 0 is for no bound")
        self.options = {"data": data, "matching": matching, "context": context}
        self.shop = published(str(data)) if data else made_up()
        self.matching = matching
        self.context = context if context is not None else 3000 if data else 0
        self.append_only = self.context == 0
        if data:
            self.best_return = self.expert_return = None
        numbers = [n for n in range(len(self.shop.goals)) if (n in self.shop.tasks) == self.is_test]
        self.tasks = numbers or list(self.shop.tasks)  # a small catalogue has no others
        self.num_tasks = len(self.tasks)
        self.observation_space, self.action_space = AnyText(100_000), AnyText(self.max_action_chars)
        self.over = True  # until the first reset

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Starts with the task `options["index"]`, or one drawn by the world's own generator.

        `info["answer"]` is the number of the goal, the item it was written for and the options: "2031: coat
        K, navy".
        """
        super().reset(seed=seed)
        index = task_index(options, self.num_tasks, self.np_random)
        self.goal = self.shop.goals[self.tasks[index]]
        self.page, self.hits, self.leaf, self.item, self.chosen = "start", (), 0, None, {}
        # of every turn: the action, what came of it, and whether that is a page
        self.log = [("", self.show(), True)]
        self.turns, self.total, self.over = 0, 0.0, False
        answer = ", ".join([self.goal.item.asin, *self.goal.options])
        return self.observe(), {"answer": f"{self.tasks[index]}: {answer}"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Does one thing; see the class for what becomes of the text."""
        if self.over:
            raise gymnasium.error.ResetNeeded("the episode is over or was never begun: call reset()")
        action = read_action(action, self.max_action_chars)

        said = re.fullmatch(r"(search|click|think)\[(.*)\]", action, re.IGNORECASE)
        remark = self.do(said[1].lower(), said[2].strip().lower()) if said else INVALID
        terminated = self.page == "end"
        points = reward(self.item, self.chosen, self.goal, self.matching) if terminated else 0.0
        if self.context and self.log[-1][1] == INVALID:
            # an observation written anew shows it once, as it says what became of the last action
            self.log.pop()
        self.log.append((action, remark or self.show(points), not remark))
        self.turns += 1
        self.total += points
        truncated = not terminated and self.turns == self.max_turns
        self.over = terminated or truncated

        info = {"action": action}
        if self.over:
            info["result"] = {
                "return": self.total,
                "length": self.turns,
                "success": terminated and points >= 1,
            }
        return self.observe(), points, terminated, truncated, info

    def do(self, verb: str, what: str) -> str:
        """Goes to another page and returns "", or stays and returns a remark."""
        page, shown = self.page, {asin.lower(): asin for asin in self.shown()}
        if verb == "think":
            return "OK."
        if verb == "search":
            if page != "start" or not words(what):
                return INVALID
            self.page, self.hits, self.leaf = "results", self.shop.index.search(what), 0
        elif page != "start" and what == "back to search":
            self.page = "start"
        elif page == "results" and what in shown:
            self.page, self.item, self.chosen = "item", self.shop.items[shown[what]], {}
        elif page == "results" and what == "next >" and len(self.hits) > (self.leaf + 1) * PAGE:
            self.leaf += 1
        elif page == "results" and what == "< prev" and self.leaf > 0:
            self.leaf -= 1
        elif page == "item" and what == "< prev":
            self.page = "results"
        elif page == "item" and what in SUBPAGES:
            self.page = what
        elif page in SUBPAGES and what == "< prev":
            self.page = "item"
        elif page == "item" and (
            names := [name for name, values in self.item.options.items() if what in values]
        ):
            self.chosen = self.chosen | {names[0]: what}
            return f"You have clicked {what}."
        elif page == "item" and what == "buy now":
            self.page = "end"
        else:
            return INVALID
        return ""

    def shown(self) -> tuple[str, ...]:
        """The ids on the current page of results: the first three of ten, as in ReAct."""
        return self.hits[self.leaf * PAGE :][:SHOWN]

    def show(self, points: float = 0.0) -> str:
        """The current page; WebShop's have a line for every button."""
        back, item = "[Back to Search]", self.item
        if self.page == "start":
            return f"Instruction: {self.goal.instruction}\n[Search]"
        if self.page == "end":
            return f"Your score (min 0.0, max 1.0): {points:.2f}"
        if self.page == "results":
            turn = " [< Prev]" * (self.leaf > 0) + " [Next >]" * (len(self.hits) > (self.leaf + 1) * PAGE)
            found = [self.shop.items[asin] for asin in self.shown()]
            head = f"{back} Page {self.leaf + 1} (Total results: {len(self.hits)}){turn}"
            return "\n".join([head, *(f"[{one.asin}] {one.title} {one.tag}" for one in found)])
        if self.page == "item":
            rows = []
            for name, values in item.options.items():
                marked = (f"[{value}]" if value == self.chosen.get(name) else value for value in values)
                rows.append(f"{name} " + "".join(f"[{value}]" for value in marked))
            buttons = "[Description] [Features] [Reviews] [Attributes] [Buy Now]"
            return "\n".join(
                [f"{back} [< Prev]", *rows, item.title, f"Price: {item.tag} Rating: N.A.", buttons]
            )
        text = {
            "description": item.description or "No description",
            "features": "; ".join(item.features) or "No features",
            "reviews": "No reviews found",
            "attributes": ", ".join(item.attributes),
        }[self.page]
        return f"{back} [< Prev]\n{text[:SUBPAGE_CHARS]}"

    def observe(self) -> str:
        """The log (D6). With `context`, the instruction at its end,
        and as many of the last turns as there is room for.

        The current page, what was done on it, and the instruction are never left out.
        """
        texts = [f"{action}\n{reply}\n" for action, reply, _ in self.log]
        texts[0] = texts[0][1:]  # no action led to the first page
        if self.append_only:
            return "".join(texts)
        texts.append(f"Instruction: {self.goal.instruction}\n")
        current, first = max(n for n, (_, _, is_page) in enumerate(self.log) if is_page), 0
        while first < current and sum(map(len, texts[first:])) > self.context:
            first += 1
        return "".join(texts[first:])

    @property
    def players(self) -> dict[str, Callable[[str, random.Random], str]]:
        """Scripted players by name; `player(observation, rng)` is an action."""
        first, knowing = partial(hasty, options=False), partial(expert, shop=self.shop)
        return {
            "scripted": scripted,
            "expert": knowing,
            "hasty": hasty,
            "first": first,
            "random": random_player,
        }

    def demonstrations(self, n: int, seed: int, **knobs) -> list[dict]:
        """`n` dialogues of the player `scripted` (whose knobs these are) about tasks of webshop-train,
        drawn evenly."""
        world, player, rng = WebShopTrain(**self.options), partial(scripted, **knobs), random.Random(seed)
        return [dialogue(world, player, rng, rng.randrange(world.num_tasks)) for _ in range(n)]


class WebShopTrain(WebShop):
    """The same with all other goals for tasks: what one warms up on is not what one is judged by."""

    id = "webshop-train"
    is_test = False
    expert_return = None


# ------------------------------------------------------------------------------ 6. the players
# A player is a function of the observation and a random.Random. All but the expert compare the words of
# the instruction with what they read, and know nothing of what there is to buy.

ASKING = {"am", "need", "would", "like", "looking", "want", "find", "color", "size", "flavor", "style"}


class View(NamedTuple):
    """What a player reads in an observation."""

    page: str  # "start", "results", "item" or "other"
    lines: list[str]  # of the current page, and of what was done on it
    wish: str  # the instruction without the price
    wishes: list[str]  # its words that count
    upper: float  # the highest price allowed


def read(observation: str) -> View:
    """The observation, understood.

    >>> wish = "find me wide boots in red, and price lower than 30.00 dollars"
    >>> view = read(f"Instruction: {wish}\\n[Search]\\n")
    >>> view.page, view.wishes, view.upper
    ('start', ['wide', 'boots', 'red'], 30.0)
    """
    lines = observation.rstrip("\n").split("\n")
    instruction = next(text for text in lines if text.startswith("Instruction: "))
    wish, _, bound = instruction.removeprefix("Instruction: ").partition(", and price lower than ")
    lines = lines[
        max(n for n, text in enumerate(lines) if text.startswith(("[Search]", "[Back to Search]"))) :
    ]
    page = "start" if lines[0] == "[Search]" else "results" if " Page " in lines[0] else "other"
    page = "item" if any(text.startswith("[Description]") for text in lines) else page
    wishes = [word for word in dict.fromkeys(words(wish)) if word not in ASKING]
    return View(page, lines, wish, wishes, float(bound.split()[0]) if bound else 1e6)


def offers(view: View) -> list[tuple[str, str, float]]:
    """Id, title and price of the items on a page of results."""
    rows = [re.match(r"\[([^\]]+)\] (.*?) \$([\d.]+)( to \$[\d.]+)?$", text) for text in view.lines]
    return [(row[1], row[2], float(row[3])) for row in rows if row]


def lacking(view: View, text: str, price: float) -> int:
    """How many words of the wish a text lacks, and one more for a price that is too high."""
    return len(set(view.wishes) - set(words(text))) + (price > view.upper)


def rows_of_options(view: View) -> list[list[str]]:
    """The values of each option on an item's page; those that are chosen are left out."""
    rows = [re.findall(r"[^\[\]]+", text)[1:] for text in view.lines[1:] if re.match(r"[^\[]+ \[.*\]$", text)]
    return [
        values for values in rows if not any(f"You have clicked {value}." in view.lines for value in values)
    ]


def named(view: View) -> list[str]:
    """The values, one of an option, that the wish names and that are not chosen yet."""
    found = [
        [value for value in values if re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", view.wish)]
        for values in rows_of_options(view)
    ]
    return [max(values, key=len) for values in found if values]


def scripted(
    observation: str,
    rng: random.Random,
    careful: float = 0.3,
    forget: float = 0.35,
    doubt: float = 0.08,
    slip: float = 0.05,
) -> str:
    """Shops like ReAct's prompted model, with its mistakes: the player of the demonstrations.

    It searches for most words of the wish. Of the items it takes, with the probability `careful`, that whose
    title and price fit best, else any. It clicks the options that the wish names, and before each of them,
    with the probability `forget`, buys instead. In the share `doubt` of the turns on an item's page it
    hesitates, and in the share `slip` of all turns it does what it should not or cannot.
    """
    view = read(observation)
    if rng.random() < slip:
        values = [value for values in rows_of_options(view) for value in values] or view.wishes
        return rng.choice(
            [f"click[{rng.choice(values)}]", f"search[{rng.choice(view.wishes)}]", "click[Buy Now]"]
        )
    if view.page == "start":
        return f"search[{' '.join(word for word in view.wishes if rng.random() < 0.8) or view.wishes[0]}]"
    if view.page == "results":
        found = offers(view)
        if not found:
            return "click[Back to Search]"
        if rng.random() < careful:
            found = [min(found, key=lambda row: lacking(view, *row[1:]))]
        return f"click[{rng.choice(found)[0]}]"
    if view.page == "other":
        return "click[< Prev]"
    if rng.random() < doubt:
        return rng.choice(["click[Attributes]", "click[< Prev]", "think[looks good]"])
    values = named(view)
    return f"click[{rng.choice(values)}]" if values and rng.random() > forget else "click[Buy Now]"


def hasty(observation: str, rng: random.Random | None = None, options: bool = True) -> str:
    """Searches for the whole wish, takes the first hit, clicks the `options` that the wish names,
    and buys."""
    view = read(observation)
    if view.page == "start":
        return f"search[{view.wish}]"
    if view.page == "results":
        return f"click[{(offers(view) or [['Back to Search']])[0][0]}]"
    return f"click[{(named(view) * options or ['Buy Now'])[0]}]"


def expert(observation: str, rng: random.Random | None = None, *, shop: Shop) -> str:
    """Knows all that is sold, but not the goal: finds, by its title, the item that fits the wish best."""

    def misfit(item: Item) -> int:
        texts = [item.title, *item.attributes, *item.features, *sum(item.options.values(), ())]
        return lacking(view, " ".join(texts), item.price)

    view = read(observation)
    if view.page == "item":
        return hasty(observation)
    best = min([shop.items[asin] for asin in shop.index.search(view.wish)], key=misfit)
    if view.page == "start":
        return f"search[{best.title} {best.description}]"
    return f"click[{best.asin}]" if any(row[0] == best.asin for row in offers(view)) else "click[Next >]"


def random_player(observation: str, rng: random.Random) -> str:
    """Any button of the page, or a search for any two words of the wish."""
    view = read(observation)
    if view.page == "start":
        return f"search[{' '.join(rng.choices(view.wishes, k=2))}]"
    buttons = re.findall(r"\[([^\[\]]+)\]", "\n".join(view.lines))
    return f"click[{rng.choice(buttons)}]"
