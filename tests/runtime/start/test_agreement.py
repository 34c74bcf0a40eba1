"""What ranks compare of batches: a digest that differs where any bit, shape, type or name does."""

import random

import pytest
import torch

from autopar.runtime.start.agreement import digest_of


@pytest.mark.parametrize("seed", range(8))
def test_batches_have_one_digest_if_and_only_if_they_are_alike(seed: int) -> None:
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    # None, a few, or more than are summed at a time; at any place in memory.
    count, start = chance.choice([0, 1, 7, 33, 2**18 - 1, 2**18, 2**19 + 5]), chance.randint(0, 9)
    data = torch.randint(0, 256, (start + count,), dtype=torch.uint8, generator=generator)[start:]
    known = digest_of({"x": data})
    assert known == digest_of({"x": data.clone()}) != 0
    others = [{"y": data}, {"x": data[None]}, {"x": data, "y": data}, {"x": torch.cat((data, data.new_zeros(1)))}]
    for _ in range(20 if count else 0):
        changed, one, other = data.clone(), chance.randrange(count), chance.randrange(count)
        changed[one] ^= 1 << chance.randrange(8)
        changed[[one, other]] = changed[[other, one]]
        others.append({"x": changed})
    assert known not in map(digest_of, others)
    values = torch.randn(4, 6, dtype=torch.complex64, generator=generator)
    assert digest_of({"x": values.T.conj()}) == digest_of({"x": values.T.conj().resolve_conj().contiguous()})
