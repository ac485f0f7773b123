"""Write names and numbers as a person reads them: without underscores, and without powers of ten where they fit."""

from __future__ import annotations

import math

_WORDS = {
    **{"f1": "F1", "mae": "MAE", "mse": "MSE", "r2": "R²", "rmse": "RMSE", "roc_auc": "ROC AUC"},
    "samples_per_second": "samples/s",
    "tokens_per_second": "tokens/s",
}
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_TIMES = "\N{MULTIPLICATION SIGN}"
_SMALLEST, _LARGEST = 1e-4, 1e12  # between which numbers have no power of ten


def label_of(name: str) -> str:
    """Return the name of a number in records in words; a target's name before a dot stays as it is."""
    target, dot, own = name.rpartition(".")
    return f"{target}{dot and ' '}{_WORDS.get(own, own.replace('_', ' '))}"


def counted(number: int, what: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def is_share(name: str) -> bool:
    """Return whether a measure is a share, which a person reads in percent."""
    return name.endswith("accuracy")


def readable(value: float | None, digits: int = 4) -> str:
    """Return a number with so many significant digits, and with separated thousands."""
    if value is None or math.isnan(value):
        return "not a number"
    if math.isinf(value) or value == 0 or isinstance(value, int):
        return f"{value:,.0f}".replace("inf", "∞")
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    if not _SMALLEST <= abs(value) < _LARGEST:
        factor = "" if float(mantissa) == 1 else f"{mantissa.rstrip('0').rstrip('.')} {_TIMES} "
        return f"{factor}10{str(int(exponent)).translate(_SUPERSCRIPTS)}"
    text = f"{value:,.{max(0, digits - 1 - int(exponent))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float, places: int = 1) -> str:
    """Return a share in percent; only 1 is 100 %, and only 0 is 0 %.

    Args:
        places: the number of decimal places, of shares that are not close to 0 or 1.
    """
    if not math.isfinite(share):
        return readable(share)
    if share in (0, 1):
        return f"{100 * share:.0f}\N{NO-BREAK SPACE}%"
    digits = places if 0.0005 <= share < 0.9995 else 3
    if 0 < share < 1:
        share = min(max(share, 1e-5), 0.99999)
    return f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"


def measure_text(name: str, value: float | None, places: int = 1) -> str:
    """Return the value of a measure of this name; `places` are those of shares."""
    return percent(value, places) if is_share(name) and value is not None else readable(value)


def duration(seconds: float) -> str:
    """Return a time in the units that a person would use."""
    if seconds < 60:
        return f"{readable(seconds, 2 if seconds < 10 else 3)} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{minutes // 60:,} h {minutes % 60} min"
