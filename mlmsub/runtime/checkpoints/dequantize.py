"""Low-precision weights of Hugging Face checkpoints as fp32: every product is exact or rounded to fp32 once."""

import torch

# OCP Microscaling Formats (MX) v1.0, 5.3.3: the values of E2M1 by their four bits
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def fp8_blocks(
    weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], offset: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """FP8 with one scale for each block of a matrix, as DeepSeek-V3 stores it (``weight_scale_inv``).

    ``weight`` [rows, columns] is the part of the whole matrix that starts at ``offset``; ``scales`` are those of
    the blocks that it lies in, edge blocks included. Sides need not be multiples of the block's.
    """
    rows, columns = weight.shape
    first = offset[1] % block[1]
    by_column = scales.to(torch.float32).repeat_interleave(block[1], dim=1)[:, first : first + columns]
    values = weight.to(torch.float32)
    cuts = list(range(block[0] - offset[0] % block[0], rows, block[0]))
    for part, scale in zip(values.tensor_split(cuts), by_column, strict=True):
        part.mul_(scale)
    return values


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4 as gpt-oss stores it: ``blocks`` [..., groups, 16] of two values a byte, the low four bits first.

    ``scales`` [..., groups] are E8M0, powers of two; 255 is NaN there. Returns [..., groups x 32].
    """
    values = torch.tensor(E2M1, device=blocks.device)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)  # by the byte's value
    powers = scales.view(torch.float8_e8m0fnu).to(torch.float32)
    return (pairs[blocks.int()].flatten(-2) * powers[..., None]).flatten(-2)
