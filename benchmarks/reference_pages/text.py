"""Text: docstrings, values and tables as Markdown."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from textwrap import dedent

SECTIONS = {"Args:": "Arguments", "Raises:": "Errors"}
_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_ENTRY = re.compile(r"(\*{0,2}\w+): (.*)")


def page(title: str, origin: str, *parts: str) -> str:
    """Return a page: its title, where its words are from, and its parts."""
    note = f"<!-- Written by `python benchmarks/reference.py` from {origin}. -->"
    return "\n\n".join((f"# {title}", note, *(part.strip("\n") for part in parts if part.strip()))) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells may hold anything but new lines.

    >>> print(table(["a", "b"], [["1", "x|y"]]))
    | a | b |
    |---|---|
    | 1 | x\\|y |
    """
    lines = [header, ["---"] * len(header), *rows]
    written = ("| " + " | ".join(_cell(each) for each in line) + " |" for line in lines)
    return "\n".join(written).replace("| --- |" + " --- |" * (len(header) - 1), "|---" * len(header) + "|")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def inline(text: str) -> str:
    """Return a docstring's words as Markdown: roles and double backquotes become code.

    >>> inline("as of :func:`profile`, or ``None``")
    'as of `profile`, or `None`'
    """
    return _ROLE.sub(r"`\1`", text).replace("``", "`")


def markdown(docstring: str | None) -> str:
    """Return a docstring as Markdown: examples and pictures become blocks of code, sections lists.

    >>> print(markdown("Add.\\n\\nArgs:\\n    a: ``1``,\\n        or more.\\n\\n    a + a"))
    Add.
    <BLANKLINE>
    **Arguments**
    <BLANKLINE>
    - `a`: `1`, or more.
    <BLANKLINE>
    ```text
    a + a
    ```
    """
    return _rendered(inspect.cleandoc(docstring or ""))


def body(docstring: str | None) -> str:
    """Return a docstring without its first paragraph, as Markdown."""
    return _rendered(inspect.cleandoc(docstring or "").partition("\n\n")[2])


def _rendered(text: str) -> str:
    return "\n\n".join(_block(each) for each in _blocks(text) if each)


def _blocks(text: str) -> Iterator[list[str]]:
    """Yield paragraphs; indented ones that follow each other are one, and so is a section with its entries."""
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = paragraph.split("\n")
        if found and found[0].startswith("    ") and lines[0].startswith("    "):
            found += ["", *lines]
            continue
        yield found
        found = lines
    yield found


def _block(lines: list[str]) -> str:
    if lines[0] in SECTIONS:
        return f"**{SECTIONS[lines[0]]}**\n\n" + "\n".join(_entries(lines[1:]))
    if lines[0].startswith(">>> "):
        return "\n".join(("```python", *(line.removesuffix("  # doctest: +SKIP") for line in lines), "```"))
    if lines[0].startswith("    "):
        code = dedent("\n".join(lines))
        return "\n".join((f"```{_language(code)}", code, "```"))
    return inline("\n".join(line.removesuffix(":") if line.endswith("::") else line for line in lines))


def _language(code: str) -> str:
    """Return what a block is written in: functions and classes are Python, all else is text."""
    try:
        found = ast.parse(code).body
    except SyntaxError:
        return "text"
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return "python" if any(isinstance(each, kinds) for each in found) else "text"


def _entries(lines: list[str]) -> Iterator[str]:
    """Yield the entries of a section as a list's items."""
    joined: list[str] = []
    for line in dedent("\n".join(lines)).split("\n"):
        if line.startswith(" ") and joined:
            joined[-1] += " " + line.strip()
        else:
            joined.append(line)
    for each in joined:
        match = _ENTRY.fullmatch(each)
        yield f"- `{match[1]}`: {inline(match[2])}" if match else f"- {inline(each)}"


def signature(name: str, value: object, *, own: bool = False) -> str:
    """Return how a function is called, as a block of code; a parameter a line where one line is too short.

    Of a function that takes options by name, only its ``own`` parameters may be wanted.
    """
    found = inspect.signature(value)  # type: ignore[arg-type]
    shown = [each for each in found.parameters.values() if each.name not in ("self", "cls")]
    code = getattr(value, "__code__", None)
    named = own and code is not None and bool(code.co_flags & inspect.CO_VARKEYWORDS)
    if named:
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        shown = [each for each in shown if each.name in names]
    parameters, kinds = [_parameter(each) for each in shown], [each.kind for each in shown]
    if named:
        parameters.append("**named: Any")
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    end = "" if found.return_annotation is inspect.Signature.empty else f" -> {annotation(found.return_annotation)}"
    line = f"{name}({', '.join(parameters)}){end}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {each},\n" for each in parameters) + f"){end}"
    return f"```python\n{line}\n```"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    if parameter.annotation is not inspect.Parameter.empty:
        text += f": {annotation(parameter.annotation)}"
    if parameter.default is inspect.Parameter.empty:
        return text
    default = parameter.default
    return f"{text} = {default.__name__ if inspect.isfunction(default) else repr(default)}"


def annotation(value: object) -> str:
    """Return a type as it is written, without the modules that it is from.

    >>> annotation("clusters.Cluster | str"), annotation(int)
    ('Cluster | str', 'int')
    """
    text = value if isinstance(value, str) else getattr(value, "__name__", str(value))
    return re.sub(r"\b(?:clusters|plans|profiles|timelines|views|torch\.optim|torch|nn)\.(?=[A-Z])", "", text)


def field_docstrings(kind: type) -> dict[str, tuple[str, str]]:
    """Return the fields of a class, not of those above it: by name, the annotation as written, and the docstring."""
    (tree,) = ast.parse(dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, tuple[str, str]] = {}
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            said = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            text = str(following.value.value) if said else ""  # type: ignore[union-attr]
            found[node.target.id] = ast.unparse(node.annotation), " ".join(inline(text).split())
    return found
