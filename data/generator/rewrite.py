"""Copying, renaming, reformatting, sorting."""

from random import Random

from generator.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    COUNTS,
    FIRST_NAMES,
    FRUITS,
    GOODS,
    JOBS,
    ROOMS,
    Exchange,
    capital,
    full_name,
    split_phrases,
    split_words,
)

SUBJECTS = [
    f"the {adjective} {who}"
    for adjective in split_words("old young tall quiet clever tired happy brave")
    for who in (*JOBS[:16], *ANIMALS[:12])
]
VERBS = split_phrases(
    "carried,cleaned,counted,dropped,found,hid,lost,painted,photographed,repaired,returned,saw,sold,took"
)
PLACES = split_phrases(
    "at the station,behind the house,by the river,in the garden,in the library,near the bridge,on the hill,"
    "on the table,under the tree,at the market,in front of the school,next to the lake",
)
WHENS = split_phrases(
    "after lunch,at night,before sunrise,during the storm,early in the morning,last week,on Friday,on a "
    "rainy day,two days ago,yesterday,in the winter,at noon",
)


def sentence(rng: Random, subject: str | None = None) -> str:
    who, verb = subject or rng.choice(SUBJECTS), rng.choice(VERBS)
    thing = f"{rng.choice(COUNTS)} {rng.choice(COLOURS)} {rng.choice(GOODS)}"
    return f"{capital(who)} {verb} {thing} {rng.choice(PLACES)} {rng.choice(WHENS)}."


def copy_text(rng: Random) -> Exchange:
    text = " ".join(sentence(rng) for _ in range(rng.randint(2, 4)))
    request = rng.choice(
        (
            "Repeat the following text exactly.\n\n{}",
            "Copy this text word for word:\n\n{}",
            "Please write this again without any change: {}",
        )
    )
    return request.format(text), text


def swap_name(rng: Random) -> Exchange:
    old, new = rng.sample(FIRST_NAMES, 2)
    count = rng.randint(2, 4)
    state = rng.getstate()
    before = " ".join(sentence(rng, old) for _ in range(count))
    rng.setstate(state)  # the same draws again, so that only the name differs
    after = " ".join(sentence(rng, new) for _ in range(count))
    request = rng.choice(
        (
            "Replace the name {old} by {new} in this text:\n\n{text}",
            "Rewrite the text with {new} instead of {old}.\n\n{text}",
        )
    )
    return request.format(old=old, new=new, text=before), after


def words_to_list(rng: Random) -> Exchange:
    words = rng.sample(GOODS + FRUITS + ANIMALS + ROOMS, rng.randint(4, 7))
    name, make = rng.choice(
        (
            ("a bulleted list", lambda: [f"- {word}" for word in words]),
            ("a numbered list", lambda: [f"{i}. {word}" for i, word in enumerate(words, start=1)]),
            ("a checklist", lambda: [f"- [ ] {word}" for word in words]),
            (
                "a numbered list in reverse order",
                lambda: [f"{i}. {word}" for i, word in enumerate(reversed(words), start=1)],
            ),
        )
    )
    request = rng.choice(
        (
            "Write these words as {name}: {words}.",
            "Turn this into {name}: {words}.",
            "{words}. Please format these as {name}.",
        )
    )
    return capital(request.format(name=name, words=", ".join(words))), "\n".join(make())


def sort_words(rng: Random) -> Exchange:
    words = rng.sample(FIRST_NAMES, rng.randint(4, 6)) if rng.random() < 0.5 else rng.sample(CITIES, 5)
    request = rng.choice(("Sort these words from A to Z: {}.", "Put these in alphabetical order: {}."))
    return request.format(", ".join(words)), ", ".join(sorted(words))


def table_rows(rng: Random) -> Exchange:
    people = [(full_name(rng), rng.choice(CITIES), rng.choice(JOBS)) for _ in range(rng.randint(2, 4))]
    csv = "\n".join(["name,city,job", *(",".join(person) for person in people)])
    rows = [f"| {name} | {city} | {job} |" for name, city, job in people]
    markdown = "\n".join(["| name | city | job |", "|---|---|---|", *rows])
    if rng.random() < 0.5:
        request = rng.choice(("Make a Markdown table from this CSV:\n\n{}", "Show this CSV as a table.\n\n{}"))
        return request.format(csv), markdown
    request = rng.choice(("Convert this table to CSV:\n\n{}", "Write this Markdown table as CSV.\n\n{}"))
    return request.format(markdown), csv


def letter(rng: Random) -> Exchange:
    sender, receiver = full_name(rng), rng.choice(FIRST_NAMES)
    body = " ".join(sentence(rng) for _ in range(rng.randint(1, 3)))
    request = rng.choice(
        (
            "Write an email from {sender} to {receiver} with this text: {text}",
            "Put this into a short email to {receiver}, signed by {sender}: {text}",
        )
    )
    answer = f"Dear {receiver},\n\n{body}\n\nBest wishes,\n{sender}"
    return request.format(sender=sender, receiver=receiver, text=body), answer


def one_per_line(rng: Random) -> Exchange:
    sentences = [sentence(rng) for _ in range(rng.randint(2, 4))]
    request = rng.choice(("Write every sentence on its own line: {}", "Split this into numbered lines: {}"))
    numbered = "numbered" in request
    lines = [f"{i}. {line}" if numbered else line for i, line in enumerate(sentences, start=1)]
    return request.format(" ".join(sentences)), "\n".join(lines)


REWRITES = (copy_text, swap_name, words_to_list, sort_words, table_rows, letter, one_per_line)


def rewrite(rng: Random) -> list[Exchange]:
    return [rng.choice(REWRITES)(rng)]
