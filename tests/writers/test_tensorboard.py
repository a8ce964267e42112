import io
import json
import re
import time

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow
from tensorboard.util.tensor_util import make_ndarray
from torch.utils.tensorboard import SummaryWriter

from entropy_monitor.names import CHANGE_NAMES, CHANGE_STAT_NAMES, STAT_NAMES
from entropy_monitor.writers import TensorBoardWriter, TooManyTagsError, custom_scalars_layout
from entropy_monitor.writers.crc32c import crc32c, masked_crc32c
from entropy_monitor.writers.heatmap import encode_png, heatmap


@pytest.fixture
def board(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    yield writer
    writer.close()


def load(folder):
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0, "images": 0})
    events.Reload()
    return events


def scalars(folder):
    """Scalars by tag, whichever way the reader keeps them."""
    events = load(folder)
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_scalars_have_the_fixed_tags(tmp_path, board, make):
    writer = TensorBoardWriter(board)
    writer.write(make(1))
    writer.write(make(7))
    writer.close()
    found = scalars(tmp_path)
    assert set(found) == {
        "attention/alerts",
        "attention/sink_mass",
        "attention/total_entropy",
        "attention/sink_mass/blocks.0.attn",
        "attention/sink_mass/blocks.1.attn_1",
        "attention/sink_mass/cross",
    }
    assert found["attention/sink_mass"] == [(1, 0.25), (7, 0.25)]
    assert all(re.fullmatch(r"[A-Za-z0-9_/.\-]+", tag) for tag in found)


def test_heads_travel_as_one_tensor_with_their_layout(tmp_path, board, make):
    writer = TensorBoardWriter(board)
    first, second = make(1, attributed=False), make(2)
    writer.write(first)
    writer.write(second)
    writer.close()
    events = load(tmp_path)
    metadata = events.SummaryMetadata("attention_heads")
    assert metadata.data_class == DATA_CLASS_TENSOR
    assert metadata.plugin_data.plugin_name == "entropy_monitor"
    layout = json.loads(metadata.plugin_data.content)
    assert layout == {
        "version": 1,
        "stats": [*STAT_NAMES, *CHANGE_STAT_NAMES, "change_since"],
        "layers": [{"name": name, "heads": heads} for name, heads in first.layers],
        "changes": list(CHANGE_NAMES),
    }
    one, two = (make_ndarray(e.tensor_proto) for e in events.Tensors("attention_heads"))
    assert one.dtype == np.float32
    assert one.shape == two.shape == (len(STAT_NAMES) + 5, 3, 4)
    np.testing.assert_array_equal(two[: len(STAT_NAMES), 1], second.stats[:, 2:6])
    assert np.isnan(two[:, 0, 2:]).all()
    assert np.isnan(one[len(STAT_NAMES) :]).all()
    np.testing.assert_array_equal(two[len(STAT_NAMES) : -1, 2, 0], second.change[:, 6])
    since = second.summary.get("baseline_step", np.nan)
    np.testing.assert_array_equal(two[-1, 0], [since, since, np.nan, np.nan])


def test_alerts_as_text_count_and_cumulative_json(tmp_path, board, make, make_alert):
    writer = TensorBoardWriter(board, alerts=[make_alert(1)])
    writer.write(make(5))  # TensorBoard flushes the very first event by itself
    writer.write(make(10, alerts=[make_alert(10, message="<b>x|y</b>"), make_alert(10, head=0)]))
    events = load(tmp_path)  # before any close
    assert [e.value for e in events.Scalars("attention/alerts")] == [1.0, 3.0]
    writer.write(make(20))
    writer.write(make(30, alerts=[make_alert(30)]))
    writer.close()
    events = load(tmp_path)
    cumulative = [
        json.loads(e.tensor_proto.string_val[0]) for e in events.Tensors("attention_alerts_json")
    ]
    assert [one["count"] for one in cumulative] == [3, 4]
    assert [alert["step"] for alert in cumulative[1]["alerts"]] == [1, 10, 10, 30]
    assert cumulative[1]["alerts"][3] == make_alert(30).to_dict()
    text = events.Tensors("attention_alerts/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "&lt;b&gt;x&#124;y&lt;/b&gt;" in text
    assert "<b>" not in text
    assert text.count("\n") == 3


def test_an_alert_is_flushed_at_once(board, make, make_alert, monkeypatch):
    flushed = []
    monkeypatch.setattr(board, "flush", lambda: flushed.append(True))
    writer = TensorBoardWriter(board)
    writer.write(make(1))
    assert not flushed
    writer.write(make(2, alerts=[make_alert(2)]))
    assert flushed


def test_layout_of_custom_scalars_is_written_once(tmp_path, board, make):
    writer = TensorBoardWriter(board)
    writer.write(make(1))
    writer.write(make(2))
    writer.close()
    assert len(load(tmp_path).Tensors("custom_scalars__config__")) == 1
    patterns = [p for chart in custom_scalars_layout()["attention"].values() for p in chart[1]]
    for tag in ("attention/sink_mass", "attention_change/total", "train/attention/max_logit"):
        assert sum(bool(re.match(p, tag)) for p in patterns) == 1
    assert not any(re.match(p, "attention/sink_mass/h.0") for p in patterns)


def test_an_own_layout_of_the_user_is_left_alone(tmp_path, board, make):
    writer = TensorBoardWriter(board, custom_scalars=False)
    writer.write(make(1))
    writer.close()
    assert "custom_scalars__config__" not in load(tmp_path).Tags()["tensors"]


def many_layers(make, count):
    layers = tuple((f"h.{i}", 1) for i in range(count))
    model = {f"attention/{stat}/{name}": 1.0 for stat in ("a", "b") for name, _ in layers}
    return make(1, layers, model={"attention/sink_mass": 0.5} | model)


def test_too_many_tags_leave_the_layers_out_with_one_warning(tmp_path, board, make):
    writer = TensorBoardWriter(board)
    message = r"602 scalar tags .* 512 .*`layers`.*layers=\['h.0'\]"
    with pytest.warns(UserWarning, match=message):
        writer.write(many_layers(make, 300))
    writer.write(many_layers(make, 300))  # a second warning would be an error
    writer.close()
    assert set(scalars(tmp_path)) == {"attention/sink_mass", "attention/alerts"}
    heads = make_ndarray(load(tmp_path).Tensors("attention_heads")[0].tensor_proto)
    assert heads.shape[1] == 300


def test_too_many_tags_that_were_asked_for_are_refused(board, make):
    writer = TensorBoardWriter(board, layers=[f"h.{i}" for i in range(299)])
    with pytest.raises(TooManyTagsError, match="`layers` must name fewer"):
        writer.write(many_layers(make, 300))


def test_512_tags_are_written(tmp_path, board, make):
    writer = TensorBoardWriter(board)
    writer.write(many_layers(make, 255))
    writer.close()
    assert len(scalars(tmp_path)) == 512


def test_chosen_layers(tmp_path, board, make):
    writer = TensorBoardWriter(board, layers=["blocks.1.attn#1", "nowhere"])
    with pytest.warns(UserWarning, match="'nowhere', which is not among blocks.0.attn"):
        writer.write(make(1))
    writer.close()
    layers = [tag for tag in scalars(tmp_path) if tag.count("/") == 2]
    assert layers == ["attention/sink_mass/blocks.1.attn_1"]


def test_scalars_can_be_left_to_the_host(tmp_path, board, make):
    writer = TensorBoardWriter(board, scalars=False)
    writer.write(make(1))
    writer.close()
    assert scalars(tmp_path) == {}
    assert "attention_heads" in load(tmp_path).Tags()["tensors"]


def test_images_and_histograms_on_request(tmp_path, board, make):
    stats = np.linspace(0, 1, len(STAT_NAMES) * 7, dtype=np.float32).reshape(-1, 7)
    stats[0, 3] = np.nan
    writer = TensorBoardWriter(board, images=["sink_mass"], histograms=["sink_mass"])
    writer.write(make(1, stats=stats))
    writer.close()
    events = load(tmp_path)
    assert events.Tags()["images"] == ["attention_heads/sink_mass"]
    assert events.Tags()["histograms"] == ["attention_heads/sink_mass"]
    assert events.Histograms("attention_heads/sink_mass")[0].histogram_value.num == 6
    image = Image.open(
        io.BytesIO(events.Images("attention_heads/sink_mass")[0].encoded_image_string)
    )
    assert image.size == (32, 24)
    assert image.getpixel((31, 0)) == (0xD9, 0xD9, 0xD9)
    with pytest.raises(ValueError, match=r"`images` must be names out of .*'sink'"):
        TensorBoardWriter(board, images=["sink"])


def test_folder_instead_of_a_writer(tmp_path, make):
    writer = TensorBoardWriter(tmp_path / "tb")
    writer.write(make(1))
    writer.close()
    writer.close()
    assert scalars(tmp_path / "tb")["attention/sink_mass"] == [(1, 0.25)]


def test_the_users_writer_stays_open(tmp_path, board, make):
    writer = TensorBoardWriter(board)
    writer.write(make(1))
    writer.close()
    board.add_scalar("loss", 1.0, 2)
    board.flush()
    # A SummaryWriter that was closed would go on in a second file.
    assert len(list(tmp_path.glob("events.*"))) == 1
    assert "loss" in scalars(tmp_path)


class PublicOnly:
    """A stand-in with the public methods alone, such as a logger's dummy on other ranks."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, *args))


class OwnProtocol(PublicOnly):
    """tensorboardX: its file writer takes its own protocol buffers only."""

    def _get_file_writer(self):
        return self

    def add_summary(self, summary, step):
        raise TypeError("not our Summary")


def test_writers_that_cannot_take_tensors(make):
    plain = PublicOnly()
    TensorBoardWriter(plain).write(make(1))
    assert ("add_scalar", "attention/sink_mass", 0.25, 1) in plain.calls
    own = OwnProtocol()
    with pytest.warns(UserWarning, match="the Attention tab stays empty"):
        TensorBoardWriter(own).write(make(1))
    assert ("add_scalar", "attention/sink_mass", 0.25, 1) in own.calls


@pytest.mark.parametrize("size", [0, 1, 3, 4, 9, 100, 8191, 8192, 8193, 100_000])
def test_checksum_equals_tensorboards(size):
    data = np.random.default_rng(size).bytes(size)
    assert masked_crc32c(data) == pywrap_tensorflow.masked_crc32c(data)
    assert crc32c(data) == pywrap_tensorflow.crc32c(data)


def test_large_records_have_valid_checksums(tmp_path, board, make):
    layers = tuple((f"h.{i}", 16) for i in range(32))
    writer = TensorBoardWriter(board)
    one = make(1, layers)
    writer.write(one)
    writer.close()
    # The accumulator checks every checksum by TensorBoard's own code.
    events = load(tmp_path)
    tensor = make_ndarray(events.Tensors("attention_heads")[0].tensor_proto)
    np.testing.assert_array_equal(tensor[: len(STAT_NAMES), 31], one.stats[:, -16:])


@pytest.mark.slow  # a time, and machines are noisy
def test_one_step_of_100_layers_x_128_heads_takes_at_most_25_ms(board, make):
    layers = tuple((f"blocks.{i}.attn", 128) for i in range(100))
    model = {f"attention/{stat}/{name}": 1.0 for stat in "abcd" for name, _ in layers}
    writer = TensorBoardWriter(board)
    times = []
    for step in range(8):
        one = make(step, layers, model=model)
        board.flush()
        start = time.process_time()  # counts the thread of the event file too
        writer.write(one)
        board.flush()
        times.append(time.process_time() - start)
    assert min(times) < 0.025


def test_heat_map_colours():
    pixels = heatmap(np.array([[0.0, 1.0], [0.5, np.nan]]), 0.0, 1.0, cell=2)
    assert pixels.shape == (4, 4, 3)
    assert pixels[0, 0].tolist() == [0x44, 0x01, 0x54]
    assert pixels[0, 3].tolist() == [0xFD, 0xE7, 0x25]
    assert pixels[3, 3].tolist() == [0xD9, 0xD9, 0xD9]
    # matplotlib's viridis at its middle, as the oracle of the table in between
    np.testing.assert_allclose(pixels[3, 0], [33, 145, 140], atol=3)
    decoded = np.asarray(Image.open(io.BytesIO(encode_png(pixels))))
    np.testing.assert_array_equal(decoded, pixels)
    assert heatmap(np.zeros((1, 1)), 0.0, 0.0).shape == (8, 8, 3)


def test_checksum_of_a_large_step_does_not_stop_training():
    data = np.random.default_rng(0).bytes(400_000)

    def cost(function):
        start = time.process_time()
        function(data)
        return time.process_time() - start

    crc32c(data)  # fills the tables
    assert 5 * min(cost(crc32c) for _ in range(3)) < cost(pywrap_tensorflow.crc32c)
