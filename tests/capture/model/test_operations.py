"""Operations of fused attention, whose keys and values may have fewer heads than its queries."""

import pytest
import torch

from autopar.capture.model.operations import operations_of

QUERIES, KEYS = torch.empty(2, 8, 16, 4, device="meta"), 24


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("kernel", ["flash_attention", "efficient_attention", "flash_attention_for_cpu"])
def test_every_head_of_queries_counts_however_many_share_keys(kernel: str, heads: int) -> None:
    keys = torch.empty(2, heads, KEYS, 4, device="meta")
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}").default
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward").default
    # Two products forth, and five back: the first one is computed again.
    product = 2 * 2 * 8 * 16 * KEYS * 4
    assert operations_of(forward, (QUERIES, keys, keys), {}, QUERIES) == 2 * product
    if kernel == "efficient_attention":
        # A mask of any number of heads counts nothing.
        mask = torch.empty(2, 1, 16, KEYS, device="meta")
        assert operations_of(forward, (QUERIES, keys, keys, mask, True), {}, QUERIES) == 2 * product
    assert operations_of(backward, (QUERIES, QUERIES, keys, keys), {}, (QUERIES, keys, keys)) == 5 * product
