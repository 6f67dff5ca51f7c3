"""envs/worlds/scienceworld/guide.py: walks along gold paths,
with a small stand-in for the Java program and with itself."""

import gzip
from importlib.util import find_spec
from pathlib import Path

import pytest

from envs.worlds.scienceworld import TASKS, Died, find_java, variations
from envs.worlds.scienceworld import guide as data

REAL = Path(__file__).parents[3] / "shared/data/guide_train.jsonl.gz"


class House:
    """A simulator of two rooms with one door: the path opens it, under a name that is no valid action,
    and goes."""

    made, loads, dies_at, dead_on_arrival = 0, [], set(), 0

    def __init__(self):
        if House.dead_on_arrival:
            House.dead_on_arrival -= 1
            raise Died("it is gone before it is there")
        House.made, self.is_open = House.made + 1, True

    def call(self, method: str, *args):
        if method == "load":
            House.loads.append(args)
            if args[1] in House.dies_at:
                House.dies_at.remove(args[1])
                raise Died("load: it is gone")
            self.task, self.variation, self.said = *args[:2], []
            assert args[2:] == ("", True), "no simplifications, with a gold path"
        elif method == "getTaskDescription":
            return f"Task Description:\nYour task is {self.task} {self.variation}."
        elif method == "step":
            self.said.append(args[0])

    def strings(self, method: str) -> list[str]:
        if method == "getGoldActionSequence":
            return ["open door to hall", "go to hall", f"take thing {self.variation}"]
        door = ["close door", "go to hall"] if self.said else ["open door"]
        return ["eat apple", *door, *([] if len(self.said) < 2 else [f"take thing {self.variation}"])]

    def close(self):
        House.made, self.is_open = House.made - self.is_open, False


@pytest.fixture
def house(monkeypatch):
    House.made, House.loads, House.dies_at, House.dead_on_arrival = 0, [], set(), 0
    monkeypatch.setattr("envs.worlds.scienceworld.Simulator", House)
    yield House
    assert House.made == 0, "every simulator was closed"


def test_a_walk(house):
    simulator = house()
    record = data.walk(simulator, "boil", 3, True)
    simulator.close()
    assert record["desc"] == "Your task is boil 3." and record["variation"] == 3
    vocab, valid, seen = record["vocab"], set(), []
    for action, step in zip(record["gold"], record["steps"], strict=True):
        valid = (valid | set(step["add"])) - set(step["rem"])
        assert vocab[step["gold"]] == action
        seen.append(sorted(vocab[i] for i in valid))
    assert seen[0] == ["eat apple", "open door"] and seen[1] == ["close door", "eat apple", "go to hall"]
    assert seen[2] == ["close door", "eat apple", "go to hall", "take thing 3"]
    assert record["steps"][0]["gold"] not in record["steps"][0]["add"], (
        "the gold action has a name of its own"
    )


def test_training_data(tmp_path, house):
    path = tmp_path / "data" / "train.jsonl.gz"
    data.make_train_data(str(path), 4, 2, 1, ["boil", "freeze"])
    records = list(data.read_lines(path))
    assert len(records) == 2 * 4 * 3 and set(records[0]) == {"task", "variation", "desc", "pos", "neg"}
    assert {r["variation"] for r in records} <= set(variations("boil", "train"))
    for record in records:
        taken = {
            r["pos"] for r in records if (r["task"], r["variation"]) == (record["task"], record["variation"])
        }
        assert record["neg"] not in taken and record["neg"]
    assert [p.name for p in path.parent.iterdir()] == ["train.jsonl.gz"], "no parts are left"
    again = tmp_path / "again.jsonl.gz"
    data.make_train_data(str(again), 4, 2, 2, ["boil", "freeze"])
    assert list(data.read_lines(again)) == records, "the number of workers changes nothing"


def test_what_was_walked_is_not_walked_again(tmp_path, house, monkeypatch):
    path, original = tmp_path / "dev.jsonl.gz", data.walk

    def stopped(simulator, task, variation, see):
        if len(house.loads) == 3:
            raise ValueError("stop")
        return original(simulator, task, variation, see)

    monkeypatch.setattr(data, "walk", stopped)
    with pytest.raises(ValueError, match="stop"):
        data.make_eval_data(str(path), 5, 1, ["boil"])
    assert not path.exists()
    monkeypatch.setattr(data, "walk", original)
    data.make_eval_data(str(path), 5, 1, ["boil"])
    assert sorted(load[1] for load in house.loads) == data.spaced(variations("boil", "dev"), 5)
    assert [r["variation"] for r in data.read_lines(path)] == data.spaced(variations("boil", "dev"), 5)


def test_a_simulator_that_dies_is_replaced(tmp_path, house):
    house.dies_at = {variations("boil", "dev")[2]}
    path = tmp_path / "dev.jsonl.gz"
    data.make_eval_data(str(path), 0, 1, ["boil"])
    assert len(list(data.read_lines(path))) == len(variations("boil", "dev"))


def test_a_simulator_that_dies_while_it_starts_is_started_again(tmp_path, house):
    house.dead_on_arrival = 2
    data.make_eval_data(str(tmp_path / "dev.jsonl.gz"), 2, 1, ["boil"])
    house.dead_on_arrival = 3
    with pytest.raises(Died):
        data.make_eval_data(str(tmp_path / "other.jsonl.gz"), 2, 1, ["boil"])


def test_train_and_dev_never_share_a_variation():
    for task in TASKS:
        train, dev = (set(data.spaced(variations(task, split), 20)) for split in ("train", "dev"))
        assert train and dev and not train & dev


def test_files_may_be_gzipped_or_not(tmp_path):
    (tmp_path / "plain.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    with gzip.open(tmp_path / "zipped", "wt") as file:
        file.write('{"a": 1}\n{"a": 2}\n')
    assert list(data.read_lines(tmp_path / "plain.jsonl")) == list(data.read_lines(tmp_path / "zipped"))


def has_java() -> bool:
    try:
        return bool(find_java())
    except FileNotFoundError:
        return False


@pytest.mark.external
@pytest.mark.skipif(not (find_spec("scienceworld") and has_java()), reason="needs scienceworld and a Java")
def test_the_real_world(tmp_path):
    """One short task; where the published file is here, its gold path must be the same."""
    path = tmp_path / "train.jsonl.gz"
    data.make_train_data(str(path), 1, 1, 1, ["lifespan-longest-lived"])
    records = list(data.read_lines(path))
    assert records and all(r["desc"].startswith("Your task is to find the animal") for r in records)
    if REAL.exists():
        theirs = [r for r in data.read_lines(REAL) if r["task"] == "lifespan-longest-lived"]
        n = records[0]["variation"]
        assert [r["pos"] for r in records] == [r["pos"] for r in theirs if r["variation"] == n]
