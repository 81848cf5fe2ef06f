"""Packing, cooking, plans, tables, agendas."""

from random import Random

from generator.words import (
    CITIES,
    DAYS,
    DISHES,
    FIRST_NAMES,
    PRODUCTS,
    TOPICS,
    Exchange,
    capital,
    join_words,
    split_phrases,
)

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
