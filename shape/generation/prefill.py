"""The prompts of a batch in the cache, and what a session keeps of them from call to call."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from shape.drafters.base import Committed, common_length
from shape.generation.loop import Batch
from shape.target.inference import fingerprint
from shape.verification.cache import KVCache
from shape.verification.forward import new_cache, prefill
from shape.verification.tree import root_only

# Cache slots allocated at first behind a prompt, for the tree under verification and for new tokens: at least so many,
# or the prompt's length if that is greater. Growing copies the whole cache, which takes more memory than they do.
_NEW_SLOTS, _TREE_SLOTS = 512, 64


@dataclass
class Memory:
    """What decoding one sequence leaves for the next call: cache, the tokens that it holds, and their states.

    Attributes:
        tokens: ids in the first slots of the cache.
        hidden: (1, len(tokens), F), the states that the drafter reads.
        switched: whether the first tokens have the rotary table of long texts (see ``shape.target.rotary``).
        computed_by: `fingerprint` of the target that they were computed by.
    """

    tokens: list[int] = field(default_factory=list)
    hidden: Tensor | None = None
    cache: KVCache | None = None
    switched: bool = False
    computed_by: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def take(self, prompt: list[int], switched: bool, width: int, computed_by: int) -> tuple[KVCache, Tensor] | None:
        """Cache and states, cut to what they have in common with a prompt; None where that is nothing, as it is with
        a prompt that has the other rotary table, where states of another width are asked for (of other layers), where
        the target has changed, and where they were made within ``torch.inference_mode`` and could not be written to.

        They leave the memory, so that a call that breaks off leaves none rather than a wrong one.
        """
        with self._lock:  # of two calls at a time one has them
            cache, hidden, tokens = self.cache, self.hidden, self.tokens
            alike = self.switched == switched and self.computed_by == computed_by
            self._set([], None, None, False)
            self.computed_by = computed_by
        # The prompt's last token always goes through the target: its state says what comes next.
        common = common_length(tokens, prompt[:-1])
        if cache is None or hidden is None or common == 0 or not alike or not cache.can_hold(common):
            return None
        if hidden.shape[-1] != width or not (torch.is_inference_mode_enabled() or _writable(cache)):
            return None
        cache.set_lengths([common])
        cache.checked_by = None
        return cache, hidden[:, :common]

    def keep(self, tokens: list[int], hidden: Tensor | None, cache: KVCache | None, switched: bool) -> None:
        with self._lock:
            self._set(tokens, hidden, cache, switched)

    def _set(self, tokens: list[int], hidden: Tensor | None, cache: KVCache | None, switched: bool) -> None:
        self.tokens, self.hidden, self.cache, self.switched = tokens, hidden, cache, switched


def _writable(cache: KVCache) -> bool:
    """Whether a cache can be gone on with outside of ``torch.inference_mode``."""
    held = (one for layer in cache.layers for one in vars(layer).values() if isinstance(one, Tensor))
    return not any(map(Tensor.is_inference, held))


def commit_prompts(
    batch: Batch, room: int, layers: Sequence[int], memory: Memory | None = None
) -> tuple[KVCache, Committed, Tensor]:
    """Prefill a batch and choose its first tokens. Samples of one prompt share its prefill.

    Args:
        room: new tokens to allocate slots for, up to a limit behind which they are grown on demand.
        layers: whose states the drafter reads.
        memory: what the session's last call left: the common beginning of its text and this prompt is not computed
            again.

    Returns:
        The cache with the prompts, they with their first tokens, and the prompts' states, (B, T, F).
    """
    target, sampler, prompts = batch.target, batch.sampler, [sequence.prompt for sequence in batch.sequences]
    distinct = {prompt: number for number, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    lengths = [len(prompt) for prompt in distinct]
    slots = min(room, max(_NEW_SLOTS, *lengths)) + _TREE_SLOTS
    known = None
    if memory is not None:
        width, computed_by = len(layers) * target.hidden_size, fingerprint(target.model)
        known = memory.take(prompts[0], target.switched(len(prompts[0])), width, computed_by)
    if known is None:
        cache = new_cache(target, batch.support, len(distinct), max(lengths) + slots)
        padded = [[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in distinct]
        hidden = prefill(
            target, cache, torch.tensor(padded, device=target.device), lengths, layers=layers, support=batch.support
        )
    else:
        cache, before = known
        batch.stats.reused_tokens += cache.longest
        rest = torch.tensor([prompts[0][cache.longest :]], device=target.device)
        hidden = torch.cat([before, prefill(target, cache, rest, lengths, layers=layers, support=batch.support)], dim=1)
    batch.stats.prompt_tokens += sum(lengths)
    if len(distinct) < len(prompts):
        index = torch.tensor([distinct[tuple(prompt)] for prompt in prompts], device=target.device)
        cache.select(index)
        hidden = hidden[index]
    last = hidden[torch.arange(len(prompts), device=hidden.device), cache.lengths - 1]
    sampler.commit(cache.lengths, prompts)
    root = sampler.choose_roots(target.logits(last[:, None, -target.hidden_size :]), root_only(cache.lengths))
    texts = [[*prompt, token] for prompt, token in zip(prompts, root.tolist(), strict=True)]
    return cache, Committed(texts, cache.lengths + 1, root), hidden
