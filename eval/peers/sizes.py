"""The models: the shipped target, and random Llamas with the shapes of models that people have.

Random weights decode at the cost of trained ones. Their embeddings are made large beside what the layers add, so that
the next token is clear in every precision (it is the last one again): otherwise rounding would decide between a hundred
thousand near-equal tokens, every system would write another text, and simulated acceptance would not be what it says.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from eval import llamas
from eval.llamas import Widths, random_llama
from shape import bundled
from shape.evaluation.prompts import chosen_prompts
from shape.target.chat import prompt_ids

_LARGE = 100.0  # times the usual embedding
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Size:
    """A column of the tables.

    Attributes:
        widths: of a random Llama; None is the shipped target.
        prompts: how many; of a random one of `length` random tokens each.
        new_tokens: of each answer, at most.
    """

    widths: Widths | None
    prompts: int
    new_tokens: int
    length: int = 100

    @property
    def shipped(self) -> bool:
        return self.widths is None


SIZES = {
    "shipped": Size(None, 24, 96),
    "135M": Size(llamas.SIZES["135M"], 4, 64),
    "0.5B": Size(llamas.SIZES["0.5B"], 2, 48),
    "1.2B": Size(llamas.SIZES["1.2B"], 2, 32),
}


def saved(name: str, work: Path) -> Path:
    """Folder of the model in the format of transformers, in bfloat16; made at the first call."""
    widths, shipped = SIZES[name].widths, bundled.path("checkpoints", bundled.TARGET)
    if widths is None:
        return shipped
    folder = work / "models" / name
    if not (folder / "config.json").is_file():  # which is written last
        model = random_llama(widths, torch.bfloat16).model
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(_LARGE)
        part = folder.with_name(f"{name}.part")
        model.save_pretrained(part, max_shard_size="100GB")
        for file in _TOKENIZER:  # no text is made with it, but exporters want one
            shutil.copy(shipped / file, part)
        part.rename(folder)
    return folder


def prompts(name: str) -> list[list[int]]:
    """Token ids: first turns of the bench split, or random ones."""
    size = SIZES[name]
    if size.widths is not None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(size.widths.vocab_size, (size.prompts, size.length), generator=generator).tolist()
    tokenizer = AutoTokenizer.from_pretrained(bundled.resolve(bundled.TARGET))
    chosen, _ = chosen_prompts(None, size.prompts)
    return [prompt_ids(prompt.messages, tokenizer) for prompt in chosen]


def end_tokens(model: Path) -> list[int]:
    """What ends an answer, for those that do not read it from the model."""
    known = json.loads((model / "config.json").read_text(encoding="utf-8")).get("eos_token_id")
    return known if isinstance(known, list) else [] if known is None else [known]
