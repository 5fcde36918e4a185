"""The mixed-integer problem that every back end solves, and a builder for it.

    minimise    cost · x + offset                                                   (1)  `Problem.objective`
    subject to  A x = b                                                             (2)  `Problem.row_values`
                resource_r · x + resource_offset_r <= cap_r    for each resource r  (3)  `Problem.resource_values`
                0 <= x <= upper,   x_j integer where integer_j                      (4)  `Problem.__post_init__`

Rows are stored in compressed sparse row form: row i holds the terms ``row_start[i] : row_start[i + 1]`` of
``row_index`` and ``row_value``. In the planner's problems cost is in seconds, the resource "memory" in bytes, and (2)
are one-hot rows and edge-marginal rows; nothing here depends on that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoplan_solver.errors import SolverInputError

__all__ = ["FloatArray", "IntArray", "Problem", "ProblemBuilder"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Problem:
    """A 0/1 mixed-integer linear problem in arrays; see the module for the equations.

    Arrays are converted to float64, int64 or bool on construction and are read-only afterwards.

    Args:
        cost: objective coefficients, shape (n,), in seconds.
        resources: resource name -> use per variable, shape (n,), e.g. "memory" in bytes.
        caps: resource name -> upper bound of equation (3), same unit; a missing name or inf is no bound.
        row_start: shape (m + 1,), the CSR row pointers of A.
        row_index: shape (nnz,), the variable of each term.
        row_value: shape (nnz,), the coefficient of each term.
        rhs: shape (m,), the right-hand sides b.
        integer: shape (n,), True where the variable must be 0 or 1.
        offset: constant added to the objective, in seconds.
        resource_offset: resource name -> constant added to its use.
        names: the variables' names, or a function from index to name; ``x<j>`` where absent.
        upper: upper bounds, shape (n,), inf allowed for continuous variables; 1 where absent.

    Raises:
        SolverInputError: a shape, an index or a number is wrong; the message names the field.
    """

    cost: FloatArray
    resources: Mapping[str, FloatArray]
    caps: Mapping[str, float]
    row_start: IntArray
    row_index: IntArray
    row_value: FloatArray
    rhs: FloatArray
    integer: BoolArray
    offset: float = 0.0
    resource_offset: Mapping[str, float] = field(default_factory=dict)
    names: Sequence[str] | Callable[[int], str] | None = None
    upper: FloatArray | None = None

    def __post_init__(self) -> None:
        cost = _floats("cost", self.cost, None)
        n = len(cost)
        rhs = _floats("rhs", self.rhs, None)
        start = _ints("row_start", self.row_start, len(rhs) + 1)
        if start[0] != 0 or bool((np.diff(start) < 0).any()):
            raise SolverInputError("row_start must begin at 0 and never decrease")
        nnz = int(start[-1])
        index = _ints("row_index", self.row_index, nnz)
        if nnz and (index.min() < 0 or index.max() >= n):
            raise SolverInputError(f"row_index must lie in 0..{n - 1}, got {index.min()}..{index.max()}")
        checked: dict[str, Any] = {
            "cost": cost,
            "rhs": rhs,
            "row_start": start,
            "row_index": index,
            "row_value": _floats("row_value", self.row_value, nnz),
            "integer": _bools("integer", self.integer, n),
            "offset": _number("offset", self.offset),
            "resources": {r: _floats(f"resources[{r!r}]", v, n) for r, v in self.resources.items()},
        }
        for name, table in (("caps", self.caps), ("resource_offset", self.resource_offset)):
            unknown = sorted(set(table) - set(self.resources))
            if unknown:
                raise SolverInputError(f"{name} names {unknown}, but resources has {sorted(self.resources)}")
            checked[name] = {r: _number(f"{name}[{r!r}]", v, infinite=name == "caps") for r, v in table.items()}
        upper = np.ones(n) if self.upper is None else np.array(self.upper, dtype=np.float64)
        checked["upper"] = _floats("upper", upper, n, infinite=True)
        if n and (upper.min() < 0 or (checked["integer"] & (upper > 1)).any()):
            raise SolverInputError("upper must be >= 0, and <= 1 where integer")
        if self.names is not None and not callable(self.names) and len(self.names) != n:
            raise SolverInputError(f"names must have {n} entries, got {len(self.names)}")
        for name, value in checked.items():
            frozen = MappingProxyType(value) if isinstance(value, dict) else value
            object.__setattr__(self, name, frozen)

    @property
    def n_variables(self) -> int:
        """Number of variables n."""
        return len(self.cost)

    @property
    def n_rows(self) -> int:
        """Number of equality rows m."""
        return len(self.rhs)

    @property
    def upper_bounds(self) -> FloatArray:
        """Upper bounds, shape (n,), never None."""
        assert self.upper is not None  # set in __post_init__
        return self.upper

    @property
    def finite_caps(self) -> dict[str, float]:
        """The caps that bind something: resource name -> finite bound."""
        return {r: c for r, c in self.caps.items() if np.isfinite(c)}

    @cached_property
    def term_row(self) -> IntArray:
        """The row of each term of ``row_index``, shape (nnz,)."""
        return np.repeat(np.arange(self.n_rows), np.diff(self.row_start))

    def name(self, variable: int) -> str:
        """The name of a variable, for messages and exported models."""
        if self.names is None:
            return f"x{variable}"
        return self.names(variable) if callable(self.names) else self.names[variable]

    def row_text(self, row: int, *, max_terms: int = 4) -> str:
        """Row ``row`` written out by variable names, cut after ``max_terms`` terms."""
        span = range(int(self.row_start[row]), int(self.row_start[row + 1]))
        terms = [f"{self.row_value[t]:+g}·{self.name(int(self.row_index[t]))}" for t in span[:max_terms]]
        more = [f"… ({len(span) - max_terms} more)"] if len(span) > max_terms else []
        return f"row {row}: {' '.join(terms + more) or '0'} = {self.rhs[row]:g}"

    def objective(self, x: FloatArray) -> float:
        """Equation (1): the cost of ``x`` with the offset, in seconds."""
        return float(self.cost @ x) + self.offset

    def row_values(self, x: FloatArray) -> FloatArray:
        """Equation (2): A x, shape (m,)."""
        weights = self.row_value * x[self.row_index]
        return np.bincount(self.term_row, weights=weights, minlength=self.n_rows).astype(np.float64)

    def resource_values(self, x: FloatArray) -> dict[str, float]:
        """Equation (3): resource name -> use with its offset, in the resource's unit."""
        return {r: float(v @ x) + self.resource_offset.get(r, 0.0) for r, v in self.resources.items()}

    def with_caps(self, **caps: float) -> Problem:
        """The same problem with these caps replaced; the others stay.

        Raises:
            SolverInputError: a name is not a resource of this problem.
        """
        return dataclasses.replace(self, caps={**self.caps, **caps})

    def __str__(self) -> str:
        caps = ", ".join(f"{r} <= {c:g}" for r, c in self.finite_caps.items()) or "no caps"
        return (
            f"Problem({self.n_variables} variables, {int(self.integer.sum())} of them integer, "
            f"{self.n_rows} rows, {len(self.row_index)} terms, {caps})"
        )


class ProblemBuilder:
    """Collects variables and rows, one at a time or in bulk, and builds a `Problem`.

    >>> b = ProblemBuilder()
    >>> fast, small = b.var(cost=1.0, integer=True, memory=8.0), b.var(cost=2.0, integer=True, memory=3.0)
    >>> b.eq([(fast, 1.0), (small, 1.0)], rhs=1.0)
    >>> print(b.build(caps={"memory": 5.0}))
    Problem(2 variables, 2 of them integer, 1 rows, 2 terms, memory <= 5)
    """

    def __init__(self) -> None:
        self._n = 0
        self._costs: list[FloatArray] = []
        self._integers: list[BoolArray] = []
        self._uppers: list[FloatArray] = []
        self._resources: dict[str, list[tuple[int, FloatArray]]] = {}
        self._lengths: list[IntArray] = []
        self._index: list[IntArray] = []
        self._value: list[FloatArray] = []
        self._rhs: list[FloatArray] = []

    @property
    def n_variables(self) -> int:
        """Number of variables added so far."""
        return self._n

    def var(self, cost: float = 0.0, integer: bool = False, *, upper: float = 1.0, **resources: float) -> int:
        """Adds one variable and returns its index; ``resources`` are its uses by resource name."""
        uses = {r: np.array([v], dtype=np.float64) for r, v in resources.items()}
        return self.add_vars(np.array([cost]), integer, uses, upper=upper)[0]

    def add_vars(
        self, costs: ArrayLike, integer: bool, resources: Mapping[str, ArrayLike] | None = None, *, upper: float = 1.0
    ) -> range:
        """Adds one variable for each entry of ``costs`` and returns their indices.

        Raises:
            SolverInputError: a resource array does not have one entry for each cost.
        """
        costs = _floats("costs", costs, None)
        k, first = len(costs), self._n
        uses = {r: _floats(f"resources[{r!r}]", v, k) for r, v in (resources or {}).items()}
        self._costs.append(costs)
        self._integers.append(np.full(k, integer))
        self._uppers.append(np.full(k, upper, dtype=np.float64))
        for r, use in uses.items():
            self._resources.setdefault(r, []).append((first, use))
        self._n += k
        return range(first, self._n)

    def eq(self, terms: Iterable[tuple[int, float]], rhs: float) -> None:
        """Adds the row ``Σ value · x[index] = rhs`` for ``terms`` of (index, value)."""
        pairs = list(terms)
        self._lengths.append(np.array([len(pairs)], dtype=np.int64))
        self._index.append(np.array([j for j, _ in pairs], dtype=np.int64))
        self._value.append(np.array([v for _, v in pairs], dtype=np.float64))
        self._rhs.append(np.array([rhs], dtype=np.float64))

    def add_rows(self, start: ArrayLike, index: ArrayLike, value: ArrayLike, rhs: ArrayLike) -> None:
        """Adds rows given in CSR form; ``start`` begins at 0 and has one entry more than ``rhs``.

        Raises:
            SolverInputError: the four arrays do not agree.
        """
        rhs = _floats("rhs", rhs, None)
        start = _ints("start", start, len(rhs) + 1)
        lengths = np.diff(start)
        if start[0] != 0 or bool((lengths < 0).any()):
            raise SolverInputError("start must begin at 0 and never decrease")
        index = _ints("index", index, int(start[-1]))
        self._value.append(_floats("value", value, len(index)))
        self._index.append(index)
        self._lengths.append(lengths)
        self._rhs.append(rhs)

    def build(
        self,
        caps: Mapping[str, float] | None = None,
        *,
        offset: float = 0.0,
        resource_offset: Mapping[str, float] | None = None,
        names: Sequence[str] | Callable[[int], str] | None = None,
    ) -> Problem:
        """The `Problem` of everything added; a resource named only in a cap or an offset is used by no variable.

        Raises:
            SolverInputError: as `Problem`.
        """
        caps, resource_offset = dict(caps or {}), dict(resource_offset or {})
        resources = {}
        for r in dict.fromkeys([*self._resources, *caps, *resource_offset]):
            resources[r] = use = np.zeros(self._n)
            for first, chunk in self._resources.get(r, ()):
                use[first : first + len(chunk)] = chunk
        return Problem(
            cost=_join(self._costs, np.float64),
            resources=resources,
            caps=caps,
            row_start=np.concatenate([[0], np.cumsum(_join(self._lengths, np.int64))]),
            row_index=_join(self._index, np.int64),
            row_value=_join(self._value, np.float64),
            rhs=_join(self._rhs, np.float64),
            integer=_join(self._integers, np.bool_),
            offset=offset,
            resource_offset=resource_offset,
            names=names,
            upper=_join(self._uppers, np.float64),
        )


def _join(chunks: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(chunks) if chunks else np.zeros(0, dtype=dtype)


def _array(field_name: str, values: ArrayLike, length: int | None, dtype: type[np.generic]) -> NDArray[Any]:
    try:
        array = np.ascontiguousarray(values, dtype=dtype).view()
    except (TypeError, ValueError) as error:
        raise SolverInputError(f"{field_name} is not an array of {dtype.__name__}: {error}") from error
    if array.ndim != 1 or (length is not None and len(array) != length):
        wanted = "(any length,)" if length is None else f"({length},)"
        raise SolverInputError(f"{field_name} must have shape {wanted}, got {array.shape}")
    array.flags.writeable = False
    return array


def _floats(field_name: str, values: ArrayLike, length: int | None, *, infinite: bool = False) -> FloatArray:
    array = _array(field_name, values, length, np.float64)
    bad = np.isnan(array) if infinite else ~np.isfinite(array)
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise SolverInputError(f"{field_name}[{at}] is {array[at]}; every entry must be a finite number")
    return array


def _ints(field_name: str, values: ArrayLike, length: int | None) -> IntArray:
    kind = np.asarray(values).dtype.kind
    if np.size(values) and kind not in "iu":
        raise SolverInputError(f"{field_name} must hold integers, got dtype {np.asarray(values).dtype}")
    return _array(field_name, values, length, np.int64)


def _bools(field_name: str, values: ArrayLike, length: int) -> BoolArray:
    kind = np.asarray(values).dtype.kind
    if np.size(values) and kind != "b":
        raise SolverInputError(f"{field_name} must hold booleans, got dtype {np.asarray(values).dtype}")
    return _array(field_name, values, length, np.bool_)


def _number(field_name: str, value: float, *, infinite: bool = False) -> float:
    number = float(value)
    if np.isnan(number) or (np.isinf(number) and not (infinite and number > 0)):
        raise SolverInputError(f"{field_name} is {number}; it must be a {'number' if infinite else 'finite number'}")
    return number
