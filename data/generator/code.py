"""Small Python functions, classes and loops."""

from random import Random

from generator.words import Exchange, join_words, split_words

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
