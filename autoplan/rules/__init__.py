"""Sharding rules: one small file per op family, and what follows from them on any mesh. Free of torch."""

from autoplan.rules import attention, embedding, factories, matmul, norm, pointwise, views
from autoplan.rules.factors import Choice, FactorTable, Position, analyse
from autoplan.rules.rule import Link, OpRule, OpView, Span, known_ops, register_rule, rule_of

__all__ = [
    "Choice",
    "FactorTable",
    "Link",
    "OpRule",
    "OpView",
    "Position",
    "Span",
    "analyse",
    "attention",
    "embedding",
    "factories",
    "known_ops",
    "matmul",
    "norm",
    "pointwise",
    "register_rule",
    "rule_of",
    "views",
]
