"""Writes the conversations that ship with the repository: ``python data/make_conversations.py``.

Every word comes from the tables below, so the text is ours to give away. The files are a pure function of the
seed and can be made again byte for byte; a recipe that wants more text asks for other seeds. The six kinds
are those that a small target can learn well and that decode differently: open dialogue, arithmetic,
structured output, code, lists, and copying.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

Exchange = tuple[str, str]  # what the user says, what the assistant answers
Row = dict[str, Any]

SEED = 20
TRAIN_ROWS, VALIDATION_ROWS, BENCH_ROWS = 4_000, 200, 96

# ------------------------------------------------------------------------------------------------ vocabulary


def split_words(text: str) -> list[str]:
    return text.split()


def split_phrases(text: str) -> list[str]:
    return text.split(",")


FIRST_NAMES = split_words(
    "Ada Amir Anna Ben Bruno Carla Chen Clara Dana David Elena Emil Fatima Felix Grace Hana Hugo Ida Ines "
    "Ivan Jana Jonas Julia Kai Karim Lara Leo Lina Lucas Maria Marta Max Mia Milan Nadia Nora Olga Omar "
    "Oscar Paula Peter Priya Rosa Ruth Sam Sara Sofia Tariq Theo Tom Uma Vera Victor Wendy Yara Yusuf Zoe"
)
LAST_NAMES = split_words(
    "Adler Baker Becker Bell Carter Costa Cruz Dietz Evans Fischer Flores Grant Gray Haddad Hill Ito Jensen "
    "Kaya Keller King Kovac Lang Lee Lopez Marsh Meyer Moreau Nolan Novak Okafor Olsen Park Patel Petrov "
    "Reed Rossi Sato Shah Silva Singh Stone Tanaka Torres Vega Walsh Weber Wong Young"
)
CITIES = split_words(
    "Amsterdam Athens Austin Bergen Berlin Boston Bristol Cairo Chicago Denver Dublin Florence Geneva "
    "Hamburg Helsinki Kyoto Leeds Lima Lisbon London Lyon Madrid Milan Montreal Munich Nairobi Naples Oslo "
    "Paris Porto Prague Quito Rome Seattle Seoul Sydney Toronto Turin Vienna Warsaw Zurich"
)
DAYS = split_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = split_words("January February March April May June July August September October November December")
TIMES = [f"{hour}:{minute}" for hour in range(8, 22) for minute in ("00", "15", "30", "45")]
DATES = [f"{month} {day}" for month in MONTHS for day in range(1, 29)]
COUNTS = split_words("two three four five six seven eight")
CUISINES = split_words("Italian Thai Mexican Indian Japanese Greek French Turkish Korean Spanish Lebanese Vietnamese")
RESTAURANTS = [
    f"{first} {second}"
    for first in split_words("Blue Golden Green Little Old Red Silver Sunny White Quiet")
    for second in split_words("Olive Lantern Garden Kitchen Table Spoon Harbor Fig Oven Lemon")
]
HOTELS = [
    f"{first} {second}"
    for first in split_words("Park Station River Palace Hill Lake Central Garden Harbor Royal")
    for second in ("Hotel", "Inn", "Lodge", "House", "Suites")
]
PRODUCTS = split_phrases(
    "backpack,blender,bookshelf,camera,coffee maker,desk lamp,drill,electric kettle,frying pan,hair dryer,"
    "headset,jacket,keyboard,mattress,microphone,monitor,office chair,phone case,printer,rain coat,router,"
    "sleeping bag,sofa,speaker,suitcase,tablet,tent,toaster,vacuum cleaner,watch,yoga mat",
)
COLOURS = split_words("black blue brown green grey orange pink purple red silver white yellow")
ROOMS = split_phrases("attic,bathroom,bedroom,dining room,garage,guest room,hallway,kitchen,living room,office")
DOCTORS = split_phrases(
    "a dentist,a dermatologist,a family doctor,a hairdresser,a physiotherapist,a vet,an eye doctor,a piano tuner",
)
DISHES = split_phrases(
    "apple pie,banana bread,bean chili,chicken soup,fish tacos,fried rice,lentil curry,mushroom risotto,"
    "pancakes,pea soup,potato salad,pumpkin soup,roast vegetables,spinach lasagna,tomato pasta,veggie "
    "burgers",
)
FRUITS = split_words(
    "apples bananas cherries figs grapes kiwis lemons limes mangoes melons oranges peaches pears plums"
)
GOODS = split_words(
    "books boxes buttons candles cards chairs cups eggs flowers folders hats lamps marbles muffins notebooks "
    "pencils plates postcards shells stamps stickers tickets tiles towels"
)
ANIMALS = split_words(
    "cat cow crow dog dolphin duck eagle fox frog goat hare horse lion mouse otter owl panda tiger wolf"
)
JOBS = split_phrases(
    "accountant,architect,baker,biologist,carpenter,chef,designer,driver,editor,electrician,engineer,farmer,"
    "gardener,journalist,lawyer,librarian,mechanic,nurse,painter,pharmacist,photographer,pilot,teacher,"
    "translator",
)
TOPICS = split_phrases(
    "art,astronomy,budget,chess,climate,cooking,design,energy,football,garden,history,hiring,language,"
    "marketing,music,poetry,robotics,safety,sales,testing,trains,travel",
)


def full_name(rng: Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def join_words(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# -------------------------------------------------------------------------------------------------- dialogue

Exchanges = list[tuple[list[str], list[str]]]  # several phrasings of what the user says, and of the answer


@dataclass(frozen=True)
class Scenario:
    """Slots with their values, and a script.

    Blank lines part the exchanges of a script, ``>`` begins a phrasing of the user, ``<`` one of the answer.

    Every user turn can be understood without the answer before it, so that the turns make a benchmark prompt
    whatever the assistant says; the first exchange is always used, the last ones may be left out.
    """

    slots: dict[str, Sequence[str]]
    script: str

    def exchanges(self) -> Exchanges:
        return [(marked_lines(part, ">"), marked_lines(part, "<")) for part in self.script.strip().split("\n\n")]


def marked_lines(part: str, mark: str) -> list[str]:
    """The texts that begin with ``mark``, their continuation lines joined."""
    entries = re.findall(r"^ *([<>]) ((?:.|\n(?! *[<>] ))*)", part, flags=re.MULTILINE)
    return [" ".join(text.split()) for begin, text in entries if begin == mark]


BOOKING_REFERENCES = [f"{letters}-{number}" for letters in ("KT", "RX", "BN", "WL", "DM") for number in range(100, 999)]

SCENARIOS = (
    Scenario(
        {
            "cuisine": CUISINES,
            "city": CITIES,
            "place": RESTAURANTS,
            "other": RESTAURANTS,
            "n": COUNTS,
            "day": DAYS,
            "time": TIMES,
            "name": LAST_NAMES,
        },
        """
        > I would like to eat {cuisine} food in {city} on {day}.
        > Can you find me a good {cuisine} restaurant in {city} for {day}?
        > We are {n} people and want a {cuisine} dinner in {city} on {day}. Any ideas?
        < I found two {cuisine} restaurants in {city}: {place} and {other}. Both have free tables on {day}.
          Which one would you like, and at what time?
        < There are two {cuisine} places in {city} with tables on {day}. {place} is in the old town and
          {other} is near the station. Shall I book one of them for you?

        > Please book a table at {place} for {n} people at {time}.
        > {place} sounds good. A table for {n} at {time}, please.
        > Let's take {place}, {n} people, {time}.
        < Please confirm the details: a table for {n} people at {place} in {city} on {day} at {time}. Is that
          right?
        < Just to confirm: {place}, {day} at {time}, {n} people. Shall I make the reservation?

        > Yes, that is right. The name is {name}.
        > Yes, please book it under the name {name}.
        < Your table for {n} at {place} is booked on {day} at {time} under the name {name}. Is there anything
          else I can help you with?
        < Done. {place} expects you on {day} at {time}. The reservation is under the name {name}.

        > Do they have vegetarian dishes?
        > Is there something for vegetarians on the menu?
        < Yes, {place} has several vegetarian dishes on the menu. You can also ask the kitchen to change a
          dish for you.
        """,
    ),
    Scenario(
        {
            "a": CITIES,
            "b": CITIES,
            "day": DAYS,
            "time": TIMES,
            "later": TIMES,
            "n": COUNTS,
            "kind": ("train", "bus"),
            "price": [str(n) for n in range(18, 96)],
            "ref": BOOKING_REFERENCES,
        },
        """
        > I need a {kind} from {a} to {b} on {day}.
        > Which {kind} can I take from {a} to {b} on {day} morning?
        > How do I get from {a} to {b} by {kind} on {day}?
        < There is a direct {kind} from {a} to {b} on {day}. It leaves at {time} and a ticket costs {price}
          dollars. Another one leaves at {later}. Which one do you prefer?
        < On {day} a {kind} leaves {a} at {time} and goes to {b} without a change. The ticket costs {price}
          dollars. Would you like to book it?

        > Please book {n} seats on the {kind} at {time}.
        > I take the one at {time}. {n} tickets, please.
        > Book the {time} {kind} for {n} people, please.
        < Please confirm: {n} seats on the {kind} from {a} to {b} on {day} at {time}. Each ticket costs
          {price} dollars.
        < I will book {n} tickets from {a} to {b} for {day} at {time}. Is that correct?

        > Yes, that is correct. What is my booking number?
        > Correct, please go ahead and tell me the number.
        < Your {kind} tickets are booked. The booking number is {ref}. Please be at the station in {a} ten
          minutes before {time}.

        > Can I take a bicycle with me?
        > May I bring my bicycle on board?
        < Yes, you can take a bicycle on this {kind}. A bicycle ticket costs 5 dollars more.
        """,
    ),
    Scenario(
        {
            "city": CITIES,
            "hotel": HOTELS,
            "date": DATES,
            "nights": COUNTS,
            "n": ("one person", "two people", "three people", "a family of four"),
            "price": [str(n) for n in range(60, 190, 5)],
            "name": LAST_NAMES,
            "ref": BOOKING_REFERENCES,
        },
        """
        > I am looking for a hotel in {city} for {nights} nights from {date}.
        > Can you recommend a hotel in {city}? We arrive on {date} and stay {nights} nights.
        > Please find a room in {city} for {n} from {date}.
        < I recommend the {hotel} in {city}. A room costs {price} dollars per night, breakfast included. Would
          you like to reserve it from {date}?
        < The {hotel} in {city} has free rooms from {date}. The price is {price} dollars per night. Shall I
          reserve a room?

        > Yes, a room for {n} for {nights} nights, please.
        > Please reserve the {hotel} for {n}, {nights} nights.
        < Please confirm: a room for {n} at the {hotel} in {city}, {nights} nights from {date}, {price}
          dollars per night.

        > That is fine. Book it for {name}.
        > Yes, please confirm it under the name {name}.
        < Your room at the {hotel} is reserved for {nights} nights from {date} under the name {name}. The
          reservation number is {ref}.

        > When is check-in?
        > What time can I check in, and is there parking?
        < Check-in at the {hotel} is from 15:00 and check-out is until 11:00. Parking is free for guests.
        """,
    ),
    Scenario(
        {
            "who": DOCTORS,
            "city": CITIES,
            "day": DAYS,
            "time": TIMES,
            "later": TIMES,
            "name": LAST_NAMES,
            "doctor": LAST_NAMES,
        },
        """
        > I need an appointment with {who} in {city} on {day}.
        > Could you find {who} in {city} who is free on {day}?
        > Please help me to book {who} in {city} for {day}.
        < I found {who} in {city} with good reviews: {doctor}. There are free appointments on {day} at {time}
          and {later}. Which time suits you?
        < {doctor} in {city} has time on {day} at {time} or at {later}. Which one shall I book?

        > The appointment at {time} is fine. My name is {name}.
        > {time} please, for {name}.
        < Please confirm: an appointment with {doctor} in {city} on {day} at {time} for {name}.
        < I have noted {day} at {time} with {doctor} for {name}. Shall I book it?

        > Yes, please book it.
        > Yes, that is correct.
        < Your appointment with {doctor} on {day} at {time} is booked. Please arrive five minutes early. Can I
          do anything else for you?

        > Can you remind me one hour before?
        > Please set a reminder for the appointment.
        < I have set a reminder for {day}, one hour before your appointment with {doctor} at {time}.
        """,
    ),
    Scenario(
        {
            "product": PRODUCTS,
            "colour": COLOURS,
            "order": [str(n) for n in range(1000, 9999)],
            "days": COUNTS,
            "date": DATES,
            "problem": (
                "is broken",
                "is too small",
                "does not turn on",
                "has a scratch",
                "arrived too late",
                "is missing a part",
            ),
            "city": CITIES,
        },
        """
        > Hello, I ordered a {colour} {product} and it {problem}. The order number is {order}.
        > My new {colour} {product} {problem}. It is order {order}. What can I do?
        > There is a problem with order {order}: the {colour} {product} {problem}.
        < I am sorry to hear that the {colour} {product} {problem}. I have found your order {order} from
          {date}. Would you like a refund or a replacement?
        < I am sorry about that. I can see order {order} with the {colour} {product}. We can send you a new
          one or give you a refund. Which do you prefer?

        > I would like a replacement, please.
        > Please send me a new {product}.
        < Of course. I will send a new {colour} {product} to your address in {city}. It should arrive within
          {days} days. You do not have to pay anything.

        > What should I do with the old one?
        > How do I return the old {product}?
        < Please put the old {product} back in its box and write the order number {order} on it. The driver
          takes it with them when the new one arrives.

        > Great, thank you for your help.
        > Thank you, that is all.
        < You are welcome. I am sorry again for the trouble with your {product}. Have a nice day!
        """,
    ),
    Scenario(
        {
            "room": ROOMS,
            "other": ROOMS,
            "degrees": [str(n) for n in range(16, 26)],
            "time": TIMES,
            "day": DAYS,
            "scene": ("reading", "movie", "dinner", "party", "sleep", "cleaning"),
            "colour": COLOURS,
        },
        """
        > Turn on the lights in the {room} and set the heating to {degrees} degrees.
        > Please make the {room} {degrees} degrees warm and switch the lights on.
        > I am cold. Heat the {room} to {degrees} degrees and turn on the lights, please.
        < The lights in the {room} are on and the heating is set to {degrees} degrees. Is there anything else
          you would like me to do?
        < Okay. I have set the {room} to {degrees} degrees and turned on the lights.

        > Start the {scene} scene in the {other} at {time}.
        > At {time} please start the {scene} scene in the {other}.
        < I will start the {scene} scene in the {other} at {time}. The lights will turn {colour} and the
          blinds will close.

        > Do it every {day}, please.
        > Repeat that every {day}.
        < Done. The {scene} scene in the {other} will start every {day} at {time}.

        > Is the window in the {room} closed?
        > Please check the window in the {room}.
        < Yes, the window in the {room} is closed and the door is locked. The temperature is {degrees}
          degrees.
        """,
    ),
    Scenario(
        {
            "topic": TOPICS,
            "name": FIRST_NAMES,
            "guest": FIRST_NAMES,
            "day": DAYS,
            "time": TIMES,
            "room": ROOMS,
            "length": ("half an hour", "one hour", "two hours", "45 minutes"),
            "next": DAYS,
        },
        """
        > Put a meeting about {topic} with {name} into my calendar on {day} at {time}.
        > Please plan a {topic} meeting with {name} for {day}, {time}.
        > I have to meet {name} about {topic} on {day} at {time}. Can you add it to my calendar?
        < I will add a meeting about {topic} with {name} on {day} at {time}. How long will it take?
        < Sure. The meeting about {topic} with {name} is on {day} at {time}. How much time do you need?

        > It takes {length}. Invite {guest} too.
        > About {length}, and please invite {guest}.
        < The meeting about {topic} on {day} at {time} takes {length}. I have invited {name} and {guest}.

        > Please move it to {next}, same time.
        > {day} does not work. Can we do {next} at the same time?
        < I have moved the meeting about {topic} to {next} at {time} and told {name} about the change.

        > What else do I have on {next}?
        > Is there something else on {next}?
        < On {next} you only have the meeting about {topic} at {time}. The rest of the day is free.
        """,
    ),
    Scenario(
        {
            "film": [f"The {colour} {animal}".title() for colour in COLOURS for animal in ANIMALS],
            "city": CITIES,
            "day": DAYS,
            "time": TIMES,
            "later": TIMES,
            "n": COUNTS,
            "row": list("ABCDEFGHJK"),
            "price": [str(n) for n in range(7, 19)],
            "ref": BOOKING_REFERENCES,
        },
        """
        > Is there a showing of {film} in {city} on {day}?
        > I want to see {film} in {city} on {day} evening.
        > When can we watch {film} at the cinema in {city}? {day} would be best.
        < Yes, {film} is shown in {city} on {day} at {time} and at {later}. A ticket costs {price} dollars.
          Would you like to buy tickets?
        < The cinema in {city} shows {film} on {day} at {time} and {later}. How many tickets do you need?

        > {n} tickets for {time}, please.
        > Please buy {n} tickets for the showing at {time}.
        < Please confirm: {n} tickets for {film} on {day} at {time} in {city}. There are free seats in row
          {row}.

        > Yes, row {row} is perfect.
        > Good, please take row {row}.
        < You have {n} seats in row {row} for {film} on {day} at {time}. Your booking number is {ref}. Enjoy
          the film!
        """,
    ),
    Scenario(
        {
            "dish": DISHES,
            "n": COUNTS,
            "street": LAST_NAMES,
            "number": [str(n) for n in range(1, 120)],
            "minutes": [str(n) for n in range(20, 65, 5)],
            "drink": (
                "apple juice",
                "cola",
                "iced tea",
                "lemonade",
                "orange juice",
                "sparkling water",
                "water",
            ),
            "pay": ("by card", "in cash"),
            "price": [str(n) for n in range(14, 80)],
        },
        """
        > I would like to order {dish} for {n} people to {street} Street {number}.
        > Can you deliver {dish} for {n} to {street} Street {number}?
        > Hi, {n} portions of {dish} to {street} Street {number}, please.
        < Sure, {n} portions of {dish} to {street} Street {number}. Would you like something to drink with
          that?
        < Of course. That is {dish} for {n}, delivered to {street} Street {number}. Any drinks?

        > Yes, {drink} for everyone.
        > Please add {n} bottles of {drink}.
        < I have added {n} bottles of {drink}. Your order is {dish} and {drink} for {n}. The total is {price}
          dollars. How would you like to pay?

        > I will pay {pay}. How long will it take?
        > I pay {pay}. When will it arrive?
        < Thank you, you pay {price} dollars {pay}. Your {dish} will be at {street} Street {number} in about
          {minutes} minutes.
        """,
    ),
    Scenario(
        {
            "car": ("a small car", "a family car", "a van", "an electric car", "a convertible"),
            "city": CITIES,
            "back": CITIES,
            "date": DATES,
            "days": COUNTS,
            "time": TIMES,
            "price": [str(n) for n in range(35, 120, 5)],
            "name": LAST_NAMES,
            "ref": BOOKING_REFERENCES,
        },
        """
        > I want to rent {car} in {city} from {date} for {days} days.
        > Do you have {car} in {city} for {days} days? I need it on {date}.
        > Please find {car} for {days} days that I can pick up in {city} on {date}.
        < Yes, {car} is available in {city} from {date}. It costs {price} dollars per day with insurance. When
          would you like to pick it up?
        < We have {car} for you in {city} on {date}. The price is {price} dollars per day. At what time will
          you come?

        > I will come at {time} and bring it back in {back}.
        > At {time}. I want to return it in {back}.
        < Please confirm: {car}, pick-up in {city} on {date} at {time}, return in {back} after {days} days,
          {price} dollars per day.

        > Yes, that is right. My name is {name}.
        > Correct. The driver is {name}.
        < Thank you, {name}. Your rental is confirmed with the number {ref}. Please bring your driving licence
          to the office in {city}.
        """,
    ),
)


def dialogue(rng: Random) -> list[Exchange]:
    scenario = rng.choice(SCENARIOS)
    slots: dict[str, str] = {}
    for name, values in scenario.slots.items():
        # two slots of one table never agree: no journey from Rome to Rome
        slots[name] = rng.choice([value for value in values if value not in slots.values()])
    exchanges = scenario.exchanges()
    count = rng.randint(2, min(4, len(exchanges)))
    return [
        (capital(rng.choice(users).format(**slots)), capital(rng.choice(answers).format(**slots)))
        for users, answers in exchanges[:count]
    ]


# ------------------------------------------------------------------------------------------------------ sums


def worked(steps: Iterable[str], answer: int) -> str:
    return "\n".join([*steps, f"Answer: {answer}"])


def long_sum(rng: Random) -> Exchange:
    numbers = [rng.randint(11, 99) for _ in range(rng.randint(3, 4))]
    question = rng.choice(("What is {}?", "Please add the numbers: {}.", "Work out {} step by step."))
    total, steps = numbers[0], []
    for number in numbers[1:]:
        steps.append(f"{total} + {number} = {total + number}")
        total += number
    return question.format(" + ".join(map(str, numbers))), worked(steps, total)


def long_product(rng: Random) -> Exchange:
    a, b = rng.randint(12, 99), rng.randint(3, 9)
    tens, ones = a // 10 * 10, a % 10
    question = rng.choice(("What is {} x {}?", "Multiply {} by {}.", "Calculate {} times {} and show your work."))
    steps = [
        f"Split {a} into {tens} and {ones}.",
        f"{tens} x {b} = {tens * b}",
        f"{ones} x {b} = {ones * b}",
        f"{tens * b} + {ones * b} = {a * b}",
    ]
    return question.format(a, b), worked(steps, a * b)


def percentage(rng: Random) -> Exchange:
    percent, price, item = 5 * rng.randint(1, 10), 20 * rng.randint(2, 40), rng.choice(PRODUCTS)
    off = price * percent // 100
    question = rng.choice(
        (
            "{article} {item} costs {price} dollars. It is {percent} percent off. What does it cost now?",
            "The price of {lower} {item} is {price} dollars and falls by {percent} percent. What is the new price?",
        )
    )
    steps = [
        f"One percent of {price} is {price} / 100 = {price / 100:g}.",
        f"The discount is {price / 100:g} x {percent} = {off} dollars.",
        f"The new price is {price} - {off} = {price - off} dollars.",
    ]
    article = "an" if item[0] in "aeiou" else "a"
    text = question.format(article=capital(article), lower=article, item=item, price=price, percent=percent)
    return text, worked(steps, price - off)


def shopping(rng: Random) -> Exchange:
    name, (one, two) = rng.choice(FIRST_NAMES), rng.sample(GOODS, 2)
    a, b, price_a, price_b = rng.randint(2, 12), rng.randint(2, 12), rng.randint(2, 9), rng.randint(2, 9)
    question = rng.choice(
        (
            "{name} buys {a} {one} for {pa} dollars each and {b} {two} for {pb} dollars each. "
            "How much does {name} pay in total?",
            "At the market {name} takes {a} {one} at {pa} dollars each and {b} {two} at {pb} dollars each. "
            "What is the total price?",
        )
    )
    steps = [
        f"The {one} cost {a} x {price_a} = {a * price_a} dollars.",
        f"The {two} cost {b} x {price_b} = {b * price_b} dollars.",
        f"Together {name} pays {a * price_a} + {b * price_b} = {a * price_a + b * price_b} dollars.",
    ]
    text = question.format(name=name, a=a, b=b, one=one, two=two, pa=price_a, pb=price_b)
    return text, worked(steps, a * price_a + b * price_b)


def sharing(rng: Random) -> Exchange:
    (name, friend), thing = rng.sample(FIRST_NAMES, 2), rng.choice(GOODS)
    people, each, given = rng.randint(2, 9), rng.randint(4, 15), rng.randint(2, 40)
    total = people * each + given
    question = rng.choice(
        (
            "{name} has {total} {thing}. {name} gives {given} {thing} to {friend} and shares the rest "
            "equally among {people} boxes. How many {thing} are in each box?",
            "There are {total} {thing}. {friend} takes {given} of them and {name} puts the others into "
            "{people} boxes, the same number in each. How many {thing} does each box hold?",
        )
    )
    steps = [
        f"After that {total} - {given} = {total - given} {thing} are left.",
        f"Each box holds {total - given} / {people} = {each} {thing}.",
    ]
    slots = {"name": name, "friend": friend, "total": total, "thing": thing, "given": given, "people": people}
    return question.format(**slots), worked(steps, each)


def journey(rng: Random) -> Exchange:
    a, b = rng.sample(CITIES, 2)
    speed, hours, more = 10 * rng.randint(4, 12), rng.randint(2, 6), rng.randint(5, 95)
    vehicle = rng.choice(("train", "bus", "car", "truck"))
    question = rng.choice(
        (
            "A {vehicle} leaves {a} for {b}. It drives {hours} hours at {speed} kilometers per hour and then "
            "{more} kilometers more. How long is the way?",
            "How far is it from {a} to {b}, if a {vehicle} goes {speed} kilometers per hour for {hours} "
            "hours and {more} kilometers after that?",
        )
    )
    steps = [
        f"In {hours} hours the {vehicle} drives {speed} x {hours} = {speed * hours} kilometers.",
        f"The whole way is {speed * hours} + {more} = {speed * hours + more} kilometers.",
    ]
    text = question.format(vehicle=vehicle, a=a, b=b, hours=hours, speed=speed, more=more)
    return text, worked(steps, speed * hours + more)


def rectangle(rng: Random) -> Exchange:
    width, length = rng.randint(3, 30), rng.randint(3, 30)
    thing = rng.choice(("garden", "field", "room", "terrace", "playground", "parking lot"))
    size = f"{width} meters wide and {length} meters long"
    half, area = width + length, width * length
    if rng.random() < 0.5:
        steps = [
            f"One side and one end: {width} + {length} = {half} meters.",
            f"The fence is {half} x 2 = {2 * half} meters long.",
        ]
        return f"A {thing} is {size}. How long is the fence around it?", worked(steps, 2 * half)
    steps = [f"The area is {width} x {length} = {area} square meters."]
    return f"What is the area of a {thing} that is {size}?", worked(steps, area)


def ages(rng: Random) -> Exchange:
    a, b, c = rng.sample(FIRST_NAMES, 3)
    age, older, factor = rng.randint(3, 20), rng.randint(2, 15), rng.randint(2, 4)
    question = f"{a} is {age} years old. {b} is {older} years older than {a}. {c} is {factor} times as old as {b}. "
    question += rng.choice((f"How old is {c}?", f"What is the age of {c}?"))
    steps = [
        f"{b} is {age} + {older} = {age + older} years old.",
        f"{c} is {age + older} x {factor} = {(age + older) * factor} years old.",
    ]
    return question, worked(steps, (age + older) * factor)


SUMS = (long_sum, long_product, percentage, shopping, sharing, journey, rectangle, ages)


def sums(rng: Random) -> list[Exchange]:
    return [rng.choice(SUMS)(rng)]


# ------------------------------------------------------------------------------------------------------ json

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


# ------------------------------------------------------------------------------------------------------ code

NOUNS = split_words(
    "account animal article author book camera client course customer device driver event film flight game "
    "house invoice item lesson letter member movie order parcel patient payment photo planet player product "
    "project recipe report room sensor server ship song station student task teacher ticket tool train user "
    "vehicle window"
)
FIELDS = {
    "str": split_words(
        "address category city code colour comment country email language name owner phone status title"
    ),
    "int": split_words("age count height index level number pages points priority rank size speed stock width year"),
    "float": split_words("amount balance distance price rate score temperature volume weight"),
    "bool": split_words("active done hidden locked open paid public ready"),
}
DEFAULTS = {"str": '""', "int": "0", "float": "0.0", "bool": "False"}


def fenced(code: str) -> str:
    return f"```python\n{code.rstrip()}\n```"


def some_fields(rng: Random, count: int) -> list[tuple[str, str]]:
    pairs = [(field, kind) for kind, fields in FIELDS.items() for field in fields]
    return rng.sample(pairs, count)


def code_dataclass(rng: Random) -> Exchange:
    noun, fields = rng.choice(NOUNS), some_fields(rng, rng.randint(3, 5))
    described = join_words([f"{field} ({kind})" for field, kind in fields])
    with_defaults = rng.random() < 0.4
    lines = [f"    {field}: {kind}" + (f" = {DEFAULTS[kind]}" if with_defaults else "") for field, kind in fields]
    code = "\n".join(["from dataclasses import dataclass", "", "", "@dataclass", f"class {noun.title()}:", *lines])
    request = rng.choice(
        (
            "Write a Python dataclass {noun} with the fields {fields}{extra}.",
            "I need a dataclass called {noun} in Python. Fields: {fields}{extra}.",
            "Define a dataclass {noun} that holds {fields}{extra}.",
        )
    )
    extra = ", all with default values" if with_defaults else ""
    return request.format(noun=noun.title(), fields=described, extra=extra), fenced(code)


def code_class(rng: Random) -> Exchange:
    noun, fields = rng.choice(NOUNS), [field for field, _ in some_fields(rng, rng.randint(2, 4))]
    lines = [f"class {noun.title()}:", f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    shown = ", ".join(f"{field}={{self.{field}}}" for field in fields)
    lines += ["", "    def __str__(self):", f'        return f"{noun.title()}({shown})"']
    request = rng.choice(
        (
            "Write a Python class {noun} with the attributes {fields} and a __str__ method.",
            "Create a class {noun} in Python. It stores {fields} and can be printed.",
            "Please write a class {noun} that takes {fields} in its constructor and has a __str__ method.",
        )
    )
    return request.format(noun=noun.title(), fields=join_words(fields)), fenced("\n".join(lines))


def code_filter(rng: Random) -> Exchange:
    noun, field, limit = rng.choice(NOUNS), rng.choice(FIELDS["int"] + FIELDS["float"]), rng.randint(2, 500)
    word, sign = rng.choice((("greater than", ">"), ("less than", "<"), ("at least", ">="), ("at most", "<=")))
    name = f"filter_{noun}s"
    code = (
        f"def {name}({noun}s):\n    result = []\n    for {noun} in {noun}s:\n"
        f'        if {noun}["{field}"] {sign} {limit}:\n            result.append({noun})\n    return '
        f"result\n"
    )
    request = rng.choice(
        (
            "Write a Python function {name}({noun}s) that returns all {noun}s whose {field} is {word} {limit}.",
            "I have a list of dictionaries called {noun}s. Write {name}({noun}s) in Python, which keeps "
            "those with a {field} {word} {limit}.",
        )
    )
    return request.format(name=name, noun=noun, field=field, word=word, limit=limit), fenced(code)


def code_total(rng: Random) -> Exchange:
    noun, field = rng.choice(NOUNS), rng.choice(FIELDS["int"] + FIELDS["float"])
    mean = rng.random() < 0.5
    word, name = ("average", f"average_{field}") if mean else ("total", f"total_{field}")
    check = f"    if not {noun}s:\n        return 0\n" if mean else ""
    last = f"    return total / len({noun}s)\n" if mean else "    return total\n"
    code = (
        f"def {name}({noun}s):\n{check}    total = 0\n    for {noun} in {noun}s:\n"
        f"        total += {noun}.{field}\n{last}"
    )
    request = rng.choice(
        (
            "Write a Python function {name}({noun}s) that returns the {word} {field} of a list of {noun}s.",
            "How do I compute the {word} {field} of all {noun}s in Python? Call the function {name}.",
            "Please write {name}({noun}s) in Python: the {word} of the attribute {field} over all {noun}s.",
        )
    )
    return request.format(name=name, noun=noun, word=word, field=field), fenced(code)


def code_best(rng: Random) -> Exchange:
    noun, field = rng.choice(NOUNS), rng.choice(FIELDS["int"] + FIELDS["float"])
    word, sign = rng.choice((("highest", ">"), ("lowest", "<")))
    name = f"find_{word}_{field}"
    code = (
        f"def {name}({noun}s):\n    best = None\n    for {noun} in {noun}s:\n"
        f"        if best is None or {noun}.{field} {sign} best.{field}:\n            best = {noun}\n    "
        f"return best\n"
    )
    request = rng.choice(
        (
            "Write a Python function {name}({noun}s) that returns the {noun} with the {word} {field}.",
            "Find the {noun} with the {word} {field} in a list. Write it as a Python function {name}({noun}s).",
        )
    )
    return request.format(name=name, noun=noun, word=word, field=field), fenced(code)


def code_group(rng: Random) -> Exchange:
    noun, field = rng.choice(NOUNS), rng.choice(FIELDS["str"])
    counting = rng.random() < 0.5
    name = f"{'count' if counting else 'group'}_{noun}s_by_{field}"
    body = (
        "        result[key] = result.get(key, 0) + 1\n"
        if counting
        else f"        result.setdefault(key, []).append({noun})\n"
    )
    code = f"def {name}({noun}s):\n    result = {{}}\n    for {noun} in {noun}s:\n        key = {noun}.{field}\n"
    code += body + "    return result\n"
    what = f"counts the {noun}s for each {field}" if counting else f"groups the {noun}s by {field}"
    request = rng.choice(
        (
            "Write a Python function {name}({noun}s) that {what} and returns a dictionary.",
            "I need a Python function that {what}. Its name is {name} and it returns a dictionary.",
        )
    )
    return request.format(name=name, noun=noun, what=what), fenced(code)


def code_loop(rng: Random) -> Exchange:
    start, step, noun = rng.randint(1, 20), rng.randint(2, 9), rng.choice(NOUNS)
    stop = start + step * rng.randint(4, 40)
    code = f'for number in range({start}, {stop}, {step}):\n    print(f"{noun} {{number}}")\n'
    request = rng.choice(
        (
            "Write a Python loop that counts from {start} up to {stop} in steps of {step}, without {stop}, "
            "and prints "
            '"{noun}" and the number.',
            'Print "{noun}" and a number for every number from {start} to {stop} (not included) in steps of '
            "{step}. Use a "
            "Python for loop.",
        )
    )
    return request.format(start=start, stop=stop, step=step, noun=noun), fenced(code)


def code_convert(rng: Random) -> Exchange:
    a, b, factor = rng.choice(
        (
            ("hours", "minutes", 60),
            ("kilometers", "meters", 1000),
            ("days", "hours", 24),
            ("weeks", "days", 7),
            ("feet", "inches", 12),
            ("minutes", "seconds", 60),
            ("kilograms", "grams", 1000),
            ("years", "months", 12),
        )
    )
    noun = rng.choice(NOUNS)
    name = f"{noun}_{a}_to_{b}"
    code = (
        f"def {name}({a}):\n    if {a} < 0:\n"
        f'        raise ValueError("{a} must not be negative")\n    return {a} * {factor}\n'
    )
    request = rng.choice(
        (
            "Write a Python function {name}({a}) that converts {a} of a {noun} to {b} and rejects negative values.",
            "Convert the {a} of a {noun} to {b} in Python. The function is {name}({a}); negative values are an error.",
        )
    )
    return request.format(name=name, a=a, b=b, noun=noun), fenced(code)


def code_sort(rng: Random) -> Exchange:
    noun, (first, second) = rng.choice(NOUNS), rng.sample(FIELDS["int"] + FIELDS["str"], 2)
    down = rng.random() < 0.5
    name = f"sort_{noun}s"
    reverse = ", reverse=True" if down else ""
    key = f"lambda {noun}: ({noun}.{first}, {noun}.{second})"
    code = f"def {name}({noun}s):\n    return sorted({noun}s, key={key}{reverse})\n"
    order = "descending" if down else "ascending"
    request = rng.choice(
        (
            "Write a Python function {name}({noun}s) that sorts {noun}s by {first} and then by {second} in "
            "{order} order.",
            "Sort a list of {noun}s by {first}, then {second}, {order}. Write a Python function {name}.",
        )
    )
    return request.format(name=name, noun=noun, first=first, second=second, order=order), fenced(code)


CODES = (
    code_dataclass,
    code_class,
    code_filter,
    code_total,
    code_best,
    code_group,
    code_loop,
    code_convert,
    code_sort,
)


def code(rng: Random) -> list[Exchange]:
    return [rng.choice(CODES)(rng)]


# ----------------------------------------------------------------------------------------------------- lists

PACKING = {
    "the beach": split_phrases("a swimsuit,a towel,sun cream,sunglasses,sandals,a hat,a water bottle,a book"),
    "the mountains": split_phrases("hiking boots,a rain jacket,a map,warm socks,a first-aid kit,snacks,a head lamp"),
    "a business trip": split_phrases("a laptop,a charger,business cards,a suit,a notebook,a pen,good shoes"),
    "a camping weekend": split_phrases("a tent,a sleeping bag,matches,a camping stove,a pocket knife,a lamp,a rope"),
    "a winter holiday": split_phrases("a warm coat,gloves,a scarf,thermal underwear,a wool hat,boots,lip balm"),
    "a bike tour": split_phrases("a helmet,a repair kit,a pump,gloves,a rain jacket,a water bottle,energy bars"),
}
INGREDIENTS = split_phrases(
    "basil,beans,bread,butter,carrots,cheese,chili,corn,cream,eggs,flour,garlic,ginger,honey,lemon,lentils,"
    "milk,mushrooms,oats,olive oil,onions,parsley,pasta,peas,pepper,potatoes,rice,salt,spinach,sugar,"
    "tomatoes,yeast",
)
ACTIVITIES = split_phrases(
    "call the bank,clean the windows,do the laundry,feed the fish,fix the bicycle,go for a run,go to the "
    "market,learn ten words,meet a friend,paint the fence,plan the week,practise the guitar,read a chapter,"
    "sort the photos,swim for half an hour,tidy the desk,visit grandmother,water the plants,write a letter,"
    "write the report",
)


def packing_list(rng: Random) -> Exchange:
    place = rng.choice(list(PACKING))
    city, days = rng.choice(CITIES), rng.randint(2, 14)
    things = rng.sample(PACKING[place], rng.randint(4, 6))
    request = rng.choice(
        (
            "Make a packing list for {place}. We leave from {city} and stay {days} days.",
            "What should I pack for {place}? I will be away for {days} days, starting in {city}.",
            "I am travelling from {city} to {place} for {days} days. Please write a packing list.",
        )
    )
    lines = [f"Packing list for {place} ({days} days):", *(f"- {thing}" for thing in things)]
    lines += [f"- {days} pairs of socks", f"- tickets from {city}"]
    return request.format(place=place, city=city, days=days), "\n".join(lines)


def cooking_steps(rng: Random) -> Exchange:
    dish, people = rng.choice(DISHES), rng.randint(2, 8)
    first, second, third = rng.sample(INGREDIENTS, 3)
    minutes = rng.randint(2, 9) * 5
    request = rng.choice(
        (
            "How do I cook {dish} for {people} people with {a}, {b} and {c}? It may take {minutes} minutes.",
            "Give me simple steps for {dish} with {a}, {b} and {c}, {people} portions, cooked for {minutes} minutes.",
        )
    )
    lines = [
        f"{capital(dish)} for {people} people:",
        f"1. Wash and prepare the {first} and the {second}.",
        "2. Heat a large pot with a little oil.",
        f"3. Add the {first} and stir for two minutes.",
        f"4. Add the {second} and the {third}.",
        f"5. Cook everything for {minutes} minutes.",
        f"6. Season to taste and serve on {people} plates.",
    ]
    text = request.format(dish=dish, people=people, a=first, b=second, c=third, minutes=minutes)
    return text, "\n".join(lines)


def week_plan(rng: Random) -> Exchange:
    start, count = rng.randrange(7), rng.randint(3, 5)
    days = [DAYS[(start + i) % 7] for i in range(count)]
    tasks = rng.sample(ACTIVITIES, count)
    as_table = rng.random() < 0.5
    request = rng.choice(
        (
            "Make a plan {layout} from {first} to {last} with these tasks, one a day: {tasks}.",
            "I have to do the following: {tasks}. Please spread it over {first} to {last} {layout}.",
        )
    )
    layout = "as a table" if as_table else "as a list"
    text = request.format(layout=layout, first=days[0], last=days[-1], tasks=", ".join(tasks))
    pairs = list(zip(days, tasks, strict=True))
    if as_table:
        rows = [f"| {day} | {task} |" for day, task in pairs]
        return text, "\n".join(["| Day | Task |", "|---|---|", *rows])
    return text, "\n".join(f"- {day}: {task}" for day, task in pairs)


def price_table(rng: Random) -> Exchange:
    goods = rng.sample(PRODUCTS, rng.randint(3, 5))
    prices = [rng.randint(5, 300) for _ in goods]
    listed = ", ".join(f"{thing} {price} dollars" for thing, price in zip(goods, prices, strict=True))
    request = rng.choice(
        (
            "Write a table of these prices: {}.",
            "Show as a Markdown table with product and price: {}.",
            "Please make a price table from this: {}.",
        )
    )
    rows = [f"| {thing} | {price} |" for thing, price in zip(goods, prices, strict=True)]
    return request.format(listed), "\n".join(["| Product | Price |", "|---|---|", *rows])


def shopping_list(rng: Random) -> Exchange:
    dish, people = rng.choice(DISHES), rng.randint(2, 8)
    things = rng.sample(INGREDIENTS, rng.randint(4, 6))
    request = rng.choice(
        (
            "Write a shopping list for {dish} for {people} people. I need {things}.",
            "I want to cook {dish} for {people}. Please make a numbered shopping list of {things}.",
        )
    )
    lines = [f"Shopping list for {dish} ({people} people):"]
    lines += [f"{i}. {thing}" for i, thing in enumerate(things, start=1)]
    return request.format(dish=dish, people=people, things=join_words(things)), "\n".join(lines)


def agenda(rng: Random) -> Exchange:
    topic, (a, b, c), hour = rng.choice(TOPICS), rng.sample(FIRST_NAMES, 3), rng.randint(8, 16)
    request = rng.choice(
        (
            "Write an agenda for a meeting about {topic} at {hour}:00 with {a}, {b} and {c}.",
            "{a}, {b} and {c} meet at {hour}:00 to talk about {topic}. Please write the agenda.",
        )
    )
    lines = [
        f"Agenda: {topic}",
        f"1. {hour}:00 Welcome ({a})",
        f"2. {hour}:10 What we know about {topic} ({b})",
        f"3. {hour}:30 Open questions ({c})",
        f"4. {hour}:50 Next steps and dates ({a})",
        f"5. {hour + 1}:00 End",
    ]
    return request.format(topic=topic, hour=hour, a=a, b=b, c=c), "\n".join(lines)


LISTS = (packing_list, cooking_steps, week_plan, price_table, shopping_list, agenda)


def lists(rng: Random) -> list[Exchange]:
    return [rng.choice(LISTS)(rng)]


# --------------------------------------------------------------------------------------------------- rewrite

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


# ----------------------------------------------------------------------------------------------------- files

KINDS: dict[str, Callable[[Random], list[Exchange]]] = {
    "dialogue": dialogue,
    "sums": sums,
    "json": json_extraction,
    "code": code,
    "lists": lists,
    "rewrite": rewrite,
}


def first_prompt(row: Row) -> str:
    return row["conversations"][0]["value"] if "conversations" in row else row["turns"][0]


def make_rows(count: int, seed: int, name: str, taken: Collection[str] = ()) -> list[Row]:
    """``count`` ShareGPT rows, the kinds in turn; no first user turn occurs twice or is among ``taken``."""
    seen, rows, kinds = set(taken), [], list(KINDS)
    for index in range(count):
        kind = kinds[index % len(kinds)]
        rng = Random(f"{name}-{seed}-{index}")  # a string seed is hashed, the same on every platform
        exchanges = KINDS[kind](rng)
        while exchanges[0][0] in seen:
            exchanges = KINDS[kind](rng)
        seen.add(exchanges[0][0])
        turns = [
            {"from": who, "value": text} for pair in exchanges for who, text in zip(("human", "gpt"), pair, strict=True)
        ]
        rows.append({"id": f"{name}-{seed}-{index:05d}", "category": kind, "conversations": turns})
    return rows


def to_prompt(row: Row) -> Row:
    turns = [turn["value"] for turn in row["conversations"] if turn["from"] == "human"]
    return {"id": row["id"], "category": row["category"], "turns": turns}


def make_splits(seed: int = SEED, train_rows: int = TRAIN_ROWS) -> dict[str, list[Row]]:
    """The splits; the small ones choose their prompts first, so that a longer train split moves nothing."""
    bench = [to_prompt(row) for row in make_rows(BENCH_ROWS, seed, "bench")]
    taken = {first_prompt(row) for row in bench}
    validation = make_rows(VALIDATION_ROWS, seed, "validation", taken)
    taken |= {first_prompt(row) for row in validation}
    return {"train": make_rows(train_rows, seed, "train", taken), "validation": validation, "bench": bench}


def json_lines(rows: Iterable[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def packed(content: bytes) -> bytes:
    """gzip without the clock, the file name and the platform in its header."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as file:
        file.write(content)
    return buffer.getvalue()


def write_splits(folder: Path, seed: int = SEED, train_rows: int = TRAIN_ROWS) -> None:
    splits = make_splits(seed, train_rows)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl.gz").write_bytes(packed(json_lines(splits[name])))
    (folder / "bench.jsonl").write_bytes(json_lines(splits["bench"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder to write to")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument(
        "--rows", type=int, default=TRAIN_ROWS, help="to train on; fewer of a seed are the first of more"
    )
    args = parser.parse_args()
    write_splits(args.output, args.seed, args.rows)


if __name__ == "__main__":
    main()
