"""Files: every kind of document that autopar writes, key by key, from the records that read it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from autopar.formats import document, program, timeline
from autopar.formats.checkpoint import Checkpoint
from autopar.formats.cluster import Cluster
from autopar.formats.document import Record
from autopar.formats.plan import Plan
from autopar.formats.profile import Profile
from autopar.formats.pulls import PullLog
from autopar.formats.report import BlackBox, ComparisonRow, Report, Verification
from autopar.hardware import clusters
from autopar.hardware.descriptions import ClusterDescription
from autopar.profiler.calibrate import COLUMNS, MeasuredRun
from reference_pages.text import body, field_docstrings, inline, markdown, page, table

DOCUMENTS: tuple[tuple[type[BaseModel], str], ...] = (
    (Profile, "`autopar profile`, `autopar import`, `autopar run --update-profile`"),
    (Cluster, "`autopar profile`, `autopar cluster probe`"),
    (Plan, "`autopar plan`"),
    (Report, "`autopar run`, `autopar worker`"),
    (Checkpoint, "`autopar run --checkpoint`, as `manifest.json`"),
    (BlackBox, "`autopar run` that fails, beside the report"),
    (PullLog, "`autopar run` of an eager plan, as `pulls.json`"),
)
"""With who writes them."""
RESULTS: tuple[tuple[type, str], ...] = (
    (ComparisonRow, "`autopar compare --json`, a list of them as `rows`"),
    (Verification, "`autopar verify --json`"),
)
NAMED = {
    document.Seconds: "seconds",
    document.Bytes: "bytes (integer)",
    document.BytesPerSecond: "bytes per second",
    document.Count: "integer, 1 or more",
    document.Index: "integer, 0 or more",
    document.Digest: "SHA-256",
    document.Name: "text",
}
"""In words, the types that most keys have."""
COMMON = {
    "batch": "Samples of a step.",
    "bytes": "Its size.",
    "dim": "A dimension, from 0.",
    "file": "By its name in the same folder.",
    "format": "Which kind of file this is.",
    "kind": "Which of these it is.",
    "micro_batches": "Micro-batches of a step.",
    "name": "What it is called.",
    "parameter": "By the model's own name.",
    "parameters": "By the model's own names.",
    "precision": "What is computed in; `bf16` and `fp16` have float32 parameters, under autocast.",
    "ranks": "How many ranks.",
    "schedule": "The rule that orders forwards and backwards.",
    "seed": "The run's seed.",
    "sha256": "Of the file's bytes.",
    "stages": "Counted from 0.",
    "tensor": "By its name.",
    "torch": "The version of torch.",
    "value": "Its value.",
    "version": "Of this kind of file.",
}
"""Of keys that mean the same wherever they are, if the record says nothing else."""
_PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false", NoneType: "null", Path: "path"}


class Key(NamedTuple):
    """A key of an object in a file."""

    name: str
    hint: Any
    default: str
    """As JSON; empty where the key must be there."""
    meaning: str


_INTRODUCTION = """
```bash
autopar show plan.json
autopar plan --json > plan.json
```

autopar's files are JSON, each with `"format": "autopar.KIND"` and `"version": 1`. Bytes are integers, times seconds.
Names end with the unit: `_s`, `_bytes`, `_bytes_per_s`, `_flops`. The same content is written byte for byte alike.
"""
_SAFETY = """
## Reading and writing

A file is there whole, or not at all: it is written under a name that nobody can guess, brought to the disk, and
renamed. Links are replaced, never followed. Who may read it is up to your umask. An existing file is replaced only with
`--overwrite`, or where it is the command's default output.

Files are data: no file of yours that they hold is executed, but for the model that a plan names, when you profile, run,
rehearse or verify. The model's code is compared with what was profiled before a line of it runs
([which files](model_file.md#which-files-are-the-models)); plans made before autopar recorded imports run, and the
report says which files they do not cover.

Reading is strict. Unknown and duplicate keys, NaN, infinities, a boolean in place of a number, and absurd nesting or
sizes are refused in one line: the file, the place in it, the value, and what was expected. Only regular files are
opened, and only of a bounded size.

A plan names other files relative to itself. They are opened only where they lie in the plan's folder, or in the folder
in which the command runs, links followed. `autopar --trust-paths run plan.json` opens the others, too, if you know who
wrote the plan.

## Trained weights

`autopar run plan.json --save trained`, and `job.save_weights("trained")`, write a safetensors file a stage, each under
a name that no other set of weights has, and then the index, `model.safetensors.index.json`. The index makes them the
folder's weights, in one rename: whoever reads the folder, at whatever moment, finds the weights before or the new ones,
all of one run. Then files that the index before named are removed, and so is a `model.safetensors` that other libraries
would read in place of the index. Other files of the folder (a tokenizer, a `config.json`) stay as they are.

- A run that fails, before or while it saves, leaves the folder as it was. One that is killed may leave files that the
  index does not name, called `model-STAGE-of-STAGES-NAME.safetensors`; you may delete them.
- The index has the size and the SHA-256 of every file, in its `metadata`, where other libraries do not look. autopar
  compares them when it reads. Weights of other libraries have no such numbers, and are read as they are.
- Where a folder has an index and a `model.safetensors`, autopar reads the files that the index names.
"""


_CLUSTERS = """
## Cluster names

`--cluster` takes a cluster that was measured (`.json`), one that is described (`.toml`), or a name. Sizes and
bandwidths in GB mean 10^9 bytes; a network's Gbps are bits.
"""
_RACKS = """
Two devices are connected at the level `node` within a node, `rack` between two nodes of a rack, and `network`
otherwise. `network` is required where there are several racks. Without a link of level `rack`, racks mean nothing.

- Several links of one level, such as NVLink and PCIe, are ways beside each other: a message takes the one that is
  quickest for its size, and so does a collective. They are not added up. Only a `.json` can state them.
- Several equal network cards of a node are one link with fewer devices each: eight GPUs on four cards have `shared_by`
  2. Devices share in the order in which the cluster lists them; `bytes_per_s` is a card's.
- Ports between racks are those of the rack: `shared_by` 32 says that 32 devices share a way out of `bytes_per_s`.
- Curves are of a level, and count before its links. There is at most one for each operation, number of ranks and level.
"""
_RUNS = """
## Measured runs for --calibrate-with

A CSV file with a header and one row per measured run, all in the precision that is profiled. Cells may be left empty
for the default.

```csv
step_s,batch,devices,stages,micro_batches,recompute,shard
0.412,64,1,,8,,
0.121,64,4,,2,,optimizer
0.139,64,4,4,16,full,
```
"""


def files_page() -> str:
    """Return the page of files."""
    kinds = [(f"[{name}](#{name.lower()})", who) for name, who in _kinds()]
    parts = [_document(kind, f"Written by {who}.") for kind, who in (*DOCUMENTS, *RESULTS)]
    program_keys = _columns("Program", program, program.Program.dumps)
    trace_keys = _columns("Trace", timeline, timeline.Timeline.save)
    index = table(["kind", "written by"], kinds)
    names = body(clusters.__doc__)
    described = _document(ClusterDescription, "What `--cluster` reads of a `.toml` file.")
    runs = [each for each in _keys(MeasuredRun) if each.name in COLUMNS]
    written = (_CLUSTERS, names, described, _RACKS, _RUNS, _table(runs, MeasuredRun))
    said = (_INTRODUCTION, index, _SAFETY, *parts, program_keys, trace_keys, *written)
    return page("Files", "the records in `autopar/formats/`", *said)


def _kinds() -> Iterator[tuple[str, str]]:
    for kind, who in DOCUMENTS:
        yield kind.__name__, who
    for result, who in RESULTS:
        yield result.__name__, who
    yield "Program", "`autopar simulate --write-program`"
    yield "Trace", "`--trace` of `autopar simulate`, `run`, `worker` and `rehearse`"


def _document(kind: type, said: str) -> str:
    """Return a document's keys, and those of every object in it."""
    parts = [f"## {kind.__name__}", said, markdown(kind.__doc__), _keys_table(kind, kind)]
    for each in _objects(kind):
        parts += [f"### {kind.__name__}: {each.__name__}", markdown(each.__doc__), _keys_table(each, kind)]
    return "\n\n".join(parts)


def _columns(title: str, module: ModuleType, write: Callable[..., object]) -> str:
    """Return the words of a file that no record describes: those of its module, and of the function that writes it."""
    return f"## {title}\n\n{markdown(module.__doc__)}\n\n{markdown(write.__doc__)}"


def _objects(kind: type) -> list[type]:
    """Return the records within a record, at any depth, in the order of their keys."""
    found: list[type] = []
    for key in _keys(kind):
        for inner in _records(key.hint):
            found += [each for each in (inner, *_objects(inner)) if each not in found]
    return found


def _records(hint: Any) -> Iterator[type]:  # noqa: ANN401
    if isinstance(hint, type) and (issubclass(hint, Record) or dataclasses.is_dataclass(hint)):
        yield hint
    for each in get_args(hint):
        yield from _records(each)


def _keys(kind: type) -> Iterator[Key]:
    hints = get_type_hints(kind, include_extras=True)
    said: dict[str, tuple[str, str]] = {}
    for each in reversed(kind.__mro__):
        if each.__module__.startswith("autopar."):
            said |= field_docstrings(each)
    if issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield Key(name, hints[name], _default(field), _meaning(name, hints[name], said[name][1]))
        return
    for name, default in _defaults_of(kind).items():
        yield Key(name, hints[name], default, _meaning(name, hints[name], said[name][1]))


def _meaning(name: str, hint: Any, said: str) -> str:  # noqa: ANN401
    """Return the words for a key: its own, those of the one record that it holds, or those that all such keys have."""
    if said:
        return said
    records = list(_records(hint))
    if len(records) == 1 and records[0].__doc__:
        return inline(" ".join(records[0].__doc__.split("\n\n")[0].split()))
    return COMMON.get(name, "")


def _defaults_of(kind: type) -> dict[str, str]:
    if dataclasses.is_dataclass(kind):
        missing = dataclasses.MISSING
        return {each.name: "" if each.default is missing else _json(each.default) for each in dataclasses.fields(kind)}
    defaults: Mapping[str, Any] = kind._field_defaults  # type: ignore[attr-defined]
    names: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    return {name: _json(defaults[name]) if name in defaults else "" for name in names}


def _default(field: FieldInfo) -> str:
    return "" if field.default is PydanticUndefined else _json(field.default)


def _json(value: object) -> str:
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower().replace('none', 'null')}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    return "`[]`" if value == () else f"`{value}`"


def _keys_table(kind: type, holder: type) -> str:
    return _table(_keys(kind), holder)


def _table(keys: Iterable[Key], holder: type) -> str:
    rows = ([f"`{each.name}`", _type(each.hint, holder), each.default, each.meaning] for each in keys)
    return table(["key", "type", "default", "meaning"], rows)


def _type(hint: Any, holder: type) -> str:  # noqa: ANN401
    """Return a type in words, with links to the objects in it."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    if isinstance(hint, type) and (issubclass(hint, Record) or dataclasses.is_dataclass(hint)):
        return f"[{hint.__name__}](#{holder.__name__.lower()}-{hint.__name__.lower()})"
    if get_origin(hint) is Annotated:
        return next((words for each, words in NAMED.items() if each == hint), None) or _range(hint, holder)
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return ", ".join(_json(each) for each in arguments)
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(each, holder) for each in arguments))
    if get_origin(hint) is tuple and arguments[-1] is not Ellipsis:
        return f"[{', '.join(_type(each, holder) for each in arguments)}]"
    if get_origin(hint) in (tuple, list):
        return f"list of {_type(arguments[0], holder)}"
    if len(arguments) == 2:
        return f"object: {_type(arguments[1], holder)}, by {_type(arguments[0], holder)}"
    return re.sub(r"[\w.]+\.", "", str(hint))


def _range(hint: Any, holder: type) -> str:  # noqa: ANN401
    """Return the words of a type with what bounds it, as far as a reader cares."""
    base, *extras = get_args(hint)
    words = _type(base, holder)
    for extra in extras:
        for each in extra.metadata if isinstance(extra, FieldInfo) else (extra,):
            if isinstance(each, Ge):
                words += f", {each.ge} or more"
            if isinstance(each, Gt):
                words += f", more than {each.gt}"
            if isinstance(each, Le):
                words += f", at most {each.le}"
            if isinstance(each, MinLen) and each.min_length > 1:
                words += f", at least {each.min_length}"
    return words
