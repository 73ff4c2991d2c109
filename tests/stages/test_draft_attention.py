"""Attention of a draft's chains against plain attention with modelopt's masks over the keys of all steps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

LENGTH, STEPS, HEADS, GROUPS, WIDTH = 11, 4, 4, 2, 16


def made(seed: int, tokens: int = LENGTH) -> list[list[torch.Tensor]]:
    """Query, key and value of every step: [tokens, heads or groups, width]."""
    random = torch.Generator().manual_seed(seed)
    sizes = (HEADS, GROUPS, GROUPS)
    return [[torch.randn(tokens, size, WIDTH, generator=random) for size in sizes] for _ in range(STEPS)]


def by_chains(given: list[list[torch.Tensor]], ids: torch.Tensor) -> list[torch.Tensor]:
    """The output of each step, [tokens, heads, width]."""
    from mlmsub.runtime.data.packing import attention_mask
    from mlmsub.runtime.models.draft_attention import Chains, Masked

    core = Chains(Masked(attention_mask(ids)))
    return [core(*(tensor[:, None] for tensor in step))[:, 0].unflatten(-1, (HEADS, WIDTH)) for step in given]


def by_masks(given: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """As modelopt attends within one document: a state moves on by a slot in each step, the last slot has no token."""
    from modelopt.torch.speculative.plugins.megatron_eagle import set_multi_step_attention_mask

    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    causal[-1], causal[:, -1] = True, True
    outs = []
    for step in range(STEPS):
        mask = set_multi_step_attention_mask(causal[None, None], step)
        query = given[step][0].transpose(0, 1)
        key, value = (
            torch.cat([given[past][which] for past in range(step + 1)]).repeat_interleave(HEADS // GROUPS, 1)
            for which in (1, 2)
        )
        outs.append(F.scaled_dot_product_attention(query, *(t.transpose(0, 1) for t in (key, value)), ~mask[0, 0]))
    return [out.transpose(0, 1) for out in outs]


def test_a_chain_sees_what_modelopts_masks_let_it_see() -> None:
    """Outputs and gradients: a chain's slot of step ``t`` is modelopt's, ``t`` slots before."""
    slots = [[tensor.requires_grad_() for tensor in step] for step in made(1)]
    chains = [[t.detach().roll(-step, 0).requires_grad_() for t in tensors] for step, tensors in enumerate(slots)]
    upstream = torch.randn(STEPS, LENGTH, HEADS, WIDTH, generator=torch.Generator().manual_seed(2))
    want, got = by_masks(slots), by_chains(chains, torch.zeros(1, LENGTH, dtype=torch.int32))
    for step in range(STEPS):
        exist = slice(0, LENGTH - 1 - step)
        assert torch.allclose(got[step][exist], want[step][step:-1], atol=1e-6)
        upstream[step, exist.stop :] = 0
    sum((out[step:-1] * upstream[step, : LENGTH - 1 - step]).sum() for step, out in enumerate(want)).backward()
    sum((out * upstream[step]).sum() for step, out in enumerate(got)).backward()
    for step in range(STEPS):
        for mine, theirs in zip(chains[step], slots[step], strict=True):
            assert torch.allclose(mine.grad, theirs.grad.roll(-step, 0), atol=1e-5)
            assert step == STEPS - 1 or float(mine.grad.norm()) > 0.1


def test_no_chain_sees_another_document() -> None:
    """Two rows: what one document's chains see does not change with all the others."""
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2], [0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2]])
    one, other = made(3, ids.numel()), made(4, ids.numel())
    want = by_chains(one, ids)
    for row in range(2):
        for document in range(3):
            inside = torch.zeros_like(ids)
            inside[row] = ids[row] == document
            here = inside.flatten().bool()
            mixed = [
                [torch.where(here[:, None, None], *pair) for pair in zip(*steps, strict=True)]
                for steps in zip(one, other, strict=True)
            ]
            for got, kept in zip(by_chains(mixed, ids), want, strict=True):
                assert torch.equal(got[here], kept[here]) and not torch.equal(got, kept)


def test_keys_and_values_pass_the_layers_quantizers() -> None:
    from types import SimpleNamespace

    from mlmsub.runtime.data.packing import attention_mask
    from mlmsub.runtime.models.draft_attention import Chains, Masked

    kernel = Masked(attention_mask(torch.zeros(1, LENGTH, dtype=torch.int32)))
    own = SimpleNamespace(k_bmm_quantizer=lambda key: 2 * key, v_bmm_quantizer=lambda value: 3 * value)
    plain, quantized = Chains(kernel), Chains(kernel, own)
    for query, key, value in made(5):
        query, key, value = (tensor[:, None] for tensor in (query, key, value))
        assert torch.allclose(quantized(query, key, value), plain(query, 2 * key, 3 * value))


@pytest.mark.parametrize("width", [64, 128])
def test_torchs_flash_kernel_takes_what_a_gpu_would_be_given(width: int) -> None:
    """Names, shapes and types alone: no GPU is here to compute on."""
    from mlmsub.runtime.models.draft_attention import Chains, Flash

    with torch.device("meta"):
        core = Chains(Flash(torch.empty(5, dtype=torch.int32), 32))
        for _ in range(3):
            given = [
                torch.empty(64, 1, size, width, dtype=torch.bfloat16, requires_grad=True)
                for size in (HEADS, GROUPS, GROUPS)
            ]
            out = core(*given)
            assert out.shape == (64, 1, HEADS * width) and out.dtype == torch.bfloat16
            out.sum().backward()
            assert all(tensor.grad.shape == tensor.shape for tensor in given)
