import json
import os
import subprocess
import sys

import pytest

from entropy_monitor import __version__
from entropy_monitor.cli import COMMANDS, main
from entropy_monitor.writers import RecordWriter


def run_python(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "entropy_monitor", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def folder(tmp_path):
    import numpy as np

    from entropy_monitor.names import STAT_NAMES
    from entropy_monitor.writers import Emission

    writer = RecordWriter(tmp_path / "run")
    for step in range(0, 100, 10):
        stats = np.full((len(STAT_NAMES), 3), 0.5, dtype=np.float32)
        stats[STAT_NAMES.index("total_entropy")] -= step / 1000
        writer.write(Emission(step=step, layers=(("a", 2), ("b", 1)), stats=stats))
    writer.close()
    return tmp_path / "run"


def test_help_names_every_command_and_loads_none():
    code = (
        "import sys; from entropy_monitor.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"    {name} " in done.stdout for name in COMMANDS)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"entropy-monitor {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["repot"], "invalid choice: 'repot'"),
        (["report"], "the following arguments are required: run"),
        (["report", "x", "--baseline", "ten"], "invalid int value: 'ten'"),
    ],
)
def test_wrong_use_is_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_report_as_a_script(folder):
    done = run_python("report", str(folder))
    assert done.returncode == 0
    assert "Steps 0 -> 90: mean entropy" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["report", "scan"])
def test_no_such_run_is_one_line_and_exit_code_2(command, tmp_path, capsys):
    for path, words in ((tmp_path / "nowhere", "does not exist"), (tmp_path, "No record of a run")):
        assert main([command, str(path)]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"entropy-monitor {command}: ")
        assert words in err
        assert err.count("\n") == 1


def test_report_of_a_step_that_does_not_exist(folder, capsys):
    assert main(["report", str(folder), "--baseline", "15"]) == 2
    assert "Step 15 is not in" in capsys.readouterr().err


def test_report_json_and_files(folder, tmp_path, capsys):
    files = {kind: tmp_path / "out" / f"report.{kind}" for kind in ("csv", "png", "parquet")}
    options = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    assert main(["report", str(folder), "--json", *options]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["last_step"] == 90
    assert all(path.stat().st_size > 100 for path in files.values())
    assert main(["report", str(folder), "--all", "--csv", str(files["csv"])]) == 0
    assert f"Written: {files['csv']}" in capsys.readouterr().out


def test_report_html(folder, tmp_path):
    pytest.importorskip("entropy_monitor.report.html")
    assert main(["report", str(folder), "--html", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "report.html").read_text().lstrip().lower().startswith("<!doctype html")


def test_file_that_cannot_be_written(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["report", str(folder), "--csv", str(tmp_path / "file" / "x.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_scan(folder, capsys):
    assert main(["scan", str(folder)]) == 0
    assert "steps 0 to 90, 10 recorded, policy default" in capsys.readouterr().out
    assert main(["scan", str(folder), "--json", "--policy", "strict"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), list)
    assert main(["scan", str(folder), "--policy", "nothing"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_output_into_a_closed_pipe(folder):
    command = [sys.executable, "-m", "entropy_monitor", "report", str(folder)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=env) as process:
        process.stdout.close()  # long before anything is written
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("report", "scan") else pytest.param(name, marks=pytest.mark.slow)
        for name in COMMANDS
    ],
)
def test_every_command_has_help(name, capsys):
    home, _ = COMMANDS[name]
    pytest.importorskip(home)
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: entropy-monitor {name}" in capsys.readouterr().out
