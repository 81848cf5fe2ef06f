"""Requests over two to four turns: restaurants, trains, hotels, appointments, orders, homes, cinemas, cars."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from generator.words import (
    ANIMALS,
    CITIES,
    COLOURS,
    COUNTS,
    CUISINES,
    DATES,
    DAYS,
    DISHES,
    DOCTORS,
    FIRST_NAMES,
    HOTELS,
    LAST_NAMES,
    PRODUCTS,
    RESTAURANTS,
    ROOMS,
    TIMES,
    TOPICS,
    Exchange,
    capital,
)

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
