"""The tasks of envs/apps.py: a scenario is a sentence, what it asks for in SQL, and how an expert solves it.

    @scenario(
        "mail-delete", 2, "mail",                                            # name, difficulty 1-3, the apps it needs
        "Delete the mail with the subject {subject}.",
        draw="select subject from mail",                                     # one row of this, drawn, is the task
        changes="delete from mail where subject = :subject",                 # the rows that must be other afterwards
    )
    def _(subject):                                                          # turn by turn: yields code, is sent
        mails = yield f"apis.mail.search(subject={subject!r})"               # what the code printed, as an object
        yield f"apis.mail.delete(id={mails[0]['id']})"

A question has `answer`, a select, instead of or beside `changes`, and the solution returns what it answers. `fresh`
draws new values beside the row: {"amount": "number"} or words of a list of apps.toml.
"""

from collections.abc import Callable, Generator
from typing import NamedTuple


class Scenario(NamedTuple):
    name: str
    difficulty: int
    apps: str
    sentence: str
    draw: str
    fresh: dict[str, str]
    changes: list[str]
    answer: str | None
    challenge: bool
    solve: Callable[..., Generator]


SCENARIOS: list[Scenario] = []


def scenario(name, difficulty, apps, sentence, draw="select 1", fresh=None, changes=(), answer=None, challenge=False):
    """Adds a scenario whose solution is the decorated function."""

    def add(solve):
        statements = [changes] if isinstance(changes, str) else list(changes)
        SCENARIOS.append(
            Scenario(name, difficulty, apps, sentence, draw, fresh or {}, statements, answer, challenge, solve)
        )
        return solve

    return add


# -------------------------------------------------------------------------------------------- phone


@scenario(
    "phone-number", 1, "phone", "What is the phone number of {name}?",
    draw="select name from contact", answer="select phone from contact where name = :name",
)  # fmt: skip
def _(name):
    contacts = yield f"apis.phone.find(name={name!r})"
    return contacts[0]["phone"]


@scenario(
    "phone-text", 2, "phone", "Text {name}: {words}.",
    draw="select name from contact", fresh={"words": "words"},
    changes="insert into text (phone, words) select phone, :words from contact where name = :name",
)  # fmt: skip
def _(name, words):
    contacts = yield f"apis.phone.find(name={name!r})"
    yield f"apis.phone.text(phone={contacts[0]['phone']}, words={words!r})"


@scenario(
    "phone-change", 2, "phone", "The new phone number of {name} is {phone}.",
    draw="select name from contact", fresh={"phone": "number"},
    changes="update contact set phone = :phone where name = :name",
)  # fmt: skip
def _(name, phone):
    contacts = yield f"apis.phone.find(name={name!r})"
    yield f"apis.phone.change(id={contacts[0]['id']}, phone={phone})"


@scenario(
    "phone-delete", 2, "phone", "Delete my contact {name}.",
    draw="select name from contact", changes="delete from contact where name = :name",
)  # fmt: skip
def _(name):
    contacts = yield f"apis.phone.find(name={name!r})"
    yield f"apis.phone.delete(id={contacts[0]['id']})"


@scenario(
    "phone-count", 3, "phone", "How many of my contacts are {kind}?",
    draw="select distinct kind from contact", answer="select count(*) from contact where kind = :kind",
)  # fmt: skip
def _(kind):
    count = yield f"sum(c['kind'] == {kind!r} for p in range(9) for c in apis.phone.list(page=p))"
    return count


# -------------------------------------------------------------------------------------------- mail


@scenario(
    "mail-star-newest", 2, "mail", "Star the newest mail from {sender}.",
    draw="select sender from mail group by sender having count(*) > 1",
    changes="update mail set starred = 1 where id = (select id from mail where sender = :sender order by day desc)",
)  # fmt: skip
def _(sender):
    mails = yield f"apis.mail.find(sender={sender!r})"
    yield f"apis.mail.star(id={mails[0]['id']})"


@scenario(
    "mail-delete", 2, "mail", "Delete the mail with the subject {subject}.",
    draw="select subject from mail", changes="delete from mail where subject = :subject",
)  # fmt: skip
def _(subject):
    mails = yield f"apis.mail.search(subject={subject!r})"
    yield f"apis.mail.delete(id={mails[0]['id']})"


@scenario(
    "mail-sender", 1, "mail", "Who sent me the mail {subject}?",
    draw="select subject from mail", answer="select sender from mail where subject = :subject",
)  # fmt: skip
def _(subject):
    mails = yield f"apis.mail.search(subject={subject!r})"
    return mails[0]["sender"]


@scenario(
    "mail-read", 2, "mail", "What does the mail {subject} say?",
    draw="select subject from mail", answer="select words from mail where subject = :subject",
)  # fmt: skip
def _(subject):
    mails = yield f"apis.mail.search(subject={subject!r})"
    mails = yield f"apis.mail.show(id={mails[0]['id']})"
    return mails[0]["words"]


# -------------------------------------------------------------------------------------------- notes


@scenario(
    "note-add", 1, "notes", "Write a note {title} that says {words}.",
    fresh={"title": "titles", "words": "words"},
    changes="insert into note (title, words) values (:title, :words)",
)  # fmt: skip
def _(title, words):
    yield f"apis.notes.add(title={title!r}, words={words!r})"


@scenario(
    "note-read", 2, "notes", "What does my note {title} say?",
    draw="select title from note", answer="select words from note where title = :title",
)  # fmt: skip
def _(title):
    notes = yield f"apis.notes.find(title={title!r})"
    notes = yield f"apis.notes.show(id={notes[0]['id']})"
    return notes[0]["words"]


@scenario(
    "note-delete", 2, "notes", "Delete my note {title}.",
    draw="select title from note", changes="delete from note where title = :title",
)  # fmt: skip
def _(title):
    notes = yield f"apis.notes.find(title={title!r})"
    yield f"apis.notes.delete(id={notes[0]['id']})"


# -------------------------------------------------------------------------------------------- pay


def log_in(app: str):
    """The turns of a login; every solution with an app that asks for one begins with it."""
    passwords = yield "apis.supervisor.show_passwords()"
    yield f"apis.{app}.login(password={next(p['password'] for p in passwords if p['app'] == app)})"


@scenario(
    "pay-balance", 2, "pay", "How much money is in my account?", answer="select balance from account",
)  # fmt: skip
def _():
    yield from log_in("pay")
    rows = yield "apis.pay.balance()"
    return rows[0]["balance"]


@scenario(
    "pay-send", 3, "pay phone", "Send {amount} to {name}.",
    draw="select name from contact", fresh={"amount": "amount"},
    changes=["update account set balance = balance - :amount",
             "insert into transfer (name, amount) values (:name, :amount)"],
)  # fmt: skip
def _(amount, name):
    yield from log_in("pay")
    contacts = yield f"apis.phone.find(name={name!r})"
    yield f"apis.pay.send(id={contacts[0]['id']}, amount={amount})"


@scenario(
    "pay-deny", 3, "pay", "Deny the request of {name}.", challenge=True,
    draw="select name from request where state = 'open'",
    changes="update request set state = 'denied' where name = :name and state = 'open'",
)  # fmt: skip
def _(name):
    yield from log_in("pay")
    requests = yield "apis.pay.requests()"
    yield f"apis.pay.deny(id={next(r['id'] for r in requests if r['name'] == name)})"
