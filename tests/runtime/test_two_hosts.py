"""Two hosts, as network namespaces with an address each and a slow link between them."""

import functools
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from autopar.errors import UsageError
from autopar.formats.plan import NodeDevices, Plan
from autopar.formats.report import Report
from autopar.runtime.checkpoint.weights import read
from paths import MODELS
from training_cases import Case, make_case

HOSTS = """
set -e
unshare --net sleep infinity &
other=$!
trap 'kill $other' EXIT
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/$$/ns/net)" ]; do :; done
inside="nsenter --target $other --net"
ip link add first type veth peer name second
ip link set second netns $other
ip address add 10.77.0.1/24 dev first
$inside ip address add 10.77.0.2/24 dev second
ip link set first up; ip link set lo up
$inside ip link set second up; $inside ip link set lo up
tc qdisc add dev first root tbf rate 100mbit burst 64kb latency 100ms
$inside tc qdisc add dev second root tbf rate 100mbit burst 64kb latency 100ms
"""


def in_hosts(script: str, folder: Path, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Run a script that may say ``$inside`` before what the second host runs; nothing of it remains."""
    command = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GLOO", "MASTER"))}
    how: dict[str, Any] = {"cwd": folder, "env": {**environment, "OMP_NUM_THREADS": "1"}, "timeout": timeout_s}
    started = [*command, "bash", "-c", HOSTS + script]
    return subprocess.run(started, capture_output=True, text=True, check=False, **how)


@functools.cache
def refused() -> str:
    """Why there can be no hosts here; empty if there can."""
    missing = [name for name in ("unshare", "nsenter", "ip", "tc", "bash") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    tried = in_hosts("$inside true", Path.cwd(), 30.0)
    return "" if tried.returncode == 0 else f"no network namespaces: {' '.join(tried.stderr.split())}"


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """A model file beside a plan of four ranks, where namespaces are allowed."""
    if refused():
        pytest.skip(refused())
    case = make_case(tmp_path / "words.py", (MODELS / "words.py").read_text())
    plan = case.plan([2, 2], 2, 4)
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"source": "words.py"})})
    plan.save(tmp_path / "plan.json")
    return case


def srun(rank: int, arguments: str) -> str:
    """Return the shell's line that starts a rank as srun would, two on each host."""
    place: dict[str, object] = {"STEP_TASKS_PER_NODE": "2(x2)", "STEP_NODELIST": "10.77.0.[1-2]", "STEP_NUM_TASKS": 4}
    place |= {"PROCID": rank, "LOCALID": rank % 2, "NODEID": rank // 2, "JOB_ID": 1, "STEP_ID": 0}
    told = " ".join(["MASTER_ADDR=10.77.0.1", *(f"SLURM_{name}='{value}'" for name, value in place.items())])
    return f"{'$inside' if rank > 1 else ''} env {told} {sys.executable} -m autopar worker {arguments} & ranks+=($!)\n"


WAIT = 'code=0; for rank in "${ranks[@]}"; do wait $rank || code=$?; done; exit $code'


BIND = 'mount --bind "$1" /proc/cpuinfo; shift; exec "$@"'
KINDS = {"V": "Tesla V100-SXM2-32GB", "H": "NVIDIA H100 80GB HBM3"}


def run_on(kinds: str, nodes: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Train a plan for four devices of two nodes on ranks that say, in the order of their launch, what they have."""
    for name, model in KINDS.items():
        (folder / name).write_text(f"model name\t: {model}\n")
    (folder / "on.sh").write_text(BIND)
    own = [NodeDevices(node=at // 2, type=KINDS[kind], memory_bytes=2**30, count=1) for at, kind in enumerate(nodes)]
    Plan.load(folder / "plan.json").model_copy(update={"nodes": tuple(own)}).save(folder / "placed.json")
    started = [srun(rank, "placed.json --steps 3 --save trained --loaders 1") for rank in range(4)]
    bound = (f" unshare --mount bash on.sh {kind} env " for kind in kinds)
    return in_hosts(
        "".join(line.replace(" env ", own) for line, own in zip(started, bound, strict=True)) + WAIT, folder
    )


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("kinds", "nodes", "placed"), [("HHVV", "VVHH", "2, 3; {0} has 0, 1"), ("HVVH", "VHVH", "1, 0; {0} has 2, 3")]
)
def test_ranks_are_where_the_plan_has_their_kind_whatever_the_launcher(
    kinds: str, nodes: str, placed: str, case: Case, tmp_path: Path
) -> None:
    done = run_on(kinds, nodes, tmp_path)
    assert done.returncode == 0, done.stderr
    report = Report.load(tmp_path / "report.json")
    assert any(note.endswith(f"has {placed.format(platform.node())}") for note in report.notes), report.notes
    losses = case.train(Plan.load(tmp_path / "plan.json"), tmp_path / "kept", 3)
    assert report.loss == pytest.approx(losses, rel=1e-6)
    kept = load_file(tmp_path / "kept" / "parameters-0") | load_file(tmp_path / "kept" / "parameters-2")
    torch.testing.assert_close(read(tmp_path / "trained", kept), kept)
    assert not list((tmp_path / "trained").glob(".*"))


@pytest.mark.slow
def test_kinds_that_no_order_of_ranks_places_are_refused_in_one_line_before_a_model_is_built(
    case: Case, tmp_path: Path
) -> None:
    (tmp_path / "words.py").write_text((tmp_path / "words.py").read_text() + "\nprint('built')\n")
    done = run_on("HVVH", "VVHH", tmp_path)
    assert done.returncode == UsageError.exit_code
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("autopar: ")]
    assert "the plan is for 1 node (2 x Tesla V100-SXM2-32GB) and 1 node (2 x NVIDIA H100 80GB HBM3), and" in line
    assert "built" not in done.stdout + done.stderr
