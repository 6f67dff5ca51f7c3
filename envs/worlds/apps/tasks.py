"""The tasks of envs/worlds/apps. A scenario is a sentence, what it asks for in SQL,
and how an expert goes about it.

    @scenario(
        "mail-delete", 2, "mail",                          # its name, difficulty 1 to 3, the apps it needs
        "Delete the mail with the subject {subject}.",
        draw="select subject from mail",                            # a row of this, drawn, fills the sentence
        changes="delete from mail where subject = :subject",  # what is to be changed, seen from the database
    )
    def _(subject):                                        # the solution: yields code, is sent what it prints
        mails = yield f"apis.mail.search(subject={subject!r})"
        yield f"apis.mail.delete(id={mails[0]['id']})"

A question has `answer`, a select, in the place of `changes`, and its solution returns what it has found.
`fresh` fills the sentence with what is not in the database: a word of a list of apps.toml, "phone",
"amount", "day", "hour" or "level", or "shop", which of the apps is the shop. `me` and `today` are known to
every statement and solution that names them. To add a scenario, write another one here;
tests/worlds/test_apps.py says if it is ambiguous or its solution wrong.
"""

import re
from collections.abc import Callable, Generator
from typing import NamedTuple


class Scenario(NamedTuple):
    """A kind of task: a sentence with blanks, and how it is solved. The fields are those of `scenario`.

    Three tasks that fill the blanks differently make one of the scenarios that envs/worlds/apps numbers.
    """

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


def scenario(
    name, difficulty, apps, sentence, draw="select 1", fresh=None, changes=(), answer=None, challenge=False
):
    """Adds a scenario; the decorated function is its solution.

    `challenge`: for the split test-challenge only.
    """

    def add(solve):
        statements = [changes] if isinstance(changes, str) else list(changes)
        fields = name, difficulty, apps, sentence, draw, fresh or {}, statements, answer, challenge, solve
        SCENARIOS.append(Scenario(*fields))
        return solve

    return add


# ---------------------------------------------------------------------------------------------- phone


@scenario(
    "phone-number", 1, "phone", "What is the phone number of {name}?",
    draw="select name from contact", answer="select phone from contact where name = :name",
)  # fmt: skip
def _(name):
    contacts = yield f"apis.phone.find(name={name!r})"
    return contacts[0]["phone"]


@scenario(
    "phone-whose", 1, "phone", "Whose phone number is {phone}?",
    draw="select phone from contact", answer="select name from contact where phone = :phone",
)  # fmt: skip
def _(phone):
    contacts = yield f"apis.phone.who(phone={phone})"
    return contacts[0]["name"]


@scenario(
    "phone-text", 2, "phone", "Text {name} the word {words}.",
    draw="select name from contact", fresh={"words": "words"},
    changes="insert into message (phone, words) select phone, :words from contact where name = :name",
)  # fmt: skip
def _(name, words):
    contacts = yield f"apis.phone.find(name={name!r})"
    yield f"apis.phone.text(phone={contacts[0]['phone']}, words={words!r})"


@scenario(
    "phone-change", 2, "phone", "{name} has a new phone number, {phone}. Change it.",
    draw="select name from contact", fresh={"phone": "phone"},
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
    "phone-text-me", 2, "phone", "Text {name} my name.",
    draw="select name from contact",
    changes="insert into message (phone, words) select phone, :me from contact where name = :name",
)  # fmt: skip
def _(name, me):
    contacts = yield f"apis.phone.find(name={name!r})"
    yield f"apis.phone.text(phone={contacts[0]['phone']}, words={me!r})"


@scenario(
    "phone-count", 3, "phone", "How many of my contacts are a {kind}?",
    draw="select distinct kind from contact", answer="select count(*) from contact where kind = :kind",
)  # fmt: skip
def _(kind):
    count = yield f"sum(c['kind'] == {kind!r} for p in range(5) for c in apis.phone.list(page=p))"
    return count


@scenario(
    "phone-text-kind", 3, "phone", "Text every {kind} the word {words}.",
    draw="select kind from contact group by kind having count(*) between 2 and 4", fresh={"words": "words"},
    changes="insert into message (phone, words) select phone, :words from contact where kind = :kind",
)  # fmt: skip
def _(kind, words):
    phones = yield f"[c['phone'] for p in range(5) for c in apis.phone.list(page=p) if c['kind'] == {kind!r}]"
    yield f"for phone in {phones}: apis.phone.text(phone=phone, words={words!r})"


# ----------------------------------------------------------------------------------------------- mail


@scenario(
    "mail-sender", 1, "mail", "Who sent me the mail {subject}?",
    draw="select subject from mail", answer="select sender from mail where subject = :subject",
)  # fmt: skip
def _(subject):
    mails = yield f"apis.mail.search(subject={subject!r})"
    return mails[0]["sender"]


@scenario(
    "mail-last", 1, "mail", "On which day did {sender} last send me a mail?",
    draw="select distinct sender from mail", answer="select max(day) from mail where sender = :sender",
)  # fmt: skip
def _(sender):
    mails = yield f"apis.mail.find(sender={sender!r})"
    return mails[0]["day"]


@scenario(
    "mail-read", 2, "mail", "What does the mail {subject} say?",
    draw="select subject from mail", answer="select words from mail where subject = :subject",
)  # fmt: skip
def _(subject):
    mails = yield f"apis.mail.search(subject={subject!r})"
    mails = yield f"apis.mail.show(id={mails[0]['id']})"
    return mails[0]["words"]


@scenario(
    "mail-delete", 2, "mail", "Delete the mail with the subject {subject}.",
    draw="select subject from mail", changes="delete from mail where subject = :subject",
)  # fmt: skip
def _(subject):
    mails = yield f"apis.mail.search(subject={subject!r})"
    yield f"apis.mail.delete(id={mails[0]['id']})"


@scenario(
    "mail-star", 2, "mail", "Star the newest mail from {sender}.",
    draw="select sender from mail group by sender having count(*) > 1",
    changes="update mail set starred = 1 where sender = :sender and "
            "day = (select max(day) from mail where sender = :sender)",
)  # fmt: skip
def _(sender):
    mails = yield f"apis.mail.find(sender={sender!r})"
    yield f"apis.mail.star(id={mails[0]['id']})"


@scenario(
    "mail-send", 2, "mail phone", "Send {name} a mail with the subject {subject}.",
    draw="select name from contact", fresh={"subject": "title"},
    changes="insert into sent (name, subject) values (:name, :subject)",
)  # fmt: skip
def _(name, subject):
    contacts = yield f"apis.phone.find(name={name!r})"
    yield f"apis.mail.send(to={contacts[0]['id']}, subject={subject!r})"


@scenario(
    "mail-unread", 3, "mail", "How many mails from {sender} are unread?",
    draw="select distinct sender from mail",
    answer="select count(*) from mail where sender = :sender and not read",
)  # fmt: skip
def _(sender):
    count = yield (
        f"sum(m['sender'] == {sender!r} and not m['read'] for p in range(5) for m in apis.mail.list(page=p))"
    )
    return count


@scenario(
    "mail-read-all", 3, "mail", "Mark all mails from {sender} as read.",
    draw="select sender from mail group by sender having count(*) > 1 and sum(not read) > 1",
    changes="update mail set read = 1 where sender = :sender",
)  # fmt: skip
def _(sender):
    yield f"for m in apis.mail.find(sender={sender!r}): apis.mail.read(id=m['id'])"


# ---------------------------------------------------------------------------------------------- notes


@scenario(
    "note-add", 1, "notes", "Write a note {title} that says {words}.",
    fresh={"title": "title", "words": "words"},
    changes="insert into note (title, words, pinned) values (:title, :words, 0)",
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
    "note-change", 2, "notes", "Make my note {title} say {words}.",
    draw="select title from note", fresh={"words": "words"},
    changes="update note set words = :words where title = :title",
)  # fmt: skip
def _(title, words):
    notes = yield f"apis.notes.find(title={title!r})"
    yield f"apis.notes.change(id={notes[0]['id']}, words={words!r})"


@scenario(
    "note-pin", 2, "notes", "Pin my note {title}.",
    draw="select title from note", changes="update note set pinned = 1 where title = :title",
)  # fmt: skip
def _(title):
    notes = yield f"apis.notes.find(title={title!r})"
    yield f"apis.notes.pin(id={notes[0]['id']})"


@scenario(
    "note-delete", 2, "notes", "Delete my note {title}.",
    draw="select title from note", changes="delete from note where title = :title",
)  # fmt: skip
def _(title):
    notes = yield f"apis.notes.find(title={title!r})"
    yield f"apis.notes.delete(id={notes[0]['id']})"


@scenario(
    "note-text", 3, "notes phone", "Text {name} what my note {title} says.",
    draw="select name, title from contact join note",
    changes="insert into message (phone, words) "
            "select phone, words from contact join note where name = :name and title = :title",
)  # fmt: skip
def _(name, title):
    notes = yield f"apis.notes.find(title={title!r})"
    notes = yield f"apis.notes.show(id={notes[0]['id']})"
    contacts = yield f"apis.phone.find(name={name!r})"
    yield f"apis.phone.text(phone={contacts[0]['phone']}, words={notes[0]['words']!r})"


# ------------------------------------------------------------------------------------------- calendar


@scenario(
    "event-day", 1, "calendar", "On which day is the event {title}?",
    draw="select title from event", answer="select day from event where title = :title",
)  # fmt: skip
def _(title):
    events = yield f"apis.calendar.find(title={title!r})"
    return events[0]["day"]


@scenario(
    "event-hour", 1, "calendar", "At what hour is the event {title}?",
    draw="select title from event", answer="select hour from event where title = :title",
)  # fmt: skip
def _(title):
    events = yield f"apis.calendar.find(title={title!r})"
    return events[0]["hour"]


@scenario(
    "event-with", 1, "calendar", "Whom do I meet at the event {title}?",
    draw="select title from event", answer="select name from event where title = :title",
)  # fmt: skip
def _(title):
    events = yield f"apis.calendar.find(title={title!r})"
    return events[0]["name"]


@scenario(
    "event-add", 1, "calendar", "Add the event {title} on day {day} at hour {hour}.",
    fresh={"title": "title", "day": "day", "hour": "hour"},
    changes="insert into event (title, name, day, hour) values (:title, '', :day, :hour)",
)  # fmt: skip
def _(title, day, hour):
    yield f"apis.calendar.add(title={title!r}, day={day}, hour={hour})"


@scenario(
    "event-today", 1, "calendar", "What is my first event today?",
    draw="select day as today from event", answer="select title from event where day = :today order by hour",
)  # fmt: skip
def _(today):
    events = yield f"apis.calendar.day(day={today})"
    return events[0]["title"]


@scenario(
    "event-move", 2, "calendar", "Move the event {title} to day {day}.",
    draw="select title from event", fresh={"day": "day"},
    changes="update event set day = :day where title = :title",
)  # fmt: skip
def _(title, day):
    events = yield f"apis.calendar.find(title={title!r})"
    yield f"apis.calendar.move(id={events[0]['id']}, day={day})"


@scenario(
    "event-cancel", 2, "calendar", "Cancel the event {title}.",
    draw="select title from event", changes="delete from event where title = :title",
)  # fmt: skip
def _(title):
    events = yield f"apis.calendar.find(title={title!r})"
    yield f"apis.calendar.cancel(id={events[0]['id']})"


@scenario(
    "event-free", 3, "calendar", "Cancel all my events on day {day}.",
    draw="select day from event group by day having count(*) > 1",
    changes="delete from event where day = :day",
)  # fmt: skip
def _(day):
    yield f"for e in apis.calendar.day(day={day}): apis.calendar.cancel(id=e['id'])"


@scenario(
    "event-text", 3, "calendar phone", "Text the word {words} to the one I meet at the event {title}.",
    draw="select title from event", fresh={"words": "words"},
    changes="insert into message (phone, words) "
            "select phone, :words from contact join event using (name) where title = :title",
)  # fmt: skip
def _(words, title):
    events = yield f"apis.calendar.find(title={title!r})"
    contacts = yield f"apis.phone.find(name={events[0]['name']!r})"
    yield f"apis.phone.text(phone={contacts[0]['phone']}, words={words!r})"


# ---------------------------------------------------------------------------------------------- music


@scenario(
    "song-length", 1, "music", "How many seconds is the song {title}?",
    draw="select title from song", answer="select seconds from song where title = :title",
)  # fmt: skip
def _(title):
    songs = yield f"apis.music.find(title={title!r})"
    return songs[0]["seconds"]


@scenario(
    "song-longest", 1, "music", "Which song of {artist} is the longest?",
    draw="select artist from song group by artist having count(*) > 1",
    answer="select title from song where artist = :artist order by seconds desc",
)  # fmt: skip
def _(artist):
    songs = yield f"apis.music.artist(name={artist!r})"
    return songs[0]["title"]


@scenario(
    "song-like", 2, "music", "Like the song {title}.",
    draw="select title from song where not liked", changes="update song set liked = 1 where title = :title",
)  # fmt: skip
def _(title):
    songs = yield f"apis.music.find(title={title!r})"
    yield f"apis.music.like(id={songs[0]['id']})"


@scenario(
    "song-play", 2, "music", "Play the song {title}.",
    draw="select title from song", changes="insert into queue (title) values (:title)",
)  # fmt: skip
def _(title):
    songs = yield f"apis.music.find(title={title!r})"
    yield f"apis.music.play(id={songs[0]['id']})"


@scenario(
    "song-count", 2, "music", "How many songs of {artist} do I have?",
    draw="select distinct artist from song", answer="select count(*) from song where artist = :artist",
)  # fmt: skip
def _(artist):
    count = yield f"len(apis.music.artist(name={artist!r}))"
    return count


@scenario(
    "song-like-all", 3, "music", "Like all songs of {artist}.",
    draw="select artist from song group by artist having sum(not liked) > 1",
    changes="update song set liked = 1 where artist = :artist",
)  # fmt: skip
def _(artist):
    yield f"for s in apis.music.artist(name={artist!r}): apis.music.like(id=s['id'])"


# -------------------------------------------------------------------------------------- files and pay


def log_in(app: str) -> Generator:
    """The turns of a login, with which the solutions of these apps begin."""
    passwords = yield f"apis.supervisor.show_password(app={app!r})"
    yield f"apis.{app}.login(password={passwords[0]['password']})"


@scenario(
    "file-size", 2, "files", "What is the size of the file {title}?",
    draw="select title from file", answer="select size from file where title = :title",
)  # fmt: skip
def _(title):
    yield from log_in("files")
    files = yield f"apis.files.find(title={title!r})"
    return files[0]["size"]


@scenario(
    "file-largest", 2, "files", "Which file in the folder {folder} is the largest?",
    draw="select folder from file group by folder having count(*) > 1",
    answer="select title from file where folder = :folder order by size desc",
)  # fmt: skip
def _(folder):
    yield from log_in("files")
    files = yield f"apis.files.folder(folder={folder!r})"
    return files[0]["title"]


@scenario(
    "file-move", 3, "files", "Move the file {title} to the folder {folder}.",
    draw="select title, f.folder from file join (select distinct folder from file) f where f.folder != "
    "file.folder",
    changes="update file set folder = :folder where title = :title",
)  # fmt: skip
def _(title, folder):
    yield from log_in("files")
    files = yield f"apis.files.find(title={title!r})"
    yield f"apis.files.move(id={files[0]['id']}, folder={folder!r})"


@scenario(
    "file-delete", 3, "files", "Delete the file {title}.",
    draw="select title from file", changes="delete from file where title = :title",
)  # fmt: skip
def _(title):
    yield from log_in("files")
    files = yield f"apis.files.find(title={title!r})"
    yield f"apis.files.delete(id={files[0]['id']})"


@scenario(
    "pay-balance", 2, "pay", "How much money do I have?", answer="select balance from account",
)  # fmt: skip
def _():
    yield from log_in("pay")
    accounts = yield "apis.pay.balance()"
    return accounts[0]["balance"]


@scenario(
    "pay-asked", 2, "pay", "How much money does {name} want from me?",
    draw="select name from request where state = 'open'",
    answer="select amount from request where name = :name and state = 'open'",
)  # fmt: skip
def _(name):
    yield from log_in("pay")
    requests = yield "apis.pay.requests()"
    return next(r["amount"] for r in requests if r["name"] == name)


@scenario(
    "pay-total", 3, "pay", "How much money have I sent to {name} in all?",
    draw="select name from transfer group by name having count(*) > 1",
    answer="select sum(amount) from transfer where name = :name",
)  # fmt: skip
def _(name):
    yield from log_in("pay")
    total = yield f"sum(t['amount'] for t in apis.pay.sent(name={name!r}))"
    return total


@scenario(
    "pay-send", 3, "pay phone", "Send {name} {amount} of my money.",
    draw="select name from contact", fresh={"amount": "amount"},
    changes=["update account set balance = balance - :amount",
             "insert into transfer (name, amount) values (:name, :amount)"],
)  # fmt: skip
def _(name, amount):
    yield from log_in("pay")
    contacts = yield f"apis.phone.find(name={name!r})"
    yield f"apis.pay.send(to={contacts[0]['id']}, amount={amount})"


@scenario(
    "pay-deny", 3, "pay", "Deny what {name} wants from me.",
    draw="select name from request where state = 'open'",
    changes="update request set state = 'denied' where name = :name and state = 'open'",
)  # fmt: skip
def _(name):
    yield from log_in("pay")
    requests = yield "apis.pay.requests()"
    yield f"apis.pay.deny(id={next(r['id'] for r in requests if r['name'] == name)})"


@scenario(
    "pay-accept", 3, "pay", "Pay what {name} wants from me.",
    draw="select name from request where state = 'open'",
    changes=["update account set balance = balance - "
             "(select amount from request where name = :name and state = 'open')",
             "update request set state = 'accepted' where name = :name and state = 'open'"],
)  # fmt: skip
def _(name):
    yield from log_in("pay")
    requests = yield "apis.pay.requests()"
    yield f"apis.pay.accept(id={next(r['id'] for r in requests if r['name'] == name)})"


# -------------------------------------------------------- devices, whose calls are named anew each time


def read_docs(app: str) -> Generator:
    """The documentation of an app, read: {what a call does, in one word: (its name, its parameters)}."""
    docs = yield f"apis.api_docs.show_api_doc(name={app!r})"
    found = [re.match(r"(\w+).*: (\S+)\((.*)\)", doc) for doc in docs]
    return {match[1]: (match[2], match[3].split(", ")) for match in found if match}


def device_level(device, room):
    docs = yield from read_docs(device)
    call, (where,) = docs["finds"]
    devices = yield f"{call}({where}={room!r})"
    return devices[0]["level"]


def device_set(device, room, level):
    docs = yield from read_docs(device)
    call, (where,) = docs["finds"]
    devices = yield f"{call}({where}={room!r})"
    call, (item, value) = docs["sets"]
    yield f"{call}({item}={devices[0]['id']}, {value}={level})"


def device_copy(device, room, other):
    docs = yield from read_docs(device)
    call, (where,) = docs["finds"]
    models = yield f"{call}({where}={other!r})"
    devices = yield f"{call}({where}={room!r})"
    call, (item, value) = docs["sets"]
    yield f"{call}({item}={devices[0]['id']}, {value}={models[0]['level']})"


for challenge in (False, True):
    suffix = "-new" * challenge
    scenario(
        f"device-level{suffix}", 2, "{device}", "What is the level of the {device} in the {room}?",
        draw="select kind as device, room from device",
        answer="select level from device where kind = :device and room = :room", challenge=challenge,
    )(device_level)  # fmt: skip
    scenario(
        f"device-set{suffix}", 2, "{device}", "Set the {device} in the {room} to {level}.",
        draw="select kind as device, room from device", fresh={"level": "level"},
        changes="update device set level = :level where kind = :device and room = :room", challenge=challenge,
    )(device_set)  # fmt: skip
    scenario(
        f"device-copy{suffix}", 3, "{device}",
        "Set the {device} in the {room} to the level of the one in the {other}.",
        draw="select kind as device, a.room, b.room as other from device a join device b using (kind) "
        "where a.level != b.level",
        changes="update device set level = (select level from device where kind = :device and room = :other) "
                "where kind = :device and room = :room", challenge=challenge,
    )(device_copy)  # fmt: skip


# ------------------------------------------- shops, whose name is not in the sentence but among the apps


def shop_price(shop, product):
    docs = yield from read_docs(shop)
    call, (what,) = docs["finds"]
    products = yield f"{call}({what}={product!r})"
    return products[0]["price"]


def shop_stock(shop, product):
    docs = yield from read_docs(shop)
    call, (what,) = docs["finds"]
    products = yield f"{call}({what}={product!r})"
    return products[0]["stock"]


def shop_buy(shop, product, level):
    docs = yield from read_docs(shop)
    call, (what,) = docs["finds"]
    products = yield f"{call}({what}={product!r})"
    call, (item, count) = docs["buys"]
    yield f"{call}({item}={products[0]['id']}, {count}={level})"


def shop_change(shop, product, level):
    docs = yield from read_docs(shop)
    call, (what,) = docs["lists"]
    orders = yield f"{call}({what}={product!r})"
    call, (order, count) = docs["changes"]
    yield f"{call}({order}={orders[0]['id']}, {count}={level})"


def shop_cancel(shop, product):
    docs = yield from read_docs(shop)
    call, (what,) = docs["lists"]
    orders = yield f"{call}({what}={product!r})"
    call, (order,) = docs["cancels"]
    yield f"{call}({order}={orders[0]['id']})"


def shop_text(shop, name, product):
    docs = yield from read_docs(shop)
    call, (what,) = docs["lists"]
    orders = yield f"{call}({what}={product!r})"
    contacts = yield f"apis.phone.find(name={name!r})"
    yield f"apis.phone.text(phone={contacts[0]['phone']}, words={orders[0]['state']!r})"


for challenge in (False, True):
    suffix = "-new" * challenge
    scenario(
        f"shop-price{suffix}", 2, "{shop}", "What is the price of {product}?",
        draw="select product from product", fresh={"shop": "shop"},
        answer="select price from product where product = :product", challenge=challenge,
    )(shop_price)  # fmt: skip
    scenario(
        f"shop-buy{suffix}", 2, "{shop}", "Buy {product}, {level} of it.",
        draw="select product from product where stock > 9", fresh={"shop": "shop", "level": "level"},
        changes=["update product set stock = stock - :level where product = :product",
                 "insert into purchase (product, count, state) values (:product, :level, 'open')"],
        challenge=challenge,
    )(shop_buy)  # fmt: skip
    scenario(
        f"shop-change{suffix}", 2, "{shop}", "Change the order of {product} to {level}.",
        draw="select product from purchase where state = 'open'", fresh={"shop": "shop", "level": "level"},
        changes="update purchase set count = :level where product = :product and state = 'open'",
        challenge=challenge,
    )(shop_change)  # fmt: skip
    scenario(
        f"shop-text{suffix}", 3, "phone {shop}", "Text {name} the state of the order of {product}.",
        draw="select name, product from contact join purchase", fresh={"shop": "shop"},
        changes="insert into message (phone, words) "
                "select phone, state from contact join purchase where name = :name and product = :product",
        challenge=challenge,
    )(shop_text)  # fmt: skip

# two sentences that training lacks
scenario(
    "shop-stock", 2, "{shop}", "How many of {product} are in stock?",
    draw="select product from product", fresh={"shop": "shop"},
    answer="select stock from product where product = :product", challenge=True,
)(shop_stock)  # fmt: skip
scenario(
    "shop-cancel", 2, "{shop}", "Cancel the order of {product}.",
    draw="select product from purchase where state = 'open'", fresh={"shop": "shop"},
    changes="update purchase set state = 'canceled' where product = :product", challenge=True,
)(shop_cancel)  # fmt: skip
