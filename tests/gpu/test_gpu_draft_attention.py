"""A GPU's flash kernel in a draft's chains, against torch's attention with masks on the CPU."""

from __future__ import annotations

import pytest
import torch

HEADS, GROUPS, STEPS = 8, 2, 4
LENGTHS = [[1, 70, 57], [100, 28]]  # of the documents in each row


@pytest.mark.parametrize("width", [64, 128])
def test_chains_have_the_outputs_and_gradients_of_masked_attention(width: int) -> None:
    """Both get the same bf16 numbers; the CPU's are computed in float32."""
    from mlmsub.runtime.data.packing import attention_mask, cu_seqlens
    from mlmsub.runtime.models.draft_attention import Chains, Flash, Masked

    ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS]).int()
    starts = cu_seqlens(ids).cuda()
    random = torch.Generator().manual_seed(1)
    sizes = (HEADS, GROUPS, GROUPS)
    given = [[torch.randn(ids.numel(), 1, n, width, generator=random).bfloat16() for n in sizes] for _ in range(STEPS)]
    upstream = [torch.randn(ids.numel(), 1, HEADS * width, generator=random).bfloat16() for _ in range(STEPS)]
    want = outputs_and_gradients(Chains(Masked(attention_mask(ids))), given, upstream, torch.float32, "cpu")
    got = outputs_and_gradients(Chains(Flash(starts, max(map(max, LENGTHS)))), given, upstream, torch.bfloat16, "cuda")
    again = outputs_and_gradients(Chains(Flash(starts, 200)), given, upstream, torch.bfloat16, "cuda")
    for name, expected in want.items():
        apart = (got[name] - expected).norm() / expected.norm()
        assert apart < 0.01, f"{name}: {float(apart):.4f}"
        assert torch.equal(got[name], again[name]), f"{name}: another sum in a second run"


def outputs_and_gradients(
    core: torch.nn.Module, given: list, upstream: list, dtype: torch.dtype, device: str
) -> dict[str, torch.Tensor]:
    steps = [[tensor.to(device, dtype).requires_grad_() for tensor in step] for step in given]
    outs = [core(*step) for step in steps]
    torch.autograd.backward(outs, [tensor.to(device, dtype) for tensor in upstream])
    found = {f"output {step}": out.detach() for step, out in enumerate(outs)}
    for number, step in enumerate(steps):
        found |= {
            f"gradient of {name} {number}": t.grad for name, t in zip(("query", "key", "value"), step, strict=True)
        }
    return {name: tensor.float().cpu() for name, tensor in found.items()}
