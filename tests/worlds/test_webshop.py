"""WebShop: the reward, the search, the pages, what an observation gives away, the published files,
the players."""

import json
import math
import random
import re
import time
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from gymnasium.error import ResetNeeded
from rapidfuzz import fuzz, utils

import envs
from envs.datasets import dialogue
from envs.worlds import webshop as ws
from envs.worlds.webshop import Goal, Item, reward

ALL = ws.made_up()
BUTTONS = [
    "back to search",
    "next >",
    "< prev",
    "description",
    "features",
    "reviews",
    "attributes",
    "buy now",
]


def start(index: int = 0, **options):
    """A world at the start of a task, and its first observation."""
    world = envs.make("webshop", **options)
    return world, world.reset(options={"index": index})[0]


def follow(index: int, *actions: str, **options) -> tuple[list[str], list[float], dict]:
    """What the world wrote for each action, the rewards and the last info."""
    world, before = start(index, **options)
    replies, rewards = [], []
    for action in actions:
        observation, gain, _, _, info = world.step(action)
        replies.append(
            observation.removeprefix(f"{before}{info['action']}\n") if world.append_only else observation
        )
        before = observation
        rewards.append(gain)
    return replies, rewards, info


def play_all(player, world_id: str = "webshop", games: int = 100, seed: int = 0) -> list[dict]:
    """As many games, each of another task if there are so many."""
    world, rng = envs.make(world_id), random.Random(seed)
    return [
        dialogue(world, world.players.get(player, player), rng, n * 31 % world.num_tasks)
        for n in range(games)
    ]


def mean(dialogues: list[dict], key: str = "return") -> float:
    return envs.summarise(dialogues)[key]


def item(
    title="", query="q", category="a › b › c", attributes=(), features=(), description="", price=35.0
) -> Item:
    return Item("B1", title, price, f"${price}", query, category, attributes, {}, description, features)


# ------------------------------------------------------------------------------- the reward
# The cases of WebShop's own tests (tests/web-agent-site/engine/test_goal.py), figures computed by hand.

SHOE = "adidas Unisex-Adult D.o.n. Issue 2 Basketball Shoe"
COURT = "adidas Unisex-Adult D.o.n. Issue 2 Indoor Court Shoe"
CORD = "Saireed UL Listed 2 Prong Power Cord for JBL Bar 3.1 Bar 2.1 Channel 4K Ultra HD Soundbar"
LEAD = (
    "BRST AC Power Cord Outlet Socket Cable Plug Lead for Panasonic SC-HT830V DVD/VCR Combo Home "
    "Theater System"
)
KNOB = "Rusticware 921ORB Kitchen and Bath Cabinet Knob"
TWEEZERS = (
    "Minkissy 2pcs Stainless Steel Eyebrow Tweezers Blackhead Acne Remover Portable Makeup Tweezers (Silver)"
)
TEA = ("tea tree", "essential oils", "natural ingredients")


def title_score(bought: str, wanted: str) -> float:
    return len(set(ws.nouns(bought)) & set(ws.nouns(wanted))) / len(ws.nouns(wanted))


@pytest.mark.parametrize(
    ("bought", "wanted", "published"),
    [
        (SHOE, SHOE, 1.0),
        (COURT, SHOE, 0.85),
        (LEAD, CORD + " Home Theater System Subwoofer", 0.31),
        (LEAD, CORD, 0.17),
        (TWEEZERS, KNOB, 0.0),
    ],
)
def test_titles_score_as_published(bought, wanted, published):
    """The tolerance is that of WebShop's tests: our rules find as many nouns there as spaCy does."""
    assert title_score(bought, wanted) == pytest.approx(published, abs=0.01)


@pytest.mark.parametrize(
    ("category", "query", "title", "expected"),
    [
        ("a › b › c", "q", "Name One", 1.0),
        ("x › y › z", "q", "Name One", 1.0),  # the query alone
        ("b › c › a", "other", LEAD, 1.0),  # two of the path, in any order; the title has 0.17
        ("a › a › b", "other", LEAD, 1.0),
        ("a › d › e", "other", LEAD, 0.5),  # one of the path is not enough
        ("a › a › d", "other", LEAD, 0.5),
        ("x › y › z", "other", LEAD + " Bar", 1.0),  # the title alone: 3 of 12 nouns
        ("a › b › c", "q", "Bar", 0.1),  # 1 of 12 nouns, although query and category agree
        ("a › b › c", "q", TWEEZERS, 0.0),  # likewise, without a noun in common
    ],
)
def test_the_kind_of_an_item(category, query, title, expected):
    wanted = item("Name One" if title == "Name One" else CORD)
    assert ws.type_reward(item(title, query, category), wanted) == expected


@pytest.mark.parametrize("matching", ["strict", "paper"])
def test_the_published_cases(matching):
    name = "Mens D.O.N. Issue 2 Gca Basketball Sneakers Shoes Casual - Off White"
    goal = Goal(item(name), "", TEA, ("grey", "XL"), 40.0)
    chosen = {"color": "grey", "size": "XL"}
    score = partial(reward, matching=matching)
    assert (
        score(item(name, attributes=("tea tree", "essential oil", "natural ingredients")), chosen, goal)
        == 1.0
    )
    # Attributes also count where they stand in the texts: 2 of 3.
    texts = {
        "features": ("This shampoo has essential oils and smells like lemons",),
        "description": "Best shampoo on the market, made with natural ingredients",
    }
    assert score(item(name, **texts), chosen, goal) == pytest.approx((2 + 2 + 1) / 6)
    assert score(item(name, **texts), {}, goal) == pytest.approx((2 + 0 + 1) / 6)
    assert score(item(name, price=40.01, **texts), chosen, goal) == pytest.approx((2 + 2 + 0) / 6)
    more = goal._replace(options=("grey", "XL", "pack of 12"))
    assert score(item(name, **texts), chosen, more) == pytest.approx((2 + 2 + 1) / 7)
    other_kind = item(LEAD, query="other", category="a › d › e", **texts)
    assert score(other_kind, chosen, more._replace(item=item(CORD))) == pytest.approx(
        0.5 * 4 / 7 + 0.5 * 1 / 7
    )
    none = item(name, attributes=("tea bag", "earl gray", "lipton"), description="Best tea made by Lipton")
    assert score(none, {}, goal) == pytest.approx(1 / 6)


@pytest.mark.parametrize("matching", ["strict", "paper"])
@pytest.mark.parametrize(
    ("chosen", "asked", "matched"),
    [
        ({"amount": "pack of 12", "color": "grey", "size": "XL"}, ("grey", "XL", "pack of 12"), 3),
        ({"amount": "pack of 12", "color": "blue", "size": "XL"}, ("grey", "XL", "pack of 12"), 2),
        ({"color": "powder snow"}, ("cool powder snow",), 1),  # fuzzy
        ({"color": "a2 - navy blue"}, ("dark blue",), 1),  # "blue" comes first in the list of colours
        ({"color": "red"}, ("dark red",), 0),  # "dark" comes before "red"
        ({"color": "z41-red"}, ("red",), 1),
        ({"size": "pack of 1"}, ("pack of 12",), 0),  # sizes must be equal
        ({"amount": "pack of 1"}, ("pack of 12",), 1),  # what is no size need not
        ({"size": "x-large"}, ("large",), 0),
        ({}, ("goal 1", "goal 2"), 0),
        ({"one": "goal 1"}, (), 0),
    ],
)
def test_options(chosen, asked, matched, matching):
    goal = Goal(item("Name"), "", ("none such",), asked, 1e6)
    assert reward(item("Name"), chosen, goal, matching) == pytest.approx((matched + 1) / (len(asked) + 2))


def test_as_released_options_can_be_counted_twice():
    """D2: two options chosen that are alike, or that stand in the title, for one that was asked for."""
    bought = item("Red Name", attributes=("soft",))
    goal = Goal(item("Red Name"), "", ("soft",), ("red",), 40.0)
    for chosen in ({"color": "red", "pattern": "red stripes"}, {"color": "red", "brand": "name"}):
        assert reward(bought, chosen, goal) == 1.0
        assert reward(bought, chosen, goal, "paper") == pytest.approx(4 / 3)
    assert reward(bought, {"pattern": "name"}, goal) == pytest.approx(2 / 3)
    assert reward(bought, {"pattern": "name"}, goal, "paper") == 1.0


def naive_reward(bought: Item, chosen: dict, goal: Goal) -> float:
    """The formula, one thing asked for after the other."""

    def color(value):
        return ([c for c in ws.NORMAL_COLORS if c in value] + [value])[0]

    def close(a, b):
        return round(fuzz.token_set_ratio(a, b, processor=utils.default_process)) > 85

    got = 1 if bought.price <= goal.price_upper else 0
    everything = [bought.title.lower(), " ".join(bought.features).lower(), bought.description.lower()]
    for asked in goal.attributes:
        if [own for own in bought.attributes if close(own, asked)] or [
            text for text in everything if asked in text
        ]:
            got += 1
    for asked in goal.options:
        for name, value in chosen.items():
            if color(value) == color(asked) if name == "size" else close(color(value), color(asked)):
                got += 1
                break
    kinds = [[word for word in i.title.lower().split() if word in (i.query, i.title.lower().split()[0])]
             for i in (bought, goal.item)]  # fmt: skip
    share = len(set(kinds[0]) & set(kinds[1])) / len(kinds[1])
    kind = 0.0 if share == 0 else 1.0  # in the made-up shop a title has two nouns, brand and kind
    return kind * got / (1 + len(goal.attributes) + len(goal.options))


def test_the_reward_against_a_naive_one():
    rng, items, seen = random.Random(0), list(ALL.items.values()), Counter()
    for _ in range(4000):
        goal = rng.choice(ALL.goals)
        same_kind = [one for one in items if one.query == goal.item.query]
        bought = rng.choice([goal.item, rng.choice(same_kind), rng.choice(same_kind), rng.choice(items)])
        chosen = {name: rng.choice(values) for name, values in bought.options.items() if rng.random() < 0.8}
        points = reward(bought, chosen, goal)
        assert points == pytest.approx(naive_reward(bought, chosen, goal)) and 0 <= points <= 1
        seen[points] += 1
    assert len(seen) > 10 and seen[1.0] > 50 and seen[0.0] > 50


# ------------------------------------------------------------------------------- the search


def naive_search(query: str, texts: dict[str, list[str]], documents: Counter) -> list[str]:
    """BM25 in float64, item by item; `documents` counts the items that have a word."""
    average, scores = sum(map(len, texts.values())) / len(texts), {}
    for asin, text in texts.items():
        total = 0.0
        for word in ws.words(query):
            if count := text.count(word):
                idf = math.log(1 + (len(texts) - documents[word] + 0.5) / (documents[word] + 0.5))
                total += idf * count / (count + 0.9 * (1 - 0.4 + 0.4 * len(text) / average))
        if total:
            scores[asin] = total
    return sorted(scores, key=lambda asin: -round(scores[asin], 4))[:50]


def test_search_against_a_naive_one():
    rng, texts = random.Random(0), {}
    for one in ALL.items.values():
        options = [*one.options, *sum(one.options.values(), ())]
        texts[one.asin] = ws.words(" ".join([one.title, one.description, one.features[0], *options]))
    documents = Counter(word for text in texts.values() for word in set(text))
    for _ in range(50):
        query = rng.choice(ALL.goals).instruction.split(",")[0]
        assert list(ALL.index.search(query)) == naive_search(query, texts, documents)


def test_search_of_words_that_nobody_has():
    assert ALL.index.search("xylophone") == ALL.index.search("") == ALL.index.search("the of and") == ()
    assert ALL.index.search("Xylophone COAT!") == ALL.index.search("coat")
    assert len(ALL.index.search("coat")) == 36 and len(ALL.index.search("coat shirt")) == 50
    few = ws.Index({asin: one for asin, one in ALL.items.items() if asin.endswith("A")})
    assert 0 < len(few.search("organic wooden vegan")) < 20


# ------------------------------------------------------------------------------- the made-up shop


def test_the_shop_is_always_the_same():
    ws.made_up.cache_clear()
    again = ws.made_up()
    assert (again.items, again.goals) == (ALL.items, ALL.goals)
    assert len(ALL.items) == 1008 and len(ALL.goals) == 6048
    assert envs.make("webshop").num_tasks == 100 and envs.make("webshop-train").num_tasks == 5948
    tasks = {goal.instruction for goal in ALL.goals[2000:2100]}
    assert len({goal.item.asin for goal in ALL.goals[2000:2100]}) > 80 and len(tasks) == 100


def test_items_are_as_the_tables_say():
    kinds = Counter(one.query for one in ALL.items.values())
    assert len(kinds) == 28 and set(kinds.values()) == {36}
    for one in ALL.items.values():
        assert len(one.attributes) == 4 and all(len(values) >= 1 for values in one.options.values())
        assert sum(word in one.title.split() for word in one.attributes) == 2
        assert ws.nouns(one.title) == [one.title.split()[0].lower(), one.query], (
            "adjectives must not count as nouns"
        )
    own = sorted({word for table in ws.DEPARTMENTS.values() for word in table["attributes"].split(", ")})
    assert not any(ws.alike(a, b) for a in own for b in own if a != b)


def test_instructions_say_all_that_is_asked_for():
    openings = Counter()
    for goal in ALL.goals:
        assert all(
            re.search(rf"\b{re.escape(part)}\b", goal.instruction)
            for part in (goal.item.query, *goal.attributes, *goal.options)
        )
        assert goal.instruction.endswith(f", and price lower than {goal.price_upper:.2f} dollars")
        assert goal.item.price < goal.price_upper <= goal.item.price + 40
        openings[next(words for words in ws.OPENINGS if goal.instruction.startswith(words + " "))] += 1
    for words, share in ws.OPENINGS.items():
        assert openings[words] / 6048 == pytest.approx(share / 32, abs=0.02)
    asked = Counter(len(goal.attributes) for goal in ALL.goals)
    assert asked[1] / 6048 == pytest.approx(0.3, abs=0.02) and asked[2] / 6048 == pytest.approx(0.4, abs=0.02)


def test_the_item_of_a_goal_earns_everything():
    for goal in ALL.goals:
        chosen = {
            name: value
            for name, values in goal.item.options.items()
            for value in values
            if value in goal.options
        }
        assert len(chosen) == len(goal.options)
        assert reward(goal.item, chosen, goal) == 1.0


# ------------------------------------------------------------------------------- pages and rules


def test_a_purchase_word_for_word():
    goal = ALL.goals[2000]
    replies, rewards, info = follow(
        0,
        f"search[{goal.item.title}]",
        f"click[{goal.item.asin}]",
        "think[all right]",
        f"click[{goal.options[0]}]",
        "click[Buy Now]",
    )
    assert start(0)[1] == f"Instruction: {goal.instruction}\n[Search]\n"
    head, *rows = replies[0].splitlines()
    assert head == "[Back to Search] Page 1 (Total results: 50) [Next >]"
    assert len(rows) == 3 and f"[{goal.item.asin}] {goal.item.title} ${goal.item.price}" in rows
    options = [
        f"{name} " + "".join(f"[{value}]" for value in values) for name, values in goal.item.options.items()
    ]
    assert replies[1].splitlines() == [
        "[Back to Search] [< Prev]",
        *options,
        goal.item.title,
        f"Price: ${goal.item.price} Rating: N.A.",
        "[Description] [Features] [Reviews] [Attributes] [Buy Now]",
    ]
    assert replies[2:4] == ["OK.\n", f"You have clicked {goal.options[0]}.\n"]
    missing = len(goal.options) - 1
    assert rewards == [0.0] * 4 + [1 - missing / (len(goal.attributes) + len(goal.options) + 1)]
    assert replies[4] == f"Your score (min 0.0, max 1.0): {rewards[4]:.2f}\n"
    assert info["result"] == {"return": rewards[4], "length": 5, "success": missing == 0}


def test_the_example_at_the_top_is_true():
    world = envs.make("webshop")
    world.reset(seed=0)
    (action,) = re.findall(r'world.step\("(.*)"\)', ws.__doc__)
    observation, *_ = world.step(action)
    assert "".join(f"    {line}\n" for line in observation.splitlines()) in ws.__doc__


def test_the_dialogue_in_the_docs_is_true():
    page = (Path(__file__).parents[2] / "docs/worlds/webshop.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```text\n(Instruction: .*?)^```$", page, re.M | re.S)
    index = next(n for n, goal in enumerate(ALL.goals[2000:2100]) if goal.instruction in text)
    actions = [line for line in text.splitlines() if line.startswith(("search[", "click[", "think["))]
    world, observation = start(index)
    for action in actions:
        observation, *_ = world.step(action)
    assert observation == text


def item_page(index: int = 0) -> tuple[ws.WebShop, Goal]:
    """A world on the page of the item that the task was written for."""
    world, _ = start(index)
    goal = world.goal
    world.step(f"search[{goal.item.title} {goal.item.description}]")
    assert goal.item.asin in world.shown()
    world.step(f"click[{goal.item.asin}]")
    return world, goal


def last_lines(observation: str, action: str) -> list[str]:
    return observation.rpartition(f"{action}\n")[2].splitlines()


def test_subpages_and_the_way_back():
    world, goal = item_page()
    name, values = next(iter(goal.item.options.items()))
    world.step(f"click[{values[0]}]")
    shown = {
        "Description": goal.item.description,
        "Features": "; ".join(goal.item.features),
        "Reviews": "No reviews found",
        "Attributes": ", ".join(goal.item.attributes),
    }
    pages = iter(shown.items())
    page, text = next(pages)
    assert last_lines(world.step(f"click[{page}]")[0], f"click[{page}]") == [
        "[Back to Search] [< Prev]",
        text,
    ]
    assert last_lines(world.step("click[Buy Now]")[0], "click[Buy Now]") == ["Invalid action!"]
    # Back on the item's page the option is still chosen, and marked.
    lines = last_lines(world.step("click[< Prev]")[0], "click[< Prev]")
    assert lines[1] == f"{name} [[{values[0]}]]" + "".join(f"[{value}]" for value in values[1:])
    for page, text in pages:
        world.page = "item"
        assert last_lines(world.step(f"click[{page}]")[0], f"click[{page}]")[1] == text


def test_an_option_replaces_another_of_its_kind_and_leaving_forgets_all():
    world, goal = item_page()
    name, values = next((name, values) for name, values in goal.item.options.items() if len(values) > 1)
    for value in (values[0], values[1], values[1].upper()):
        world.step(f"click[{value}]")
    assert world.chosen == {name: values[1]}
    world.step("click[< Prev]")
    lines = last_lines(world.step(f"click[{goal.item.asin.lower()}]")[0], f"click[{goal.item.asin.lower()}]")
    assert world.chosen == {} and "[[" not in "\n".join(lines)
    assert last_lines(world.step("click[Back to Search]")[0], "click[Back to Search]")[1] == "[Search]"


def test_pages_of_results():
    world, _ = start()
    world.step("search[coat shirt]")
    hits = ALL.index.search("coat shirt")
    seen = []
    for leaf, action in enumerate(["", "next >", "next >", "next >", "next >"]):
        observation = world.step(f"click[{action}]")[0] if action else world.observe()
        lines = observation.splitlines()[-4:]
        turn = " [< Prev]" * (leaf > 0) + " [Next >]" * (leaf < 4)
        assert lines[0] == f"[Back to Search] Page {leaf + 1} (Total results: 50){turn}"
        seen.append([line[1 : line.index("]")] for line in lines[1:]])
    assert seen == [list(hits[leaf * 10 : leaf * 10 + 3]) for leaf in range(5)]
    assert world.step("click[Next >]")[0].endswith("Invalid action!\n")
    assert " Page 4 " in world.step("click[< Prev]")[0].splitlines()[-4]
    unseen = hits[30 + 3]  # on this page, but not shown
    assert world.step(f"click[{unseen}]")[0].endswith("Invalid action!\n")
    assert world.step(f"click[{hits[30]}]")[0].endswith("[Buy Now]\n")


def test_a_search_without_results():
    replies, _, _ = follow(0, "search[xylophone]", "click[Next >]", "click[< Prev]", "click[Back to Search]")
    assert replies[0] == "[Back to Search] Page 1 (Total results: 0)\n"
    assert replies[1] == replies[2] == "Invalid action!\n" and replies[3].endswith("\n[Search]\n")


def test_what_is_no_action_or_not_here():
    """On every page: all buttons that are not on it, a search where none is, and what is no action at all."""
    goal = ALL.goals[2000]
    ways = {
        "start": [],
        "results": ["search[coat]"],
        "item": [f"search[{goal.item.title} {goal.item.description}]", f"click[{goal.item.asin}]"],
    }
    ways["attributes"] = [*ways["item"], "click[attributes]"]
    here = {
        "start": [],
        "results": ["back to search", "next >"],
        "item": ["back to search", "< prev", *ws.SUBPAGES, "buy now"],
        "attributes": ["back to search", "< prev"],
    }
    never = [
        "",
        "click",
        "click[]",
        "click[",
        "click[buy now",
        "search[]",
        "search[ the ]",
        "buy now",
        "[Search]",
        "think",
    ]
    never += ["click[search]", "click [next >]", "xclick[next >]", "click[next >] now", "click[coat aa]"]
    for page, way in ways.items():
        for action in [f"click[{button}]" for button in BUTTONS if button not in here[page]] + never:
            replies, _, _ = follow(0, *way, action)
            assert replies[-1] == "Invalid action!\n", (page, action)
        for action in [f"click[{button}]" for button in here[page]] + ["think[]", "THINK[x]"]:
            assert follow(0, *way, action)[0][-1] != "Invalid action!\n", (page, action)
        searched = follow(0, *way, "SEARCH[Coat]")[0][-1]
        assert (searched == "Invalid action!\n") == (page != "start")


def test_refused_actions_change_nothing_but_the_time():
    world, _ = item_page()
    state = world.page, world.item, world.chosen, world.hits, world.leaf
    for n in range(8):
        _, gain, terminated, truncated, info = world.step("click[nothing of the kind]")
        assert (world.page, world.item, world.chosen, world.hits, world.leaf) == state
        assert gain == 0.0 and not terminated and truncated == (n == 7)
    assert info["result"] == {"return": 0.0, "length": 10, "success": False}


# ------------------------------------------------------------------------------- paid without playing


def test_thinking_for_ever_earns_nothing():
    game = play_all(lambda observation, rng: "think[Your score (min 0.0, max 1.0): 1.0]", games=3)
    for one in game:
        assert (
            one["truncated"] and not one["terminated"] and one["return"] == 0.0 and len(one["actions"]) == 10
        )
    assert mean(game, "success") == 0.0


def test_nothing_is_bought_twice():
    world, _ = item_page()
    _, gain, terminated, _, _ = world.step("click[Buy Now]")
    assert terminated and gain > 0
    with pytest.raises(ResetNeeded):
        world.step("click[Buy Now]")


def test_clicking_every_option_earns_no_more_than_one_of_each():
    for index in range(20):
        for matching in ("strict", "paper"):
            world, _ = start(index, matching=matching)
            goal = world.goal
            world.step(f"search[{goal.item.title} {goal.item.description}]")
            world.step(f"click[{goal.item.asin}]")
            every = [value for values in goal.item.options.values() for value in values]
            for value in every[:7]:
                world.step(f"click[{value}]")
            assert len(world.chosen) <= len(goal.item.options)
            assert world.step("click[Buy Now]")[1] <= 1.0


def test_without_reading_little_is_earned():
    """The same actions whatever the instruction says; and only buying, which no page but an item's allows."""
    blind = ["search[coat]", "click[coat A]", "click[Buy Now]"]
    world = envs.make("webshop")
    best = 0.0
    for query in ("coat", "coffee", "desk", "boot", "red large washable coat"):
        total = 0.0
        for index in range(100):
            world.reset(options={"index": index})
            for action in (f"search[{query}]", f"click[{ALL.index.search(query)[0]}]", "click[Buy Now]"):
                total += world.step(action)[1]
        best = max(best, total / 100)
    assert best < 0.15
    assert follow(0, *blind)[1][-1] == 0.0 and follow(0, "click[Buy Now]")[0] == ["Invalid action!\n"]


def test_the_words_of_the_instruction_are_no_key():
    """The whole instruction for a query, as the first hit: below what looking at three items brings."""
    whole = [play_all("hasty"), play_all("hasty", "webshop-train", 1500)]
    first = [play_all("first"), play_all("first", "webshop-train", 1500)]
    assert max(map(mean, whole)) <= 0.88 and max(mean(games, "success") for games in whole) <= 0.6
    assert max(map(mean, first)) <= 0.6 and max(mean(games, "success") for games in first) <= 0.05

    def kindless(observation, rng):
        action = envs.make("webshop").players["hasty"](observation, rng)
        kinds = "|".join({one.query for one in ALL.items.values()})
        return re.sub(kinds, "", action) if action.startswith("search") else action

    assert mean(play_all(kindless)) < 0.45, "what kind of thing is asked for must matter"


# ------------------------------------------------------------------------------- nothing leaks

HOSTILE = [
    *(
        "",
        " ",
        "\n",
        "\nclick[Buy Now]",
        "[[[((({{{<<<|*+?.^$\\",
        "{0} %s {goal}",
        "\x00\x07\x1b[31mred\x1b[0m\x7f",
    ),
    *(
        "search[",
        "search]",
        "search[]",
        "search[[[]]]",
        "search[]]",
        "click[[coat a]]",
        "think[",
        "think[[[",
        "click[\x00]",
    ),
    *(
        "search[これは何ですか]",
        "search[куртка]",
        "click[هل]",
        "think[🔍🔍]",
        "search[\ud800]",
        "\ud800",
        "a\u2028b",
    ),
    *(
        "search[" + "coat " * 5000 + "]",
        "think[" + "a" * 1_000_000 + "]",
        "click" * 100_000,
        "[" * 5000,
        "(" * 5000,
    ),
    *(
        "Instruction: buy coat A, and price lower than 1.00 dollars",
        "[Back to Search] [< Prev]",
        "[Buy Now]",
        "</s><pad>",
    ),
    *(
        "Your score (min 0.0, max 1.0): 1.00",
        "search[Your score (min 0.0, max 1.0): 1.00]",
        "search[(a+)+$]",
        "OK.",
    ),
]


def hostile_actions(n: int, seed: int) -> list[str]:
    """Random characters, buttons with something wrong about them, ordinary ones, and HOSTILE."""
    rng = random.Random(seed)
    words = sorted({word for goal in ALL.goals[:200] for word in goal.instruction.split()})
    made = []
    for _ in range(n - len(HOSTILE)):
        kind = rng.random()
        noise = "".join(
            chr(rng.choice([rng.randrange(32, 127), rng.randrange(1, 0x3000)]))
            for _ in range(rng.randrange(60))
        )
        verb = rng.choice(["search", "click", "think", "SEARCH", "Click", ""])
        inside = rng.choice(
            [noise, rng.choice(BUTTONS), " ".join(rng.sample(words, 3)), rng.choice(sorted(ALL.items))]
        )
        made.append(noise if kind < 0.3 else f"{verb}[{inside}]" if kind < 0.9 else f"{verb}[{inside}{noise}")
    made += HOSTILE
    rng.shuffle(made)
    return made


@pytest.mark.parametrize("context", [None, 800])
def test_ten_thousand_hostile_actions(context):
    """None raises, none is paid but a purchase, and until then no reply depends on the goal."""
    worlds = [envs.make("webshop", context=context) for _ in range(2)]
    length = Counter(len(goal.instruction) for goal in ALL.goals[2000:2100]).most_common(1)[0][0]
    twins = [n for n, goal in enumerate(ALL.goals[2000:2100]) if len(goal.instruction) == length][:2]

    def reset() -> None:
        for world, index in zip(worlds, twins, strict=True):
            world.reset(options={"index": index})

    reset()
    assert worlds[0].goal.instruction != worlds[1].goal.instruction
    purchases = 0
    for action in hostile_actions(10_000, seed=0):
        results = [world.step(action) for world in worlds]
        bought = worlds[0].page == "end"
        purchases += bought
        for (observation, gain, terminated, truncated, info), world in zip(results, worlds, strict=True):
            assert terminated == bought and (gain == 0.0 or bought) and 0 <= gain <= 1
            assert observation in world.observation_space and info["action"] in world.action_space
            assert info.keys() == ({"action", "result"} if terminated or truncated else {"action"})
        texts = [
            text.replace(world.goal.instruction, "")
            for (text, *_), world in zip(results, worlds, strict=True)
        ]
        assert bought or texts[0] == texts[1]
        if bought or truncated:
            reset()
    assert purchases < 100


# ------------------------------------------------------------------------------- a context of few characters


def walks(context: int, games: int = 60):
    """(world, observation) for every step of games of several players."""
    world, rng = envs.make("webshop", context=context), random.Random(0)
    players = [
        *world.players.values(),
        lambda o, r: r.choice(["think[" + "x" * r.randrange(190) + "]", "nonsense"]),
    ]
    for game in range(games):
        player = players[game % len(players)]
        observation, _ = world.reset(options={"index": game % 100})
        over = False
        while not over:
            yield world, observation
            observation, _, terminated, truncated, _ = world.step(player(observation, rng))
            over = terminated or truncated
        yield world, observation


@pytest.mark.parametrize("context", [1, 300, 600, 1000])
def test_old_turns_are_cut_first_and_the_current_page_and_the_instruction_never(context):
    assert not envs.make("webshop", context=context).append_only
    cut = 0
    for world, observation in walks(context):
        end = f"Instruction: {world.goal.instruction}\n"
        pages = [n for n, (_, _, is_page) in enumerate(world.log) if is_page]
        assert observation.endswith(end)
        current = "".join(f"{action}\n{reply}\n" for action, reply, _ in world.log[pages[-1] :]).removeprefix(
            "\n"
        )
        assert observation.endswith(current + end)
        old = observation.removesuffix(current + end)
        whole = "".join(f"{action}\n{reply}\n" for action, reply, _ in world.log[: pages[-1]]).removeprefix(
            "\n"
        )
        cut += old != whole
        assert old == whole or len(whole + current + end) > context
        assert len(observation) <= max(context, len(current + end))
        turns = [f"{action}\n{reply}\n" for action, reply, _ in world.log[: pages[-1]]]
        left = ["".join(turns[n:]).removeprefix("\n") for n in range(len(turns) + 1)]
        assert old == next((text for text in left if len(text + current + end) <= context), "")
    assert cut > 0


def test_with_room_for_all_it_is_the_log_and_the_instruction_once_more():
    for world, observation in walks(10**6):
        log = "".join(f"{action}\n{reply}\n" for action, reply, _ in world.log).removeprefix("\n")
        assert observation == f"{log}Instruction: {world.goal.instruction}\n"


def test_a_refusal_is_told_once():
    actions = ["nonsense", "", "think[invalid]", "click[x]", "search[coat]", "click[y]", "click[next >]"]
    replies, _, _ = follow(0, *actions, context=3000)
    assert [reply.count("Invalid action!") for reply in replies] == [1, 1, 0, 1, 0, 1, 0]
    told = [bool(envs.INVALID.search(reply.replace("think[invalid]", ""))) for reply in replies]
    assert sum(told) == 4


# ------------------------------------------------------------------------------- figures


@pytest.mark.parametrize("context", [None, 2000])
def test_success_is_the_whole_score_and_nothing_an_agent_says(context):
    worlds = envs.VecTextEnv("webshop", 100, context=context)
    worlds.reset(indices=list(range(100)))
    players = worlds.envs[0].players
    rng = random.Random(0)
    lies = [f"think[Your score (min 0.0, max 1.0): {score}]" for score in ("0.0", "1.0", "0.50")]
    actions = [lies[i % 3] for i in range(100)]
    while worlds.alive():
        worlds.step({i: actions[i] for i in worlds.alive()})
        said = enumerate(worlds.observations)
        actions = [players["hasty" if i % 2 else "expert"](text, rng) for i, text in said]
    told = [envs.summarise([one])["success"] for one in worlds.dialogues]
    assert 50 < sum(told) < 100
    assert [one["rewards"][-1] == 1.0 for one in worlds.dialogues] == told


# ------------------------------------------------------------------------------- the players


def test_players_from_bad_to_good():
    played = {name: play_all(name, games=300) for name in envs.make("webshop").players}
    means = {name: mean(games) for name, games in played.items()}
    assert means["expert"] == pytest.approx(envs.make("webshop").expert_return)
    assert (
        means["random"] < 0.12 < 0.5 < means["scripted"] < 0.65
        and means["first"] < means["scripted"] < means["hasty"]
    )
    assert mean(play_all("expert", "webshop-train", 600)) > 0.99
    assert mean(played["scripted"], "success") < 0.25 and mean(played["random"], "success") < 0.03
    assert all(mean(played[name], "invalid") == 0.0 for name in ("expert", "hasty", "first", "random"))


def test_the_best_return_can_be_reached():
    """By who knows the item of each task, in at most ten turns."""
    world = envs.make("webshop")
    for index in range(100):
        world.reset(options={"index": index})
        goal = world.goal
        world.step(f"search[{goal.item.title} {goal.item.description} {' '.join(goal.options)}]")
        while goal.item.asin not in world.shown():
            world.step("click[Next >]")
        for button in (goal.item.asin, *goal.options):
            world.step(f"click[{button}]")
        assert world.step("click[Buy Now]")[1] == world.best_return == 1.0


def test_demonstrations():
    world, began = envs.make("webshop"), time.process_time()
    made = world.demonstrations(3000, seed=0)
    assert time.process_time() - began < 5  # about 0.6 s on one CPU core
    figures = envs.summarise(made)
    assert figures["return"] == pytest.approx(0.58, abs=0.04) and figures["success"] == pytest.approx(
        0.16, abs=0.04
    )
    assert 0.01 < figures["invalid"] < 0.05 and figures["truncated"] < 0.06
    assert not {one["answer"] for one in made} & {
        world.reset(options={"index": n})[1]["answer"] for n in range(100)
    }
    starts = {re.match(r"\w*", action)[0] for one in made for action in one["actions"]}
    assert starts == {"search", "click", "think"}
    assert sum("click[Attributes]" in one["actions"] for one in made) > 20
    careful = world.demonstrations(1000, seed=0, careful=1.0, forget=0.0, doubt=0.0, slip=0.0)
    assert mean(careful) > 0.74 and mean(careful, "invalid") == 0.0


def test_texts_are_short_enough_for_a_small_model():
    made = envs.make("webshop").demonstrations(2000, seed=1)
    lengths = sorted(len(one["observations"][-1]) for one in made)
    assert lengths[1000] < 850 and lengths[-1] < 2000
    assert max(len(action) for one in made for action in one["actions"]) < 80
    longest = max(len(one["observations"][-1]) for one in play_all("random", "webshop-train", 300))
    assert longest < 3000


def test_players_do_not_remember():
    """The same observation gets the same action from a player that draws the same numbers."""
    world = envs.make("webshop")
    for name, player in world.players.items():
        for one in play_all(name, games=5):
            for observation in one["observations"][:-1]:
                assert player(observation, random.Random(1)) == player(observation, random.Random(1))


# ------------------------------------------------------------------------------- the published files

PRODUCT = {
    "asin": "B01",
    "name": "Acme  Jacket\nfor Women",
    "query": " Women Jackets ",
    "category": "fashion",
    "product_category": "Clothing › Women › Jackets",
    "pricing": "$19.99",
    "full_description": "A jacket.",
    "small_description": ["warm", "machine wash"],
    "customization_options": {
        "Color": [{"value": " Navy/Blue ", "image": None}, {"value": "Red"}],
        "Size": None,
    },
}


def publish(folder, products: list[dict], known: dict, human: dict, suffix: str = "_1000"):
    """The three files, as published."""
    for name, content in {
        f"items_shuffle{suffix}": products,
        f"items_ins_v2{suffix}": known,
        "items_human_ins": human,
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return str(folder)


def wish(text: str = "i want a warm jacket.", attributes=("warm",), options=("navy | blue",)) -> dict:
    return {"instruction": text, "instruction_attributes": list(attributes), "instruction_options": options}


def test_published_records(tmp_path):
    products = [
        PRODUCT,
        PRODUCT | {"name": "the same asin again"},
        PRODUCT | {"asin": "nan"},
        PRODUCT | {"asin": "B0123456789"},
        PRODUCT
        | {
            "asin": "B02",
            "pricing": "$1,010.50 - $1,020.00",
            "customization_options": "",
            "small_description": "one",
        },
        PRODUCT | {"asin": "B03", "pricing": "", "small_description": None, "full_description": None},
    ]
    human = {
        "B01": [wish(), wish(attributes=())],
        "B02": [wish("a jacket", options=[]), wish("no price", options={"color": "red"})],
        "B99": [wish()],
    }
    shop = ws.published(publish(tmp_path, products, {"B01": {"attributes": ["warm", "long sleeve"]}}, human))
    assert list(shop.items) == ["B01", "B02", "B03"]
    one, two, three = shop.items.values()
    assert (one.title, one.query, one.price, one.tag) == (
        "Acme Jacket for Women",
        "women jackets",
        19.99,
        "$19.99",
    )
    assert one.options == {"color": ("navy | blue", "red")} and one.attributes == ("warm", "long sleeve")
    assert two.options == {} and two.features == ("one",) and two.attributes == ("DUMMY_ATTR",)
    assert 1010.5 <= two.price <= 1020 and two.tag == "$1010.5 to $1020.0"
    assert (three.price, three.tag, three.features, three.description) == (100.0, "$100.0", (), "")
    texts = {goal.instruction: goal for goal in shop.goals}
    assert len(shop.goals) == 3 and set(texts) >= {"a jacket", "no price"}, (
        "nothing above 1,000 dollars has a bound"
    )
    assert texts["a jacket"].price_upper == 1e6 and texts["no price"].options == ("red",)
    (bounded,) = [text for text in texts if text.startswith("i want a warm jacket, and price lower than ")]
    assert texts[bounded].price_upper in (30, 40, 50) and bounded.endswith(
        f"{texts[bounded].price_upper:.2f} dollars"
    )


def test_a_game_in_the_published_shop(tmp_path):
    folder = publish(tmp_path, [PRODUCT], {"B01": {"attributes": ["warm"]}}, {"B01": [wish()]}, suffix="")
    world = envs.make("webshop", data=folder)
    assert world.num_tasks == 1 and world.context == 3000 and world.best_return is None
    assert envs.make("webshop", data=folder, context=0).append_only and not world.append_only
    observation, info = world.reset(seed=0)
    assert info["answer"] == "0: B01, navy | blue"
    for action in (
        "search[jacket]",
        "click[B01]",
        "click[Description]",
        "click[< Prev]",
        "click[navy | blue]",
    ):
        observation, *_ = world.step(action)
        assert "Invalid" not in observation
    assert "color [navy | blue][red]\n" in observation and observation.splitlines()[-1].startswith(
        "Instruction: i want"
    )
    _, gain, terminated, _, info = world.step("click[Buy Now]")
    assert gain == 1.0 and terminated and info["result"]["success"]
    for name in world.players:
        dialogue(world, world.players[name], random.Random(0), 0)
    assert len(envs.make("webshop-train", data=folder).demonstrations(5, seed=0)) == 5


def test_long_published_texts_are_cut_on_subpages(tmp_path):
    product = PRODUCT | {"full_description": "very long " * 1000}
    folder = publish(tmp_path, [product], {}, {"B01": [wish()]})
    world = envs.make("webshop", data=folder)
    world.reset(seed=0)
    for action in ("search[jacket]", "click[B01]", "click[Description]"):
        observation, *_ = world.step(action)
    assert len(observation) < 3000 and observation.count("very long") == 100


def test_goals_are_those_of_archer(tmp_path):
    """Of 2,150 goals, the numbers 2000 to 2099 after the published shuffle."""
    products = [PRODUCT | {"asin": f"B{n:04d}"} for n in range(2150)]
    human = {one["asin"]: [wish(f"number {n}")] for n, one in enumerate(products)}
    folder = publish(tmp_path, products, {}, human)
    numbers = list(range(2150))
    random.seed(233)
    random.shuffle(numbers)
    world = envs.make("webshop", data=folder)
    assert world.num_tasks == 100 and envs.make("webshop-train", data=folder).num_tasks == 2050
    for index in (0, 57, 99):
        assert f"number {numbers[2000 + index]}, and price" in world.reset(options={"index": index})[0]


def test_missing_and_malformed_files_are_one_line(tmp_path):
    with pytest.raises(envs.Unavailable, match=r"^webshop: [^\n]*items_shuffle.json does not exist; [^\n]*$"):
        envs.make("webshop", data=str(tmp_path))
    folder = publish(tmp_path, [PRODUCT], {}, {"B02": [wish()]})
    with pytest.raises(ValueError, match=r"^[^\n]*no instruction of items_human_ins.json is about [^\n]*$"):
        envs.make("webshop", data=folder)
    publish(tmp_path, [{"asin": "B01"}], {}, {})
    with pytest.raises(
        ValueError, match=r"^[^\n]*not as published: KeyError\('pricing'\) in the record [^\n]*$"
    ):
        envs.make("webshop", data=folder)
    (tmp_path / "items_ins_v2_1000.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"^[^\n]*items_ins_v2_1000.json is not JSON: [^\n]*$"):
        envs.make("webshop", data=folder)
    (tmp_path / "items_ins_v2_1000.json").unlink()
    with pytest.raises(
        envs.Unavailable, match=r"^webshop: [^\n]*items_ins_v2_1000.json does not exist; [^\n]*$"
    ):
        envs.make("webshop", data=folder)


@pytest.mark.parametrize("depth", [1, 900, 100_000])
@pytest.mark.parametrize(
    "where", ["file", "pricing", "product_category", "attributes", "instruction_options"]
)
def test_a_nested_file_is_one_line(tmp_path, where, depth):
    """A list of a list of ... where a text should be: no RecursionError, nor an error in the game."""
    known, asked, item = {"attributes": ["warm"]}, wish(), dict(PRODUCT)
    for record in (known, asked, item):
        if where in record:
            record[where] = ["@"]
    folder = publish(tmp_path, [item], {"B01": known}, {"B01": [asked]})
    nested = "[" * depth + "]" * depth
    for path in tmp_path.iterdir():
        text = path.read_text(encoding="utf-8")
        path.write_text(nested if where == "file" else text.replace('["@"]', f"[{nested}]"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"^[^\n]*(is not JSON|not as published|no instruction)[^\n]*$"):
        envs.make("webshop", data=folder)


@pytest.mark.parametrize(
    ("options", "message"), [({"matching": "loose"}, "matching: 'loose'"), ({"context": -1}, "context: -1")]
)
def test_bad_options_are_one_line(options, message):
    with pytest.raises(ValueError, match=rf"^{message} [^\n]*$"):
        envs.make("webshop", **options)


# ------------------------------------------------------------------------------- speed


def test_it_is_fast():
    """At least 5,000 steps a second on one core, far below what is measured (docs/worlds/webshop.md)."""
    world, rng, steps = envs.make("webshop"), random.Random(0), 5000
    observation, _ = world.reset(seed=0)
    began = time.process_time()
    for _ in range(steps):
        observation, _, terminated, truncated, _ = world.step(world.players["random"](observation, rng))
        if terminated or truncated:
            observation, _ = world.reset()
    assert time.process_time() - began < 1.0


def test_the_log_is_append_only():
    for one in play_all("random", games=20) + play_all("scripted", games=20):
        for (before, after), action in zip(pairwise(one["observations"]), one["actions"], strict=True):
            assert after.startswith(f"{before}{action}\n")
