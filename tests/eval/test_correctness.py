"""What counts as a right answer."""

from decimal import Decimal

import pytest

from eval.text_quality import sandbox
from eval.text_quality.correctness import final_number, known_number, program
from shape.data.conversations import Checks, Prompt

ASKED = 'from math import floor\n\ndef halved(n: int) -> int:\n    """Half of n, rounded down."""\n'
CHECKS = Checks("def check(candidate):\n    assert candidate(7) == 3\n    assert candidate(8) == 4\n", "halved")


@pytest.mark.parametrize(
    "text, number",
    [
        ("2 + 2 = 4, so\n#### 1,204", "1204"),
        ("#### $18.50 per hour, for 3 hours", "18.50"),
        ("She has 3 left, which is -7.", "-7"),
        ("#### 5\nNo, wait:\n#### 6", "6"),
        ("The answer is 12.", "12"),
        ("None at all", None),
    ],
)
def test_the_final_number(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


def test_equal_numbers_may_be_written_differently():
    assert final_number("#### 18.0") == final_number("It is 18")


def test_references_that_ask_for_a_number():
    assert known_number("It is 3 + 4 = 7.\n#### 7") == 7
    assert known_number("1,000") == 1000
    assert known_number("In 1969 they landed on the moon.") is None
    assert known_number("") is None


@pytest.mark.parametrize(
    "answer, passes",
    [
        ("    return floor(n / 2)\n", True),
        ("    return n\n", False),
        ("Here it is:\n```python\ndef halved(n):\n    return floor(n / 2)\n```\nIt rounds down.", True),
        ("```\ndef halved(n):\n    return n // 3\n```", False),
        ("I cannot do that.", False),
    ],
)
def test_programs_of_answers(answer, passes):
    prompt = Prompt("one", "code", (ASKED,), (), checks=CHECKS)
    assert (sandbox.run(program(prompt, CHECKS, answer)) is None) == passes


def test_words_around_the_code_that_is_asked_for():
    """Only what is code comes before a whole function."""
    prompt = Prompt("one", "code", ("Complete this:\n" + ASKED,), (), checks=CHECKS)
    assert sandbox.run(program(prompt, CHECKS, "def halved(n):\n    return n // 2")) is None
