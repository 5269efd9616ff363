"""`distkeras run`: command lines as strings, then real jobs on real launchers."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path

import mpi_runtimes
import pytest

from distkeras._cores import usable_cores
from distkeras._launcher import Launcher
from distkeras.launch import _cli
from distkeras.launch import _mpiexec
from distkeras.launch import _process
from distkeras.launch import _worker
from distkeras.launch._mpiexec import LaunchError

VERSIONS = {
    "Open MPI": "mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/",
    "Intel MPI": "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 2026",
    "MPICH": "HYDRA build details:\n    Version:       5.0.2\n",
    "Slurm": "slurm 24.05.1",
}
WORKER = f"{sys.executable} -m distkeras.launch._worker"
CORES = usable_cores()


FakeMpiexec = Callable[[str], str]


@pytest.fixture
def fake_mpiexec(tmp_path: Path) -> FakeMpiexec:
    """Makes a program that calls itself the `mpiexec` of an implementation."""

    def make(name: str) -> str:
        path = tmp_path / "bin" / "mpiexec"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{VERSIONS.get(name, name)}\nEND\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def dry_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Runs `distkeras run --dry-run` in this process and returns what it prints."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "I_MPI_", "MPI4PY_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    def call(*words: str) -> str:
        assert _cli.main(["run", "--dry-run", *words]) == 0
        return capsys.readouterr().out.strip()

    return call


# Command lines


@pytest.mark.parametrize(
    ("name", "environ", "flags", "tag"),
    [
        (
            "Open MPI",
            "env OMPI_MCA_mpi_yield_when_idle=1 'OMPI_MCA_osc=^ucx' ",
            "--bind-to none --oversubscribe ",
            "--tag-output ",
        ),
        (
            "Intel MPI",
            "env I_MPI_PIN=0 I_MPI_THREAD_YIELD=2 ",
            "",
            "-prepend-rank ",
        ),
        ("MPICH", "", "-bind-to none ", "-prepend-rank "),
    ],
)
def test_command_line_of_each_mpi(
    name: str,
    environ: str,
    flags: str,
    tag: str,
    fake_mpiexec: FakeMpiexec,
    dry_run: Callable[..., str],
) -> None:
    path = fake_mpiexec(name)
    common = ("--mpiexec", path, "-n", "3")
    assert dry_run(*common, "train.py", "--epochs", "9", "a b") == (
        f"{environ}{path} -n 3 {flags}{WORKER} train.py --epochs 9 'a b'"
    )
    assert dry_run(*common, "--tag", "-m", "pack.train", "-n", "5") == (
        f"{environ}{path} -n 3 {flags}{tag}{WORKER} -m pack.train -n 5"
    )


@pytest.mark.parametrize(
    ("words", "passed_on", "program"),
    [
        ("--host a:4,b:4 train.py", "--host a:4,b:4", "train.py"),
        ("--mca btl tcp,self -x A -n 3 train.py -x", "--mca btl tcp,self -x A", None),
        ("--rankfile ranks.txt -- prog -m", "--rankfile ranks.txt", "prog -m"),
        ("--rankfile ranks.txt -m prog x.py", "--rankfile ranks.txt", "-m prog x.py"),
        ("--mpi-args '--mca btl tcp' prog x.py", "--mca btl tcp", "prog x.py"),
        ("--mpi-args=--display=map prog", "--display=map", "prog"),
        ("-- -m prog", "", "-m prog"),
    ],
)
def test_other_options_reach_mpiexec(
    words: str,
    passed_on: str,
    program: str | None,
    fake_mpiexec: FakeMpiexec,
    dry_run: Callable[..., str],
) -> None:
    path = fake_mpiexec("MPICH")
    line = dry_run("--mpiexec", path, "-np", "3", *shlex.split(words))
    between = f"{passed_on} " if passed_on else ""
    program = program or "train.py -x"
    assert line == f"{path} -n 3 -bind-to none {between}{WORKER} {program}"


def test_options_of_python_reach_the_ranks(fake_mpiexec: FakeMpiexec) -> None:
    path = fake_mpiexec("MPICH")
    words = ["run", "--dry-run", "--mpiexec", path, "-n", "1", "train.py"]
    command = [sys.executable, "-O", "-W", "error::UserWarning", "-m", "distkeras"]
    answer = subprocess.run([*command, *words], capture_output=True, text=True)
    line = shlex.split(answer.stdout)
    assert "-O" in line[: line.index("-m")]
    assert "-Werror::UserWarning" in line[: line.index("-m")]


def test_elastic_jobs_are_open_mpi_s(
    fake_mpiexec: FakeMpiexec,
    dry_run: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = fake_mpiexec("Open MPI")
    words = ["--mpiexec", path, "-n", "3", "--elastic", "--min-n", "2", "train.py"]
    line = dry_run(*words)
    assert "DISTKERAS_ELASTIC=2" in line
    assert f"--oversubscribe --with-ft ulfm {WORKER} train.py" in line
    for wrong in (
        ["--mpiexec", path, "-n", "3", "--elastic", "--min-n", "4", "train.py"],
        ["--mpiexec", path, "-n", "3", "--min-n", "2", "train.py"],
        ["--mpiexec", fake_mpiexec("MPICH"), "-n", "3", "--elastic", "train.py"],
    ):
        assert _cli.main(["run", "--dry-run", *wrong]) == 2
    assert "--max-restarts" in capsys.readouterr().err


@pytest.fixture
def few_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment of which two variables are for other hosts too."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("PYTHONPATH", "lib")
    monkeypatch.setenv("HOSTNAME", "a")


@pytest.mark.parametrize(
    ("name", "equal", "unequal"),
    [
        (
            "Open MPI",
            "-n 4 --host a:2,b:2 --bind-to none --oversubscribe -x PATH "
            "-x PYTHONPATH {}",
            "-n 5 --host a:4,b:1 --bind-to none --oversubscribe -x PATH "
            "-x PYTHONPATH {}",
        ),
        (
            "Intel MPI",
            "-n 4 -hosts a,b -ppn 2 -genvall {}",
            "-genvall -host a -n 4 {} : -host b -n 1 {}",
        ),
        (
            "MPICH",
            "-n 4 -hosts a:2,b:2 -bind-to none -genvall {}",
            "-n 5 -hosts a:4,b:1 -bind-to none -genvall {}",
        ),
        (
            "Slurm",
            "-n 4 --nodelist a,b --nodes 2 --cpu-bind=none {}",
            "-n 5 --nodelist a,b --nodes 2 --cpu-bind=none {}",
        ),
    ],
)
def test_command_line_for_several_hosts(
    name: str,
    equal: str,
    unequal: str,
    few_variables: None,
    fake_mpiexec: FakeMpiexec,
    dry_run: Callable[..., str],
    tmp_path: Path,
) -> None:
    path = fake_mpiexec(name)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=4\nb slots=4\n")
    program = f"{WORKER} train.py"
    for words, expected in (
        (("-H", "a:2,b:2"), equal),
        (("-n", "4", "--hosts=a,b"), equal),
        (("-n", "5", "--hostfile", str(hostfile)), unequal),
    ):
        line = dry_run("--mpiexec", path, *words, "train.py")
        line = line.replace(" -x PYTEST_CURRENT_TEST", "")
        expected = f"{path} {expected.format(program, program)}"
        assert line[line.index(path) :] == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-n 9 -H a:4,b:4", "at most 8 ranks"),
        ("-H a,b", "expected -n N, or the slots"),
        ("-H a:x", "expected hosts as name:slots"),
        ("-H a --hostfile hosts", "not both"),
        ("--hostfile hosts", "cannot be read"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(
    words: str,
    message: str,
    fake_mpiexec: FakeMpiexec,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = fake_mpiexec("MPICH")
    assert _cli.main(["run", "--mpiexec", path, *words.split(), "train.py"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Open MPI", "MPICH", "Slurm"])
def test_an_allocation_of_slurm_is_used(
    name: str,
    fake_mpiexec: FakeMpiexec,
    dry_run: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = fake_mpiexec(name)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    line = dry_run("--mpiexec", path, "-n", "8", "train.py")
    assert (" n1:4,n2:4 " in line) == (name != "Slurm")  # srun knows them itself
    assert "-x SLURM" not in line
    # One task a node is how sbatch counts unless told otherwise.
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "1(x2)")
    line = dry_run("--mpiexec", path, "-n", "8", "train.py")
    assert (" n1:4,n2:4 " in line) == (name != "Slurm")
    # One node is this one.
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    assert "n1" not in dry_run("--mpiexec", path, "-n", "8", "train.py")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Open MPI", "--bind-to socket"),
        ("MPICH", "--bind-to socket"),
        ("Intel MPI", "-bind-to socket"),
        ("Slurm", "--cpu-bind=sockets"),
    ],
)
def test_binding_of_the_user_replaces_ours(
    name: str, words: str, fake_mpiexec: FakeMpiexec, dry_run: Callable[..., str]
) -> None:
    line = dry_run("--mpiexec", fake_mpiexec(name), "-n", "2", *words.split(), "a.py")
    assert line.count("bind-to ") + line.count("bind=") == 1
    assert f" {words} " in line


def test_the_superuser_may_run_open_mpi(fake_mpiexec: FakeMpiexec) -> None:
    mpiexec = _mpiexec.find(fake_mpiexec("Open MPI"))
    added = _mpiexec.environment(mpiexec, {}, root=True)
    assert added["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    assert added["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def test_variables_of_the_user_stay(fake_mpiexec: FakeMpiexec) -> None:
    mpiexec = _mpiexec.find(fake_mpiexec("Open MPI"))
    added = _mpiexec.environment(mpiexec, {"OMPI_MCA_osc": "sm"}, root=False)
    assert added == {"OMPI_MCA_mpi_yield_when_idle": "1"}


def test_ranks_load_the_library_of_their_launcher(fake_mpiexec: FakeMpiexec) -> None:
    mpiexec = _mpiexec.find(fake_mpiexec("MPICH"))
    library = Path(mpiexec.path).parent.parent / "lib" / "libmpi.so.12"
    library.parent.mkdir()
    library.touch()
    added = _mpiexec.environment(mpiexec, {}, root=False)
    assert added == {"MPI4PY_LIBMPI": str(library)}


def test_default_size_is_one_rank_a_gpu_else_a_core(
    fake_mpiexec: FakeMpiexec,
    dry_run: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = fake_mpiexec("MPICH")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert " -n 3 " in dry_run("--mpiexec", path, "train.py")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert f" -n {CORES} " in dry_run("--mpiexec", path, "-n", "auto", "train.py")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "1")
    assert f" -n {CORES} " in dry_run("--mpiexec", path, "train.py")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "5")
    assert f" -n {CORES} " in dry_run("--mpiexec", path, "train.py")
    monkeypatch.setenv("SLURM_NTASKS", "5")
    assert " -n 5 " in dry_run("--mpiexec", path, "train.py")


# Errors of use


@pytest.mark.parametrize("text", ["mpiexec (OpenRTE) 4.1.4", VERSIONS["Open MPI"]])
def test_open_mpi_is_recognised_by_old_and_new_names(text: str) -> None:
    assert _mpiexec.identify(text).name == "Open MPI"


def test_unknown_launcher_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"none of the kinds known.*'Fast MPI 1'"):
        _mpiexec.identify("Fast MPI 1\nmore", "mpiexec")


def test_without_mpiexec_the_error_says_how_to_get_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert _cli.main(["run", "-n", "2", "train.py"]) == 2
    error = capsys.readouterr().err
    assert "pip install 'distkeras3[mpi]'" in error
    assert "apt-get install" in error


def test_without_a_script_the_error_shows_a_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _cli.main(["run", "-n", "2", "--host", "a,b", "prog"]) == 2
    assert "distkeras run -n 2 train.py" in capsys.readouterr().err


def test_a_missing_script_is_one_error_not_one_a_rank(
    fake_mpiexec: FakeMpiexec, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fake_mpiexec("MPICH")
    assert _cli.main(["run", "-n", "2", "--mpiexec", path, "missing.py"]) == 2
    assert capsys.readouterr().err.endswith("no such file: missing.py\n")


@pytest.mark.parametrize("word", ["0", "-1", "two", "1.5"])
def test_size_must_be_a_positive_number(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        _cli.main(["run", "-n", word, "train.py"])
    assert "expected" in capsys.readouterr().err


# A rank's share of the node


def launcher(local_rank: int, local_size: int) -> Launcher:
    """A rank among those of one node."""
    return Launcher("test", local_rank, local_size, local_rank, local_size)


@pytest.mark.parametrize(
    ("visible", "local_rank", "expected"),
    [
        ("0,1,2,3", 2, "2"),
        ("4,6", 1, "6"),
        ("GPU-aa,GPU-bb", 0, "GPU-aa"),
        ("0,1", 3, "1"),  # more ranks than GPUs: shared in turn
        ("5", 1, "5"),  # one already: the user's or the scheduler's choice
        ("", 1, ""),
        ("-1", 1, "-1"),
    ],
)
def test_each_rank_sees_one_gpu(visible: str, local_rank: int, expected: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    _worker.prepare(environ, launcher(local_rank, 4))
    assert environ["CUDA_VISIBLE_DEVICES"] == expected


def test_ranks_leave_memory_of_their_gpu_to_nccl() -> None:
    """The model may be made, and TensorFlow started, before the `Trainer`."""
    name = "TF_FORCE_GPU_ALLOW_GROWTH"
    for size, visible, given, expected in (
        (2, "0,1", {}, "true"),
        (2, "0", {}, "true"),
        (2, "0", {name: "false"}, "false"),
        (2, "", {}, None),
        (1, "0", {}, None),
    ):
        environ = {"CUDA_VISIBLE_DEVICES": visible, **given}
        _worker.prepare(environ, launcher(0, size))
        assert environ.get(name) == expected


def test_threads_are_shared_out_unless_set() -> None:
    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    environ = {"CUDA_VISIBLE_DEVICES": ""}
    _worker.prepare(environ, launcher(0, 2))
    share = max(1, CORES // 2)
    assert [environ[name] for name in names] == [
        str(share),
        str(share),
        str(max(2, share)),
    ]
    environ = {"CUDA_VISIBLE_DEVICES": "", **dict.fromkeys(names, "7")}
    _worker.prepare(environ, launcher(0, 2))
    assert [environ[name] for name in names] == ["7"] * 3
    environ = {"CUDA_VISIBLE_DEVICES": ""}
    _worker.prepare(environ, launcher(0, 1))
    assert not set(names) & set(environ)


@pytest.mark.launches
def test_cores_are_those_this_process_may_use() -> None:
    code = (
        "import os; from distkeras._cores import usable_cores; "
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "print(usable_cores())"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert answer.stdout == b"1\n"
    assert 1 <= CORES <= len(os.sched_getaffinity(0))


# Real jobs


@pytest.fixture(scope="module", params=["here", "mpich"])
def mpiexec(request: pytest.FixtureRequest) -> list[str]:
    """The option that selects a launcher: this environment's, then MPICH's."""
    if request.param == "here":
        return []
    return ["--mpiexec", mpi_runtimes.mpich().command[0]]


def job(*words: object, environ: dict[str, str] | None = None) -> list[str]:
    """Returns the command `distkeras run` with these words."""
    return [sys.executable, "-m", "distkeras", "run", *map(str, words)]


def finish(
    command: list[str], cwd: Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Runs a job to its end."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environ},
        stdin=subprocess.DEVNULL,
        timeout=90,
    )


def write(folder: Path, name: str, text: str) -> Path:
    """Writes a script that knows `rank` and `size`."""
    path = folder / name
    header = (
        "import json, os, sys, time\n"
        "from distkeras._launcher import discover\n"
        "me = discover(os.environ)\n"
        "rank, size = me.rank, me.size\n"
    )
    path.write_text(header + text)
    return path


def shown(output: str) -> list[dict[str, object]]:
    """Reads one JSON object a line, sorted by rank."""
    lines = [json.loads(line) for line in output.splitlines()]
    return sorted(lines, key=lambda line: line["rank"])


SHOW = (
    "import helper\n"
    "print(json.dumps(dict(rank=rank, size=size, argv=sys.argv, path=sys.path[0],"
    " name=__name__, main=sys.modules['__main__'].__dict__ is globals(),"
    " helper=helper.__file__)))\n"
)


@pytest.mark.launches
def test_script_runs_as_python_would_run_it(tmp_path: Path, mpiexec: list[str]) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    script = write(folder, "show.py", SHOW)
    (folder / "helper.py").write_text("")
    answer = finish(
        job("-n", 3, *mpiexec, "scripts/show.py", "--lr", "a b", "-n"), tmp_path
    )
    assert answer.returncode == 0, answer.stderr
    plain = finish(
        [sys.executable, "scripts/show.py", "--lr", "a b", "-n"],
        tmp_path,
        OMPI_COMM_WORLD_RANK="0",
        OMPI_COMM_WORLD_SIZE="3",
    )
    (expected,) = shown(plain.stdout)
    assert expected["argv"] == ["scripts/show.py", "--lr", "a b", "-n"]
    assert expected["path"] == str(script.parent)
    assert shown(answer.stdout) == [{**expected, "rank": rank} for rank in range(3)]


@pytest.mark.launches
def test_module_runs_as_python_would_run_it(tmp_path: Path, mpiexec: list[str]) -> None:
    folder = tmp_path / "pack"
    folder.mkdir()
    write(folder, "show.py", SHOW)
    (folder / "__init__.py").write_text("")
    (tmp_path / "helper.py").write_text("")
    answer = finish(job("-n", 2, *mpiexec, "-m", "pack.show", "--lr", "1"), tmp_path)
    assert answer.returncode == 0, answer.stderr
    for line in shown(answer.stdout):
        assert line["argv"] == [str(folder / "show.py"), "--lr", "1"]
        assert line["path"] == str(tmp_path)
        assert line["main"]


@pytest.mark.launches
def test_ranks_reduce_together(tmp_path: Path, mpiexec: list[str]) -> None:
    """By `distkeras run`; the next test does it by `mpiexec` itself."""
    script = write(tmp_path, "reduce.py", REDUCE)
    answer = finish(job("-n", 3, *mpiexec, script), tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == ["6.0"] * 3


REDUCE = (
    "import numpy as np\n"
    "from distkeras import communicators\n"
    "world = communicators.world()\n"
    "assert (world.rank, world.size) == (rank, size)\n"
    "buffer = np.full(5, world.rank + 1, np.float32)\n"
    "world.allreduce(buffer)\n"
    "print(buffer[0])\n"
)


@pytest.mark.launches
def test_mpiexec_itself_works_equally(tmp_path: Path) -> None:
    script = write(tmp_path, "reduce.py", REDUCE)
    found = _mpiexec.find()
    added = _mpiexec.environment(found, os.environ, root=os.geteuid() == 0)
    command = _mpiexec.command(found, [sys.executable, str(script)], n=3)
    answer = finish(command, tmp_path, **added)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == ["6.0"] * 3


@pytest.mark.launches
def test_each_rank_gets_its_share_of_threads(
    tmp_path: Path, mpiexec: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        monkeypatch.delenv(name, raising=False)
    script = write(
        tmp_path,
        "threads.py",
        "names = 'OMP_NUM_THREADS', 'TF_NUM_INTRAOP_THREADS', 'CUDA_VISIBLE_DEVICES'\n"
        "print(json.dumps(dict(rank=rank, **{n: os.environ.get(n) for n in names})))\n",
    )
    answer = finish(
        job("-n", 2, *mpiexec, script),
        tmp_path,
        TF_NUM_INTRAOP_THREADS="5",
        CUDA_VISIBLE_DEVICES="6,7",
    )
    share = str(max(1, CORES // 2))
    assert shown(answer.stdout) == [
        {
            "rank": rank,
            "OMP_NUM_THREADS": share,
            "TF_NUM_INTRAOP_THREADS": "5",
            "CUDA_VISIBLE_DEVICES": str(6 + rank),
        }
        for rank in range(2)
    ]


@pytest.mark.launches
def test_rank_0_reads_standard_input(tmp_path: Path, mpiexec: list[str]) -> None:
    """By lines: Open MPI 5 does not pass the end of the input on."""
    text = "if rank == 0: print(sys.stdin.readline() + sys.stdin.readline())\n"
    script = write(tmp_path, "read.py", text)
    answer = subprocess.run(
        job("-n", 2, *mpiexec, script),
        input="one\ntwo\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.stdout == "one\ntwo\n\n"


@pytest.mark.launches
def test_tags_are_alike_on_every_mpi(tmp_path: Path, mpiexec: list[str]) -> None:
    script = write(
        tmp_path,
        "lines.py",
        "print('out', rank, 'one')\nprint('out', rank, 'two')\n"
        "print('err', rank, file=sys.stderr)\n",
    )
    answer = finish(job("-n", 2, "--tag", *mpiexec, script), tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert sorted(answer.stdout.splitlines()) == [
        f"[{rank}] out {rank} {word}" for rank in range(2) for word in ("one", "two")
    ]
    assert sorted(answer.stderr.splitlines()) == [
        f"[{rank}] err {rank}" for rank in range(2)
    ]


@pytest.mark.launches
@pytest.mark.parametrize("tag", [True, False])
def test_each_rank_has_its_log(tmp_path: Path, mpiexec: list[str], tag: bool) -> None:
    """By a list of hosts too: this one."""
    script = write(
        tmp_path,
        "lines.py",
        "print('out', rank)\nprint('err', rank, file=sys.stderr)\n",
    )
    words = ["-H", "localhost:2", *mpiexec, "--log-dir", tmp_path / "logs" / "new"]
    answer = finish(job(*words, *(["--tag"] if tag else []), script), tmp_path)
    assert answer.returncode == 0, answer.stderr
    prefixes = ["[0] ", "[1] "] if tag else ["", ""]
    expected = [f"{prefix}out {rank}" for rank, prefix in enumerate(prefixes)]
    assert sorted(answer.stdout.splitlines()) == expected
    logs = {path.name: path.read_text() for path in (tmp_path / "logs/new").iterdir()}
    assert sorted(logs) == ["rank-0.log", "rank-1.log"]
    for rank in range(2):
        lines = logs[f"rank-{rank}.log"].splitlines()
        assert sorted(lines) == [f"err {rank}", f"out {rank}"]


def test_tags_of_every_launcher() -> None:
    for line in (b"[1,12]<stderr>: text\n", b"[12] text\n", b" 12: text\n"):
        assert _process.split_tag(line) == (12, b"text\n")
    for line in (b"text\n", b"[x] text\n", b"\n", b"12 text\n"):
        assert _process.split_tag(line) == (None, line)


BEGINNINGS = {
    "before MPI": "",
    "after MPI has started": "from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n",
}
# Rank 1 fails; the others wait for it far longer than the job may take to end.
WAIT = "time.sleep(60)\nprint('survived')\n"


@pytest.mark.launches
@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
@pytest.mark.parametrize(
    ("statement", "code"),
    [("sys.exit(7)", 7), ("sys.exit('no')", 1), ("sys.exit(256)", 1)],
)
def test_exit_code_of_a_failing_rank_ends_the_job(
    tmp_path: Path, mpiexec: list[str], beginning: str, statement: str, code: int
) -> None:
    script = write(tmp_path, "f.py", f"{beginning}if rank == 1: {statement}\n{WAIT}")
    start = time.monotonic()
    answer = finish(job("-n", 3, *mpiexec, script), tmp_path)
    assert time.monotonic() - start < 10
    assert answer.returncode == code, answer.stderr
    assert "survived" not in answer.stdout
    assert "[rank 1] " + ("no" if "no" in statement else "exited") in answer.stderr


@pytest.mark.launches
@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
def test_exception_shows_its_rank_and_ends_the_job(
    tmp_path: Path, mpiexec: list[str], beginning: str
) -> None:
    text = f"{beginning}if rank == 1: raise ValueError('on purpose')\n{WAIT}"
    script = write(tmp_path, "f.py", text)
    start = time.monotonic()
    answer = finish(job("-n", 3, *mpiexec, script), tmp_path)
    assert time.monotonic() - start < 10
    assert answer.returncode == 1
    assert "survived" not in answer.stdout
    assert answer.stderr.count("ValueError: on purpose") == 1
    lines = answer.stderr.splitlines()
    first = lines.index("[rank 1] Traceback (most recent call last):")
    # The frames are the script's alone, as if Python had been started with it.
    assert lines[first + 1].startswith(f'[rank 1]   File "{script}", line')


@pytest.mark.launches
def test_a_job_that_failed_is_started_again(tmp_path: Path) -> None:
    """As often as it may be; each run has logs of its own."""
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "count = pathlib.Path(sys.argv[1])\n"
        "number = len(count.read_text()) if count.exists() else 0\n"
        "count.write_text('x' * (number + 1))\n"
        "print('run', number)\n"
        "sys.exit([5, 75, 0][number])\n"
    )
    logs = tmp_path / "logs"
    command = [sys.executable, "-m", "distkeras", "run", "-n", "1"]
    command += ["--log-dir", str(logs)]
    for most, code, runs in (("1", 75, 2), ("5", 0, 3)):
        count = tmp_path / f"count-{most}"
        words = [*command, "--max-restarts", most, str(script), str(count)]
        answer = subprocess.run(words, capture_output=True, text=True, timeout=100)
        assert answer.returncode == code, answer.stderr
        assert len(count.read_text()) == runs
        assert f"starting it again, {runs - 1} of {most}" in answer.stderr
    assert (logs / "restart-2" / "rank-0.log").read_text() == "run 2\n"


@pytest.mark.launches
def test_success_needs_all_ranks_and_is_zero(
    tmp_path: Path, mpiexec: list[str]
) -> None:
    script = write(tmp_path, "fine.py", "time.sleep(rank / 2)\nsys.exit(0)\n")
    answer = finish(job("-n", 2, *mpiexec, script), tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.launches
@pytest.mark.parametrize(
    ("statement", "warned"),
    [
        ("import keras", True),
        ("import keras; sys.exit(0)", True),
        ("import keras; sys.exit(3)", False),
        ("import keras, distkeras; distkeras.rank()", False),
        ("import keras; from mpi4py import MPI", False),
    ],
)
def test_ranks_that_never_knew_of_each_other(
    tmp_path: Path, statement: str, warned: bool
) -> None:
    """Each trained a model of its own, and the job looked fine."""
    (tmp_path / "keras.py").touch()  # that it is imported is all that counts
    script = write(tmp_path, "alone.py", f"{statement}\n")
    answer = finish(job("-n", 2, script), tmp_path)
    assert answer.returncode == 3 * ("exit(3)" in statement), answer.stderr
    words = "[rank 0] warning: the program ended without any use of distkeras"
    assert answer.stderr.count("without any use of distkeras") == warned
    assert (words in answer.stderr) == warned


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended but was not waited for does not."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    # The second: it ended between the opening of the file and the reading.
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def started(tmp_path: Path, mpiexec: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A job whose three ranks have written their process ids and sleep."""
    script = write(
        tmp_path,
        "sleep.py",
        "open(f'{rank}.tmp', 'w').write(str(os.getpid()))\n"
        "os.rename(f'{rank}.tmp', f'{rank}.pid')\n"
        "time.sleep(60)\n",
    )
    process = subprocess.Popen(
        job("-n", 3, *mpiexec, script),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.pid"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    yield process
    process.kill()
    process.wait()


@pytest.mark.launches
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_orphans(
    tmp_path: Path, started: subprocess.Popen[str], number: signal.Signals
) -> None:
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 3
    started.send_signal(number)
    code = started.wait(timeout=10)
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))


@pytest.mark.launches
def test_ranks_that_handle_sigterm_are_waited_for(
    tmp_path: Path, mpiexec: list[str]
) -> None:
    """Longer than Open MPI would; one that was forked does not hear of it."""
    text = (
        "import signal\n"
        "def finish(number, frame):\n"
        "    time.sleep(1.5)\n"
        "    open(f'{rank}-{forked > 0}.done', 'w').close()\n"
        "    if forked > 0: os.kill(forked, signal.SIGKILL)\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, finish)\n"
        "forked = os.fork()\n"
        "open(f'{rank}-{forked > 0}.ready', 'w').close()\n"
        "time.sleep(60)\n"
    )
    script = write(tmp_path, "handler.py", text)
    process = subprocess.Popen(
        job("-n", 2, *mpiexec, script), cwd=tmp_path, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.ready"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 75
    done = sorted(path.name for path in tmp_path.glob("*.done"))
    assert done == ["0-True.done", "1-True.done"]


@pytest.mark.launches
def test_a_log_that_cannot_be_written_ends_no_job(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-1.log").symlink_to("/dev/full")
    text = r"for i in range(9): print('[0] kept\n[1] lost')"
    code = _process.run(
        [sys.executable, "-c", text],
        os.environ,
        tagged=True,
        shown=True,
        logs=tmp_path,
    )
    shown = capfd.readouterr()
    assert code == 0
    assert shown.out == "[0] kept\n[1] lost\n" * 9
    assert shown.err.count("lines are missing there") == 1
    assert (tmp_path / "rank-0.log").read_text() == "kept\n" * 9
