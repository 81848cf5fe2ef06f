"""How a target comes to be loaded: what the options of all commands mean to transformers' ``from_pretrained``."""

import json
import re
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file, extract_commit_hash, logging

from shape import bundled
from shape.errors import ConfigError, UnsupportedTarget, did_you_mean, out_of_memory
from shape.target.options import AnsweringOptions, PairOptions, PlacedOptions, TargetOptions

# Where hub repositories are read from, in transformers' words. A revision is one repository's own; the rest serves the
# target's and the predictor's.
SOURCE = frozenset({"token", "cache_dir", "local_files_only", "force_download", "proxies"})
HUB_OPTIONS = SOURCE | {"revision"}
# Options of Target.load, and of commands by themselves.
_OURS = {"dtype", "device_map", "tokenizer", "prepacked", "quantize"}
# What is often meant by an option that nobody knows.
_OFTEN_GIVEN = [*_OURS, "drafter", "fall_back", "num_draft_tokens", "predictor", "tree", "draft_device"]
# What transformers, safetensors and torch say of weights that are not there or cut.
_WEIGHTS_GONE = ("no file named", "deserializing header", "PytorchStreamReader", "Unable to load weights")
# What says which files are read: all that a tokenizer takes, of which any other would become a setting.
FILE_OPTIONS = HUB_OPTIONS | {"trust_remote_code", "code_revision", "subfolder", "gguf_file"}


def of_target(options: TargetOptions) -> dict[str, Any]:
    """What was given, as options of ``Target.load``.

    Raises:
        ConfigError: one is given twice, or a device that is not there.
    """
    given: dict[str, Any] = {
        "revision": options.revision,
        "token": options.token,
        "trust_remote_code": options.trust_remote_code or None,
        "attn_implementation": options.attn_implementation,
        "quantization_config": options.quantization_config,
        "quantize": options.quantize,
    }
    if isinstance(options, PlacedOptions):
        if options.device is not None and options.device_map is not None:
            raise ConfigError("device and device_map both say where the target is put; give one of them")
        device: Any = options.device
        if isinstance(options, AnsweringOptions) and options.backend != "torch":
            given["backend"] = options.backend  # it has its own names for devices
        elif device is not None:
            device = resolve_device(device)
        given["device_map"] = options.device_map if device is None else device
    given = {name: value for name, value in given.items() if value is not None}
    if ours := sorted(_OURS & options.target_options.keys()):
        raise ConfigError(f"{ours[0]} is given in target_options, which are transformers' own; leave it out there")
    if "token" in options.target_options:
        raise ConfigError("token is given in target_options, which results record; give --token, or set HF_TOKEN")
    if twice := sorted(given.keys() & options.target_options.keys()):
        raise ConfigError(f"{twice[0]} is given by itself and in target_options; give it once")
    return {**given, **options.target_options}


def of_predictor(options: PairOptions) -> dict[str, Any]:
    """Where predictors are read from."""
    revision = {} if options.predictor_revision is None else {"revision": options.predictor_revision}
    return {**only(SOURCE, of_target(options)), **revision}


def of_pair(options: PairOptions) -> dict[str, Any]:
    """What was given, as options of ``ShapeDecoder.from_pretrained``."""
    return {**of_target(options), "predictor_revision": options.predictor_revision}


def recorded(options: Any) -> dict[str, Any]:
    """A command's options as results keep them: without the token, which is a secret."""
    return {name: value for name, value in asdict(options).items() if name != "token"}


def default_device() -> torch.device:
    """Where a target is put that nobody puts elsewhere: torch's default device if it was set, or else an accelerator if
    there is one.
    """
    if (chosen := torch.get_default_device()).type != "cpu":
        return chosen
    if torch.cuda.is_available():
        return torch.device("cuda")  # of several the process's own, by transformers' rule
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def resolve_device(device: str | torch.device) -> torch.device:
    """A device that is there, from its name.

    Raises:
        ConfigError: no such device.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # an unknown name; or torch was built without that kind
        here = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        here += ["mps"] if torch.backends.mps.is_available() else []
        raise ConfigError(f"device {device} is not here; give {' or '.join(here)} ({first_line(error)})") from error


def resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype from its name; None and "auto" mean the checkpoint's own.

    Raises:
        ConfigError: not the name of a floating-point dtype.
    """
    if dtype is None or dtype == "auto":
        return None
    found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype {dtype} is not a floating-point dtype; use float32, bfloat16 or float16")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """The name that ``resolve_dtype`` takes: float32, bfloat16, ..."""
    return str(dtype).removeprefix("torch.")


def dtype_of(dtype: str | torch.dtype | None, config: Any) -> torch.dtype:
    """What a target is computed in: the dtype asked for, else its checkpoint's, else float32."""
    own = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    return resolve_dtype(dtype) or resolve_dtype(own) or torch.float32


def commit_of(where: str, options: dict[str, Any]) -> str:
    """The commit that a revision of a hub repository stands for now; empty for a folder, and for what cannot be read,
    which its reader reports.
    """
    try:
        found = cached_file(where, "config.json", **only(HUB_OPTIONS | {"subfolder"}, options))
        return extract_commit_hash(found, None) or ""
    except (OSError, ValueError):
        return ""


def read_config(target: str | Path, **options: Any) -> PretrainedConfig:
    """The configuration of a target that is not loaded yet; options as in ``Target.load``.

    Raises:
        UnsupportedTarget: nothing that can be read there, or no target.
    """
    known = {name: value for name, value in options.items() if name not in ("quantization_config", "quantize")}
    where = bundled.resolve(str(target))
    try:
        config, _ = AutoConfig.from_pretrained(where, return_unused_kwargs=True, **known)  # these are not merged here
    except Exception as error:  # damaged files have errors of many kinds
        there = Path(where).exists()
        # Of a path transformers would say why it is no name on the hub.
        reason = "" if not there and str(target).startswith((".", "/")) else f" ({first_line(error)})"
        raise UnsupportedTarget(
            f"target {target} cannot be loaded; give a folder with config.json or the id of a reachable hub "
            f"model{'' if there else ': no such folder is here'}{reason}"
        ) from error
    if config.model_type == "shape":
        raise UnsupportedTarget(f"{target} is a predictor; give it as predictor, and a language model as target")
    return config


def auto_class(config: PretrainedConfig) -> Any:
    """transformers' class by which a target is loaded: that of causal LMs, or, of models that see images as well and
    are known by that alone, theirs.
    """
    sees = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def model_of(target: str | Path, config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """A model with the weights of its files.

    Args:
        target: folder, hub id or name of a bundled one.
        options: of transformers' `from_pretrained`.

    Raises:
        ConfigError: an option that transformers does not know.
        UnsupportedTarget: it cannot be loaded, or its files lack weights.
    """
    try:
        model, found = auto_class(config).from_pretrained(
            bundled.resolve(str(target)), output_loading_info=True, **options
        )
    except TypeError as error:  # transformers gives what it does not know to the model
        raise _unknown_option(target, error) from error
    except Exception as error:  # a quantiser that is not installed, damaged files: each has errors of its own
        raise _not_loaded(target, error, options.get("device_map")) from error
    # What is missing is filled at random; weights of fewer bits have other names, which their readers look after.
    quantised = {"quantization_config", "gguf_file"}.intersection(options) or hasattr(config, "quantization_config")
    if (missing := sorted(found["missing_keys"])) and not quantised:
        raise UnsupportedTarget(
            f"target {target} cannot be loaded: its files lack {len(missing)} of its configuration's weights "
            f"({', '.join(missing[:3])}); copy or download them again, or, if this is a drafter of EAGLE-1 or 2, whose "
            "configuration is a Llama's, give one of EAGLE-3"
        )
    return model


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")


def _file(where: str, name: str, options: Mapping[str, Any]) -> str | None:
    """Where a file of a folder or hub repository lies; None where it has none, as far as that can be known."""
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")}
    try:
        place = only((HUB_OPTIONS | {"subfolder"}) - {"force_download"}, options)
        return cached_file(where, name, **quiet, **place)
    except Exception:  # such as a repository that is not there
        return None


def read_tokenizer(target: str | Path, options: Mapping[str, Any]) -> Any:
    """A target's tokenizer; None where it has none: ids in, ids out, and rendering text then raises with the reason.

    Raises:
        UnsupportedTarget: its files are damaged, or need a package that is not there.
    """
    where = bundled.resolve(str(target))
    try:
        # With mistral-common installed its tokenizer, which has no chat template, would be taken for Mistral's models.
        tokenizer = AutoTokenizer.from_pretrained(where, **only(FILE_OPTIONS, options), mistral_format=False)
        # Of models that see images some have their template where transformers' processors alone look for it.
        if tokenizer.chat_template is None and (file := _file(where, "chat_template.json", options)) is not None:
            tokenizer.chat_template = json.loads(Path(file).read_text(encoding="utf-8"))["chat_template"]
        return tokenizer
    except Exception as error:
        if any(_file(where, name, options) for name in _TOKENIZER_FILES):
            raise UnsupportedTarget(
                f"the tokenizer of target {target} cannot be read ({first_line(error)}); install what it names, or "
                "restore its files"
            ) from error
        return None


def tokenizer_named(name: str | Path, options: Mapping[str, Any]) -> Any:
    """The tokenizer of a folder or hub id. Raises ConfigError where there is none."""
    found = read_tokenizer(name, only({*SOURCE, "trust_remote_code"}, options))
    if found is None:
        raise ConfigError(f"there is no tokenizer in {name}; give a folder or a hub id that has one")
    return found


def tokenizer_of(target: str, options: TargetOptions) -> Any:
    """A target's tokenizer; None where it has none, of which transformers may make one that knows no word.

    Raises:
        UnsupportedTarget: its files are damaged.
    """
    found = read_tokenizer(target, of_target(options))
    knows_words = found is not None and len(found.encode("two words", add_special_tokens=False)) > 1
    return found if knows_words else None


def only(names: Set[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of these names."""
    return {name: value for name, value in options.items() if name in names}


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def without_report() -> Iterator[None]:
    """Without transformers' table of weights that do not fit: who loads names them in a sentence, or expects them."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _not_loaded(target: Any, error: Exception, place: Any) -> UnsupportedTarget:
    """What to say where the weights of a target cannot be read, or find no room."""
    said = first_line(error)
    if out_of_memory(error) == "accelerator":
        return UnsupportedTarget(
            f"target {target} does not fit into the memory of {place}; give device_map auto, which spreads it, or cpu, "
            f"or a smaller dtype; in training, which has no device_map, shard_target or a smaller dtype ({said})"
        )
    gone = any(phrase in said for phrase in _WEIGHTS_GONE)
    advice = "; its weights are missing or damaged: copy or download them again" if gone else ""
    return UnsupportedTarget(f"target {target} cannot be loaded{advice} ({said})")


def _unknown_option(target: Any, error: TypeError) -> ConfigError:
    """What to say where a model was given an option that it does not know."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    meant = did_you_mean(unknown[1], _OFTEN_GIVEN) if unknown else ""
    return ConfigError(
        f"target {target} cannot be loaded with these options ({first_line(error)}); give such as ours, or "
        f"transformers' from_pretrained, takes{meant}"
    )
