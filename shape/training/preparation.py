"""Before training: the target, the conversations to learn from, and what is validated and measured on."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, cast

import pytorch_lightning as pl
from pytorch_lightning.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch import Tensor
from transformers import PretrainedConfig

from shape import bundled
from shape.data.conversations import Conversation, Prompt, evenly
from shape.data.encoding import encode_row, supervised_runs
from shape.data.reading import conversations_of, load_conversations, load_prompts
from shape.data.regeneration import answers_file, own_answers
from shape.data.statistics import DataStatistics, count_tokens
from shape.errors import ConfigError, DataError, FeatureStoreError
from shape.evaluation.prompts import refuse_shared_ids
from shape.features.extraction import place, single_texts, split_conversations
from shape.features.manifest import MANIFEST, refuse_others
from shape.features.storage import Storage
from shape.generation.answers import LocalBackend
from shape.generation.decoder import ShapeDecoder
from shape.target.loading import of_target, read_config
from shape.target.model import Target, announce
from shape.target.quantize import quantized
from shape.target.size import Size, size_of
from shape.training.defaults import network_config, resolve
from shape.training.forecast import Forecast
from shape.training.options import TrainOptions
from shape.training.warm_start import refuse_other_sizes

_HELD_OUT_SHARE = 0.1
_MANY_CUT = 0.2  # share of the conversations
_TEXT_PROMPT = 32  # tokens of a text that prompt for the rest


@dataclass(frozen=True)
class Material:
    """What is learned from and validated on: the same for runs that differ in their network and its optimisation alone.

    Attributes:
        runs: the options of each, resolved.
        conversations: each of one text, as `single_texts` makes them.
        excluded: numbers of those that are not learned from: validated on, measured on, or more than were asked for.
        for_validation: those, or others, that choose the weights.
        prompts: of the measurement at the end; they chose nothing.
        home: where features and answers lie.
        trainer: runs the target beforehand.
    """

    runs: list[TrainOptions]
    target: Target
    conversations: list[Conversation]
    excluded: set[int]
    for_validation: list[Conversation]
    prompts: list[Prompt]
    home: Storage
    trainer: pl.Trainer

    @property
    def answers(self) -> str:
        """Whose they are, for the record: the target answers where there is a prompt, and nothing else."""
        asked = [conversation.asks for conversation in self.conversations]
        if not self.runs[0].regenerate or not any(asked):
            return "as given"
        return "the target's own" if all(asked) else "the target's own; texts without a prompt as given"


def prepare(runs: Sequence[TrainOptions], home: Storage) -> Material:
    """Target and data of runs that share them, and every check of their options that needs these.

    Args:
        home: where features lie, or will; answers too.

    Raises:
        ConfigError, DataError, UnsupportedTarget, FeatureStoreError: what cannot be trained on.
    """
    options = runs[0]
    trainer = options.trainer.for_extraction()
    for run in runs:  # early, as is all up to the target: what is wrong stops the run before the work
        run.trainer.for_training(1, logger=False, enable_checkpointing=False)
    if options.shard_target and trainer.world_size < 2:
        raise ConfigError(
            "shard_target shares the target out among processes, and there is one; give --trainer.devices and "
            "--trainer.strategy ddp, or leave it out"
        )
    for run in runs:
        if not run.trust_remote_code:  # code that comes with a target is only fetched beside its weights
            sized_before_loading(run)
    prompts = _measurement_prompts(options)
    conversations, for_validation = load_data(options), validation_data(options)
    target = load_target(options, trainer)
    if target.tokenizer is None:
        raise DataError(f"target {target.name} has no tokenizer, and conversations are text; put one into its folder")
    # Weights in fewer bits are packed, or no parameters: then the configuration says how many there are.
    packed = getattr(target.model.config, "quantization_config", None) or quantized(target.model)
    size = size_of(target.model.config if packed else target.model, options.trust_remote_code)
    for run in runs:
        first = resolve(run, size, None)
        first.feature_options().check(target)
        network_config(first, target)
        refuse_other_sizes(run, target)
    refuse_others(home, target)
    options = resolve(options, size, None)  # what follows reads its length
    _refuse_early(options, target, conversations, for_validation, prompts)
    if options.writes_answers:
        conversations = _regenerated(options, target, conversations, home, trainer)
    texts = split_conversations(target, conversations, options.max_length, options.skip_bad_rows)
    held_out = set() if for_validation else held_out_numbers(options, conversations)
    excluded = excluded_numbers(options, conversations, held_out, for_validation)
    text = text_to_learn(options, conversations, excluded, target.tokenizer)
    resolved = [resolve(run, size, text) for run in runs]
    for_validation = for_validation or [conversations[index] for index in sorted(held_out)]
    longest = math.inf
    if not prompts:
        # The best of many measurements owes something to luck on its own prompts, and is measured on others.
        for_validation, prompts = for_validation[::2], _as_prompts(for_validation[1::2])
        longest = cast(int, options.max_length)  # longer ones are neither learned from nor validated on
    rank_zero_only(announce)(target)
    for run in resolved:
        plan = Forecast(run, size, text, target.dtype).lines[:2]
        rank_zero_only(print)("\n".join(plan), flush=True)
    owners = [number for number, own in enumerate(texts) for _ in own]
    return Material(
        resolved,
        target,
        list(chain.from_iterable(texts)),
        {index for index, number in enumerate(owners) if number in excluded},
        single_texts(target, for_validation, options.max_length, options.skip_bad_rows),
        _fitting(prompts, target, options, longest),
        home,
        trainer,
    )


def _refuse_early(
    options: TrainOptions,
    target: Target,
    conversations: list[Conversation],
    for_validation: list[Conversation],
    prompts: list[Prompt],
) -> None:
    """Raises DataError for what the files alone can say, before the target answers."""
    if for_validation:
        texts = single_texts(target, for_validation, options.max_length, options.skip_bad_rows)
        validation_prompts(texts, target, options)
    else:
        held_out_numbers(options, conversations)
    _fitting(prompts, target, options)
    if options.measurement.limit and len(for_validation) == 1 and not prompts:
        raise DataError(
            "there is one conversation to validate on, and none is left to measure on; give more --validation_data, or "
            "--measurement.prompts, or --measurement.limit 0"
        )


def writable(output: Path) -> Path:
    """The output folder, made; raises ConfigError where nothing can be written."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=output).close()
    except OSError as error:
        raise ConfigError(f"output {output} cannot be written ({error.strerror}); give another folder") from error
    return output


def load_target(options: TrainOptions, trainer: pl.Trainer) -> Target:
    """As its options say, and where the trainer computes."""
    return Target.load(
        options.target,
        dtype=options.dtype,
        device_map="cpu" if options.shard_target else trainer.strategy.root_device,
        prepacked=False if options.shard_target else None,
        **of_target(options),
    )


# ------------------------------------------------------------------------------------------------- what is learned


def sized_before_loading(options: TrainOptions) -> tuple[TrainOptions, Size, PretrainedConfig]:
    """The options resolved by the size of the target, which its configuration says, and these.

    Raises:
        ConfigError, UnsupportedTarget: they do not fit it, or one another.
    """
    config = read_config(options.target, **of_target(options))
    size = size_of(config, options.trust_remote_code)
    first = resolve(options, size, None)
    first.feature_options().check_for(options.target, size.positions, config.get_text_config().num_hidden_layers)
    network_config(first, size)
    return first, size, config


def load_data(options: TrainOptions) -> list[Conversation]:
    """The conversations to train on; those that ship come with the shipped target's own answers."""
    if options.data is None:
        name = "answers.jsonl.gz" if options.uses_bundled_answers else "train.jsonl.gz"
        options = replace(options, data=str(bundled.path("data", name)))
    return conversations_of(options, require_answers=not options.regenerate)


def _regenerated(
    options: TrainOptions, target: Target, conversations: list[Conversation], home: Storage, trainer: pl.Trainer
) -> list[Conversation]:
    """The conversations answered by the target, where the Trainer would run it. Written once, beside the features that
    are made of them, or, where these lie elsewhere, to the output folder.
    """
    folder = home.folder or Path(options.output)
    place(target, trainer.strategy.root_device)
    chosen = replace(options.regeneration, max_new_tokens=options.longest_answer)
    decoder = ShapeDecoder(target)
    backend = LocalBackend(decoder, chosen.max_new_tokens, chosen.temperature, options.max_length)
    answers = answers_file(conversations, backend, folder, chosen)
    asked = any(conversation.asks for conversation in conversations)
    if asked and home.exists(MANIFEST) and not answers.exists():
        elsewhere = "" if home.folder else f", or the run that made them has {answers.name} in another --output"
        raise FeatureStoreError(
            f"features in {home} are not of the target's answers to these conversations: the data or the options of "
            f"answering have changed since{elsewhere}; give another folder with --features or --output, or, where the "
            "data holds the target's own answers, --regenerate false"
        )
    answered = own_answers(
        conversations,
        backend,
        answers,
        chosen,
        replace(options.trainer, enable_progress_bar=False).for_extraction(),
        progress=options.trainer.enable_progress_bar,
    )
    decoder.close()  # frees captured steps and their caches, which a cycle of references would keep
    chats = [each for each in answered if each.asks]
    within = (each for each in chats if all(len(text.input_ids) < cast(int, options.max_length) for text in each.texts))
    cut = sum(not all(message.finished for message in each.messages) for each in within)
    if cut > _MANY_CUT * len(chats):
        rank_zero_warn(
            f"{cut} of {len(chats)} conversations end in an answer that was cut at {chosen.max_new_tokens} tokens; "
            "what would have followed, such as the answer behind a long thought, is not learned. Give more "
            "--regeneration.max_new_tokens, and a --max_length of twice as many, or, to a target that thinks, "
            "--chat_template_kwargs.enable_thinking false"
        )
    return answered


def held_out_numbers(options: TrainOptions, conversations: list[Conversation]) -> set[int]:
    """Numbers of the conversations to validate on, to measure on at the end, and not to train on: whatever is measured,
    the same, so that the same is learned.
    """
    if len(conversations) < 3:
        raise DataError(
            f"{options.data} has {len(conversations)} conversation(s), too few to train on, to validate on and to "
            "measure on; give more, or --validation_data"
        )
    count = max(2, min(2 * options.validation.prompts, int(len(conversations) * _HELD_OUT_SHARE)))
    return set(evenly(range(len(conversations)), count))


def excluded_numbers(
    options: TrainOptions,
    conversations: Sequence[Conversation],
    held_out: set[int],
    for_validation: Sequence[Conversation] = (),
) -> set[int]:
    """Numbers of the conversations that are not learned from: held out, asking the same as one that is held out or
    given for validation, or beyond the number asked for.
    """
    asked = {_asked(conversations[number]) for number in held_out} | {_asked(each) for each in for_validation}
    rest = [number for number in range(len(conversations)) if number not in held_out]
    copies = {number for number in rest if _asked(conversations[number]) in asked}
    if 2 * len(copies) > len(rest):
        rank_zero_warn(
            f"{len(copies)} of {len(conversations)} conversations ask the same as one that is validated on; they are "
            "learned from, as little would be left, so that acceptance in validation is of known questions. Give other "
            "--validation_data"
        )
        copies = set()
    elif copies:
        rank_zero_only(print)(
            f"left out: {len(copies)} conversations that ask the same as one that is validated on", flush=True
        )
    rest = [number for number in rest if number not in copies]
    return held_out | copies | (set(rest) - set(evenly(rest, options.training.conversations)))


def _asked(conversation: Conversation) -> tuple[Any, ...]:
    """All but the answers, by which copies are known; of a conversation that asks nothing, all."""
    said = tuple((message.role, message.content) for message in conversation.messages)
    asked = tuple(message for message in said if message[0] != "assistant")
    return asked or said or tuple(text.input_ids.tobytes() for text in conversation.texts)


def text_to_learn(
    options: TrainOptions, conversations: Sequence[Conversation], excluded: set[int], tokenizer: Any
) -> DataStatistics:
    """What the conversations that are learned from hold, in the target's tokens, by a sample of them."""
    assert options.max_length is not None
    learned = [conversation for number, conversation in enumerate(conversations) if number not in excluded]
    return count_tokens(learned, tokenizer, options.max_length, options.skip_bad_rows)


# ------------------------------------------------------------------------------------------------- what is decoded


def validation_data(options: TrainOptions) -> list[Conversation]:
    """Conversations that are only validated on; empty where a part of the data has to be held out."""
    given = options.validation_data
    if given is None and options.data is None:
        given = str(bundled.path("data", "validation.jsonl.gz"))
    if given is None:
        return []
    return load_conversations(
        given, skip_bad_rows=options.skip_bad_rows, chat_template_kwargs=options.chat_template_kwargs
    )


def validation_prompts(conversations: Sequence[Conversation], target: Target, options: TrainOptions) -> list[Tensor]:
    """Token ids up to an assistant turn, (T,) each: a turn of every conversation in rotation, evenly chosen.

    Raises:
        DataError: no prompt fits the target's positions.
    """
    room = length = cast(int, options.max_length)
    if target.max_positions is not None:
        room = min(room, target.max_positions - options.validation.max_new_tokens)
    found: list[Tensor] = []
    for index, conversation in enumerate(conversations):
        encoded = encode_row(conversation, target.tokenizer, length, options.skip_bad_rows)
        starts = [first for first, _ in supervised_runs(encoded.loss_mask)]
        if conversation.kind == "text":
            starts = [min(_TEXT_PROMPT, len(encoded.input_ids) // 2)]
        starts = [start for start in starts if 1 <= start <= room]
        if starts:
            found.append(encoded.input_ids[: starts[index % len(starts)]])
    if not found:
        raise DataError(
            f"no validation conversation has an assistant turn within {room} tokens; raise max_length, or give other "
            "--validation_data"
        )
    return evenly(found, options.validation.prompts)


def _measurement_prompts(options: TrainOptions) -> list[Prompt]:
    path = options.measurement.prompts
    if path is None and options.data is None:
        path = str(bundled.path("data", "bench.jsonl"))
    prompts = [] if path is None else load_prompts(path, options.chat_template_kwargs)
    if options.measurement.limit:
        refuse_shared_ids(prompts, str(path))
    return prompts


def _as_prompts(conversations: Sequence[Conversation]) -> list[Prompt]:
    """Chats up to their first answer; ids that repeat get a number, as measurements know prompts by them."""
    found: dict[str, Prompt] = {}
    repeated: Counter[str] = Counter()
    for each in conversations:
        roles = [message.role for message in each.messages]
        if each.kind == "chat" and "assistant" in roles and "user" in roles[: roles.index("assistant")]:
            opening = each.messages[: roles.index("assistant")]
            name = each.id
            while name in found:
                repeated[each.id] += 1
                name = f"{each.id}-{repeated[each.id] + 1}"
            found[name] = Prompt(name, "", (opening[-1].content,), opening, each.template)
    return list(found.values())


def _fitting(
    prompts: Sequence[Prompt], target: Target, options: TrainOptions, longest: float = math.inf
) -> list[Prompt]:
    """Those of at most so many tokens that leave room for an answer within the target's positions and, with
    `skip_bad_rows`, that the chat template takes.
    """
    room = math.inf if target.max_positions is None else target.max_positions - options.measurement.max_new_tokens
    room = min(room, longest)

    def fits(prompt: Prompt) -> bool:
        try:
            return target.encode(prompt.opening, prompt.template).shape[1] <= room
        except DataError:
            if not options.skip_bad_rows:
                raise
            return False

    return [prompt for prompt in prompts if fits(prompt)]
