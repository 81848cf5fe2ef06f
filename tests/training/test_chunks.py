"""A loss in chunks: the same value and gradients as at once, of which less is held."""

import pytest
import torch

from shape.training import chunks
from shape.training.chunks import chunked_sum
from shape.training.module import likeliest_tokens


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("size", [1, 3, 10, 100])
def test_sum_and_gradients_are_those_of_the_whole(size):
    states, fixed, weight, unused = numbers(10, 4), numbers(10, 2).detach(), numbers(7, 4), numbers(2)

    def loss_of(chunk: slice, own, given, nothing):
        assert nothing is None and given.shape[0] == own.shape[0] == len(range(10)[chunk])
        return (own @ weight.T).logsumexp(-1).sum() + (own[:, :2] * given).sum()

    total = chunked_sum(loss_of, [states, fixed, None], [weight, unused], size, scale=1000)
    found = torch.autograd.grad(3 * total, [states, weight, unused])
    whole = (states @ weight.T).logsumexp(-1).sum() + (states[:, :2] * fixed).sum()
    torch.testing.assert_close(total, whole)
    expected = torch.autograd.grad(3 * whole, [states, weight])
    torch.testing.assert_close(found[:2], expected)
    assert not found[2].any()


def test_weights_that_are_not_trained_and_nothing_to_learn():
    weight = numbers(7, 4).detach()
    states = numbers(0, 4)
    total = chunked_sum(lambda _, own: (own @ weight.T).sum(), [states], [weight], 5)
    total.backward()
    assert total == 0 and states.grad.shape == (0, 4)


def test_the_likeliest_tokens_are_found_some_states_at_a_time(tiny_target, monkeypatch):
    states = numbers(5, 2, tiny_target.hidden_size)
    expected = tiny_target.logits(states.float()).argmax(-1)
    logits, seen = tiny_target.logits, []
    monkeypatch.setattr(tiny_target, "logits", lambda some: seen.append(len(some)) or logits(some))
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * 4 * tiny_target.vocab_size + 1)
    assert torch.equal(likeliest_tokens(tiny_target, states), expected)
    assert seen == [4, 4, 2]
