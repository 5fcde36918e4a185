from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from autoplan.codegen.attention import attention

CASES = {
    "causal": {"is_causal": True},
    "plain": {},
    "scaled": {"scale": 0.3},
    "boolean mask": {"mask": "bool"},
    "additive mask": {"mask": "float"},
    "mask per head": {"mask": "head"},
    "shared heads": {"kv": 2, "is_causal": True},
    "one shared head": {"kv": 1},
    "other value width": {"values": 6},
    "other value width, causal": {"values": 6, "is_causal": True, "kv": 2},
    "cross": {"columns": 9},
    "learned bias": {"mask": "learned", "kv": 2},
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_stock_op(case: str, dtype: torch.dtype) -> None:
    options = {"kv": 4, "values": 8, "columns": 12, "mask": None, "is_causal": False, "scale": None, **CASES[case]}
    torch.manual_seed(0)
    rows, columns, kv = 12, options["columns"], options["kv"]
    shapes = [(3, 4, rows, 8), (3, kv, columns, 8), (3, kv, columns, options["values"])]
    qkv = [torch.randn(s, dtype=dtype).requires_grad_() for s in shapes]
    mask = {
        None: lambda: None,
        "bool": lambda: torch.rand(3, 1, rows, columns) > 0.4,
        "float": lambda: torch.randn(rows, columns, dtype=dtype),
        "head": lambda: torch.randn(1, 4, rows, columns, dtype=dtype),
        "learned": lambda: torch.randn(1, 4, rows, columns, dtype=dtype).requires_grad_(),
    }[options["mask"]]()
    flags = (mask, options["is_causal"], options["scale"], kv != 4)
    got = attention(*qkv, *flags)
    expected = scaled_dot_product_attention(
        *qkv, attn_mask=mask, is_causal=flags[1], scale=flags[2], enable_gqa=flags[3]
    )
    close = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(got, expected, **close)
    upstream = torch.randn_like(expected)
    leaves = [*qkv, *([mask] if mask is not None and mask.requires_grad else [])]
    ours = torch.autograd.grad(got, leaves, upstream)
    theirs = torch.autograd.grad(expected, leaves, upstream)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **close)


def test_rows_that_see_nothing_are_zero() -> None:
    q = torch.randn(1, 2, 4, 8, dtype=torch.float64)
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    for values in (8, 6):
        out = attention(q, q, torch.randn(1, 2, 4, values, dtype=torch.float64), mask, False, None, False)
        assert not out[0, :, 1].any() and out[0, :, 0].any()


def test_other_numbers_of_leading_dims() -> None:
    for lead in ((), (2,), (2, 3, 4)):
        x = torch.randn(*lead, 5, 8, dtype=torch.float64)
        torch.testing.assert_close(
            attention(x, x, x, None, True, None, False), scaled_dot_product_attention(x, x, x, is_causal=True)
        )


def test_declared_results_are_the_real_ones() -> None:
    x = torch.randn(2, 4, 6, 8).requires_grad_()
    torch.library.opcheck(torch.ops.autoplan.attention.default, (x, x, x, None, True, 0.5))
