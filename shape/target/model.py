"""The frozen target: hidden states, logits, embeddings, and the identity by which a predictor knows it.

Indexing used everywhere: ``h_i`` is the vector that enters the target's output embedding at position i, and
``softmax(logits(h_i))`` is the distribution of ``x_{i+1}``.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import align_module_device
from torch import Tensor
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import output_capturing

from shape import bundled
from shape.errors import ConfigError, DataError, UnsupportedTarget
from shape.target import loading
from shape.target.chat import answer_message, plain_text, prompt_ids, render
from shape.target.identity import TargetIdentity, float_weight
from shape.target.inference import evaluating
from shape.target.prepack import PrepackedForward, is_prepacked, linear, prepack, unpack, why_slow
from shape.target.quantize import Quantization, QuantizedLinear, check, quantize_model, quantized
from shape.target.rotary import Switch, find_switch
from shape.target.size import longest_text
from shape.target.support import Masks, Support, cache_name

# What logits are scaled by, in this order: Cohere, Granite, Falcon-H1, and the cap of Gemma's.
_SCALING = ("logit_scale", "logits_scaling", "lm_head_multiplier", "final_logit_softcapping")
# Whether a model that is asked for some layers' states counts embeddings among them, as in the tuple that it gives.
_SELECTS = hasattr(output_capturing, "selected_hidden_states")
_HEAD_CHUNK = 256  # unit vectors sent through a quantised head at a time


class Target:
    """A frozen causal LM with the few operations that drafting and verification need.

    Not an ``nn.Module``: it must stay out of the module tree of whatever is trained beside it.

    Args:
        model: a decoder-only Hugging Face causal LM. It stays as its owner has it: it is computed with in
            evaluation mode (see ``inference.evaluating``), and its weights get no gradient from here.
        tokenizer: its tokenizer, or None where only ids are used.
        name: how to load it again (a path, a hub id, or the name of a bundled checkpoint).
        revision: the commit of its hub repository, where that is known.

    Raises:
        UnsupportedTarget: encoder-decoder models, or models without an output embedding.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any = None, name: str | None = None, revision: str = ""
    ) -> None:
        label = name or getattr(model.config, "_name_or_path", "") or type(model).__name__
        if model.config.is_encoder_decoder:
            raise UnsupportedTarget(f"target {label} is an encoder-decoder model; give a decoder-only causal LM")
        head = model.get_output_embeddings()
        # Some name as their base what only a larger model has, which they are cut out of.
        body = getattr(model, "model", None) if model.base_model is model else model.base_model
        if head is None or body is None:
            raise UnsupportedTarget(f"target {label} has no output embedding; load it as a causal LM")
        self.model: Any = model
        self.tokenizer = tokenizer
        self.name = str(label)
        self.revision = revision or str(getattr(model.config, "_commit_hash", None) or "")
        self.config = model.config.get_text_config()
        # Asked for at every step, and transformers' configurations take their time to answer.
        self._scaling = [getattr(self.config, name, None) for name in _SCALING]
        self.head, self._body = head, body
        self._embedding: Any = model.get_input_embeddings()
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.config.vocab_size
        self.max_positions = longest_text(self.config)
        self.support: Support | None = None  # found out, once, by ``shape.verification.probe.support_of``
        self._packed = False  # whether the model's prepacked layers are this object's doing
        self.sharded = False  # over processes, which then have to run every layer together: see `shape.target.sharding`

    @classmethod
    def load(
        cls,
        target: "str | Path | PreTrainedModel | Target",
        *,
        tokenizer: Any = None,
        dtype: str | torch.dtype | None = None,
        device_map: Any = None,
        prepacked: bool | None = None,
        quantize: Quantization | None = None,
        backend: str = "torch",
        **options: Any,
    ) -> "Target":
        """The target from a path, a hub id, the name of a bundled checkpoint, or a model at hand.

        A checkpoint that says how it is quantised, and a model that its owner has quantised or spread over devices, are
        taken as they are.

        Args:
            tokenizer: or the folder or hub id of one; None takes the target's own.
            dtype: "float32", "bfloat16", ... ; None keeps the checkpoint's own.
            device_map: as in transformers: a device, "auto", or a device for each part; also offloading. None takes an
                accelerator where there is one. A model at hand stays where it is.
            prepacked: on a CPU, use copies of the weights in the layout of its matrix kernels, which takes memory and
                makes forwards over a few tokens up to three times as fast (see ``shape.target.prepack``); None does so
                where memory allows it, for models that are loaded here.
            quantize: on a CPU, "int8" or "int4": weights of linear layers in so many bits, activations rounded too (see
                ``shape.target.quantize``). Plain and drafted decoding are of the same quantised model.
            backend: what computes: torch, or "openvino" (see ``shape.target.openvino.OpenVinoTarget.load``), which has
                devices of its own, and quantises weights alone.
            options: any other of transformers' ``from_pretrained``: revision, token, trust_remote_code,
                attn_implementation, quantization_config, ... The tokenizer is of the same revision.

        Raises:
            ConfigError: an option that transformers does not know or that this target does not take; or any, beside a
                model at hand.
            UnsupportedTarget: when nothing can be loaded from there.
        """
        if backend not in ("torch", "openvino"):
            raise ConfigError(f"backend {backend} is unknown; give torch or openvino")
        if isinstance(tokenizer, str | Path):
            tokenizer = loading.tokenizer_named(tokenizer, options)
        if isinstance(target, Target | PreTrainedModel):
            how = {"dtype": dtype, "device_map": device_map, "quantize": quantize}
            options |= {name: value for name, value in how.items() if value is not None}
            given = cls._at_hand(target, tokenizer, backend, options)
            if prepacked:  # otherwise it stays as its owner has it
                given._prepack(True)
            return given
        if backend == "openvino":
            from shape.target.openvino import OpenVinoTarget  # which is an extra, and a Target

            return OpenVinoTarget.load(
                target, tokenizer=tokenizer, dtype=dtype, device_map=device_map, quantize=quantize, **options
            )
        if not isinstance(target, str | Path):
            raise ConfigError(
                f"target is a {type(target).__name__}; give the PreTrainedModel in it, a folder or a hub id"
            )
        chosen = loading.resolve_dtype(dtype) or "auto"
        where, options = bundled.resolve(str(target)), {"trust_remote_code": False, **options}
        revision = loading.commit_of(where, options)
        if revision:  # all parts are of one, even while somebody uploads
            options["revision"] = revision
        config = loading.read_config(target, **options)
        if config.is_encoder_decoder:
            raise UnsupportedTarget(f"target {target} is an encoder-decoder model; give a decoder-only causal LM")
        if device_map is None and (place := loading.default_device()).type != "cpu":
            device_map = str(place)
        if quantize is not None:
            check(quantize, device_map, loading.dtype_of(dtype, config), config, options)
        if tokenizer is None:
            tokenizer = loading.read_tokenizer(target, options)
        model = loading.model_of(target, config, dtype=chosen, device_map=device_map, **options)
        if quantize is not None:
            quantize_model(model, quantize)
        loaded = cls(model.requires_grad_(False), tokenizer, name=str(target), revision=revision)
        loaded._prepack(prepacked)
        if prepacked is None and loaded.device.type == "cpu" and (slow := why_slow(loaded.model, loaded.dtype)):
            warnings.warn(f"target {loaded.name} {slow}", stacklevel=2)
        return loaded

    @classmethod
    def _at_hand(
        cls, target: "PreTrainedModel | Target", tokenizer: Any, backend: str, options: Mapping[str, Any]
    ) -> "Target":
        """The target itself, or one of a model. Raises ConfigError for what is asked of loading."""
        given = target if isinstance(target, Target) else cls(target, tokenizer)
        if backend != "torch" and not isinstance(target, Target):
            raise ConfigError(
                f"backend {backend} loads a target by itself, while the model {given.name} is at hand; give its "
                "folder or hub id"
            )
        if isinstance(target, Target) and tokenizer not in (None, given.tokenizer):
            raise ConfigError(f"target {given.name} has a tokenizer of its own already; give it to Target alone")
        if options:
            raise ConfigError(
                f"option {min(options)} is unknown, or says how a target is loaded, while {given.name} is at hand; "
                "leave it out, or give the target's folder or hub id"
            )
        return given

    def _prepack(self, wanted: bool | None) -> None:
        self._packed |= not self.prepacked and prepack(self.model, wanted)

    def close(self) -> None:
        """Take from the model what was attached to it here, prepacked layers, which also hold memory."""
        if self._packed:
            unpack(self.model)
            self._packed = False
            if self.support is not None and self.support.fused is not None:
                self.support.fused.forget()

    @property
    def version(self) -> list[Any]:
        """Changes whenever an embedding table, of which drafters may hold copies, is moved, cast, replaced or written
        to; writing into ``weight.data`` in place is the one change that PyTorch does not count.
        """
        tables = self.model.get_output_embeddings(), self.model.get_input_embeddings()
        return [_version(getattr(table, "weight", None)) for table in tables]

    @property
    def device(self) -> torch.device:
        """Where ids go in and states come out. The layers between may lie elsewhere: see ``device_map``."""
        # Between forwards accelerate keeps offloaded weights off the device that they compute on.
        own = getattr(vars(self._embedding).get("_hf_hook"), "execution_device", None)
        if own is not None:
            return torch.device(own)
        weight = getattr(self._embedding, "weight", None)  # asked for at every step: no search where none is needed
        if isinstance(weight, Tensor):
            return weight.device
        return next(chain(self._embedding.parameters(), self._embedding.buffers())).device

    @property
    def places(self) -> str:
        """For reports: the device, or all that it is spread over."""
        spread = getattr(self.model, "hf_device_map", None) or {}
        return ", ".join(sorted({str(place) for place in spread.values()})) or str(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of states."""
        weight = float_weight(self._embedding)
        return self._embedded_dtype if weight is None else weight.dtype

    @cached_property
    def _embedded_dtype(self) -> torch.dtype:
        """Where the embedding is quantised: the dtype of what it gives."""
        return self.embed(torch.zeros(1, dtype=torch.long, device=self.device)).dtype

    @cached_property
    def switch(self) -> Switch | None:
        """Where the target changes its rotary table, as LongRoPE does; None where it does not."""
        return find_switch(self)

    def switched(self, length: int) -> bool:
        """Whether a prompt of so many tokens has the second rotary table throughout."""
        return self.switch is not None and length > self.switch.positions

    @property
    def prepacked(self) -> bool:
        """Whether layers use weights laid out for the CPU (see ``shape.target.prepack``)."""
        return is_prepacked(self.model)

    @property
    def precision(self) -> str:
        """For reports: the dtype of states, and how or by whom the weights are quantised, if known; or prepacked."""
        dtype = loading.dtype_name(self.dtype)
        if (kind := quantized(self.model)) is not None:
            return f"{dtype}, {kind} weights"
        how = getattr(self.model.config, "quantization_config", None)
        method = how.get("quant_method") if isinstance(how, dict) else getattr(how, "quant_method", None)
        if method is None:
            return f"{dtype}, prepacked" if self.prepacked else dtype
        return f"{dtype}, quantised by {getattr(method, 'value', method)}"

    @property
    def eos_token_ids(self) -> list[int]:
        own = getattr(self.model.generation_config, "eos_token_id", None)
        eos = self.config.eos_token_id if own is None else own
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    @torch.no_grad()
    def hidden(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Masks = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        layers: Sequence[int] = (-1,),
        **more: Any,
    ) -> Tensor:
        """States of given tokens in the target's dtype and on its device, (B, N, len(layers) * H).

        Args:
            layers: -1 is h, before the output embedding (after the final norm); k >= 0 is the output of block k
                (0 = embeddings). Several are laid side by side.
            more: what else the model's own forward takes.
        """
        kept = [layer for layer in layers if layer >= 0]  # all others are freed on the way, where that can be said
        outputs = self._body(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=cache is not None,
            **{cache_name(type(self._body).forward): cache},
            **({"output_hidden_states": kept if _SELECTS else True} if kept else {}),
            **more,
        )
        if tuple(layers) == (-1,):
            return outputs.last_hidden_state.to(self.device)
        states = [outputs.last_hidden_state if layer == -1 else outputs.hidden_states[layer] for layer in layers]
        return torch.cat([state.to(self.device) for state in states], dim=-1)

    def features(
        self, input_ids: Tensor, layers: Sequence[int] = (-1,), lengths: Sequence[int] | None = None
    ) -> Tensor:
        """``hidden`` of whole texts, (B, T) int64 padded on the right -> (B, T, len(layers) * H).

        Right padding needs no mask: under a causal mask no real token sees it.

        Args:
            lengths: of the texts, where they differ: each has the rotary table that it has by itself (see ``switch``).
        """
        with evaluating([self.model]):
            if lengths is None or self.switch is None:
                return self.hidden(input_ids, layers=layers)
            groups = self.switch.groups(lengths, 1)
            some = [input_ids[rows, : max(lengths[row] for row in rows)] for rows in groups]
            found = [self.hidden(ids, layers=layers) for ids in some]
            if self.sharded and len(groups) == 1:  # another process may have two, and all run every layer together
                self.hidden(input_ids[:1, :1])
        states = found[0].new_zeros(*input_ids.shape, found[0].shape[-1])
        for rows, own in zip(groups, found, strict=True):
            states[rows, : own.shape[1]] = own
        return states

    @torch.no_grad()
    def normed(self, states: Tensor) -> Tensor:
        """h of what the last block gives, (..., H) -> (..., H).

        Raises:
            UnsupportedTarget: its final norm has another name than `norm`.
        """
        norm = getattr(self._body, "norm", None)
        if norm is None:
            raise UnsupportedTarget(f"the final norm of target {self.name} is not known; compute its states here")
        return norm(states)

    def logits(self, hidden: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The target's own logit function, (..., H) -> (..., V), with its scaling and soft-capping.

        Differentiable in ``hidden`` alone, whose device the logits are on. That it is complete for an architecture is
        checked by the probe at load.

        Args:
            head: instead of the output embedding, for instance some rows of it (``head_of``).
        """
        read = self._read if head is None else head
        logits = read(hidden).to(hidden.device)
        scale, scaling, multiplier, cap = self._scaling
        if scale is not None:
            logits = logits * scale
        if scaling is not None:
            logits = logits / scaling
        if multiplier is not None:
            logits = logits * multiplier
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _read(self, hidden: Tensor) -> Tensor:
        """The output embedding of states, without gradients for its weights, which their owner may be training."""
        if torch.is_grad_enabled():
            theirs = {name: weight.detach() for name, weight in self.head.named_parameters() if weight.requires_grad}
            if theirs:
                return functional_call(self.head, theirs, (hidden,))
        return self.head(hidden)

    @torch.no_grad()
    def head_of(self, tokens: Tensor, dtype: torch.dtype, bits: int | None = None) -> Callable[[Tensor], Tensor]:
        """A copy of the output embedding for some tokens, (K,) int64, on their device: (..., H) -> (..., K).

        Args:
            bits: 8 for weights of so many on a CPU, which are not trained through.
        """
        weight, bias = self._head_rows(tokens.to(self.device))
        bias = None if bias is None else bias.to(tokens.device, dtype)
        weight = weight.to(tokens.device, dtype)
        if bits is not None:
            return QuantizedLinear(linear(weight, bias), bits).eval()
        if self.prepacked or quantized(self.model):
            return PrepackedForward(linear(weight, bias))
        return partial(F.linear, weight=weight, bias=bias)

    @torch.no_grad()
    def output_rows(self, tokens: Tensor | None = None) -> Tensor:
        """Rows of the output embedding, (K, H) in their own dtype, for some tokens, (K,) int64; None stands for all."""
        if tokens is None:
            weight = float_weight(self.head)
            if weight is not None and weight.device.type != "meta":
                return weight.detach()  # no copy
            tokens = torch.arange(self.vocab_size)
        return self._head_rows(tokens.to(self.device))[0]

    def _head_rows(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output embedding's weight (K, H) and bias (K,) for some tokens."""
        with align_module_device(self.head):  # offloaded weights are brought in
            if (weight := float_weight(self.head)) is not None:
                bias = getattr(self.head, "bias", None)
                tokens = tokens.to(weight.device)
                return weight[tokens], None if bias is None else bias[tokens]
        if isinstance(self.head, QuantizedLinear):
            return self.head.rows(tokens, self.dtype), None if self.head.bias is None else self.head.bias[tokens]
        # Of a quantised head only its results are known: zeros give the bias, unit vectors the columns.
        bias = self.head(torch.zeros(1, self.hidden_size, dtype=self.dtype, device=self.device))[0]
        units = torch.eye(self.hidden_size, dtype=self.dtype, device=self.device).split(_HEAD_CHUNK)
        columns = [(self.head(some) - bias).to(self.device)[:, tokens] for some in units]
        return torch.cat(columns).T.contiguous(), bias.to(self.device)[tokens]

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings, (...) int64 -> (..., H), on the device of ``ids``."""
        return self._embedding(ids.to(self.device)).to(ids.device)

    @cached_property
    def identity(self) -> TargetIdentity:
        return TargetIdentity.of(self)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat template applied to messages.

        Args:
            chat_template_kwargs: what the template is given beside them: `enable_thinking`, `tools`, ...

        Raises:
            DataError: no tokenizer, one without a chat template, or a template that refuses the messages.
        """
        if self.tokenizer is None:
            raise DataError(f"target {self.name} has no tokenizer, so no chat template; give one that has")
        return render(self.tokenizer, messages, add_generation_prompt, chat_template_kwargs)

    def encode(
        self, prompt: str | Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        """(1, T) int64 ids of a text, or of messages that await an answer; of their bare text without a chat template.

        Prompts of regeneration and of training are made by the same function, `shape.target.chat.prompt_ids`.

        Args:
            chat_template_kwargs: as in ``render``.

        Raises:
            DataError: no tokenizer, nothing to encode, or a template that refuses the messages.
        """
        if self.tokenizer is None:
            raise DataError(f"target {self.name} has no tokenizer; give a folder that has one, or token ids")
        if not isinstance(prompt, str) and not self.tokenizer.chat_template:
            prompt = plain_text(self.name, prompt)
        ids = prompt_ids(prompt, self.tokenizer, chat_template_kwargs)
        if not ids:
            raise DataError("the prompt is empty; give at least one token")
        return torch.tensor([ids], device=self.device)

    def message(self, answer: list[int], chat_template_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Token ids of an answer, (T,), as the message that a chat goes on from: without special tokens, and with its
        reasoning apart where the chat template has a place for it.
        """
        return answer_message(self.before_end(answer), self.tokenizer, chat_template_kwargs).chat

    def before_end(self, answer: list[int], ends: Sequence[int] | None = None) -> list[int]:
        """What of an answer comes before its end token, if it has one; None stands for the target's."""
        stops = set(self.eos_token_ids if ends is None else ends)
        return list(takewhile(lambda token: token not in stops, answer))

    def __repr__(self) -> str:
        return f"Target({self.name}, hidden_size={self.hidden_size}, vocab_size={self.vocab_size}, {self.precision})"


def announce(target: Target, more: str = "") -> None:
    """What computes where, in one line: commands log it once."""
    logging.getLogger("shape").info("target %s: %s on %s%s", target.name, target.precision, target.places, more)


def _version(weight: Any) -> tuple[Any, ...]:
    """Of a tensor: where it lies, without keeping it there, and how often it was written to."""
    # What is offloaded is another tensor after every forward.
    if not isinstance(weight, Tensor) or weight.is_meta:
        return ()
    return StorageWeakRef(weight.untyped_storage()), None if weight.is_inference() else weight._version
