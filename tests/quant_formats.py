"""Writes quantised weights in the layouts of other tools, from the layouts' descriptions, bit by bit with Python's integers.

Nothing here is shared with tilefold.quant: tests pack with this and read with that.
"""

import json

import torch

AWQ_NIBBLES = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}  # the nibble of a word where column c of eight lies


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def stream(values: list[int], bits: int) -> list[int]:
    """Values end to end from the lowest bit on, as signed 32-bit words."""
    number = sum(value << (bits * j) for j, value in enumerate(values))
    return [signed((number >> (32 * i)) & 0xFFFFFFFF) for i in range(-(-len(values) * bits // 32))]


def whole(values: list[int], bits: int) -> list[int]:
    """32 // bits values a word, none across its end, as signed 32-bit words."""
    fields = 32 // bits
    cut = [values[i : i + fields] for i in range(0, len(values), fields)]
    return [signed(sum(value << (bits * i) for i, value in enumerate(part))) for part in cut]


def words(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def gptq(codes: torch.Tensor, zeros: torch.Tensor, bits: int, version: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(qweight, qzeros) of codes [N, K] and zeros [groups, N]."""
    kept = (zeros - 1) % 2**bits if version == 1 else zeros
    qweight = words([stream(row, bits) for row in codes.tolist()]).t().contiguous()
    return qweight, words([stream(row, bits) for row in kept.tolist()])


def awq(codes: torch.Tensor, zeros: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(qweight, qzeros) of codes [N, K] and zeros [groups, N], N a multiple of 8."""

    def pack(matrix: list[list[int]]) -> torch.Tensor:
        rows = []
        for row in matrix:
            eights = [row[i : i + 8] for i in range(0, len(row), 8)]
            rows.append([signed(sum(v << (4 * AWQ_NIBBLES[c]) for c, v in enumerate(eight))) for eight in eights])
        return words(rows)

    return pack(codes.t().tolist()), pack(zeros.tolist())


def compressed(
    codes: torch.Tensor, zeros: torch.Tensor, bits: int, dense: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight_packed, weight_zero_point) of signed codes [N, K] and signed zeros [N, groups]; dense: end to end."""
    middle, lay = 2 ** (bits - 1), stream if dense else whole
    packed = words([lay(row, bits) for row in (codes + middle).tolist()])
    return packed, words([lay(row, bits) for row in (zeros + middle).t().tolist()]).t().contiguous()


def nf4(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [ceil(N K / 2), 1] of codes [N, K], the first of a pair in the high nibble."""
    flat = codes.flatten().tolist()
    flat += [0] * (len(flat) % 2)
    return torch.tensor([[16 * a + b] for a, b in zip(flat[::2], flat[1::2], strict=True)], dtype=torch.uint8)


def nf4_state(shape: tuple[int, int], blocksize: int, offset: float | None = None) -> torch.Tensor:
    """What bitsandbytes keeps beside the codes: JSON as uint8."""
    state = {"quant_type": "nf4", "blocksize": blocksize, "dtype": "bfloat16", "shape": list(shape)}
    if offset is not None:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def explicit(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, g_idx: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(code - zero[g, n]) * scale[g, n], column by column, in fp32 and rounded once; zeros and scales [groups, N]."""
    columns = [(codes[:, k].float() - zeros[g].float()) * scales[g].float() for k, g in enumerate(g_idx.tolist())]
    return torch.stack(columns, 1).to(dtype)
