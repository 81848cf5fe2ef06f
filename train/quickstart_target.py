"""Makes the target that ships in ``checkpoints/quickstart-target``: a chat model of 12M parameters.

    python train/quickstart_target.py --output checkpoints/quickstart-target

From scratch, it learns Schema-Guided Dialogue, Taskmaster-4 and GSM8K (about 5.5M tokens) and 20,000
conversations of our own generator (2M tokens), so that it has been taught every kind of prompt that the
repository measures on. Two CPU cores need about an hour; ``--resume`` continues a run that was stopped.

Without ``--data`` the three public sets come from the Hugging Face hub and GitHub by name. The shipped
weights were made from local copies of the same sets in ShareGPT form (``--data sgd_train.jsonl.gz
tm4.jsonl.gz gsm8k_train.jsonl.gz``; of Taskmaster-4 about half). The loaders by name follow the published
schemas, but have not been run on the machine that made the weights.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from tqdm import tqdm
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

REPOSITORY = Path(__file__).resolve().parent.parent
PAD, START, END = SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}

Row = dict[str, Any]
Texts = dict[str, list[str]]  # rendered conversations by source


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights."""

    hidden_size: int = 384
    layers: int = 6
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 1024
    vocabulary: int = 8192
    positions: int = 2048
    block: int = 512  # tokens per packed sequence
    batch: int = 16  # sequences per step
    portion: int = 4  # sequences per forward: their logits stay in the processor's cache
    steps: int = 900
    warmup: int = 20
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    clip: float = 1.0
    generated: int = 20_000  # conversations of our generator, the shipped train split included
    save_every: int = 100
    first_export: int = 50  # early weights, to try loading and decoding with
    held_out_blocks: int = 64
    seed: int = 0


# ------------------------------------------------------------------------------------------------------ data


def render(row: Row) -> str:
    """The conversation as the chat template writes it."""
    turns = (f"{START}{ROLES[turn['from']]}\n{turn['value']}{END}\n" for turn in row["conversations"])
    return "".join(turns)


def read_rows(path: Path) -> list[Row]:
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def local_sources(paths: Iterable[Path]) -> tuple[Texts, Texts]:
    """Training and held-out texts; dialogues of the development part of SGD are held out."""
    train, held_out = {}, {}
    for path in paths:
        rows, name = read_rows(path), path.name.split(".")[0]
        train[name] = [render(row) for row in rows if not row["id"].startswith("sgd-dev-")]
        if rest := [render(row) for row in rows if row["id"].startswith("sgd-dev-")]:
            held_out["sgd-dev"] = rest
    return train, held_out


def alternating(speakers: Iterable[bool], texts: Iterable[str]) -> Row:
    """A ShareGPT row from pairs (is it the user?, text)."""
    pairs = zip(speakers, texts, strict=True)
    return {"conversations": [{"from": "human" if user else "gpt", "value": text} for user, text in pairs]}


def hub_sources() -> tuple[Texts, Texts]:
    """The same sets by name (see the module's docstring on how far this has been run)."""
    from datasets import load_dataset

    def sgd(split: str) -> list[str]:
        parquet = "hf://datasets/google-research-datasets/schema_guided_dstc8@refs%2Fconvert%2Fparquet/dialogues"
        rows = load_dataset("parquet", data_files=f"{parquet}/{split}/*.parquet", split="train")
        turns = (row["turns"] for row in rows)
        return [render(alternating([who == 0 for who in t["speaker"]], t["utterance"])) for t in turns]

    def taskmaster() -> list[str]:
        folder = "https://raw.githubusercontent.com/google-research-datasets/Taskmaster/master/TM-4-2024/data"
        files = [f"{folder}/data_{i:02d}.json" for i in range(8)]
        rows = load_dataset("json", data_files=files, split="train")
        spoken = (row["utterances"] for row in rows)
        return [render(alternating([u["speaker"] == "user" for u in us], [u["text"] for u in us])) for us in spoken]

    def strip_marks(answer: str) -> str:
        return re.sub(r"<<.*?>>", "", answer)  # the calculator annotations

    def gsm8k() -> list[str]:
        rows = load_dataset("openai/gsm8k", "main", split="train")
        return [render(alternating([True, False], [row["question"], strip_marks(row["answer"])])) for row in rows]

    return {"sgd_train": sgd("train"), "tm4": taskmaster(), "gsm8k_train": gsm8k()}, {"sgd-dev": sgd("validation")}


def load_generator() -> ModuleType:
    sys.path.append(str(REPOSITORY / "data"))
    return import_module("make_conversations")


def generated_rows(count: int) -> tuple[list[Row], list[Row]]:
    """The shipped train split and more from another seed, of which none has a validation or bench prompt; and the
    validation split.
    """
    generator = load_generator()
    splits = generator.make_splits()
    taken = {generator.first_prompt(row) for rows in splits.values() for row in rows}
    shipped = splits["train"][:count]
    more = generator.make_rows(count - len(shipped), generator.SEED + 1, "extra", taken)
    return [*shipped, *more], splits["validation"]


def generated_sources(count: int) -> tuple[Texts, Texts]:
    train, validation = generated_rows(count)
    texts = {"generated": [render(row) for row in train]}
    return texts, {"generated-validation": [render(row) for row in validation]}


# ------------------------------------------------------------------------------------------------- tokenizer


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE; digits stay single, so that a small model can see place values."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def wrap_tokenizer(tokenizer: Tokenizer, positions: int) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Token ids of each text, closed by <|endoftext|>, so that packed neighbours are told apart."""
    stop = tokenizer.token_to_id(PAD)
    return [np.array([*item.ids, stop], dtype=np.int64) for item in tokenizer.encode_batch(texts)]


def pack(documents: list[np.ndarray], block: int, count: int, seed: int) -> torch.Tensor:
    """The first ``count`` blocks of an endless stream of shuffled epochs: a pure function of its arguments."""
    rng, pieces, length = np.random.default_rng(seed), [], 0
    while length < count * block:
        for index in rng.permutation(len(documents)):
            pieces.append(documents[index])
            length += len(documents[index])
    return torch.from_numpy(np.concatenate(pieces)[: count * block].reshape(count, block))


# -------------------------------------------------------------------------------------------------- training


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention over whole blocks, all query heads of a KV head in one product: on a CPU, in bfloat16,
    forward and backward take half the time of the fused kernel. (B, H, T, D) -> (B, T, H, D)."""
    batch, heads, length, width = query.shape
    groups = key.shape[1]
    future = torch.full((length, length), float("-inf"), dtype=query.dtype, device=query.device).triu(1)
    scores = query.reshape(batch, groups, -1, width) @ key.transpose(-1, -2) * scaling
    weights = torch.softmax(scores.view(batch, groups, -1, length, length) + future, dim=-1)
    mixed = weights.view(batch, groups, -1, length) @ value
    return mixed.view(batch, heads, length, width).transpose(1, 2).contiguous(), None


def build_model(recipe: Recipe, tokenizer: Tokenizer, device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(recipe.seed)
    AttentionInterface.register("grouped", grouped_attention)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=recipe.positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
        attn_implementation="grouped" if device.type == "cpu" else "sdpa",
    )
    return LlamaForCausalLM(config).to(device)


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = -100  # the last token predicts nothing; cheaper than a sliced copy of the logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def build_optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the (tied) embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in name]
    return [
        torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=0.0),
        torch.optim.AdamW(others, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(step: int, recipe: Recipe) -> float:
    """Factor of the learning rate: short warm-up, constant, linear to zero over the second half."""
    return min(1.0, (step + 1) / recipe.warmup, (recipe.steps - step) / (recipe.steps / 2))


@dataclass
class Progress:
    """What a resumed run needs to go on as if it had never stopped."""

    step: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)


class Training:
    """The model, its optimizers and where they stand; the batch of a step depends on nothing but the step."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, documents: list[np.ndarray]) -> None:
        self.recipe = recipe
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.blocks = pack(documents, recipe.block, recipe.steps * recipe.batch, recipe.seed)
        self.model = build_model(recipe, tokenizer, self.device)
        self.optimizers = build_optimizers(self.model, recipe)
        self.progress = Progress()

    def batch(self, step: int) -> torch.Tensor:
        return self.blocks[step * self.recipe.batch : (step + 1) * self.recipe.batch].to(self.device)

    def step(self) -> float:
        factor = schedule(self.progress.step, self.recipe)
        for optimizer, lr in zip(self.optimizers, (self.recipe.muon_lr, self.recipe.adamw_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
        batch, loss = self.batch(self.progress.step), 0.0
        for portion in batch.split(self.recipe.portion):
            share = loss_of(self.model, portion) * (len(portion) / len(batch))
            share.backward()
            loss += share.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.progress.step += 1
        self.progress.losses.append(loss)
        return loss

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": vars(self.progress),
            "recipe": vars(self.recipe),
        }
        torch.save(state, partial := path.with_name(path.name + ".partial"))
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True, map_location=self.device)
        if state["recipe"] != vars(self.recipe):
            raise SystemExit(f"{path} was written with other settings: {state['recipe']}")
        self.model.load_state_dict(state["model"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.progress = Progress(**state["progress"])


@torch.no_grad()
def held_out_loss(training: Training, documents: list[np.ndarray]) -> float:
    """Nats per token over packed held-out text."""
    recipe = training.recipe
    count = min(recipe.held_out_blocks, sum(map(len, documents)) // recipe.block)
    blocks = pack(documents, recipe.block, count, recipe.seed).to(training.device)
    losses = [loss_of(training.model, chunk) * len(chunk) for chunk in blocks.split(recipe.portion)]
    return float(sum(losses) / len(blocks))


# ---------------------------------------------------------------------------------------------------- export

CARD = """\
---
license: cc-by-sa-4.0
language: en
pipeline_tag: text-generation
---
# SHAPE quickstart target

A small chat model, made to learn and test speculative decoding on a laptop: Llama architecture, {layers}
layers, width {hidden_size}, {heads} heads with {kv_heads} KV heads, MLP {intermediate_size}, tied head,
byte-level BPE of {vocabulary} tokens with single digits, ChatML template, {parameters:.1f}M parameters,
bfloat16.

It writes dialogue turns, small lists, JSON and Python functions in the manner of its training text. The form
is mostly right, while names and values are often not those of the prompt, and it knows little else: fit for
measuring prediction and decoding, not for judging answers.

## How it was made
`python train/quickstart_target.py --steps {steps}` from scratch: {done} steps of {batch} x {block} tokens
({tokens:.1f}M tokens seen, {unique:.1f}M different ones), Muon ({muon_lr}) for matrices, AdamW ({adamw_lr})
for the rest, warm-up of {warmup} steps, linear decay over the second half, bfloat16 autocast over float32
weights, {minutes:.0f} minutes on {where}.

| training text | conversations | tokens |
|---|---|---|
{sources}

{held_out}

## Data and licence
The weights are under CC BY-SA 4.0, because Schema-Guided Dialogue is.
- Schema-Guided Dialogue (DSTC8), train part: Google, CC BY-SA 4.0,
  `google-research-datasets/schema_guided_dstc8`.
- Taskmaster-4: Google, CC BY 4.0, `github.com/google-research-datasets/Taskmaster`.
- GSM8K, train part: OpenAI, MIT, `openai/gsm8k`.
- Conversations of `data/make_conversations.py` in this repository, CC0.

None of the prompts of `data/validation.jsonl.gz` and `data/bench.jsonl`, and none of the development
dialogues of Schema-Guided Dialogue, were trained on.
"""


def held_out_table(losses: dict[str, float]) -> str:
    if not losses:
        return "Training is still running: interim weights."
    rows = [f"| {name} | {loss:.3f} | {np.exp(loss):.2f} |" for name, loss in losses.items()]
    return "\n".join(["| held-out text | nats per token | perplexity |", "|---|---|---|", *rows])


def write_card(training: Training, counts: dict[str, tuple[int, int]], losses: dict[str, float]) -> str:
    recipe, done = training.recipe, training.progress.step
    where = "a GPU" if training.device.type == "cuda" else f"{torch.get_num_threads()} CPU cores"
    return CARD.format(
        **vars(recipe),
        done=done,
        parameters=sum(p.numel() for p in training.model.parameters()) / 1e6,
        tokens=done * recipe.batch * recipe.block / 1e6,
        unique=sum(tokens for _, tokens in counts.values()) / 1e6,
        minutes=training.progress.seconds / 60,
        where=where,
        sources="\n".join(f"| {name} | {rows:,} | {tokens:,} |" for name, (rows, tokens) in counts.items()),
        held_out=held_out_table(losses),
    )


def export(training: Training, tokenizer: PreTrainedTokenizerFast, card: str, output: Path) -> None:
    """Writes the model folder in bfloat16; files are renamed into place, so that none is ever seen half."""
    partial = output.with_name(f".{output.name}.partial")
    model = LlamaForCausalLM(training.model.config).to(torch.bfloat16)
    model.load_state_dict(training.model.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / "README.md").write_text(card, encoding="utf-8")
    output.mkdir(parents=True, exist_ok=True)
    for path in partial.iterdir():
        path.chmod(0o644)  # weights are written through a private temporary file
        os.replace(path, output / path.name)
    shutil.rmtree(partial)


# ------------------------------------------------------------------------------------------------------- run


def timed_steps(training: Training) -> Iterator[int]:
    """Trains step by step; yields after each one, with the clock stopped."""
    recipe, progress = training.recipe, training.progress
    with tqdm(total=recipe.steps, initial=progress.step, unit="step", mininterval=10) as bar:
        while progress.step < recipe.steps:
            begin = time.perf_counter()
            loss = training.step()
            progress.seconds += time.perf_counter() - begin
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()
            yield progress.step


def run(recipe: Recipe, output: Path, data: list[Path] | None = None, resume: bool = False) -> dict[str, float]:
    """Trains, exports on the way and at the end; returns the held-out losses by source."""
    train, held_out = hub_sources() if data is None else local_sources(data)
    for texts, more in zip((train, held_out), generated_sources(recipe.generated), strict=True):
        texts.update(more)
    core = train_tokenizer((text for texts in train.values() for text in texts), recipe.vocabulary)
    tokenizer = wrap_tokenizer(core, recipe.positions)
    encoded = {name: encode(core, texts) for name, texts in train.items()}
    counts = {name: (len(documents), sum(map(len, documents))) for name, documents in encoded.items()}
    training = Training(recipe, core, [document for documents in encoded.values() for document in documents])

    state = output.parent / f".{output.name}.state.pt"
    output.parent.mkdir(parents=True, exist_ok=True)
    if resume and state.exists():
        training.load(state)
    for step in timed_steps(training):
        if step == recipe.first_export or step % recipe.save_every == 0:
            training.save(state)
            export(training, tokenizer, write_card(training, counts, {}), output)

    losses = {name: held_out_loss(training, encode(core, texts)) for name, texts in held_out.items()}
    export(training, tokenizer, write_card(training, counts, losses), output)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("checkpoints/quickstart-target"))
    parser.add_argument(
        "--data", type=Path, nargs="*", help="ShareGPT files; default: the three sets by name; nothing behind it: none"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last saved state")
    for each in fields(Recipe):
        parser.add_argument(f"--{each.name}", type=type(each.default), default=each.default, help="of the recipe")
    args = parser.parse_args()
    recipe = Recipe(**{each.name: getattr(args, each.name) for each in fields(Recipe)})
    losses = run(recipe, args.output, args.data, args.resume)
    for name, loss in losses.items():
        print(f"{name}: {loss:.3f} nats per token")


if __name__ == "__main__":
    main()
