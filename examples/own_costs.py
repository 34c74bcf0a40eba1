"""Costs of your own: five layers in a table, of which you ask the planner. No model, no GPU, no file.

python examples/own_costs.py
"""

import autopar
from autopar.formats.profile import Cost, DeviceKind, Layer, ModelSource, Noise, Profile, SavedStorage, Tensor

MIB = 2**20
TABLE = {
    # layer: ms of a forward and of a backward of one sample, MiB of parameters, MiB of its output of one sample
    "embed": (1, 1, 400, 4),
    "block.0": (6, 12, 100, 4),
    "block.1": (6, 12, 100, 4),
    "block.2": (6, 12, 100, 4),
    "head": (3, 6, 400, 1),
}


def profile(batch: int = 32) -> Profile:
    """Return the table as a profile, in which every layer reads what the one before it makes."""
    names = list(TABLE)
    return Profile(
        model=ModelSource(source="own_costs.py", sha256="0" * 64),
        batch=batch,
        device=DeviceKind(type="cuda", name="A100-SXM-80G", memory_bytes=80 * 2**30),
        precision="bf16",
        layers=tuple(layer(name, batch) for name in names),
        tensors=tuple(tensor(name, after) for name, after in zip([None, *names[:-1]], names, strict=True)),
        noise=Noise(median_spread=0, max_spread=0),
    )


def layer(name: str, batch: int) -> Layer:
    """Return a layer whose times and bytes are proportional to the number of samples; Adam keeps two more of each."""
    size = TABLE[name][2] * MIB
    state = {"trainable_bytes": size, "gradient_bytes": size, "optimizer_bytes": 2 * size}
    costs = tuple(cost(name, rows) for rows in (1, batch))
    return Layer(name=name, modules=(name,), costs=costs, parameters_bytes=size, update_s=size / 3e11, **state)


def cost(name: str, rows: int) -> Cost:
    """Return the seconds of a layer, and what it keeps for its backward: its output."""
    forward_ms, backward_ms, _, output = TABLE[name]
    times = {"forward_s": rows * forward_ms / 1000, "backward_s": rows * backward_ms / 1000}
    size, kept = rows * output * MIB, SavedStorage(storage=name, bytes=rows * output * MIB)
    return Cost(micro_batch=rows, saved=(kept,), peak_bytes=2 * size, output_bytes=size, **times)


def tensor(name: str | None, reader: str) -> Tensor:
    """Return what a layer makes, or what the model is given, for its reader."""
    size, dtype = (TABLE[name][3] * MIB, "f32") if name else (8, "i64")
    ends = {"producer": name, "consumers": (reader,), "gradient": name is not None}
    return Tensor(name=name or "tokens", bytes_per_sample=size, dtype=dtype, **ends)


if __name__ == "__main__":
    for machines in ("4xA100", "4x1xA100:10Gbps"):
        print(autopar.plan(profile(), autopar.Cluster.of(machines)).explain())
