"""The noise that makes sampling reproducible.

It depends only on (request seed, number of the sequence, position in the text, token id), through a counter-based hash:
it survives compaction of the batch, padding and any tree, and no generator state exists that could be left in another
place by another drafter. Sampling is the Gumbel-max trick, argmax(log p + g) ~ p, so the sampled text is a function of
prompt and noise alone.
"""

from collections.abc import Sequence
from ctypes import c_int64
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from numba.extending import register_jitable
from torch import Tensor

from shape.errors import UnsupportedGeneration
from shape.verification.compiled import compiled, first_largest, largest, log, log_complement, runs_on_host

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB
# What noise beside the target's own is for; any different numbers will do.
DRAFTS, UNIFORMS, RESIDUALS = 0x6472616674, 0x636F696E73, 0x7265736964

Array = TypeVar("Array", Tensor, np.ndarray, int)


@register_jitable
def mix(x: Array) -> Array:
    """The finaliser of splitmix64 (Steele et al. 2014) on int64; multiplication wraps as it does on uint64."""
    x = (x ^ shift(x, 30)) * _MIX1
    x = (x ^ shift(x, 27)) * _MIX2
    return x ^ shift(x, 31)


@register_jitable
def shift(x: Array, bits: int) -> Array:
    """Logical right shift (that of int64 is arithmetic)."""
    x = x >> bits
    x &= (1 << (64 - bits)) - 1
    return x


@register_jitable
def step_hash(key: Array, length: Array, purpose: int) -> Array:
    """A word for a sequence's key, the length of its text and a purpose, unrelated to those of other noise.

    For the step, not the position: what was drawn behind the accepted tokens and then refused must not come again at
    the same position in the next step.
    """
    return mix(mix(key ^ purpose) + mix(length * GOLDEN))


@register_jitable
def numbered_bits(word: Array, number: Array) -> Array:
    """52 bits for a number from 1 on, of a ``step_hash``."""
    return shift(mix(word + number * GOLDEN), 12)


def sequence_keys(
    seed: int | Sequence[int], prompts: int, samples: int = 1, device: torch.device | str = "cpu"
) -> Tensor:
    """One key per sequence of the batch, (prompts * samples,) int64.

    Args:
        seed: one seed, numbered through all sequences; or one seed per prompt, so that a prompt's samples do not
            depend on which batch it is in.
        prompts: how many.
        samples: samples per prompt, adjacent in the batch.

    Raises:
        UnsupportedGeneration: the device does not multiply and shift integers as others do.
    """
    _check_integers(torch.device(device))
    count = prompts * samples
    if isinstance(seed, int):
        seeds, numbers = [seed] * count, list(range(count))
    else:
        seeds, numbers = [s for s in seed for _ in range(samples)], [i % samples for i in range(count)]
    hashes = torch.tensor([c_int64(s).value for s in seeds], dtype=torch.long, device=device)  # modulo 2^64
    counters = torch.tensor(numbers, dtype=torch.long, device=device)
    return mix(mix(hashes + GOLDEN) + (counters + 1) * GOLDEN)


@cache
def _check_integers(device: torch.device) -> None:
    """Apple's GPUs have been silently wrong in 64 bits (pytorch#147889, #154171); none but CPUs and CUDA was tested."""
    if device.type not in ("cpu", "cuda"):
        words = torch.arange(16) * GOLDEN
        if not torch.equal(mix(words.to(device)).cpu(), mix(words)):
            raise UnsupportedGeneration(
                f"device {device} computes other numbers in 64 bits than the CPU, so that sampling would be wrong "
                "there; decode greedily, or on another device"
            )


def gumbel(keys: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise for some tokens at given positions.

    -log(-log(1 - u)), with u of 63 hashed bits, always finite. Small uniform numbers keep their relative precision as
    floats, so that the upper tail, which decides over rare tokens of large vocabularies, is exact far below the
    probability of any token (24-bit uniforms are not).

    Args:
        keys: (...,) int64 from sequence_keys; they and the positions may be broadcast.
        positions: (...,) int64, position in the text, without padding, of the token being chosen.
        tokens: (K,) int64, ``token_hashes`` of these tokens.

    Returns:
        (..., K) float32.
    """
    if not runs_on_host(keys):
        return _gumbel_on_device(keys, positions, tokens)
    keys, positions = torch.broadcast_tensors(keys, positions)
    out = torch.empty(*positions.shape, len(tokens), dtype=torch.float32)
    _fill_rows(keys.flatten().numpy(), positions.flatten().numpy(), tokens.numpy(), out.view(-1, len(tokens)).numpy())
    return out


# The smallest u above 0 and the largest float below 1.
_LEAST, _MOST = np.float32(2.0**-64), np.float32(1 - 2.0**-24)
_UNIT = np.float32(2.0**-63)
_BLOCK = 64  # tokens whose noise is made together
_EVERY = 2**63 - 1
_DOUBT = 1e-5  # of a sum, far more than rounding makes of it


def _gumbel_on_device(keys: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """``gumbel`` by operations of tensors; the same to the last bits of its two logarithms."""
    # Counter and tokens are hashed each by itself; joining them takes one round more, in place: this is the bulk of the
    # work, and a high bit depends on all bits of both.
    hashes = mix(keys + positions * GOLDEN)[..., None] ^ tokens
    hashes *= _MIX1
    hashes ^= shift(hashes, 32)
    hashes *= _MIX2
    # As floats first: Apple's devices take the size of integers through them, and 2^63 becomes -2^63 (pytorch#190052).
    uniform = hashes.float().abs_().mul_(float(_UNIT)).clamp_(float(_LEAST), float(_MOST))
    return uniform.neg_().log1p_().neg_().log_().neg_()


@register_jitable
def _joined(row: int, token: int) -> int:
    """The word of a token's noise, from the hashes of its position and of its id."""
    word = (row ^ token) * _MIX1
    return (word ^ shift(word, 32)) * _MIX2


@compiled
def fill_gumbel(key: int, position: int, hashes: np.ndarray, out: np.ndarray) -> None:
    """``gumbel`` of one sequence at one position: hashes (K,) int64, out (K,) float32."""
    row = mix(key + position * GOLDEN)
    for k in range(hashes.shape[0]):  # integers and floats apart: together they are not computed in lanes
        out[k] = min(max(np.float32(abs(_joined(row, hashes[k]))) * _UNIT, _LEAST), _MOST)
    for k in range(hashes.shape[0]):
        out[k] = -log(-log_complement(out[k]))


@compiled
def noisiest(scores: np.ndarray, key: int, position: int, hashes: np.ndarray) -> int:
    """Where scores + ``gumbel`` is largest, of (K,) float32 and hashes (K,) int64; the first of equal ones.

    Noise, two logarithms a token, is made where it can matter alone. In a block with scores up to m a token needs more
    noise than the largest sum known, b, less m. It has that much only if its u is below exp(m - b), and u is hashed
    bits as they come: in most blocks of a sharp distribution no token has.
    """
    noise, found = np.empty(_BLOCK, np.float32), first_largest(scores)
    fill_gumbel(key, position, hashes[found : found + 1], noise)
    known = scores[found] + noise[0]
    if not np.isfinite(known):  # nor is the largest score
        return found
    doubt, row = _DOUBT * (1 + abs(known)), mix(key + position * GOLDEN)
    best, found = known - doubt, -1
    for start in range(0, scores.shape[0], _BLOCK):
        some, own = scores[start : start + _BLOCK], hashes[start : start + _BLOCK]
        share = np.exp(largest(some) - best + doubt)
        if share < _LEAST:  # no noise is so large
            continue
        if share < 1:
            least = _EVERY
            for k in range(own.shape[0]):
                least = min(least, abs(_joined(row, own[k])))
            if least > share * 2.0**63:
                continue
        fill_gumbel(key, position, own, noise)
        for k in range(own.shape[0]):
            value = some[k] + noise[k]
            if value > best:
                best, found = value, start + k
    return found


@compiled
def _fill_rows(keys: np.ndarray, positions: np.ndarray, hashes: np.ndarray, out: np.ndarray) -> None:
    for row in range(keys.shape[0]):
        fill_gumbel(keys[row], positions[row], hashes, out[row])


def token_hashes(tokens: Tensor) -> Tensor:
    """A hash of each token id, int64, as ``gumbel`` takes it."""
    return mix((tokens + 1) * GOLDEN)


@cache
def all_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """``token_hashes`` of the whole vocabulary, (V,) int64, made once for each device."""
    return token_hashes(torch.arange(vocab_size, device=device))
