"""Makes a folder that the package appworld takes for its data:
tasks of ours in which one makes and reads notes.

    venv-appworld/bin/python tests/worlds/appworld_data.py FOLDER

Documents of the calls and empty databases come from the package; people, notes, tasks, tests and solutions
are ours. test_appworld.py runs this, in the package's own environment: nothing here is imported by
anything.
"""

import json
import os
import sys
from pathlib import Path

SCENARIOS = {
    "train": ["made001", "read002"],
    "dev": ["made003"],
    "test_normal": ["read004"],
    "test_challenge": ["made005"],
}
ME = {
    "first_name": "Ida",
    "last_name": "Vogel",
    "email": "ida.vogel@example.com",
    "phone_number": "5550001234",
}
PASSWORD = "not-a-secret"
NOW = "2023-05-18T12:00:00"
TESTS = ["the answer is right", "the note is there", "nothing else has changed"]

LOGIN = f"""\
# A solution, in the form in which the package has its own.
def solution(apis, requester):
    passwords = {{row["account_name"]: row["password"] for row in apis.supervisor.show_account_passwords()}}
    password = passwords["simple_note"]
    token = apis.simple_note.login(username="{ME["email"]}", password=password)["access_token"]
"""
MAKE = """\
    apis.simple_note.create_note(title="WORD", content="made", access_token=token)
    apis.supervisor.complete_task()
"""
READ = """\
    (found,) = apis.simple_note.search_notes(query="WORD", access_token=token)
    note = apis.simple_note.show_note(note_id=found["note_id"], access_token=token)
    apis.supervisor.complete_task(answer=note["content"])
"""
EVALUATION = f"""\
import json

def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    added, updated, removed = models.changed_records("simple_note.Note")
    (task,) = models.end.supervisor.Task.all()
    with test("{TESTS[0]}"):
        test.answer(json.loads(task.answer), ground_truth_answer)
    with test("{TESTS[1]}"):
        test.case([note.title for note in added], "==", private_data["titles"])
    with test("{TESTS[2]}"):
        test.case(len(updated) + len(removed), "==", 0)
"""


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if path.suffix != ".json" else json.dumps(content), encoding="utf-8")


def make_base(data: Path, apps: list[str]) -> None:
    """What all tasks share: the documents of the calls, as files and as rows,
    and databases without other rows."""
    from appworld.api_docs import prepare_api_docs
    from appworld.collections.models import ModelCollection

    models = ModelCollection.load(":memory:base", ":memory:base", apps, create_db=True)
    for app in apps[1:]:  # the first is that of the administrator, which has no documents
        docs = prepare_api_docs(app)
        write(
            data / "api_docs/standard" / f"{app}.json",
            {doc["api_name"]: doc | {"canary_string": ""} for doc in docs},
        )
        for doc in docs:
            models.api_docs.ApiDoc(
                **{"app_name_" if key == "app_name" else key: doc[key] for key in doc}
            ).save()
    (data / "base_dbs").mkdir()
    models.save(str(data / "base_dbs"), app_names=list(apps), delete_if_exists=True)


def make_task(data: Path, apps: list[str], id: str) -> None:
    """A task: what is asked for, rows of its own, and what it is graded by."""
    from appworld.collections.models import ModelCollection
    from appworld.common.constants import DB_VERSION

    folder, word, asks = data / "tasks" / id, f"word{id[6:].replace('_', '')}", id.startswith("read")
    instruction = f"What does my note {word} say?" if asks else f"Make a note with the title {word}."
    write(
        folder / "specs.json",
        {"instruction": instruction, "supervisor": ME, "datetime": NOW, "db_version": DB_VERSION},
    )
    # whether idling passes the test
    labels = ["no_op_fail", "no_op_pass" if asks else "no_op_fail", "no_op_pass"]
    counts = dict.fromkeys(("num_apps", "num_apis", "num_api_calls", "num_solution_code_lines"), 1)
    truth = {
        "metadata.json": {"difficulty": 1 + asks, "mode": "full"} | counts,
        "public_data.json": {},
        "private_data.json": {"titles": [] if asks else [word]},
        "answer.json": f"blue {word}" if asks else None,
        "test_data.json": [
            {"requirement": test, "label": label} for test, label in zip(TESTS, labels, strict=True)
        ],
        "evaluation.py": EVALUATION,
        "compiled_solution.py": LOGIN + (READ if asks else MAKE).replace("WORD", word),
    }
    for name, content in truth.items():
        write(folder / "ground_truth" / name, content)

    models = ModelCollection.load(f":memory:task_input-{id}", str(data / "base_dbs"), apps)
    models.restart_db_tracker()
    models.admin.MainUser(**ME, birthday="1990-01-01").save()
    models.supervisor.Supervisor(**ME, birthday="1990-01-01").save()
    models.supervisor.Task(supervisor_id=1, instruction=instruction).save()
    models.supervisor.AccountPassword(supervisor_id=1, account_name="simple_note", password=PASSWORD).save()
    user = {key: value for key, value in ME.items() if key != "phone_number"}
    models.simple_note.User(**user, password=PASSWORD, verified=True).save()
    if asks:
        models.simple_note.Note(user_id=1, title=word, content=f"blue {word}").save()
    models.save(
        str(folder / "dbs"), "changes", app_names=list(apps), delete_if_exists=True, save_model_hashes=True
    )
    models.close()


def main(root: Path) -> None:
    os.environ["APPWORLD_ROOT"] = str(root)  # before the package is imported
    from appworld.apps import get_all_apps
    from appworld.apps.api_lib import set_local_date_and_time
    from appworld.common.datetime import DateTime

    apps, data = get_all_apps(), root / "data"
    data.mkdir(parents=True)
    set_local_date_and_time(DateTime.fromisoformat(NOW))
    make_base(data, apps)
    for split, scenarios in SCENARIOS.items():
        ids = [f"{scenario}_{n}" for scenario in scenarios for n in (1, 2, 3)]
        write(data / "datasets" / f"{split}.txt", "\n".join(ids) + "\n")
        for id in ids:
            make_task(data, apps, id)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
