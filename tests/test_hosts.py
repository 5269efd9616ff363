"""Hosts from the words of a user, from files and from schedulers' variables."""

from pathlib import Path

import pytest

from distkeras.launch import _hosts
from distkeras.launch._hosts import Host
from distkeras.launch._mpiexec import LaunchError
from distkeras.launch._mpiexec import outside_jobs


def test_hosts_of_the_command_line() -> None:
    assert _hosts.parse_hosts("a:4, b,10.0.0.1:12") == (
        Host("a", 4),
        Host("b"),
        Host("10.0.0.1", 12),
    )


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:x", "a,,b", "a b", "a:1:2"])
def test_wrong_hosts_are_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="expected hosts as name:slots"):
        _hosts.parse_hosts(text)


@pytest.mark.parametrize(
    "text",
    [
        "# ours\na slots=4\n\nb slots=2 max_slots=8  # the old one\n",
        "a:4\nb:2\n",
        "a 4 all.q@a UNDEFINED\nb 2 all.q@b UNDEFINED\n",
        "a\nb\na\nb\na\na\n",
    ],
    ids=["Open MPI", "MPICH", "Grid Engine", "PBS"],
)
def test_hostfiles_of_every_kind(text: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    assert _hosts.read_hostfile(path) == (Host("a", 4), Host("b", 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [("# nothing\n", "names no host"), ("a\n:4\n", "a host in line 2"), (None, "read")],
)
def test_wrong_hostfiles_are_refused(
    text: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LaunchError, match=message):
        _hosts.read_hostfile(path)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("a[1-2]-ib,b", ["a1-ib", "a2-ib", "b"]),
    ],
)
def test_node_names_of_slurm(text: str, names: list[str]) -> None:
    assert _hosts.expand_nodes(text) == names


@pytest.mark.parametrize("text", ["gpu[]", "gpu[1-]", "gpu[a]", "gpu[1,,2]"])
def test_node_names_that_slurm_does_not_write(text: str) -> None:
    with pytest.raises(LaunchError, match="--hostfile"):
        _hosts.expand_nodes(text)


def test_allocation_of_slurm() -> None:
    environ = {
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_TASKS_PER_NODE": "4(x2),1",
    }
    found = _hosts.allocation(environ)
    assert found == _hosts.Allocation(
        "Slurm job 42", (Host("n1", 4), Host("n2", 4), Host("n3", 1))
    )
    del environ["SLURM_TASKS_PER_NODE"]
    found = _hosts.allocation(environ)
    assert found is not None
    assert [host.slots for host in found.hosts] == [None] * 3


def test_tasks_of_one_node() -> None:
    """What Slurm was told; a single task starts as many as there are GPUs."""
    one = {"SLURM_JOB_NODELIST": "n1"}
    for tasks, expected in (("3", 3), ("1", None), ("", None)):
        environ = {**one, "SLURM_TASKS_PER_NODE": tasks, "SLURM_NTASKS": tasks}
        assert _hosts.tasks_here(environ) == expected
    counted = {**one, "SLURM_TASKS_PER_NODE": "128"}  # processors of a whole node
    assert _hosts.tasks_here(counted) is None
    assert _hosts.tasks_here({**counted, "SLURM_NTASKS_PER_NODE": "128"}) == 128
    several = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
    several["SLURM_NTASKS"] = "4"
    assert _hosts.tasks_here(several) is None
    assert _hosts.tasks_here({"SLURM_TASKS_PER_NODE": "3"}) is None


def test_allocation_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a\na\nb\n")
    found = _hosts.allocation({"PBS_NODEFILE": str(path)})
    assert found == _hosts.Allocation("PBS (PBS_NODEFILE)", (Host("a", 2), Host("b")))
    assert _hosts.allocation({"PBS_NODEFILE": str(tmp_path / "none")}) is None
    assert _hosts.allocation({}) is None


def test_what_makes_a_process_a_rank_is_left_out_for_a_new_job() -> None:
    stays = {"OMPI_MCA_btl": "tcp", "OMPI_ALLOW_RUN_AS_ROOT": "1", "SLURM_JOB_ID": "4"}
    stays |= {"PMIX_MCA_gds": "hash", "PATH": "/bin", "I_MPI_FABRICS": "shm"}
    stays |= {"DISTKERAS_TIMEOUT": "60"}
    goes = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_FD", "PMI_RANK", "SLURM_PROCID")
    goes += ("DISTKERAS_ELASTIC", "DISTKERAS_STATUS")
    assert outside_jobs({**stays, **dict.fromkeys(goes, "0")}) == stays
