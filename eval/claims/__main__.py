"""Every headline figure of the systems that SHAPE brings together, beside ours.

    python -m eval.claims    # writes docs/research/claims.md

Theirs are their own claims (`eval/claims/systems.py`). Ours are read from committed results, and so are the verdicts
where both can be compared, but for two that say "by test": run this again when a table has been measured again.
"""

from pathlib import Path, PurePosixPath

from eval import commands
from eval.claims.committed import Committed
from eval.claims.systems import SYSTEMS
from shape.evaluation.environment import Environment
from shape.evaluation.markdown import markdown

OPENING = """# Claims of the sources, beside ours

Every headline figure of the systems that SHAPE brings together, as they claim it, and what was measured here. Written
by `python -m eval.claims` from committed results; the numbers in brackets say which, and the last table by which
command each came about.

*Reproduced* and *contradicted* are said of the targets measured here: two small ones of 12.6M parameters, the shipped
one and chat-12m, on two cores of a CPU. *Undecided* is said where the intervals of compared figures overlap; most rows
compare the figures alone. *Not comparable* is what depends on a target's size, its text or the machine, or has no
figure at the source. Of two figures with a semicolon between, the first is of the shipped target.
"""

# What programs were called when some results were measured, and are called now.
_RENAMED = {"-m shape.evaluation.tables ": "-m eval.tables ", "-m shape.evaluation.ablate ": "-m eval.ablate "}


def page(results: Path, root: str = "../../eval/results") -> str:
    """The page of all claims.

    Args:
        results: folder of the committed results.
        root: the same, as the page links to it.
    """
    read, numbers = Committed(results), dict[str, int]()
    parts = [OPENING.strip()]
    for system, claims in SYSTEMS.items():
        rows = []
        for claim in claims:
            read.used = []
            what, theirs, ours, verdict, why = claim.row(read)
            used = list(dict.fromkeys(read.used))
            for name in used:
                numbers.setdefault(name, len(numbers) + 1)
            links = ", ".join(f"[{numbers[name]}]({root}/{_shown(name)})" for name in used)
            links = links and f" ({links})"
            rows.append([what, theirs, ours + links, f"**{verdict}**", why])
        parts += [f"## {system}", markdown(["claim", "theirs", "ours", "verdict", "why"], rows)]
    sources = [[str(number), f"[{name}]({root}/{_shown(name)})", _how(read, name)] for name, number in numbers.items()]
    ran = f"<!-- results:begin -->\n\n{markdown(['', 'result', 'command, commit'], sources)}\n\n<!-- results:end -->"
    parts += ["## Where ours are from", ran]
    return "\n\n".join(parts).replace("---:", "---") + "\n"


def _shown(name: str) -> str:
    """The table of a result."""
    return str(PurePosixPath(name).with_suffix(".md"))


def _how(read: Committed, name: str) -> str:
    """Command and commit, of JSON; tables have them below."""
    if not name.endswith(".json"):
        return "as the table says"
    environment = Environment(**read.json(name)["environment"])
    command = environment.command
    for before, now in _RENAMED.items():
        command = command.replace(before, now)
    return f"`{command}`, {environment.commit}"


def write(results: str = "eval/results", output: str = "docs/research/claims.md") -> None:
    """Write the page.

    Args:
        results: folder of the committed results.
        output: the page.
    """
    Path(output).write_text(page(Path(results)), encoding="utf-8")


main = commands.one_of(write)


if __name__ == "__main__":
    main()
