"""Errors whose text is odd, as a model's file makes them; and what of it must be read where they are said."""

HEAD = r"""
class Mute(Exception):
    def __str__(self): raise ValueError("no text")
class Number(Exception):
    def __str__(self): return 3
class Leaving(Exception):
    def __str__(self): raise SystemExit(3)
def noted(error):
    error.add_note("a note\nof \x1b[1mtwo lines")
    return error
def oddly_noted(error, notes):
    error.__notes__ = notes
    return error
"""
ODD_ERRORS: dict[str, tuple[str, tuple[str, ...]]] = {
    "several lines": (
        r'RuntimeError("CUDA error: an illegal access\nkernel errors may be\n\n\treported later\r\n")',
        ("RuntimeError: CUDA error: an illegal access kernel errors may be reported later",),
    ),
    "escapes": (
        r'ValueError("\x1b[31mred\x1b[0m\x07 \x9b2J\u202e tail")',
        (r"ValueError: \x1b[31mred\x1b[0m\x07 \x9b2J\u202e tail",),
    ),
    "long": ('RuntimeError("x" * 70000 + " tail")', ("RuntimeError: x", f"{'x' * 70000} tail")),
    "not UTF-8": (r'OSError(5, b"caf\xe9".decode("utf-8", "surrogateescape"))', (r"OSError: [Errno 5] caf\udce9",)),
    "empty": ("AssertionError()", ("AssertionError: no message",)),
    "blank": (r'RuntimeError(" \n ")', ("RuntimeError: no message",)),
    "mute": ("Mute()", ("Mute: its own message cannot be made (ValueError)",)),
    "no text": ("Number()", ("Number: its own message cannot be made (TypeError)",)),
    "notes": ('noted(RuntimeError("first"))', (r"RuntimeError: first; a note of \x1b[1mtwo lines",)),
    "leaving": ("Leaving()", ("Leaving: its own message cannot be made (SystemExit)",)),
    "notes of other types": (
        "oddly_noted(RuntimeError('first'), [3, None, b'x', 'a note'])",
        ("RuntimeError: first; a note",),
    ),
    "no list of notes": ("oddly_noted(RuntimeError('first'), 3)", ("RuntimeError: first",)),
    "a group": (
        "ExceptionGroup('two', [ValueError('one\\nof'), ExceptionGroup('inner', [Mute(), noted(KeyError('k'))])])",
        ("ExceptionGroup: two (2 sub-exceptions); ValueError: one of; ", "KeyError: 'k'; a note of", "Mute: its own"),
    ),
    "huge": ("RuntimeError('x' * 10**7 + ' tail')", ("RuntimeError: x", "letters are left out here", "x tail")),
    "name": (r'type("Kind\x1b[2J", (Exception,), {})("x")', (r"Kind\x1b[2J: x",)),
}
"""By what is odd: an expression, and words."""


def odd_error(name: str) -> Exception:
    names: dict[str, object] = {"__name__": __name__}
    exec(f"{HEAD}\nmade = {ODD_ERRORS[name][0]}", names)
    made = names["made"]
    assert isinstance(made, Exception)
    return made
