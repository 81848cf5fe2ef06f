"""From names to parts: a target and its drafter from folders, hub ids, bundled names, or models at hand."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from shape import bundled
from shape.drafters import Drafter, ModelDrafter, TrainedDrafter, TreeShape, make_drafter
from shape.drafters.lengths import DraftLength
from shape.drafters.recipes.drafter import RecipeDrafter
from shape.drafters.recipes.pack import Pack
from shape.errors import CheckpointError, ConfigError, TargetMismatch
from shape.files import reading, typed
from shape.networks.base import Predictor
from shape.networks.config import ShapeConfig
from shape.networks.formats.files import architectures
from shape.networks.formats.table import FORMATS, format_of
from shape.networks.formats.table import load as load_foreign
from shape.networks.registry import PREDICTORS
from shape.target.identity import TargetIdentity
from shape.target.inference import multiplies_bfloat16
from shape.target.loading import FILE_OPTIONS, HUB_OPTIONS, SOURCE, first_line, only, resolve_device, without_report
from shape.target.model import Target
from shape.target.prepack import multiplies, prepack

TargetSource = str | Path | PreTrainedModel | Target
# The length of a draft in our words, transformers' and vLLM's.
_DRAFT_LENGTHS = ("num_draft_tokens", "num_assistant_tokens", "num_speculative_tokens")
# What a predictor can be called as a drafter, beside "shape", and the kind that it then has to be of.
PREDICTOR_KINDS = {
    "medusa": "medusa",
    "eagle": "eagle",
    "eagle3": "eagle",
    "peagle": "peagle",
    "mtp": "mtp",
    "block": "block",
    "dflash": "block",
    "dflash2": "block",
    "dspark": "block",
}
_DEFAULT_DRAFTER = "suffix"  # drafts for a target alone
_A_DRAFTER = re.compile("eagle|medusa|dflash|dspark|domino|speculator|draft", re.IGNORECASE)
_OWN_LAYER = "mtp"  # without a predictor it drafts with the layer that the target's own files have


_TRAINED = frozenset({"shape", "model", *PREDICTOR_KINDS})  # names that need a predictor


def names_of(kind: str) -> list[str]:
    """What a drafter of this kind, of a predictor or a smaller model, may be asked for by."""
    return list(dict.fromkeys(["shape", kind, *(name for name, each in PREDICTOR_KINDS.items() if each == kind)]))


def needs_predictor(drafter: str | None) -> bool:
    """Whether one of the names joined by "+" is a predictor's; without a name a given predictor drafts."""
    return drafter is None or not _TRAINED.isdisjoint(drafter.split("+"))


def refuse_unknown(drafters: Iterable[str], predictor: object, pack: object) -> None:
    """Raises ConfigError for names, joined by "+", that no drafter has, or that need a predictor or a pack where none
    is given, before a target is loaded for them.
    """
    parts = {part for name in drafters for part in name.split("+")}
    for part in sorted(parts - _TRAINED - {"recipes"}):
        make_drafter(part)
    if "recipes" in parts and pack is None:
        raise ConfigError("drafter 'recipes' needs a pack; give --pack FILE, which `shape recipes compile` writes")
    if not predictor and (missing := sorted(parts & _TRAINED - {_OWN_LAYER})):
        raise ConfigError(f"drafter {missing[0]!r} needs a predictor; give --predictor DIR")


@dataclass(frozen=True)
class DrafterOptions:
    """What drafts, and how; see ``ShapeDecoder.from_pretrained``."""

    drafter: str | Sequence[str] | None = None
    tree: TreeShape | None = None
    draft_device: str | torch.device | None = None
    num_draft_tokens: str | int | DraftLength | None = None
    pack: str | Path | None = None
    misses: str | Path | None = None


def load_pair(
    source: TargetSource | None,
    target: TargetSource | None,
    predictor: str | Path | None,
    drafts: DrafterOptions,
    predictor_revision: str | None = None,
    prepacked: bool | None = None,
    **options: Any,
) -> tuple[Target, Drafter | None]:
    """Arguments and errors are those of ``ShapeDecoder.from_pretrained``."""
    options = {name: value for name, value in options.items() if value is not None}
    if not isinstance(predictor, str | Path | None):
        raise ConfigError(f"predictor is a {type(predictor).__name__}; give a folder or a hub id")
    hub, code = only(SOURCE, options), only({"trust_remote_code"}, options)
    if predictor_revision is not None:
        hub["revision"] = predictor_revision
    predictor, target = _predictor_and_target(source, target, predictor, hub, options)
    length = drafts.num_draft_tokens
    device = None if drafts.draft_device is None else resolve_device(drafts.draft_device)
    name = drafts.drafter if drafts.drafter is None or isinstance(drafts.drafter, str) else "+".join(drafts.drafter)
    parts = [] if name is None else name.split("+")
    predictor_name = next((part for part in parts if part in PREDICTOR_KINDS), "shape")
    trained = needs_predictor(name)
    if predictor is None and target is None:
        raise ConfigError("neither a predictor nor a target is given; give at least one of them")
    own = predictor is None and predictor_name == _OWN_LAYER
    if predictor is None and name is not None and trained and not own:
        raise ConfigError(f"drafter {name!r} needs a predictor; give the folder of an exported one")
    if drafts.pack is None and "recipes" in parts:
        raise ConfigError(f"drafter {name!r} needs a pack; give a file of `shape recipes compile`")
    if drafts.pack is not None and name is not None and "recipes" not in parts:
        raise ConfigError(
            f"a pack is given, and drafter {name!r} looks nothing up in it; give "
            f"{'recipes' if name == 'none' else f'recipes+{name}'}, or leave the pack out"
        )
    if drafts.pack is None and drafts.misses is not None:
        raise ConfigError("misses are of a pack, and none is given; give one, or leave misses out")
    given: dict[str, Drafter] = {}
    if drafts.pack is not None:
        given["recipes"] = RecipeDrafter(Pack.load(drafts.pack), misses=drafts.misses)
    network, is_model = None, predictor is not None and is_language_model(predictor, **hub)
    if predictor is not None and not is_model:
        network = load_predictor(predictor, target, **hub)
        target = target or _target_of(network, predictor)
    if own:
        assert target is not None
        network = _own_layer(target, **only(HUB_OPTIONS, options))
    if predictor is not None and name is not None and is_model != ("model" in parts) and trained:
        what = "language model" if is_model else "predictor"
        raise ConfigError(
            f"drafter {name!r} is asked for, and {predictor} is a {what}; leave drafter out, or give another"
        )
    if network is not None and network.kind != PREDICTOR_KINDS.get(predictor_name, network.kind):
        raise ConfigError(f"drafter {name!r} is asked for, and predictor {predictor} is of kind {network.kind}")
    if target is None:
        raise ConfigError(
            f"{predictor} is a language model, which drafts for any with its tokens; give a target beside it, or give "
            "it as target to decode it"
        )
    if not isinstance(length, int | None) and not (is_model and trained):
        raise ConfigError(f"num_draft_tokens {length} is for a smaller model as drafter; give a number")
    # What is wrong with these is said before a target is loaded.
    limit = length if isinstance(length, int) else None
    make_drafter("none", None, limit)
    others = {part: make_drafter(part, None, limit) for part in parts if part not in {*given, predictor_name, "model"}}
    if not isinstance(target, str | Path):  # these are the predictor's alone, then
        options = {name: value for name, value in options.items() if name not in {*SOURCE, *code}}
    loaded = Target.load(target, prepacked=prepacked, **options)
    where = device or loaded.device
    if network is not None and trained:
        network = network.to(where, draft_dtype(loaded, where))  # type: ignore[arg-type]
        prepack(network, prepacked)
        given[predictor_name] = TrainedDrafter(network, drafts.tree)
    elif predictor is not None and trained:
        small = Target.load(
            predictor, dtype=draft_dtype(loaded, where), device_map=where, prepacked=prepacked, **code, **hub
        )
        given["model"] = ModelDrafter(small, "adaptive" if isinstance(length, int | None) else length)
    chosen = "+".join(given) or _DEFAULT_DRAFTER if name is None else name
    return loaded, make_drafter(chosen, given | others, limit)


def _own_layer(target: TargetSource, **hub: Any) -> Predictor:
    """The MTP layer in a target's own files.

    Raises:
        CheckpointError: they have none.
        ConfigError: a model that was made and not loaded.
    """
    if isinstance(target, Target):
        return _own_layer(target.name, **{"revision": target.identity.revision or None, **hub})
    name = target.name_or_path if isinstance(target, PreTrainedModel) else target
    if not name:
        raise ConfigError(
            f"drafter {_OWN_LAYER!r} reads the target's files, and the model at hand does not say where these are; "
            "give their folder or hub id"
        )
    return load_predictor(name, form=_OWN_LAYER, **hub)


def draft_dtype(target: Target, device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies in it: a draft's rounding costs acceptance, never a token."""
    slow = device.type == "cpu" and target.dtype == torch.float16 and not multiplies(target.dtype)
    if device.type == target.device.type and target.dtype != torch.float32 and not slow:
        return target.dtype
    return torch.bfloat16 if multiplies_bfloat16(device) else torch.float32


def _predictor_and_target(
    source: TargetSource | None,
    target: TargetSource | None,
    predictor: str | Path | None,
    hub: dict[str, Any],
    options: dict[str, Any],
) -> tuple[str | Path | None, TargetSource | None]:
    """Predictor and target, where the first argument may be either.

    Args:
        hub: where predictors are read from. options: where targets are.

    Raises:
        ConfigError: two of one kind.
        CheckpointError: what is given alone cannot be read.
    """
    if source is None:
        return predictor, target
    if predictor is not None:
        if target is not None:
            raise ConfigError(f"{source}, {target} and {predictor} are given; give one target and one predictor")
        return predictor, source
    if not isinstance(source, str | Path):
        if isinstance(target, PreTrainedModel | Target):
            raise ConfigError("two models at hand are given; give one, and the folder or hub id of a predictor")
        return target, source
    if target is None:
        for known in (only(FILE_OPTIONS, options), hub):
            try:
                predicts = _is_predictor(_config_of(source, known))
            except Exception as error:  # damaged files have errors of many kinds
                reason = first_line(error)
            else:
                return (source, None) if predicts else (None, source)
        raise CheckpointError(
            f"{source} cannot be read; give the folder or hub id of a target or of a predictor ({reason})"
        )
    if isinstance(target, str | Path) and _is_predictor(_known_config(target, hub)):
        return target, source
    return source, target


def _config_of(source: str | Path, hub: dict[str, Any]) -> dict[str, Any]:
    """What its configuration says, of which no code is run."""
    return PretrainedConfig.get_config_dict(bundled.resolve(str(source)), **hub)[0]


def _known_config(source: str | Path, hub: dict[str, Any]) -> dict[str, Any]:
    """Empty for what cannot be read, which is left to its reader."""
    try:
        return _config_of(source, hub)
    except Exception:  # damaged files have errors of many kinds
        return {}


def _is_predictor(config: dict[str, Any]) -> bool:
    """Whether a configuration is a predictor's, ours or of a format that is read."""
    return config.get("model_type") == ShapeConfig.model_type or format_of(config) is not None


def is_language_model(source: str | Path, **hub: Any) -> bool:
    """Whether a predictor is a causal LM; False for what cannot be read.

    Raises:
        CheckpointError: by its name it is a drafter, of a kind that is not known here. Weights of one that were read as
            a language model's would draft noise.
    """
    config = _known_config(source, hub)
    if "model_type" not in config or _is_predictor(config):
        return False
    if strange := [name for name in architectures(config) if _A_DRAFTER.search(name)]:
        raise CheckpointError(
            f"predictor {source} is a drafter of a kind that is not known here ({strange[0]}); the formats "
            f"{', '.join(FORMATS)} are"
        )
    return True


def _target_of(network: Predictor, source: str | Path) -> str:
    """Name of the target that a predictor was trained for."""
    if (known := network.config.target_identity) is None:
        raise TargetMismatch(f"predictor {source} does not say which target it was trained for; give a target")
    return known["name"]


def load_predictor(source: str | Path, target: TargetSource | None = None, form: str = "auto", **hub: Any) -> Predictor:
    """A predictor of any kind in eval mode, ours or of another format; `hub` says where it is read.

    Args:
        target: tells of another's checkpoint what it leaves open.
        form: its format, by a name of `shape.networks.formats.table`, or "auto".

    Raises:
        CheckpointError: nothing that can be read there, weights that are not those of its configuration, or damage to
            either that can be seen.
    """
    where = bundled.resolve(str(source))
    advice = (
        f"give a folder written by shape train or a hub id{'' if Path(where).exists() else ': no such folder is here'}"
    )
    with reading(f"predictor {source}", CheckpointError, advice):
        if Path(where).is_file():
            raise CheckpointError(f"predictor {source} is a file; give the folder of a predictor")
        if form == "auto" and is_language_model(source, **hub):
            raise CheckpointError(f"{source} is a language model and no predictor; give it as target")
        if form != "auto" or format_of(_config_of(source, hub)) is not None:
            given = target if isinstance(target, str | Path | None) else target.config
            return _sound(load_foreign(where, given, form, **hub), source)
        config = ShapeConfig.from_pretrained(where, **hub)
        typed(TreeShape, config.draft or {})
        if config.target_identity is not None:
            TargetIdentity.from_dict(config.target_identity)
        with without_report():
            found: Any = PREDICTORS[config.kind].from_pretrained(
                where, config=config, output_loading_info=True, ignore_mismatched_sizes=True, **hub
            )
    predictor, info = found
    # transformers would fill in what is missing at random, and every draft would be refused.
    sizes = (key if isinstance(key, str) else key[0] for key in info["mismatched_keys"])
    if wrong := sorted({*info["missing_keys"], *info["unexpected_keys"], *sizes}):
        raise CheckpointError(
            f"the weights of predictor {source} are not those of its configuration ({', '.join(wrong[:3])} missing, "
            "too many or of another size); it may be of another version of this package: train it anew"
        )
    return _sound(predictor.eval().requires_grad_(False), source)


def _sound(predictor: Predictor, source: str | Path) -> Predictor:
    """The predictor; raises CheckpointError where its weights are damaged."""
    config, vocabulary = predictor.config, predictor.draft_vocabulary
    size = (config.target_identity or {}).get("vocab_size", config.vocab_size)
    strange = vocabulary is not None and bool((vocabulary < 0).any() or (size and (vocabulary >= size).any()))
    if strange or not all(bool(weight.isfinite().all()) for weight in predictor.parameters()):
        raise CheckpointError(
            f"the weights of predictor {source} are damaged: they hold numbers that are not finite, or tokens that the "
            "target has not; copy them again, or train it anew"
        )
    return predictor


def draft_length(
    options: dict[str, Any], num_draft_tokens: str | int | DraftLength | None = None
) -> str | int | DraftLength | None:
    """Takes the length of a draft, under whatever name it is given, out of options.

    Raises:
        ConfigError: it is given twice.
    """
    given = [num_draft_tokens, *(options.pop(name, None) for name in _DRAFT_LENGTHS)]
    found = [value for value in given if value is not None]
    if len(found) > 1:
        raise ConfigError(f"the length of a draft is given {len(found)} times; give num_draft_tokens alone")
    return found[0] if found else None
