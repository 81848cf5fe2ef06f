"""Sums worked step by step, with an answer line."""

from collections.abc import Iterable
from random import Random

from generator.words import CITIES, FIRST_NAMES, GOODS, PRODUCTS, Exchange, capital


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
