"""Compute with sizes as formulas of the inputs' sizes, and prove what holds for all of them.

A formula is a sum of products of atoms with rational coefficients. An atom is a symbol, a quotient rounded down, a
maximum, a minimum, or a quotient of formulas. The functions here keep formulas in one form, so that equal formulas
are equal sizes. What cannot be proved stays in the formula: `floor(S / 160)` is no number, and `min(S, 128)` is
neither `S` nor 128.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

MOST_TERMS = 48  # in a formula, counting those of its atoms
_MOST_TRIALS = 200  # of one proof
_MOST_FACTORS = 8  # of one atom in a product


class TooLong(ArithmeticError):
    """Report a formula that is too long to compute with."""


@dataclass(frozen=True)
class Symbol:
    """Name a size that is at least 0, or at least 1."""

    name: str
    least: int = 0


@dataclass(frozen=True)
class _Floor:
    of: Formula


@dataclass(frozen=True)
class _Extreme:
    """Hold the largest or the smallest of several formulas."""

    is_largest: bool
    of: frozenset[Formula]


@dataclass(frozen=True)
class _Ratio:
    numerator: Formula
    denominator: Formula


_Atom = Symbol | _Floor | _Extreme | _Ratio
_Product = frozenset[tuple[_Atom, int]]  # atoms with their powers


@dataclass(frozen=True)
class Formula:
    """Hold a sum of products with their coefficients.

    >>> n = symbol("N")
    >>> (n + 1) * (n + 1) - n * n == n * 2 + 1
    True
    """

    terms: frozenset[tuple[_Product, Fraction]]

    @functools.cached_property
    def number(self) -> Fraction | None:
        if not self.terms:
            return Fraction(0)
        (product, factor), *more = self.terms
        return factor if not more and not product else None

    @functools.cached_property
    def name(self) -> str | None:
        """The name of the symbol that a formula is, or None."""
        atom = next(iter(self.atoms), None)
        return atom.name if isinstance(atom, Symbol) and self == _of_atom(atom) else None

    @functools.cached_property
    def atoms(self) -> frozenset[_Atom]:
        """The atoms of the products, without those inside them."""
        return frozenset(atom for product, _ in self.terms for atom, _ in product)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        inner = [_parts(atom) for atom in self.atoms if not isinstance(atom, Symbol)]
        own = {atom.name for atom in self.atoms if isinstance(atom, Symbol)}
        return frozenset(own.union(*(part.names for parts in inner for part in parts)))

    @functools.cached_property
    def length(self) -> int:
        """The number of terms, including those of the atoms."""
        inner = sum(part.length for atom in self.atoms for part in _parts(atom))
        return len(self.terms) + inner

    def __add__(self, other: Formula | Fraction | int) -> Formula:
        return _sum([*self.terms, *_formula(other).terms])

    def __sub__(self, other: Formula | Fraction | int) -> Formula:
        return self + _formula(other) * -1

    def __mul__(self, other: Formula | Fraction | int) -> Formula:
        pairs = [(a, b) for a in self.terms for b in _formula(other).terms]
        if len(pairs) > MOST_TERMS:
            raise TooLong
        return _sum((_product(p, q), a * b) for (p, a), (q, b) in pairs)


def _parts(atom: _Atom) -> Iterable[Formula]:
    match atom:
        case Symbol():
            return ()
        case _Ratio():
            return atom.numerator, atom.denominator
        case _Floor():
            return (atom.of,)
    return atom.of


def _sum(terms: Iterable[tuple[_Product, Fraction]]) -> Formula:
    factors: dict[_Product, Fraction] = {}
    for product, factor in terms:
        factors[product] = factors.get(product, Fraction(0)) + factor
    result = Formula(frozenset((product, factor) for product, factor in factors.items() if factor))
    if result.length > MOST_TERMS:
        raise TooLong
    return result


def _product(*products: _Product) -> _Product:
    powers: dict[_Atom, int] = {}
    for product in products:
        for atom, power in product:
            powers[atom] = powers.get(atom, 0) + power
    if any(abs(power) > _MOST_FACTORS for power in powers.values()):
        raise TooLong
    return frozenset((atom, power) for atom, power in powers.items() if power)


def _formula(x: Formula | Fraction | int) -> Formula:
    return x if isinstance(x, Formula) else Formula(frozenset({(frozenset(), Fraction(x))} if x else ()))


def _of_atom(atom: _Atom, power: int = 1) -> Formula:
    return Formula(frozenset({(frozenset({(atom, power)}), Fraction(1))}))


@functools.lru_cache(2**10)
def number(value: int | Fraction) -> Formula:
    return _formula(value)


@functools.lru_cache(2**10)
def symbol(name: str, least: int = 1) -> Formula:
    """Return the formula of a size that is at least so large."""
    return _of_atom(Symbol(name, least))


def quotient(numerators: Sequence[Formula], denominators: Sequence[Formula]) -> Formula:
    """Return a product divided by a product that is not 0, where no rest remains.

    >>> n, s = symbol("N"), symbol("S")
    >>> quotient([n, s + 1, number(6)], [s + 1, n, number(2)]).number
    Fraction(3, 1)
    """
    above, below = list(numerators), []
    for x in denominators:
        if x in above:
            above.remove(x)
        else:
            below.append(x)
    result = functools.reduce(Formula.__mul__, above, number(1))
    rest = number(1)
    for x in below:
        if len(x.terms) == 1:
            ((product, factor),) = x.terms
            inverse = frozenset((atom, -power) for atom, power in product)
            result *= Formula(frozenset({(inverse, 1 / factor)}))
        else:
            rest *= x
    if rest.number == 1 or not result.terms:
        return result
    if not rest.terms:
        raise TooLong
    return _of_atom(_Ratio(result, rest))


def floor(x: Formula) -> Formula:
    """Return a formula rounded down.

    >>> n = symbol("N")
    >>> floor((n * 4 + 3) * Fraction(1, 2)) == n * 2 + 1
    True
    >>> floor(floor(n * Fraction(1, 2)) * Fraction(1, 2)) == floor(n * Fraction(1, 4))
    True
    """
    whole, rest = number(0), number(0)
    for product, factor in x.terms:
        is_whole = all(power > 0 and not isinstance(atom, _Ratio) for atom, power in product)
        part = math.floor(factor) if is_whole else 0
        whole += Formula(frozenset({(product, Fraction(part))} if part else ()))
        rest += Formula(frozenset({(product, factor - part)} if factor != part else ()))
    if rest.number is not None:
        return whole + math.floor(rest.number)
    below = _below(rest)
    for product, factor in rest.terms if below else ():  # floor((floor(a) + b) / q) = floor((a + b) / q)
        inner = next(iter(product))[0] if len(product) == 1 else None
        if isinstance(inner, _Floor) and product == {(inner, 1)} and factor == below:
            return whole + floor(rest + (inner.of - _of_atom(inner)) * factor)
    if below and is_nonnegative(rest) and is_nonnegative(number(1 - below) - rest):
        return whole
    return whole + _of_atom(_Floor(rest))


def ceiling(x: Formula) -> Formula:
    """Return a formula rounded up."""
    below = _below(x)
    return floor(x + (1 - below)) if below else floor(x * -1) * -1


def _below(x: Formula) -> Fraction | None:
    """Return the number of which a formula is a whole multiple, 1 / q; None if it may be a multiple of none."""
    if any(power < 0 or isinstance(atom, _Ratio) for product, _ in x.terms for atom, power in product):
        return None
    return Fraction(1, math.lcm(*(factor.denominator for _, factor in x.terms)))


def largest(*formulas: Formula) -> Formula:
    """Return the maximum of formulas.

    >>> n = symbol("N")
    >>> largest(n, smallest(n, number(512))) == n
    True
    """
    return _extreme(True, formulas, lambda a, b: is_nonnegative(a - b))


def smallest(*formulas: Formula) -> Formula:
    return _extreme(False, formulas, lambda a, b: is_nonnegative(b - a))


def _extreme(is_largest: bool, formulas: Iterable[Formula], wins: Callable[[Formula, Formula], bool]) -> Formula:
    left: list[Formula] = []
    for x in formulas:
        atom = next(iter(x.atoms), None)
        is_same_kind = isinstance(atom, _Extreme) and atom.is_largest == is_largest and x == _of_atom(atom)
        for each in atom.of if is_same_kind and isinstance(atom, _Extreme) else (x,):
            if not any(other == each or wins(other, each) for other in left):
                left = [other for other in left if not wins(each, other)] + [each]
    return left[0] if len(left) == 1 else _short(_of_atom(_Extreme(is_largest, frozenset(left))))


def _short(x: Formula) -> Formula:
    if x.length > MOST_TERMS:
        raise TooLong
    return x


@functools.lru_cache(2**12)
def is_nonnegative(x: Formula) -> bool:
    """Return whether a formula is proved to be at least 0 for all values of its symbols.

    >>> n = symbol("N")
    >>> is_nonnegative(n - 1), is_nonnegative(n - 2)
    (True, False)
    """
    if x.number is not None:
        return x.number >= 0
    try:
        return _is_nonnegative(x, [_MOST_TRIALS])
    except TooLong:
        return False


def _is_nonnegative(x: Formula, trials: list[int]) -> bool:
    """Put bounds in place of the atoms one by one, and then the least value of each symbol."""
    trials[0] -= 1
    if trials[0] < 0:
        return False
    atom = next((atom for atom in x.atoms if not isinstance(atom, Symbol)), None)
    if atom is None:
        return _is_sum_of_nonnegative(x)
    signs = {factor > 0 for product, factor in x.terms if any(own == atom for own, _ in product)}
    powers = {power for product, _ in x.terms for own, power in product if own == atom}
    if len(signs) > 1 or powers != {1} or not _rest_is_nonnegative(x, atom, trials):
        return False
    need, bounds = _bounds(atom, is_below=True in signs, trials=trials)
    return bool(bounds) and need(_is_nonnegative(_with(x, atom, bound), trials) for bound in bounds)


def _rest_is_nonnegative(x: Formula, atom: _Atom, trials: list[int]) -> bool:
    """Return whether all that multiplies an atom is at least 0."""
    rest = {own for product, _ in x.terms if (atom, 1) in product for own, _ in product if own != atom}
    return all(isinstance(own, Symbol) or _is_nonnegative(_of_atom(own), trials) for own in rest)


def _bounds(atom: _Atom, is_below: bool, trials: list[int]) -> tuple[Callable[[Iterable[bool]], bool], list[Formula]]:
    """Return bounds of an atom from below or above, and whether one of them must do or all."""
    match atom:
        case _Floor() if not is_below:
            return any, [atom.of]
        case _Floor():
            step = _below(atom.of)
            zero = [number(0)] if _is_nonnegative(atom.of, trials) else []
            return any, [*zero, atom.of - (1 - step if step else 1)]
        case _Extreme():
            return any if atom.is_largest == is_below else all, list(atom.of)
    return any, []


def _is_sum_of_nonnegative(x: Formula) -> bool:
    """Return whether a polynomial has no negative coefficient once its symbols are counted from their least values."""
    for atom in x.atoms:
        if isinstance(atom, Symbol) and atom.least:
            if any((atom, power) in product for product, _ in x.terms for power in range(-_MOST_FACTORS, 0)):
                return False
            x = _with(x, atom, symbol(f"{atom.name} - {atom.least}", 0) + atom.least)
    return all(factor > 0 and all(power > 0 for _, power in product) for product, factor in x.terms)


def _with(x: Formula, atom: _Atom, other: Formula) -> Formula:
    """Return a formula with another one in place of an atom."""
    result = number(0)
    for product, factor in x.terms:
        power = dict(product).get(atom, 0)
        if power < 0:
            raise TooLong
        rest = frozenset(pair for pair in product if pair[0] != atom)
        factors = [Formula(frozenset({(rest, factor)})), *[other] * power]
        result += functools.reduce(Formula.__mul__, factors)
    return result
