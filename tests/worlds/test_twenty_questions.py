"""Twenty Questions: the table, the parser, the rules of guessing, the players and the model oracle."""

import doctest
import random
import re
import shutil
import time
from collections import Counter
from functools import cache, partial
from pathlib import Path
from statistics import fmean

import pytest

import envs
from envs.datasets import dialogue
from envs.worlds import twenty_questions as tq
from envs.worlds.twenty_questions import BIT, QUESTIONS, SUBSET, WORDS, parse, words_in


def play_all(world, name: str, rounds: int = 1, seed: int = 0, **knobs) -> list[dict]:
    """`rounds` dialogues of a player about every word of the world."""
    player, rng = partial(world.players[name], **knobs), random.Random(seed)
    return [dialogue(world, player, rng, index) for index in range(world.num_tasks) for _ in range(rounds)]


def mean_return(dialogues: list[dict]) -> float:
    return sum(dialogue["return"] for dialogue in dialogues) / len(dialogues)


def success_rate(dialogues: list[dict]) -> float:
    return sum(dialogue["terminated"] for dialogue in dialogues) / len(dialogues)


def test_docstrings():
    assert doctest.testmod(tq).failed == 0


# ------------------------------------------------------------------------------------- the table


def test_the_words():
    assert len(WORDS) == len(set(WORDS)) == 157
    assert len(SUBSET) == 10 and set(SUBSET) <= set(WORDS)
    names = [(name, word) for word in WORDS for name in tq.names_of(word)]
    assert len({name for name, _ in names}) == len(set(names)), "a name belongs to two words"


def test_every_two_words_are_told_apart():
    rows = {word: tuple(yes & BIT[word] > 0 for yes in QUESTIONS.values()) for word in WORDS}
    assert len(set(rows.values())) == len(WORDS), "two words have the same answers to all questions"
    assert all(0 < yes < tq.ALL for yes in QUESTIONS.values()), "a question has the same answer for all words"


def test_every_question_of_the_table_is_read_as_itself():
    misread = {ask: parse(ask) for ask, yes in QUESTIONS.items() if parse(ask) != tq.Question(yes)}
    assert not misread


def test_every_answer_is_the_tables():
    world = envs.make("twenty-questions")
    for ask, yes in QUESTIONS.items():
        for index, word in enumerate(WORDS):
            world.reset(options={"index": index})
            observation, reward, *_ = world.step(ask)
            assert observation == f"Questions:\n{ask} {'Yes.' if word in words_in(yes) else 'No.'}\n"
            assert reward == -1.0


@pytest.mark.parametrize(
    ("question", "yes", "no"),
    [
        ("Is it a pet?", "cat dog", "lion car"),
        ("Does it give milk?", "cow sheep", "horse"),
        ("Would you find it in a kitchen?", "knife apple refrigerator", "car"),
        ("Is it made out of wood?", "chair piano", "car dog"),
        ("does it need electricity", "blender camera", "hammer"),
        ("Is the object larger than a microwave?", "car lion", "microwave key"),
        ("Is it smaller than a bread box?", "apple key", "horse chair"),
        ("Does it fit in your pocket?", "key ring", "chair"),
        ("Is it small?", "apple key", "car"),
        ("Is it orange?", "orange carrot", "banana"),
        ("Is it a book?", "diary", "bookcase"),
        ("Is it a kitchen utensil?", "whisk pan spoon", "apple refrigerator"),
        ("Is it a large animal?", "bear", "cat mountain"),
        ("Is it made of metal?", "hammer truck", "dog"),
        ("Does it have a trunk?", "elephant tree car", "piano"),
        ("Does it have 2 wheels?", "motorcycle", "car"),
    ],
)
def test_free_questions(question, yes, no):
    answer = words_in(parse(question).yes)
    assert set(yes.split()) <= set(answer) and not set(no.split()) & set(answer)


@pytest.mark.parametrize(
    "question",
    [
        "",
        "dog",
        "a dog?",
        "What is it?",
        "Is it not an animal?",
        "Isn't it an animal?",
        "Is it a non-living thing?",
        "Is it something other than an animal?",
        "Is it anything but a vehicle?",
        "Does it lack legs?",
        "Is it a vehicle without wheels?",
        "Is it unable to fly?",
        "Is it neither a fruit nor a vegetable?",
        "Is it never used outdoors?",
        "Does it eat animals?",
        "Is it food for animals?",
        "Is it a unicorn?",
        "Is it a cat or a dog?",
        "Is it",
        "Is it bigger than",
        "Is it bigger than a quark?",
        "Tell me the word.",
        "is " * 25,
    ],
)
def test_invalid_questions(question):
    assert parse(question) is None


def test_hostile_questions_cost_little():
    start = time.perf_counter()
    for piece in [
        "is ",
        "is it a ",
        "a",
        "does it hold with ",
        "fit in ",
        "is bigger than ",
        "carry it ",
        " ",
        "'",
        "é",
    ]:
        parse((piece * 200)[:200])
        parse(("is it " + piece * 200)[:200])
    assert time.perf_counter() - start < 1.0


# -------------------------------------------------------------------------------------- guessing


def test_every_name_is_a_guess_of_its_word():
    for word in WORDS:
        assert parse(tq.guess_of(word)) == tq.Question(BIT[word], guess=word)
        for name in tq.names_of(word):
            forms = [
                "Is it a {}?",
                "Is it an {}?",
                "Is it the {}?",
                "Is the object a {}?",
                "is it possibly a {}",
            ]
            for form in [*forms, "Is it {}?"] if name != "orange" else forms:
                assert parse(form.format(name)).guess == word, form.format(name)


def wins(word: str, question: str, **options) -> bool:
    world = envs.make("twenty-questions", **options)
    world.reset(options={"index": WORDS.index(word)})
    observation, reward, terminated, _, info = world.step(question)
    assert reward == (0.0 if terminated else -1.0)
    assert not terminated or (observation.endswith(" Yes.\n") and info["result"]["success"])
    return terminated


def test_strict_matching_wins_every_word_by_its_name_alone():
    assert all(wins(word, tq.guess_of(word)) for word in WORDS)
    assert not wins("dog", "Is it a cat or a dog?")
    assert not wins("dog", "Is it bigger than a dog?")
    assert wins("pants", "Is it a pair of trousers?")


def test_the_papers_matching_looks_at_the_answer_and_the_last_word(monkeypatch):
    unwinnable = {
        word
        for word in WORDS
        if not any(wins(word, f"Is it a {name}?", matching="paper") for name in tq.names_of(word))
    }
    assert unwinnable == {
        *(
            "soccer ball",
            "golf ball",
            "tennis ball",
            "tennis racket",
            "baseball bat",
            "watering can",
            "lawn mower",
        )
    }
    assert wins("dog", "Is it an animal, dog?", matching="paper")
    assert wins("headphone", "Is it a pair of headphones?", matching="paper")
    assert not wins("pants", "Is it trousers?", matching="paper")
    no_yes = {"Is it bigger than a dog?": tq.NO, "Is it a cat or a dog?": tq.INVALID, "dog!": tq.INVALID}
    assert {question: tq.table_oracle("dog", question) for question in no_yes} == no_yes
    assert not any(wins("dog", question, matching="paper") for question in no_yes)
    monkeypatch.setattr(tq, "table_oracle", lambda word, question: tq.YES)
    assert all(wins("dog", question, matching="paper") for question in no_yes), "an oracle may be wrong"
    assert not wins("dog", "Is it a dog or a cat?", matching="paper")
    with pytest.raises(ValueError, match="matching: 'loose' is none of strict, paper"):
        envs.make("twenty-questions", matching="loose")


def test_the_last_question_may_win():
    world = envs.make("twenty-questions")
    world.reset(options={"index": WORDS.index("dog")})
    for _ in range(19):
        assert world.step("Is it a cat?")[2:4] == (False, False)
    *_, terminated, truncated, info = world.step("Is it a dog?")
    assert (terminated, truncated) == (True, False)
    assert info["result"] == {"return": -19.0, "length": 20, "success": True}


# --------------------------------------------------------------------------------------- players


def test_candidates_are_the_words_that_agree_with_every_answer():
    start = "Questions:\n"
    felines = start + "Is it a feline? Yes.\n"
    assert tq.candidates(start) == tq.ALL
    assert words_in(tq.candidates(felines)) == ["cat", "lion", "tiger"]
    assert words_in(tq.candidates(felines + "Is it kept as a pet? No.\nIt feline Invalid Question.\n")) == [
        "lion",
        "tiger",
    ]
    # What only a model as an oracle can say: Yes to a guess that was wrong, and things that cannot be.
    assert words_in(tq.candidates(felines + "Is it a cat? Yes.\n")) == ["lion", "tiger"]
    assert tq.candidates(felines + "Is it an animal? No.\n") == tq.ALL
    assert words_in(tq.candidates(felines + "Blah? Yes.\n")) == ["cat", "lion", "tiger"]
    subset = tq.as_bits(SUBSET)
    assert words_in(tq.candidates(start + "Is it an animal? Yes.\n", subset)) == ["dog"]


def least_cost(n: int) -> int:
    """The least sum, over n words, of the questions that do not win,
    if every yes/no question may be asked."""
    cost = [0, 0]
    for k in range(2, n + 1):
        guess = k - 1 + cost[k - 1]
        cost.append(min([guess, *(k + cost[yes] + cost[k - yes] for yes in range(1, k))]))
    return cost[n]


@cache
def least_cost_of_subset(left: int) -> int:
    """The same for a set of words, if only the table's questions may be asked."""
    words = words_in(left)
    if len(words) == 1:
        return 0
    guess = min(len(words) - 1 + least_cost_of_subset(left & ~BIT[word]) for word in words)
    splits = {left & yes for yes in QUESTIONS.values()} - {0, left}
    return min(
        [
            guess,
            *(len(words) + least_cost_of_subset(yes) + least_cost_of_subset(left & ~yes) for yes in splits),
        ]
    )


def test_best_returns():
    full, subset = envs.make("twenty-questions"), envs.make("twenty-questions-subset")
    assert full.best_return == -least_cost(157) / 157 == -1064 / 157  # -6.78, a bound
    assert subset.best_return == -least_cost_of_subset(tq.as_bits(SUBSET)) / 10 == -2.8  # exact


@pytest.mark.parametrize(("id", "total"), [("twenty-questions", -1077), ("twenty-questions-subset", -28)])
def test_the_expert(id, total):
    world = envs.make(id)
    dialogues = play_all(world, "expert")
    assert success_rate(dialogues) == 1.0
    assert sum(dialogue["return"] for dialogue in dialogues) == total  # -6.86 and -2.80 a word
    assert world.expert_return == total / world.num_tasks <= world.best_return


def test_the_random_player_hardly_ever_wins():
    dialogues = play_all(envs.make("twenty-questions"), "random", rounds=4)
    assert -19.8 < mean_return(dialogues) < -19.0 and success_rate(dialogues) < 0.1


@pytest.mark.parametrize(
    ("knobs", "mean", "success"),
    [({}, -14.2, 0.75), ({"broad": 1, "guess": 0.1}, -15.9, 0.52)],  # the second asks about anything at all
)
def test_the_scripted_player(knobs, mean, success):
    dialogues = play_all(envs.make("twenty-questions"), "scripted", rounds=20, **knobs)
    assert mean_return(dialogues) == pytest.approx(mean, abs=0.5)
    assert success_rate(dialogues) == pytest.approx(success, abs=0.04)


def test_the_scripted_player_asks_only_what_is_open():
    """Without slips it repeats nothing, and every question could have been answered the other way."""
    for game in play_all(envs.make("twenty-questions"), "scripted", garbled=0.0):
        assert len(set(game["actions"])) == len(game["actions"])
        for observation, action in zip(game["observations"], game["actions"], strict=False):
            left = tq.candidates(observation)
            assert left & BIT[game["answer"]] and left & parse(action).yes
            assert left & ~parse(action).yes or left.bit_count() == 1


def test_demonstrations():
    start = time.process_time()
    dialogues = envs.make("twenty-questions-subset").demonstrations(5000, seed=0)
    assert time.process_time() - start < 20  # about 2 s on one CPU core
    assert {dialogue["answer"] for dialogue in dialogues} == set(WORDS), "the warm start is the full game's"
    actions = [action for dialogue in dialogues for action in dialogue["actions"]]
    assert {action for action in actions if parse(action)} == {*QUESTIONS, *map(tq.guess_of, WORDS)}
    assert all(len(dialogue["imitate"]) == len(dialogue["actions"]) for dialogue in dialogues)
    # Whoever narrows the words down asks in the first turn, and its first ones are not imitated.
    hasty = [dialogue for dialogue in dialogues if dialogue["imitate"][0]]
    flawless = [dialogue for dialogue in hasty if all(dialogue["imitate"])]
    assert len(flawless) / len(dialogues) == pytest.approx(0.4, abs=0.04)
    assert len(hasty) / len(dialogues) == pytest.approx(0.56, abs=0.04)
    first = [parse(dialogue["actions"][0]) for dialogue in hasty]
    assert all(first), "it garbles nothing"
    assert fmean(question.guess is not None for question in first) == pytest.approx(0.94 * 0.12, abs=0.03)
    # What was said before comes again, also long after; that is never imitated.
    gaps, copied = [], []
    for game in dialogues[:1000]:
        for turn, (action, imitate) in enumerate(zip(game["actions"], game["imitate"], strict=True)):
            if action in game["actions"][:turn]:
                gaps.append(turn - game["actions"].index(action))
                copied.append(imitate)
    assert len(gaps) > 1000 and fmean(gap >= 8 for gap in gaps) > 0.2 and not any(copied)
    late, early, mistakes = 0, 0, 0
    for game in dialogues[:1000]:
        lefts = [tq.candidates(observation) for observation in game["observations"][:-1]]
        turns = list(zip(game["actions"], lefts, game["imitate"], strict=True))
        if any(imitate and left.bit_count() > 16 for _, left, imitate in turns):
            continue  # the hasty one's
        for action, left, imitate in turns:
            question = parse(action)
            if imitate:  # never a guess that is excluded
                assert question and (question.guess is None or left & question.yes)
            late += imitate
            early += left.bit_count() > 16
            mistakes += left.bit_count() <= 16 and not imitate
    assert min(late, early, mistakes) > 300


def test_demonstrations_go_off_script_late():
    """Twice as often with at most sixteen words left. A guess out of order is never imitated."""
    turns, wrong, out_of_order = Counter(), Counter(), 0
    for game in envs.make("twenty-questions").demonstrations(3000, seed=0):
        lefts = [tq.candidates(observation) for observation in game["observations"][:-1]]
        for action, left, imitate in zip(game["actions"], lefts, game["imitate"], strict=True):
            guess = (question := parse(action)) and question.guess
            if guess and left & question.yes and guess != words_in(left)[0]:
                out_of_order += 1
                assert not imitate
            if game["imitate"][0]:  # the hasty one's, whose turns are all imitated but these
                turns[left.bit_count() <= 16] += 1
                wrong[left.bit_count() <= 16] += not imitate
    assert out_of_order > 500
    assert wrong[True] / turns[True] == pytest.approx(2 * wrong[False] / turns[False], rel=0.25)


def test_the_hasty_player_plays_badly_but_by_the_answers():
    """Guesses early, in the table's order; asks few broad questions; prefers the first of the alphabet."""
    games = play_all(envs.make("twenty-questions"), "hasty", rounds=4)
    assert mean_return(games) == pytest.approx(-14.9, abs=0.4)
    guesses, broad, ranks = [], [], Counter()
    for game in play_all(envs.make("twenty-questions"), "hasty", rounds=4, wise=0.0):
        assert len(set(game["actions"])) == len(game["actions"])
        for observation, action in zip(game["observations"], game["actions"], strict=False):
            question, left = parse(action), tq.candidates(observation)
            assert left & question.yes, "never what is excluded"
            if left.bit_count() > 2:
                guesses.append(bool(question.guess))
            if question.guess:
                assert question.guess == words_in(left)[0]
            else:
                assert left & ~question.yes, "never what is known"
                is_broad = question.yes.bit_count() >= 25
                broad.append(is_broad)
                asks = tq.broad_questions(25) if is_broad else tq.narrow_questions(24)
                ranks[sorted(ask for ask, yes in asks if 0 < left & yes < left).index(action)] += 1
    assert fmean(guesses) == pytest.approx(0.12, abs=0.03)
    assert fmean(broad) == pytest.approx(0.06, abs=0.02)
    for rank in (1, 2, 3):
        assert ranks[0] / ranks[rank] == pytest.approx(rank + 1, rel=0.2)


def test_the_hasty_player_is_wise_at_times():
    """Always so, it is the player that narrows the words down."""
    wise = play_all(envs.make("twenty-questions"), "hasty", wise=1.0)
    narrowing = partial(tq.narrowing, look=8, few=4, broad=25)
    world, rng = envs.make("twenty-questions"), random.Random(0)
    games = [dialogue(world, narrowing, rng, index) for index in range(157)]
    assert mean_return(wise) == pytest.approx(mean_return(games), abs=0.4)
    assert mean_return(wise) == pytest.approx(-8.4, abs=0.3)


def test_who_narrows_down_guesses_in_the_order_of_the_table():
    observation = "Questions:\nIs it a ball? Yes.\n"
    left = words_in(tq.candidates(observation))
    assert 2 < len(left) < 10
    rng = random.Random(0)
    guess = {tq.narrowing(observation, rng, few=len(left)) for _ in range(20)}
    assert guess == {tq.guess_of(left[0])}
    asked = {tq.narrowing(observation, rng, few=len(left) - 1) for _ in range(20)}
    assert not any(parse(question).guess for question in asked)


def test_slips_are_never_valid():
    rng = random.Random(0)
    for question in [*QUESTIONS, *map(tq.guess_of, WORDS)]:
        slip = tq.garble(question, rng)
        assert slip and parse(slip) is None


# ---------------------------------------------------------------------------------- the model oracle


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A T5 with 8-dimensional random weights and a tokenizer of a few words."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "</s>", "<unk>", "the", "object", "is", "dog", "it", "a", "cat", "yes", "no", ".", "?"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("oracle")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = transformers.T5Config(
        vocab_size=len(words), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def test_a_model_may_answer(checkpoint):
    world, other = (envs.make("twenty-questions", oracle=checkpoint) for _ in range(2))
    assert world.oracle is other.oracle, "the model is loaded once"
    world.reset(options={"index": WORDS.index("dog")})
    for question in ["Is it a cat?", "", "🐕" * 100, "Is it a cat?"]:
        observation, reward, terminated, *_ = world.step(question)
        assert observation.split("\n")[-2].removeprefix(question + " ") in (tq.YES, tq.NO, tq.INVALID)
        assert reward == -1.0 and not terminated
    observation, reward, terminated, *_ = world.step("Is it a dog?")
    assert terminated and reward == 0.0 and observation.endswith("Is it a dog? Yes.\n")
    assert len(world.demonstrations(3, seed=0)) == 3


def test_players_survive_an_oracle_that_contradicts_the_table(monkeypatch):
    world, liar = envs.make("twenty-questions"), random.Random(0)
    monkeypatch.setattr(world, "oracle", lambda word, question: liar.choice([tq.YES, tq.NO, tq.INVALID]))
    for name in world.players:
        assert len(play_all(world, name)) == 157


def test_a_folder_without_a_model_is_named(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(
        envs.Unavailable, match=r"^twenty-questions: the oracle [^\n]* cannot be loaded \(\w+: .+\); give .*$"
    ):
        envs.make("twenty-questions", oracle=tmp_path)


def test_weights_that_an_oracle_lacks_are_not_drawn_at_random(checkpoint, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    folder = shutil.copytree(checkpoint, tmp_path / "less")
    tensors = safetensors.load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "layer_norm" in name)
    safetensors.save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors")
    with pytest.raises(envs.Unavailable, match=rf"no weights for {name}"):
        envs.make("twenty-questions", oracle=folder)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(envs.Unavailable, match=r"cannot be loaded \(\w+: [^\n]+$"):
        envs.make("guess-my-city", oracle=folder)


def test_the_model_is_asked_as_the_authors_ask(checkpoint, monkeypatch):
    """The prompt on which theirs was fine-tuned, to the letter."""
    transformers, prompts = pytest.importorskip("transformers"), []
    load = transformers.AutoTokenizer.from_pretrained

    class Listening:
        def __init__(self, *args, **options):
            self.tokenizer = load(*args, **options)

        def __call__(self, prompt, **options):
            prompts.append(prompt)
            return self.tokenizer(prompt, **options)

        def decode(self, *args, **options):
            return self.tokenizer.decode(*args, **options)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", Listening)
    tq.model_oracle.cache_clear()
    tq.model_oracle(str(checkpoint))("dog", "Is it a cat?")
    tq.model_oracle.cache_clear()
    assert prompts == ["The object is dog.Is it a cat?"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Yes", tq.YES),
        ("yes.", tq.YES),
        (" No. ", tq.NO),
        ("no, it is not", tq.NO),
        ("I know", tq.INVALID),
        ("", tq.INVALID),
    ],
)
def test_what_a_model_writes_becomes_one_of_three_answers(text, answer):
    assert tq.normalise(text) == answer


def test_the_dialogue_of_the_page_is_true():
    page = (Path(__file__).parents[2] / "docs/worlds/twenty-questions.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```text\n(Questions:\n.*?)^```$", page, re.M | re.S)
    world = envs.make("twenty-questions")
    world.reset(options={"index": WORDS.index("baseball")})
    lines = text.splitlines()[1:]
    for line in lines:
        observation, _, terminated, _, _ = world.step(line[: line.index("?") + 1])
    assert terminated and observation == text
    assert f"{len(tq.QUESTIONS)} questions" in page and f"{len(WORDS)} words" in page
