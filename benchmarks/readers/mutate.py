"""Mutate: breaks a file, as texts or, where it is JSON, TOML or Python, as values."""

from __future__ import annotations

import ast
import json
import random
import tomllib
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["broken"]

Change = Callable[[random.Random, Any], Any]

_TEXTS = (
    "",
    "\0",
    "\x1b[2J\x1b[31mred",
    "a\nb",
    "\u202egnp.exe",
    "\ud800",
    "..",
    "../../etc/passwd",
    "/dev/zero",
    "$\\frac{$",
    "x" * 2000,
    "y" * 200_000,
    "hf:",
    "a:b",
    "NaN",
    "1e999",
    "0x10",
    "\ufeff",
    "%s%n{0}{self}",
)
_NUMBERS: tuple[object, ...] = (0, -1, 1, 2**31, 2**63, 10**400, -(10**400), 0.5, 1e308, -0.0, 1e-320, True, None)
_OTHERS: tuple[object, ...] = ([], {}, [[]], {"": {}}, [None], "text", 1, False)
_LITERALS = (
    "{[]: 1}",
    "{{}}",
    "{1: 2, **{}}",
    "0x" + "f" * 6000,
    "-0x" + "f" * 6000,
    "9" * 4000,
    "1e999",
    "1j",
    "-[]",
    "1 + []",
    "[" * 90 + "]" * 90,
    "-" * 3000 + "1",
    "b'x'",
    "f'{x}'",
    "...",
    "set()",
    "'\\ud800'",
    "'\\x1b[31m'",
    "'\\d'",
    "1if 1else 2",
    "2**31",
)
_BYTES = (b"\0", b"\xff\xfe", b"\xed\xa0\x80", b'"', b"{", b"[" * 300, b"," * 9, b"9" * 5000, b"\x1b[0m", b"=")


def broken(chance: random.Random, content: bytes) -> bytes:
    """Return a file that is like a good one, but for one to three changes."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        written = None
        if chance.random() < 0.75:
            # A name or a number may be JSON or Python, too.
            written = _of_json(chance, content) or _of_toml(chance, content) or _of_python(chance, content)
        content = _bytes(chance, content) if written is None else written
    return content


def _of_json(chance: random.Random, content: bytes) -> bytes | None:
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return None
    _change_one(chance, tree)
    # Indented, deep nests take a hundred times as long to write as to read.
    text = json.dumps(tree, separators=(chance.choice((", ", ",\n")), ": "))
    if chance.random() < 0.05:
        # Of two equal keys, one.
        text = text.replace('"format"', '"version"', 1)
    return text.encode("utf-8", "surrogatepass")


def _of_toml(chance: random.Random, content: bytes) -> bytes | None:
    try:
        tree = tomllib.loads(content.decode())
        _change_one(chance, tree)
        # JSON's values are TOML's, but for null; numbers of thousands of digits are not written again.
        lines = [f"{json.dumps(key)} = {json.dumps(value, separators=(', ', ' = '))}\n" for key, value in tree.items()]
    except (ValueError, RecursionError):
        return None
    text = "".join(lines)
    if chance.random() < 0.05:
        # Decimal digits are limited, and others not.
        text = text.replace("= 2", f"= 0x{'f' * 6000}", 1)
    return text.encode()


def _of_python(chance: random.Random, content: bytes) -> bytes | None:
    """Put another literal in the place of one."""
    text = content.decode("utf-8", "replace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant | ast.List)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    source = ast.get_source_segment(text, chance.choice(found)) if found else None
    return text.replace(source, chance.choice(_LITERALS), 1).encode() if source else None


def _change_one(chance: random.Random, tree: Any) -> None:  # noqa: ANN401
    holders = [tree] if isinstance(tree, (dict, list)) and tree else []
    # Down from the top, so that what stands high up is changed as often as what is one of many.
    while holders:
        holder = holders[-1]
        key = chance.choice(list(holder)) if isinstance(holder, dict) else chance.randrange(len(holder))
        inner = holder[key]
        if isinstance(inner, (dict, list)) and inner and chance.random() < 0.75:
            holders.append(inner)
            continue
        _change(chance, holder, key)
        break


def _change(chance: random.Random, holder: Any, key: Any) -> None:  # noqa: ANN401
    kind = chance.randrange(9)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        holder[key] = chance.choice(_NUMBERS)
    elif kind == 2:
        holder[key] = chance.choice(_TEXTS)
    elif kind == 3:
        holder[key] = chance.choice(_OTHERS)
    elif kind == 4:
        nest: object = 1
        for _ in range(chance.choice((3, 70, 900))):
            nest = [nest] if chance.random() < 0.5 else {"a": nest}
        holder[key] = nest
    elif kind == 5 and isinstance(holder, dict):
        holder[chance.choice(_TEXTS)] = holder[key]
    elif kind == 5:
        holder.insert(key, holder[key])
    elif kind == 6:
        other = chance.choice(list(holder)) if isinstance(holder, dict) else chance.randrange(len(holder))
        holder[key], holder[other] = holder[other], holder[key]
    elif kind == 7 and isinstance(holder[key], (int, float)):
        value = holder[key]
        holder[key] = chance.choice((-value, value + 1, str(value), float(max(-1e300, min(value, 1e300))), [value]))
    elif kind == 8 and isinstance(holder[key], str):
        holder[key] = holder[key] + chance.choice(_TEXTS)
    else:
        holder[key] = [holder[key]] * chance.choice((0, 2, 50))


def _bytes(chance: random.Random, content: bytes) -> bytes:
    at, length = chance.randrange(len(content) + 1), chance.choice((1, 2, 8, 100))
    kind = chance.randrange(6)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + content[at + length :]
    if kind == 2:
        return content[:at] + content[at : at + length] * 2 + content[at + length :]
    if kind == 3:
        return content[:at] + bytes(chance.randrange(256) for _ in range(length)) + content[at + length :]
    if kind == 4:
        put = chance.choice((*_BYTES, *(text.encode("utf-8", "replace") for text in _TEXTS)))
        return content[:at] + put + content[at:]
    return content[:at] + content[at:][:length][::-1] + content[at + length :]
