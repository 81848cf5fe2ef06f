"""What several tests decode with: random prompts of unequal length and an untrained predictor."""

import torch

from shape.config import ShapeConfig
from shape.predictor import ShapePredictor

FAMILIES = ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "mistral"]
LENGTHS = [3, 17, 9, 1, 12]


def prompts(lengths=LENGTHS, side: str = "left", vocab_size: int = 64) -> dict[str, torch.Tensor]:
    """A batch of random prompts of unequal length, with its attention mask."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        at = slice(max(lengths) - length, None) if side == "left" else slice(0, length)
        ids[row, at] = torch.randint(3, vocab_size, (length,), generator=generator)
        mask[row, at] = 1
    return {"input_ids": ids, "attention_mask": mask}


def predictor(dtype=torch.float64, **options) -> ShapePredictor:
    torch.manual_seed(0)
    options = {"step_mode": "recursive", "token_conditioning": "path", **options}
    return ShapePredictor(ShapeConfig(hidden_size=32, intermediate_size=48, **options)).to(dtype).eval()
