"""Word tables, from which every conversation is made, so that the text is ours to give away."""

from collections.abc import Sequence
from random import Random

Exchange = tuple[str, str]
"""What the user says, what the assistant answers."""


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
