"""benchmarks/compare.py: areas, levels, intervals, what is run again, which setting is taken; variants.py."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tiny import make_checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import compare
import plot
import tables
import variants

import archer
import loop_ppo
from baselines import chai, filtered_bc, ppo
from envs import models

ROOT = compare.ROOT
SUBSET = compare.SUBSET


def a_curve(returns: list[float], per: int = 128, first: int = 128) -> list[dict]:
    """A run's curve; an iteration takes 10 CPU-seconds."""
    start = {"iteration": 0, "dialogues": first, "cpu_seconds": 5.0, "eval_sampled": -13.0}
    numbered = enumerate(returns, 1)
    points = [
        {"iteration": n, "dialogues": first + n * per, "cpu_seconds": 5.0 + 10 * n, "return": value}
        for n, value in numbered
    ]
    return [start, *points]


def a_run(cell: compare.Cell, iteration: int, returns: list[float] = (), place: str = "run") -> Path:
    """What a run leaves: a checkpoint, and if `returns` are given the end of it."""
    run = cell.folder / place
    run.mkdir(parents=True)
    (run / "checkpoint.pt").touch()
    costs = {"seconds": 100.0, "cpu_seconds": 50.0}
    summary = {"iteration": iteration, "episodes": iteration * cell.per} | costs
    (run / "summary.json").write_text(json.dumps(summary))
    rows = [
        {"iteration": n, "rollout/return": value, "time/cpu_seconds": 10.0 * n}
        for n, value in enumerate(returns, 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


@pytest.fixture
def args(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "FAILED", [])
    return compare.Args(worlds=(SUBSET,), runs=tmp_path / "runs", out=tmp_path / "out")


def cell_of(args, name: str = "ArCHer", setting: str = "", seed: int = 1) -> compare.Cell:
    return compare.cell_of(args, SUBSET, name, setting, seed)


# ------------------------------------------------------------------------------ figures of a curve


def test_the_area_is_the_return_of_the_mean_dialogue():
    assert compare.area(a_curve([-10.0, -6.0, -5.0])) == -7.0, "the evaluation before them has no return"


@pytest.mark.parametrize(
    ("returns", "per", "level", "dialogues"),
    [
        ([-9, -9, -9, -6, -6, -6, -6], 128, -6, 128 + 6 * 128),  # the first three of which all are -6
        ([-9, -3, -6, -9], 128, -6, 128 + 3 * 128),  # their mean counts, and it may fall again
        ([-9, -9, -7], 128, -6, None),
        ([-1, -1], 128, -6, None),  # too few
        ([-9] * 5 + [-1] * 3 + [-9] * 40, 16, -6, None),  # three small iterations are chance
        ([-9] * 12 + [-5] * 12, 16, -6, 128 + 16 * (12 + 9)),  # of 192 dialogues three quarters
        ([-9, -5, -5, -5], 512, -6, 128 + 4 * 512),
    ],
)
def test_when_a_level_is_reached(returns, per, level, dialogues):
    points = a_curve(returns, per)
    assert compare.crossing(points, level, "dialogues") == dialogues
    seconds = None if dialogues is None else 5.0 + 10 * (dialogues - 128) / per
    assert compare.crossing(points, level, "cpu_seconds") == seconds


def test_figures_of_three_seeds():
    """Student's t with two degrees of freedom: 4.30 times 1 / sqrt 3."""
    curves = [a_curve([-10.0, -8.0, -6.0, last]) for last in (-7.0, -6.0, -5.0)]
    for points, greedy in zip(curves, (-1.0, -2.0, -3.0), strict=True):
        points[-1] |= {"eval_sampled": -3.0, "eval_greedy": greedy}
    found = compare.figures(SUBSET, curves)
    assert (found["seeds"], found["sampled"], found["sampled_half"]) == (3, -3.0, 0.0)
    assert found["greedy"] == -2.0 and found["greedy_half"] == pytest.approx(4.30 / 3**0.5, abs=1e-3)
    assert found["area"] == -7.5 and found["area_half"] == pytest.approx(0.25 * 4.30 / 3**0.5, abs=1e-3)
    assert (found["level_1"], found["level_2"]) == (-8, -6)
    assert found["dialogues_1"] == f"{128 + 3 * 128}" and found["cpu_seconds_1"] == "35"
    assert found["dialogues_2"] == "never" and found["dialogues"] == 128 + 4 * 128
    lost = [{k: v for k, v in point.items() if k != "eval_greedy"} for point in curves[0]]
    assert "greedy" not in compare.figures(SUBSET, [lost]), "CHAI has no greedy play"


def test_dialogues_of_an_iteration_are_counted_from_the_total():
    metrics = [{"iteration": 0, "eval/return": -13.0, "time/cpu_seconds": 5.0}]
    metrics += [{"iteration": n, "rollout/return": -n, "time/cpu_seconds": 5.0 + 7 * n} for n in (1, 2)]
    points = compare.curve(metrics, {"iteration": 2, "episodes": 12}, 4)
    assert [point["dialogues"] for point in points] == [4, 8, 12]
    assert [point["cpu_seconds"] for point in points] == [5.0, 12.0, 19.0]
    assert points[0]["eval_sampled"] == -13.0 and "return" not in points[0]


# ------------------------------------------------------------------------------------ the commands


def test_all_rows_have_the_same_dialogues_and_tries():
    for name, row in compare.METHODS.items():
        assert len(row.tries) == len(set(row.tries)) == compare.TRIES, name
    for name, row in compare.ROWS.items():
        assert not row.like or row.like in compare.METHODS, name
        for world in row.worlds:
            for setting in compare.tries_of(compare.Args(), name):
                cell = compare.cell_of(compare.Args(), world, name, setting, 1)
                played = cell.per * cell.iterations
                assert abs(played - compare.DIALOGUES[world]) < cell.per, (name, setting)


def test_a_command(args):
    cell = cell_of(args, "D1: no KL penalty", "--kl 0.02 --actor-lr 6e-4", 3)
    words = " ".join(cell.words())
    assert words.startswith("archer.py --kl 0.02 --actor-lr 6e-4 --kl 0 "), "the row's own flag comes last"
    assert f"--env {SUBSET} --seed 3 --threads 1" in words and "--iterations 56 --eval-every 28" in words
    loop = cell_of(args, "LOOP", "--tasks 8 --minibatch 24")
    assert (loop.per, loop.iterations) == (48, 37)
    chosen = replace(args, start="some/folder")
    assert "--model some/folder" in " ".join(cell_of(chosen, "LOOP").words())
    assert "--actor some/folder" in " ".join(cell_of(chosen, "PPO").words())
    assert cell_of(chosen).folder != cell_of(args).folder, "another start, other runs"
    same = cell_of(args, "PPO", "--rollouts 64"), cell_of(args, "PPO, 64 an iteration")
    assert same[0].folder == same[1].folder, "the same command is not run twice"


def test_what_is_finished_is_not_run_again_and_the_rest_goes_on(args):
    done, begun, stopped, new = [cell_of(args, seed=seed) for seed in (1, 2, 3, 4)]
    a_run(done, 56, [-5.0])
    (a_run(begun, 0) / "summary.json").unlink()
    a_run(stopped, 14, [-5.0])  # an interrupted run has a summary, too
    told = []

    def start(words):
        told.append(words)
        cell = {str(cell.folder): cell for cell in (begun, stopped, new)}[str(Path(words[-1]).parent)]
        if "--resume" in words:
            (cell.folder / "run/summary.json").write_text('{"iteration": 56}')

    new_words = new.words()
    compare.run_cell(done, start)
    compare.run_cell(begun, start)
    compare.run_cell(stopped, start)
    assert told == [["archer.py", "--resume", str(cell.folder / "run")] for cell in (begun, stopped)]
    assert compare.FAILED == [] and new_words == new.words_to_go_on()
    compare.run_cell(new, lambda words: told.append(words))
    assert told[-1] == new_words and "it was interrupted" in compare.FAILED[0]


def test_what_has_diverged_is_not_run_again(args):
    cell = cell_of(args)
    told = []

    def start(words):
        told.append(words)
        raise RuntimeError("archer.py: the actor diverged (loss nan)")

    compare.run_cell(cell, start)
    compare.run_cell(cell, start)
    assert len(told) == len(compare.FAILED) == 1
    assert (
        compare.area_of(cell, {cell.folder.name: -3.0}) == -float("inf")
        and compare.state_of(cell) == "diverged"
    )


def test_the_setting_is_taken_once_all_are_known(args):
    cells = compare.tuning_cells(args, SUBSET, "ArCHer")
    assert {cell.seed for cell in cells.values()} == {compare.TUNING_SEED} - set(range(11))
    *others, last = cells
    for k, setting in enumerate(others):
        a_run(cells[setting], cells[setting].iterations, [-10.0 + k] * 2 + [-5.0])
    assert compare.setting_of(args, SUBSET, "ArCHer") is None
    cells[last].folder.mkdir(parents=True)
    (cells[last].folder / "diverged.txt").touch()
    assert compare.setting_of(args, SUBSET, "ArCHer") == others[-1]
    assert compare.setting_of(args, SUBSET, "D3: no centring") == others[-1], "its own switch alone differs"
    assert compare.setting_of(args, compare.FULL, "PPO, 64 an iteration") == "", "that has no choice"
    assert compare.setting_of(args, SUBSET, "PPO") is None


def test_what_comes_out(args):
    """CSVs that plot.py draws, a table, and the list of commands."""
    world = compare.FULL
    args = replace(args, worlds=(world,))
    compare.start_file(args, world).parent.mkdir(parents=True)
    compare.start_file(args, world).write_text(
        "temperature 1      return -13.00 ± 0.30  success 0.75  tokens 2.10\n"
        "temperature 0.5    return  -9.50 ± 0.30  success 0.75  tokens 2.10\n"
        "greedy             return  -9.75 ± 0.30  success 0.75  tokens 2.10\n"
        "best: temperature 0.5: return -9.50, success 0.75\n"
    )
    for seed in (1, 2, 3):
        cell = compare.cell_of(args, world, "PPO, 64 an iteration", "", seed)
        a_run(cell, 14, [-10.0, -8.0 + seed, -3.0])
    kept = {"world": "guess-my-city", "method": "ArCHer", "sampled": -6.5}
    tables.write_results(args.out / "compare_summary.csv", [kept])
    table = compare.report(args)
    assert "| start |  |  | -13.00 | -9.75 | - |" in table
    assert "| start: temperature 0.5 |  |  | -9.50 | - | - |" in table
    assert "| PPO, 64 an iteration | `--rollouts 64` | 3 | - | - | -6.33 ± 0.83 | 192; 30 |" in table
    summary = tables.read_results(args.out / "compare_summary.csv")
    assert kept in summary and len(summary) == 4, "a world without runs keeps its lines"
    methods = [line["method"] for line in summary]
    assert methods == ["start", "start: temperature 0.5", "PPO, 64 an iteration", "ArCHer"]
    assert compare.report(args) == table and len(tables.read_results(args.out / "compare_summary.csv")) == 4
    path = args.out / f"compare_{world}.csv"
    rows = tables.read_results(path)
    assert len(rows) == 9 and rows[4]["seed"] == 2 and rows[4]["return"] == -6.0
    (mean, *edges) = plot.compared(rows, "dialogues", 1)[1][1:]
    assert mean == -6.0 and edges == pytest.approx([-6 - 4.30 / 3**0.5, -6 + 4.30 / 3**0.5])
    plot.main(plot.Args(runs=[path], out=args.out / "a.svg", title="the game"))
    text = (args.out / "a.svg").read_text()
    assert "the game by dialogues" in text and "the game by CPU-seconds" in text
    with pytest.raises(SystemExit):
        plot.main(plot.Args(runs=[path], out=args.out / "a.svg", methods=("DQN",)))
    shown = compare.dry(replace(args, methods=("PPO, 64 an iteration", "ArCHer"), seeds=(1, 4)))
    assert shown.splitlines()[0] == f"after tuning   ArCHer in {world}, 2 seeds"
    assert "--seed 4 " in shown and "--seed 1 " not in shown, "the CSVs have seed 1"
    assert shown.splitlines()[-1].startswith("5 are to be run")


def recorded(
    method: str, seed: int, returns: list[float], sampled: float, greedy: float | None
) -> list[dict]:
    """The lines of a run in the CSV of curves; with an evaluation at its end."""
    points = a_curve(returns)
    points[-1]["eval_sampled"] = sampled
    if greedy is not None:
        points[-1]["eval_greedy"] = greedy
    return [{"method": method, "seed": seed, "run": f"{method} {seed}"} | point for point in points]


def test_others_are_paired_with_ppo_by_seed(args):
    lines = []
    for seed, end in ((1, -6.0), (2, -8.0), (3, -7.0)):  # PPO ends at -7 on the mean
        lines += recorded("PPO", seed, [-10.0, -10.0, -10.0, -8.0], end, end)
    lines += [line | {"method": "PPO, 16 an iteration"} for line in lines]
    for seed, end in ((3, -5.0), (1, -5.0)):  # in another order, without a second seed
        lines += recorded("ArCHer", seed, [-9.0, -7.0, -7.0, -7.0 - seed], end, end - 1)
    lines += recorded("CHAI", 1, [-9.0, -9.0, -9.0, -9.0], -9.0, None)
    tables.write_results(args.out / f"compare_{compare.FULL}.csv", lines)
    assert compare.paired(args, compare.FULL).splitlines() == [
        "| less PPO | seeds | sampled | greedy | area | dialogues to -7.00 |",
        "|---|---:|---:|---:|---:|---:|",
        "| CHAI | 1 | -3.00 | - | 0.50 | never |",
        "| PPO | 3 |  |  |  | never, never, never |",
        "| ArCHer | 2 | 1.50 (1.00, 2.00) | 0.50 (0.00, 1.00) | 1.50 (1.75, 1.25) | never, never |",
    ]
    lines += recorded("Filtered BC", 2, [-7.0, -7.0, -7.0, -7.0], -9.0, None)
    tables.write_results(args.out / f"compare_{compare.FULL}.csv", lines)
    assert "| Filtered BC | 1 | -1.00 | - | 2.50 | 512 |" in compare.report(args)
    assert compare.paired(args, compare.SUBSET) == "", "nothing was run there"
    tables.write_results(
        args.out / f"compare_{compare.FULL}.csv", [line for line in lines if line["method"] != "PPO"]
    )
    assert compare.paired(args, compare.FULL) == ""


def curves_of(args, world: str) -> list[dict]:
    """The lines of a world's CSV of curves."""
    return tables.read_results(args.out / f"compare_{world}.csv")


def test_a_row_that_is_not_made_anew_is_kept(args):
    """As that of --other without --other, or one for which a setting more is to be tried."""
    world = compare.FULL
    for name in ("ArCHer from --other", "ArCHer"):
        line = {"method": name, "seed": 1, "run": "gone", "iteration": 1, "dialogues": 64, "return": -5.0}
        lines = curves_of(args, world)
        tables.write_results(args.out / f"compare_{world}.csv", [*lines, line])
    cell = compare.cell_of(args, world, "PPO, 64 an iteration", "", 1)
    a_run(cell, cell.iterations, [-10.0])
    for _ in range(2):
        compare.report(args)
        found = [line["method"] for line in curves_of(args, world)]
        assert sorted(set(found)) == ["ArCHer", "ArCHer from --other", "PPO, 64 an iteration"]
        assert len(found) == 3


@pytest.mark.parametrize("per", [64, 32])
def test_a_buffer_of_three_iterations(per, args):
    words = compare.cell_of(args, SUBSET, "Monte Carlo", f"--rollouts {per}", 1).words()
    assert compare.last(words, "--buffer-size", 0) == 3 * per


def test_a_row_of_which_a_seed_diverged_is_none(args):
    """A mean over the others would be better than the method."""
    world = compare.FULL
    cells = [compare.cell_of(args, world, "PPO, 64 an iteration", "", seed) for seed in (1, 2)]
    for cell in cells:
        a_run(cell, cell.iterations, [-10.0])
    assert "PPO, 64 an iteration" in compare.report(args)
    (cells[1].folder / "diverged.txt").touch()
    assert "PPO, 64 an iteration" not in compare.report(args)
    assert curves_of(args, world) == [], "nor is it drawn or paired"


def test_a_run_of_loop_counts_once_it_is_evaluated(args):
    """Else a stop between both would leave a row without an end for good."""
    world = compare.FULL
    cells = compare.tuning_cells(args, world, "LOOP")
    setting = next(iter(cells))
    for cell in cells.values():
        a_run(cell, cell.iterations, [-10.0])
    cell = compare.cell_of(args, world, "LOOP", setting, 1)
    a_run(cell, cell.iterations, [-10.0])
    compare.report(args)
    args = replace(args, methods=("LOOP",), seeds=(1,))
    assert curves_of(args, world) == [] and compare.missing(args, world) == [cell]
    judged = a_run(cell.judge(), 0)
    (judged / "summary.json").write_text('{"iteration": 0, "eval_return": -9.0, "eval_return_greedy": -8.0}')
    assert "| -9.00 | -8.00 |" in compare.report(args)
    assert curves_of(args, world)[-1]["eval_greedy"] == -8.0 and compare.missing(args, world) == []


def test_what_the_csvs_have_is_not_run_again(args):
    """The runs' folders may be gone, as on another machine: the CSVs alone lead to the same table."""
    world = compare.FULL
    args = replace(args, worlds=(world,), methods=("PPO", "PPO, 8 an iteration"), seeds=(1, 2))
    best, *others = compare.tuning_cells(args, world, "PPO").values()
    a_run(best, best.iterations, [-9.0, -8.0, -7.0])
    for cell in others:
        a_run(cell, cell.iterations, [-10.0, -9.0, -8.0])
    compare.start_file(args, world).write_text("temperature 1  return -13.0 ±\ngreedy  return -9.0 ±\n")
    for seed in args.seeds:
        a_run(compare.cell_of(args, world, "PPO", compare.PPO[0], seed), best.iterations, [-8.0, -7.0, -5.0])
    table = compare.report(args)
    before = {path.name: path.read_bytes() for path in args.out.glob("*.csv")}
    assert len(before) == 3 and compare.missing(args, world) == []
    elsewhere = replace(args, runs=args.runs / "elsewhere")
    assert compare.missing(elsewhere, world) == []
    compare.run_start(elsewhere, world, None)
    compare.run_world(elsewhere, world)
    assert compare.FAILED == [] and compare.report(elsewhere) == table
    assert {path.name: path.read_bytes() for path in args.out.glob("*.csv")} == before
    points = [(line["method"], line["seed"], line["iteration"]) for line in curves_of(args, world)]
    assert len(set(points)) == len(points) > 0
    more = compare.missing(replace(elsewhere, seeds=(1, 2, 3)), world)
    assert [cell.seed for cell in more] == [3], "two rows share the runs"
    path = args.out / "compare_tuning.csv"
    tables.write_results(path, tables.read_results(path)[1:])
    assert [cell.folder.name for cell in compare.missing(elsewhere, world)] == [best.folder.name]


def test_another_start_needs_another_folder(args, capsys):
    with pytest.raises(SystemExit):
        compare.check(replace(args, start="checkpoints/other", out=compare.RESULTS))
    assert "--out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [{"worlds": ("moon",)}, {"methods": ("DQN",)}, {"jobs": 0}, {"seeds": (11,)}]
)
def test_bad_input_gets_one_line(args, wrong, capsys):
    with pytest.raises(SystemExit):
        compare.main(replace(args, **wrong))
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_dialogues_are_counted_by_the_defaults_of_the_scripts():
    """A script without --rollouts plays as many as its own default says."""
    for script, module in (("archer", archer), ("variants", archer), ("ppo", ppo), ("chai", chai)):
        assert compare.dialogues_of(script, []) == module.Args.rollouts
    assert compare.dialogues_of("filtered_bc", []) == filtered_bc.Args.rollouts
    loop = loop_ppo.Args
    assert compare.dialogues_of("loop_ppo", []) == loop.tasks * loop.rollouts


# --------------------------------------------------------------------------------------- variants


def test_D4_heads_start_near_zero_and_only_there():
    torch.manual_seed(0)
    with variants.exchanged("D4"):
        assert archer.mlp(2, 4, -9.0)[-1].bias.item() == 0.0
    assert archer.mlp(2, 4, -9.0)[-1].bias.item() == -9.0


def test_D7_each_update_of_the_critic_samples_for_its_own_batch(monkeypatch):
    told = []
    monkeypatch.setattr(archer, "with_fresh", lambda dialogues, *rest: [told.append(dialogues), "fresh"])
    monkeypatch.setattr(archer, "critic_update", lambda critic, target, optimizer, dialogues, args: dialogues)
    monkeypatch.setattr(archer, "actor_update", lambda dialogues: archer.with_fresh(dialogues))
    args = archer.Args()
    with variants.exchanged("D7"):
        assert archer.with_fresh("pool", "actor", args, None) == "pool" and told == []
        assert archer.critic_update(None, None, None, "batch 1", args)[1] == "fresh"
        assert archer.critic_update(None, None, None, "batch 2", args)[1] == "fresh"
        assert archer.actor_update("batch 3")[1] == "fresh", "the actor samples as before"
    assert told == ["batch 1", "batch 2", "batch 3"]


def test_D8_the_baseline_reads_with_a_network_of_its_own(tmp_path, monkeypatch):
    """It learns, is saved and comes back."""
    monkeypatch.setattr(variants, "BASELINE_UPDATES", 4)
    small = {"rollouts": 2, "warmup": 0, "critic_updates": 1, "critic_batch": 2, "critic_pool": 2}
    small |= {"actor_updates": 2, "actor_batch": 2, "eval_episodes": 1, "iterations": 1}
    small |= {"baseline": True, "fresh": True}
    args = archer.Args(
        env=SUBSET, runs=str(tmp_path), actor=str(make_checkpoint(SUBSET, tmp_path / "m")), **small
    )
    losses = []
    loss_of = archer.baseline_loss
    monkeypatch.setattr(archer, "baseline_loss", lambda *given: losses.append(given) or loss_of(*given))
    with variants.exchanged("D8"):
        archer.main(args)
    assert len(losses) == 4, "one of each two is archer.py's own"
    (run,) = tmp_path.glob("*__archer__*")
    modules = torch.load(run / "checkpoint.pt", weights_only=True)["modules"]
    start = models.load(transformers.AutoModelForCausalLM, args.actor, args)
    assert any(not torch.equal(value, modules["network"][name]) for name, value in start.state_dict().items())
    with variants.exchanged("D8"):
        archer.main(replace(args, resume=str(run), iterations=2))
    again = torch.load(run / "checkpoint.pt", weights_only=True)["modules"]["network_optimizer"]
    steps = [state["step"].item() for state in again["state"].values()]
    assert set(steps) == {4.0}, "two in each iteration, and the count goes on"


def test_D9_q_is_a_network_of_its_own(tmp_path):
    folder = make_checkpoint(SUBSET, tmp_path / "m")
    actor = models.load(transformers.AutoModelForCausalLM, str(folder), archer.Args())
    body = actor.base_model
    body.tokenizer = actor.tokenizer
    played = [{"observations": ["Questions:\n", ""], "actions": ["Is it big?"], "rewards": [-1.0]}]
    torch.manual_seed(0)
    with variants.exchanged("D9"):
        critic = archer.Critic(body, -3.0, "float32")
    v_12, q_12 = critic(played)
    q_12.sum().backward()
    assert all(p.grad is None or p.grad.abs().max() < 1e-6 for p in critic.v_heads.parameters())
    assert (q_12 + 3).abs().max() < 2 and (q_12 - v_12).abs().max() > 1e-4


def test_mc_both_learn_the_return_that_followed():
    dialogues = [{"rewards": [-1.0, -2.0]}, {"rewards": [-4.0]}]
    target = torch.nn.Module()
    target.body = torch.nn.Linear(1, 1)
    target.body.device = "cpu"
    with variants.exchanged("mc"):
        q_N2, v_N2 = archer.critic_targets(target, dialogues, 0.5)
    assert q_N2.tolist() == v_N2.tolist() == [[-2.0, -2.0], [-2.0, -2.0], [-4.0, -4.0]]


def test_iql_v_tends_to_the_best_of_the_data():
    """The minimiser of the expectile 0.9 of {0, 1} is 0.9."""
    q_N2 = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    v = torch.tensor([0.9, 0.9], requires_grad=True)
    with variants.exchanged("iql"):
        archer.value_loss(v.expand(2, 2), q_N2).backward()
    assert v.grad.abs().max() < 1e-6


def test_iql_the_critic_reads_what_was_said_and_the_actor_what_it_would_say(monkeypatch):
    dialogues = [{"observations": ["Questions:\n", ""], "actions": ["Is it big?"], "rewards": [-1.0]}]
    monkeypatch.setattr(archer, "with_fresh", lambda *_: "sampled")
    monkeypatch.setattr(archer, "actor_update", lambda *_: archer.with_fresh())
    with variants.exchanged("iql"):
        (read,) = archer.with_fresh(dialogues, None, None, None)
        assert archer.actor_update() == "sampled"
    assert read["fresh"] == ["Is it big?"]


@pytest.mark.parametrize(("variant", "lam"), [("gae", 0.95), ("td", 0.0)])
def test_gae_advantages_are_sums_of_later_surprises(variant, lam, monkeypatch):
    """Of each dialogue on its own; an update gets them in micro-batches, in order."""
    args = archer.Args(env=SUBSET, gamma=0.5, micro_batch=2)
    dialogues = [{"rewards": [-1.0, -2.0, 0.5]}, {"rewards": [-4.0]}, {"rewards": [0.25, 3.0]}]

    def critic(batch):
        """V of turn n is n: the twins say one more and one less."""
        v_N = torch.tensor([float(n) for dialogue in batch for n in range(len(dialogue["rewards"]))])
        return torch.stack([v_N + 1, v_N - 1], -1), None

    expected = []
    for dialogue in dialogues:
        n = len(dialogue["rewards"])
        values = [*range(n), 0.0]
        surprises = [dialogue["rewards"][t] + 0.5 * values[t + 1] - values[t] for t in range(n)]
        for m in range(n):
            expected.append(sum((0.5 * lam) ** t * d for t, d in enumerate(surprises[m:])))

    def update(actor, ref_model, critic, baseline, optimizer, dialogues, args, rng):
        parts = models.micro_batches(dialogues, args.micro_batch)
        return [archer.advantages("Q", "V") for _ in parts]

    monkeypatch.setattr(archer, "actor_update", update)
    with variants.exchanged(variant):
        first, second = archer.actor_update(None, None, critic, None, None, dialogues, args, None)
    assert (len(first), len(second)) == (4, 2)
    assert torch.cat([first, second]).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the first word must be one of"),
        (["D8", "--baseline"], "give --baseline and --fresh"),
        (["D8", "--fresh"], "give --baseline and --fresh"),
        (["td", "--fresh"], "leave --fresh out"),
        (["td", "--resume", "/no/such"], "/no/such"),
    ],
)
def test_a_variant_that_is_none_is_one_line(words, said):
    with pytest.raises(RuntimeError, match=said):
        compare.call(["benchmarks/variants.py", *words])


@pytest.mark.slow
def test_the_quick_comparison():
    """.ci/run has it, too: every command of the table, the CSVs and the pictures."""
    command = [sys.executable, ROOT / "benchmarks/compare.py", "--quick", "--worlds", SUBSET]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]
    for name, row in compare.ROWS.items():
        assert f"| {name} |" in result.stdout or SUBSET not in row.worlds
