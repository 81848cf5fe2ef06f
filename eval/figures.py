"""The pictures of README: tokens per second by method, and an answer with its drafted tokens coloured.

    python -m eval.figures --output docs/images

`speed.svg` shows a committed measurement, on a transparent ground in colours that can be read on light and dark pages;
`show-draft.svg` is what `shape generate --show-draft` shows of a real answer of the shipped pair.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from eval import commands
from shape.evaluation.results import SpeedResults
from shape.generation.decoder import ShapeDecoder
from shape.generation.engine import ShapeOutput
from shape.generation.trace import STYLES, pieces

QUESTION = "Book a table for two."
METHODS = {
    "transformers": "transformers",
    "autoregressive": "autoregressive (baseline)",
    "ngram": "n-gram lookup",
    "shape": "SHAPE",
}
_INK, _BAR, _OURS = "#7d8590", "#8c959f", "#2da44e"  # each has a contrast of 3:1 with white and with GitHub's dark
_LABELS, _FIGURES, _WIDTH, _ROW = 215, 200, 720, 34
_THEME = TerminalTheme(
    (22, 27, 34),
    (230, 237, 243),
    [(22, 27, 34), (255, 123, 114), (86, 211, 100), (227, 179, 65), (121, 192, 255), (210, 168, 255), (57, 197, 207),
     (230, 237, 243)],
)  # fmt: skip


def bars(rates: Mapping[str, float], notes: Mapping[str, str], ours: str, caption: str) -> str:
    """A bar chart as SVG.

    Args:
        rates: label -> tokens per second.
        notes: label -> what follows the figure.
        ours: the label whose bar is green.
    """
    scale = (_WIDTH - _LABELS - _FIGURES) / max(rates.values())
    parts = []
    for number, (label, rate) in enumerate(rates.items()):
        top, width = 8 + number * _ROW, rate * scale
        weight = ' font-weight="600"' if label == ours else ""
        parts += [
            f'<text x="{_LABELS - 12}" y="{top + 17}" text-anchor="end"{weight}>{escape(label)}</text>',
            f'<rect x="{_LABELS}" y="{top}" width="{width:.1f}" height="24" rx="4" '
            f'fill="{_OURS if label == ours else _BAR}"/>',
            f'<text x="{_LABELS + width + 10:.1f}" y="{top + 17}"{weight}>{rate:.0f} {escape(notes[label])}</text>',
        ]
    height = 8 + len(rates) * _ROW + 26
    told = "; ".join(f"{label}: {rate:.0f} tokens/s" for label, rate in rates.items())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="15" fill="{_INK}">\n<title>{escape(told)}</title>\n'
        + "\n".join(parts)
        + f'\n<text x="{_LABELS}" y="{height - 8}" font-size="13">{escape(caption)}</text>\n</svg>\n'
    )


def speed(results: SpeedResults, methods: Mapping[str, str] = METHODS) -> str:
    """Tokens per second of some methods of a measurement."""
    settings, lines = results.settings, {label: results.summary[name] for name, label in methods.items()}
    rates = {label: line.tokens_per_second or 0.0 for label, line in lines.items()}
    notes = {label: "tokens/s" for label in lines}
    notes |= {
        methods[name]: f"tokens/s, {results.summary[name].speed_up.text('x').partition(' ')[0]}"
        for name in methods
        if name in results.drafted
    }
    dtype = settings["dtype"].partition(",")[0]
    caption = f"{settings['target']}, {dtype}, greedy, {results.environment.threads} threads of a CPU"
    return bars(rates, notes, list(methods.values())[-1], caption)


def show_draft(decoder: ShapeDecoder, question: str, width: int = 88) -> str:
    """An answer as `--show-draft` shows it, as SVG of a terminal."""
    ids = decoder.target.encode([{"role": "user", "content": question}])
    out = decoder.generate(ids, max_new_tokens=96, do_sample=False, trace=True, return_dict_in_generate=True)
    assert isinstance(out, ShapeOutput) and out.trace is not None
    tokens = out.trace.emitted()
    texts = pieces(decoder.tokenizer, [token for token, _ in tokens])
    console = Console(record=True, width=width, file=StringIO(), force_terminal=True, highlight=False)
    console.print(Text.assemble(("> ", "bold"), question))
    console.print(Text.assemble(*((text, STYLES[event]) for text, (_, event) in zip(texts, tokens, strict=True))))
    shown: Sequence[str] = [event for event in STYLES if event in {event for _, event in tokens}]
    console.print(Text(" / ").join(Text(event, style=STYLES[event]) for event in shown))
    console.print(
        f"{len(tokens)} tokens in {out.stats.forwards} forwards of the model after the prefill: acceptance length "
        f"{out.stats.acceptance_length:.2f}",
        style="dim",
    )
    console.print()  # rich cuts the last line off at its baseline
    drawn = console.export_svg(title="shape generate --show-draft", theme=_THEME, unique_id="show-draft")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # nothing from the network


def figures(
    output: str = "docs/images",
    results: str = "eval/results/shipped/bfloat16-t0/results.json",
    predictor: str = "quickstart-shape",
    question: str = QUESTION,
) -> None:
    """Write the pictures of README.

    Args:
        output: folder of the pictures.
        results: the measurement to draw.
        predictor: folder, hub id or bundled name of the predictor that answers.
        question: asked for the answer that is shown.
    """
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "speed.svg").write_text(
        speed(SpeedResults.from_json(Path(results).read_text(encoding="utf-8"))), encoding="utf-8"
    )
    decoder = ShapeDecoder.from_pretrained(predictor=predictor)
    (folder / "show-draft.svg").write_text(show_draft(decoder, question), encoding="utf-8")
    print(f"written: {folder}/speed.svg, {folder}/show-draft.svg")


main = commands.one_of(figures)


if __name__ == "__main__":
    main()
