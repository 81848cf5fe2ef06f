"""Products in compiled loops against torch's."""

import numpy as np
import pytest
import torch

from shape.target.products import multiply, narrow, numbers, widen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_product_is_that_of_the_matrices(dtype, rows) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(7, 33).to(dtype), torch.randn(7), torch.randn(rows, 33)
    for given, added in ((bias.numpy(), bias), (np.empty(0, np.float32), 0.0)):
        found = np.empty((rows, 7), np.float32)
        multiply(numbers(weight), given, x.numpy(), found)
        torch.testing.assert_close(torch.from_numpy(found), x @ weight.float().T + added)


def test_rounding_is_that_of_torch() -> None:
    torch.manual_seed(0)
    halfway = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0, 3e38, 1e-40])  # between two of bfloat16
    x = torch.cat([halfway, torch.randn(1000), 1e30 * torch.randn(1000)])[None]
    found, wide = torch.empty(x.shape, dtype=torch.bfloat16), np.empty(x.shape, np.float32)
    narrow(x.numpy(), numbers(found))
    assert torch.equal(found, x.bfloat16())
    widen(numbers(found), wide)
    assert torch.equal(torch.from_numpy(wide), found.float())
