"""Facts of a short text as one JSON object."""

import json
from random import Random
from typing import Any

from generator.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    DATES,
    FRUITS,
    GOODS,
    JOBS,
    PRODUCTS,
    ROOMS,
    TIMES,
    TOPICS,
    Exchange,
    full_name,
    join_words,
)

Facts = tuple[str, dict[str, Any]]  # a text and what it says


def person_facts(rng: Random) -> Facts:
    name, age, city, job = full_name(rng), rng.randint(19, 79), rng.choice(CITIES), rng.choice(JOBS)
    hobby = rng.choice(TOPICS)
    text = rng.choice(
        (
            "{name} is {age} years old and lives in {city}. For work: {job}. Favourite subject: {hobby}.",
            "Our new neighbour is called {name}, aged {age}. Profession: {job}. {name} comes from {city} and "
            "loves {hobby}.",
            "In {city} we met {name} ({age}), by profession {job}, who talked about {hobby} all evening.",
        )
    )
    facts = {"name": name, "age": age, "city": city, "job": job, "hobby": hobby}
    return text.format(**facts), facts


def order_facts(rng: Random) -> Facts:
    facts = {
        "order": rng.randint(1000, 9999),
        "customer": full_name(rng),
        "product": rng.choice(PRODUCTS),
        "colour": rng.choice(COLOURS),
        "quantity": rng.randint(2, 9),
        "price": rng.randint(9, 240),
    }
    text = rng.choice(
        (
            "Order {order}: {customer} bought {quantity} pieces of the {product} in {colour} for {price} dollars each.",
            "{customer} wants {quantity} of the {colour} {product}. The price is {price} dollars, the order "
            "number {order}.",
            "We received order {order} from {customer}. Item: {product}, {colour}. Quantity: {quantity}. "
            "Price: {price} dollars.",
        )
    )
    return text.format(**facts), facts


EVENTS = ("workshop", "lecture", "festival", "course", "meeting")


def event_facts(rng: Random) -> Facts:
    facts = {
        "event": f"{rng.choice(TOPICS)} {rng.choice(EVENTS)}",
        "city": rng.choice(CITIES),
        "date": rng.choice(DATES),
        "time": rng.choice(TIMES),
        "host": full_name(rng),
        "free": rng.random() < 0.5,
    }
    price = "Entrance is free." if facts["free"] else "You need a ticket."
    text = rng.choice(
        (
            "The {event} takes place in {city} on {date} at {time}. {host} is the host. {price}",
            "On {date} at {time} {host} opens the {event} in {city}. {price}",
            "Come to {city} on {date}! {host} invites you to the {event} at {time}. {price}",
        )
    )
    return text.format(price=price, **facts), facts


def book_facts(rng: Random) -> Facts:
    title = f"The {rng.choice(COLOURS)} {rng.choice(ANIMALS)} of {rng.choice(CITIES)}"
    facts = {
        "title": title,
        "author": full_name(rng),
        "year": rng.randint(1950, 2024),
        "pages": rng.randint(90, 640),
        "subject": rng.choice(TOPICS),
    }
    text = rng.choice(
        (
            '"{title}" is a book by {author} about {subject}. It came out in {year} and has {pages} pages.',
            'In {year} {author} wrote "{title}", {pages} pages on {subject}.',
            'I am reading "{title}" ({year}). {author} needs {pages} pages to explain {subject}.',
        )
    )
    return text.format(**facts), facts


def trip_facts(rng: Random) -> Facts:
    start, goal = rng.sample(CITIES, 2)
    facts = {
        "traveller": full_name(rng),
        "from": start,
        "to": goal,
        "date": rng.choice(DATES),
        "vehicle": rng.choice(("train", "bus", "plane", "ship", "car")),
        "bags": rng.randint(2, 6),
    }
    text = rng.choice(
        (
            "{traveller} goes from {from} to {to} by {vehicle} on {date} and takes {bags} bags.",
            "On {date} {traveller} leaves {from} with {bags} bags. The {vehicle} goes to {to}.",
            "Travel note: {date}, {from} to {to}, {vehicle}, {bags} bags, passenger {traveller}.",
        )
    )
    return text.format(**facts), facts


def shelf_facts(rng: Random) -> Facts:
    goods = rng.sample(GOODS + FRUITS, rng.randint(3, 4))
    amounts = [rng.randint(2, 60) for _ in goods]
    room = rng.choice(ROOMS)
    listed = join_words([f"{n} {thing}" for n, thing in zip(amounts, goods, strict=True)])
    text = rng.choice(
        (
            "In the {room} there are {listed}.",
            "We counted {listed} in the {room}.",
            "The {room} holds {listed}.",
        )
    )
    items = [{"item": thing, "count": n} for n, thing in zip(amounts, goods, strict=True)]
    return text.format(room=room, listed=listed), {"room": room, "items": items}


FACTS = (person_facts, order_facts, event_facts, book_facts, trip_facts, shelf_facts)


def json_extraction(rng: Random) -> list[Exchange]:
    text, facts = rng.choice(FACTS)(rng)
    keys = join_words(list(facts))
    compact = rng.random() < 0.25
    layout = " on one line" if compact else ""
    request = rng.choice(
        (
            "Extract {keys} from the text and answer with a JSON object{layout} only.\n\nText: {text}",
            "Read the text and return JSON{layout} with the keys {keys}.\n\n{text}",
            "{text}\n\nWrite this as a JSON object{layout} with {keys}.",
            "Turn the following note into JSON{layout}. Keys: {keys}.\n\nNote: {text}",
        )
    )
    answer = json.dumps(facts, indent=None if compact else 2)
    return [(request.format(keys=keys, layout=layout, text=text), answer)]
