"""What a launcher's environment makes of a process: environments as launchers set them, and what they may not say."""

import pytest

from autopar.errors import UsageError
from autopar.ranks.environment import rank_from_environment


def told(text: str) -> dict[str, str]:
    return dict(each.split("=") for each in text.split())


# Started inside an allocation: the agent's own place is not the rank's.
TORCHRUN = told("""RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 MASTER_ADDR=node-a MASTER_PORT=29400
    TORCHELASTIC_USE_AGENT_STORE=True SLURM_PROCID=1 SLURM_LOCALID=0""")
SRUN = told("""SLURM_JOB_ID=4711 SLURM_STEP_ID=2 SLURM_PROCID=9 SLURM_LOCALID=1 SLURM_NODEID=2 SLURM_NTASKS=11
    SLURM_STEP_NUM_TASKS=11 SLURM_STEP_TASKS_PER_NODE=4(x2),3 SLURM_STEP_NODELIST=gpu[007-008,012]
    SLURM_JOB_NODELIST=gpu[001-012] PMI_RANK=9 PMI_SIZE=11""")
OPEN_MPI = told("""OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1
    OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=10.0.0.4""")
IN_SLURM = {**OPEN_MPI, **SRUN, "OMPI_COMM_WORLD_RANK": "2"}
INTEL_MPI = told("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
PYTORCH_JOB = told("""MASTER_ADDR=job-master-0 MASTER_PORT=23456 WORLD_SIZE=3 RANK=2 PET_NPROC_PER_NODE=1
    PET_NODE_RANK=2 PET_NNODES=3 KUBERNETES_SERVICE_HOST=10.96.0.1""")
TRAIN_JOB = told("""PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_NODE_RANK=1 PET_MASTER_ADDR=job-node-0-0.job
    PET_MASTER_PORT=29400""")
INDEXED = told("JOB_COMPLETION_INDEX=1 WORLD_SIZE=2 MASTER_ADDR=job-0.job")
PLAIN = told("RANK=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param(TORCHRUN, (5, 8, 1, 4, "node-a", 29400), id="torchrun"),
        pytest.param(SRUN, (9, 11, 1, 3, "gpu007", 15000 + (16 * 4711 + 2) % 15000), id="srun"),
        pytest.param({**SRUN, "MASTER_ADDR": "ib-007", "MASTER_PORT": "7"}, (9, 11, 1, 3, "ib-007", 7), id="srun-told"),
        pytest.param(OPEN_MPI, (3, 4, 1, 2, "10.0.0.4", 29500), id="openmpi"),
        pytest.param(IN_SLURM, (2, 4, 1, 2, "10.0.0.4", 29500), id="openmpi-in-slurm"),
        pytest.param(INTEL_MPI, (1, 2, 1, 2, "127.0.0.1", 29500), id="intel"),
        pytest.param(PYTORCH_JOB, (2, 3, 0, 1, "job-master-0", 23456), id="pytorchjob"),
        pytest.param(TRAIN_JOB, (1, 2, 0, 1, "job-node-0-0.job", 29400), id="trainjob"),
        pytest.param(INDEXED, (1, 2, 0, 1, "job-0.job", 29500), id="indexed"),
        pytest.param(PLAIN, (1, 2, 1, 2, "127.0.0.1", 29500), id="one-host"),
    ],
)
def test_a_launcher_s_environment_says_which_rank_this_is(environment: dict[str, str], expected: object) -> None:
    found = rank_from_environment(environment)
    assert found[:6] == expected
    assert found.one_host == (found.local_size == found.size)


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set; start workers with torchrun, srun or mpirun"),
        (without(PLAIN, "MASTER_PORT"), "MASTER_PORT not set; start workers with torchrun"),
        ({**PLAIN, "RANK": "first"}, "RANK must be a number, found 'first'"),
        ({**PLAIN, "MASTER_PORT": "99999"}, "MASTER_PORT must be at most 65535, found 99999"),
        ({**PLAIN, "LOCAL_RANK": "-1"}, "LOCAL_RANK must be a number, found '-1'"),
        ({**PLAIN, "RANK": "2"}, "the rank is 2 of 2: ranks count from 0"),
        ({**PLAIN, "MASTER_ADDR": "node-a"}, "LOCAL_RANK, LOCAL_WORLD_SIZE not set; start workers with torchrun"),
        (without(TORCHRUN, "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE not set; start workers with torchrun"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "rank 5 is number 4 of 4 on its host, and there are 8 in all"),
        (without(SRUN, "SLURM_STEP_NUM_TASKS"), "SLURM_STEP_NUM_TASKS not set; start workers with srun"),
        ({**SRUN, "SLURM_NODEID": "3"}, "SLURM_STEP_TASKS_PER_NODE is 4(x2),3, of 3 nodes, and SLURM_NODEID 3"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4*2"}, "SLURM_STEP_TASKS_PER_NODE must be like 4(x2),3, found '4*2'"),
        (without(OPEN_MPI, "MASTER_ADDR"), "MASTER_ADDR not set; start workers with mpirun -x MASTER_ADDR=HOST"),
        ({**PYTORCH_JOB, "PET_NPROC_PER_NODE": "4"}, "PET_NPROC_PER_NODE is 4: this pod holds several ranks"),
        (without(INDEXED, "WORLD_SIZE"), "WORLD_SIZE not set; start workers with the indexed job's pod template"),
    ],
)
def test_what_an_environment_lacks_or_contradicts_is_named(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        rank_from_environment(environment)
    assert str(caught.value).startswith(message)
