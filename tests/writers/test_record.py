import errno
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from entropy_monitor.names import COVARIANCE_PAIRS, STAT_NAMES
from entropy_monitor.writers import RecordError, RecordWriter, read_run
from entropy_monitor.writers import record as record_module


def write(run, *emissions, **options):
    writer = RecordWriter(run, **options)
    for one in emissions:
        writer.write(one)
    writer.close()


def lines(run):
    return (run / "entropy_monitor" / "record.jsonl").read_bytes().splitlines(keepends=True)


def test_round_trip(tmp_path, make, make_alert):
    first, second = make(0, attributed=False), make(10, alerts=[make_alert()])
    write(tmp_path, first, second, header={"sink": "first", "rows": 64})
    run = read_run(tmp_path)
    assert run.problems == ()
    assert run.steps.tolist() == [0, 10]
    assert run.layers == first.layers
    assert run.stat_names == STAT_NAMES
    for name in STAT_NAMES:
        np.testing.assert_array_equal(
            run.stat(name), np.stack([first.stat(name), second.stat(name)])
        )
    assert np.isnan(run.change[0]).all()
    np.testing.assert_array_equal(run.change[1], second.change)
    np.testing.assert_array_equal(run.change_se[1], second.change_se)
    np.testing.assert_array_equal(run.cov[1], second.cov)
    np.testing.assert_array_equal(run.frame(10), second.stats)
    assert run.frame(10, "cov").shape == (len(COVARIANCE_PAIRS), 7)
    assert run.summary(10)["sink_share"] == 0.75
    assert run.summary(0) == {}
    assert (run.baseline_step(), run.baseline_step(0)) == (0, None)
    assert run.alerts == (make_alert(),)
    assert run.header["sink"] == "first"
    assert run.header["units"]["sink_mass"] == "mass"
    np.testing.assert_array_equal(run.scalar("attention/total_entropy"), [1.5, 1.5])
    assert np.isnan(run.scalar("attention_change/sink")).all()


def test_frames_are_float32_little_endian(tmp_path, make):
    one = make(3, attributed=False)
    write(tmp_path, one)
    raw = (tmp_path / "entropy_monitor" / "heads.bin").read_bytes()
    assert raw == one.stats.astype("<f4").tobytes()


def test_lines_are_strict_json_without_layer_scalars(tmp_path, make):
    write(tmp_path, make(3))

    def refuse(text):
        raise AssertionError(text)

    step = [json.loads(line, parse_constant=refuse) for line in lines(tmp_path)][-1]
    assert step["model"] == {
        "attention/sink_mass": 0.25,
        "attention/total_entropy": 1.5,
        "attention_change/sink": None,
    }


def test_grid_pads_layers_of_different_head_counts(tmp_path, make):
    one = make(1)
    write(tmp_path, one)
    grid = read_run(tmp_path).grid("log_odds")
    assert grid.shape == (1, 3, 4)
    assert np.isnan(grid[0, 0, 2:]).all()
    assert np.isnan(grid[0, 2, 1:]).all()
    np.testing.assert_array_equal(grid[0, 1], one.stat("log_odds")[2:6])
    assert set(read_run(tmp_path).history()) == set(STAT_NAMES)


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_line_cut_off_in_mid_write_is_left_unread(tmp_path, make, cut):
    write(tmp_path, make(1), make(2))
    path = tmp_path / "entropy_monitor" / "record.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    run = read_run(tmp_path)
    assert run.steps.tolist() == [1]
    assert run.problems == ()
    # The resumed run starts on a line of its own; what was cut off is named, not fatal.
    write(tmp_path, make(2), make(3))
    run = read_run(tmp_path)
    assert run.steps.tolist() == [1, 2, 3]
    assert len(run.problems) == (
        cut > 1
    )  # with only its newline missing, a line is whole after all
    np.testing.assert_array_equal(run.frame(3), make(3).stats)


def test_every_prefix_of_the_two_files_is_readable(tmp_path, make, make_alert):
    write(tmp_path, make(1), make(2, alerts=[make_alert(2)]), make(3))
    folder = tmp_path / "entropy_monitor"
    text, frames = (folder / "record.jsonl").read_bytes(), (folder / "heads.bin").read_bytes()
    copy = tmp_path / "copy"
    copy.mkdir()
    for share in np.linspace(0, 1, 23):
        (copy / "record.jsonl").write_bytes(text[: int(share * len(text))])
        for other in (share, 0.0, 1.0):
            (copy / "heads.bin").write_bytes(frames[: int(other * len(frames))])
            run = read_run(copy)
            for step in run.steps:
                np.testing.assert_array_equal(run.frame(int(step)), make(int(step)).stats)
    assert run.steps.tolist() == [1, 2, 3]


def test_damaged_frame_is_left_out_and_named(tmp_path, make):
    write(tmp_path, make(1), make(2))
    path = tmp_path / "entropy_monitor" / "heads.bin"
    raw = bytearray(path.read_bytes())
    raw[5] ^= 0xFF
    path.write_bytes(raw)
    run = read_run(tmp_path)
    assert run.steps.tolist() == [2]
    assert run.problems == ("step 1: the frame's checksum is wrong",)


def test_frame_that_is_cut_off_is_left_out_and_named(tmp_path, make):
    write(tmp_path, make(1), make(2))
    path = tmp_path / "entropy_monitor" / "heads.bin"
    path.write_bytes(path.read_bytes()[:-4])
    run = read_run(tmp_path)
    assert run.steps.tolist() == [1]
    assert run.problems == ("step 2: heads.bin ends before its frame",)


def test_leftover_bytes_of_a_crash_do_not_shift_later_frames(tmp_path, make):
    write(tmp_path, make(1))
    with (tmp_path / "entropy_monitor" / "heads.bin").open("ab") as file:
        file.write(b"half a frame")
    write(tmp_path, make(2))
    np.testing.assert_array_equal(read_run(tmp_path).frame(2), make(2).stats)


def test_later_duplicate_of_a_step_wins_and_nothing_is_lost(tmp_path, make, make_alert):
    old = make(2, alerts=[make_alert(2, message="old"), make_alert(2, head=0)])
    write(tmp_path, make(1), old, make(3))
    again = make(2, alerts=[make_alert(2, message="new")])
    again.stats[:] = 7.0
    write(tmp_path, again)
    run = read_run(tmp_path)
    assert run.steps.tolist() == [1, 2, 3]
    assert (run.frame(2) == 7.0).all()
    assert sorted((a.head, a.message) for a in run.alerts) == [
        (0, "content entropy fell"),
        (1, "new"),
    ]
    assert sum(json.loads(line)["type"] == "step" for line in lines(tmp_path)) == 4
    assert sum(json.loads(line)["type"] == "header" for line in lines(tmp_path)) == 1
    assert sum(json.loads(line)["type"] == "layout" for line in lines(tmp_path)) == 1


def test_layout_that_changes_in_mid_run(tmp_path, make):
    later = (("blocks.1.attn#1", 4), ("new", 3))
    write(tmp_path, make(1), make(2, later), make(3))
    run = read_run(tmp_path)
    assert run.layers == (("blocks.0.attn", 2), ("blocks.1.attn#1", 4), ("cross", 1), ("new", 3))
    values = run.stat("sink_mass")
    assert np.isnan(values[1, :2]).all()
    assert np.isnan(values[1, 6]).all()
    np.testing.assert_array_equal(
        values[1, [2, 3, 4, 5, 7, 8, 9]], make(2, later).stat("sink_mass")
    )
    assert np.isnan(values[0, 7:]).all()
    np.testing.assert_array_equal(values[2, :7], make(3).stat("sink_mass"))


def test_statistics_that_an_older_part_of_the_run_lacks(tmp_path, make):
    one = make(1, attributed=False)
    few = make(2, attributed=False, stat_names=("sink_mass", "support"), stats=one.stats[:2])
    write(tmp_path, few, one)
    run = read_run(tmp_path)
    assert run.stat_names == STAT_NAMES
    np.testing.assert_array_equal(run.frame(2)[0], one.stats[0])
    assert np.isnan(run.stat("log_odds")[1]).all()
    np.testing.assert_array_equal(run.stat("support")[1], one.stats[1])


def test_read_while_it_is_written(tmp_path, make):
    writer = RecordWriter(tmp_path)
    assert len(read_run(tmp_path)) == 0
    for step in range(3):
        writer.write(make(step))
        assert read_run(tmp_path).steps.tolist() == list(range(step + 1))
    writer.close()
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write(make(9))


def test_full_disk_is_an_error_and_the_record_goes_on_after_it(tmp_path, make, monkeypatch):
    writer = RecordWriter(tmp_path)
    writer.write(make(1))
    really = os.write

    def half(fd, data):
        return really(fd, data[: len(data) // 2])

    monkeypatch.setattr(record_module.os, "write", half)
    with pytest.raises(OSError, match="fit on the disk") as caught:
        writer.write(make(2))
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    calls = []

    def only_frames(fd, data):
        calls.append(len(data))
        return really(fd, data if len(calls) == 1 else data[:10])

    monkeypatch.setattr(record_module.os, "write", only_frames)
    with pytest.raises(OSError, match="fit on the disk"):
        writer.write(make(3))
    monkeypatch.undo()
    writer.write(make(4))
    writer.close()
    run = read_run(tmp_path)
    assert run.steps.tolist() == [1, 4]
    np.testing.assert_array_equal(run.frame(4), make(4).stats)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_really_full_disk(tmp_path, make):
    writer = RecordWriter(tmp_path)
    frames = tmp_path / "entropy_monitor" / "heads.bin"
    writer.close()
    frames.unlink()
    frames.symlink_to("/dev/full")
    writer = RecordWriter(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        writer.write(make(1))
    writer.close()


def test_without_timestamps_equal_runs_give_equal_bytes(tmp_path, make):
    for name in ("a", "b"):
        write(tmp_path / name, make(1), timestamps=False)
        write(tmp_path / name, make(2), timestamps=False)
    write(tmp_path / "c", make(1), make(2), timestamps=False)
    files = [
        [
            (tmp_path / name / "entropy_monitor" / file).read_bytes()
            for file in ("record.jsonl", "heads.bin")
        ]
        for name in ("a", "b", "c")
    ]
    assert files[0] == files[1] == files[2]


def test_two_writers_do_not_mix_their_frames(tmp_path, make):
    one, two = RecordWriter(tmp_path), RecordWriter(tmp_path)
    for step in range(0, 10, 2):
        one.write(make(step))
        two.write(make(step + 1))
    run = read_run(tmp_path)
    assert run.steps.tolist() == list(range(10))
    for step in range(10):
        np.testing.assert_array_equal(run.frame(step), make(step).stats)


def test_checkpoints(tmp_path, make):
    writer = RecordWriter(tmp_path)
    writer.checkpoint(512, "missing", "no such revision", name="step512")
    writer.checkpoint(0, "measured", name="step0", sha256="ab")
    writer.checkpoint(512, "measured", name="step512")
    writer.close()
    assert [(line["step"], line["status"]) for line in read_run(tmp_path).checkpoints] == [
        (0, "measured"),
        (512, "measured"),
    ]


def test_where_a_record_is_looked_for(tmp_path, make):
    run = tmp_path / "logs" / "version_0"
    write(run, make(1))
    for path in (
        run,
        run / "entropy_monitor",
        run / "entropy_monitor" / "record.jsonl",
        tmp_path,
        str(tmp_path),
    ):
        assert read_run(path).steps.tolist() == [1]
    write(tmp_path / "logs" / "version_1", make(2))
    with pytest.raises(RecordError, match=r"2 runs in .*version_0.*version_1"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "does not exist"),
        ("empty", "No record of a run"),
        ("file.txt", "not a run folder"),
    ],
)
def test_wrong_path_is_named(tmp_path, path, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(RecordError, match=message) as caught:
        read_run(tmp_path / path)
    assert "\n" not in str(caught.value)


def test_unknown_statistic_and_step_are_named(tmp_path, make):
    write(tmp_path, make(1), make(5))
    run = read_run(tmp_path)
    with pytest.raises(RecordError, match=r"'sink'.*sink_mass"):
        run.stat("sink")
    with pytest.raises(RecordError, match=r"Step 4 .*nearest: 5, 1"):
        run.frame(4)


def test_record_of_a_newer_version_is_refused(tmp_path):
    (tmp_path / "record.jsonl").write_text('{"type":"header","version":99}\n')
    with pytest.raises(RecordError, match="newer"):
        read_run(tmp_path)


def test_hostile_lines_are_skipped(tmp_path, make):
    write(tmp_path, make(1))
    with (tmp_path / "entropy_monitor" / "record.jsonl").open("ab") as file:
        file.write(b'[1]\n{"type":5}\n\xff\xfe\n{"type":"step","step":2,"layout":99}\n')
        file.write(
            b'{"type":"step","step":3,"layout":0}\n{"type":"alert","kind":"x"}\n{"type":"checkpoint"}\n'
        )
        file.write(
            b'{"type":"layout","id":7}\n{"type":"step","step":4,"layout":7,"offset":-8,"length":0,"crc32":0}\n'
        )
    run = read_run(tmp_path)
    assert run.steps.tolist() == [1]
    assert len(run.problems) >= 6


def test_reader_needs_no_torch():
    code = "import sys, entropy_monitor.writers.record_reader; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
