"""One decoder turns files into pixels, one conversion numbers into those of a batch."""

import io

import numpy as np
import pyarrow as pa
import pytest
from image_files import make_pictures, png_of
from PIL import Image, PngImagePlugin

from raydl.data.schema import Feature
from raydl.data.values import Decoder, convert, mode_of

COLOR = make_pictures(1, (16, 16, 3))[0]
WIDE = np.linspace(0, 4095, 64).astype(np.uint16).reshape(8, 8)
ORIENTATION = 0x112


def saved(image, form, **options):
    file = io.BytesIO()
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    image.save(file, form, **options)
    return file.getvalue()


def test_pixels_are_those_of_the_file_channels_first():
    assert np.array_equal(Decoder().decode(png_of(COLOR)), np.moveaxis(COLOR, 2, 0))
    assert Decoder().decode(png_of(COLOR[:, :, 0])).shape == (1, 16, 16)
    assert Decoder(mode="L").decode(png_of(COLOR)).shape == (1, 16, 16)
    assert Decoder(mode="RGB").decode(png_of(COLOR[:, :, 0])).shape == (3, 16, 16)


def test_an_image_is_turned_upright_as_its_exif_data_say():
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    data = saved(COLOR[:12], "JPEG", exif=exif, quality=95)
    with Image.open(io.BytesIO(data)) as stored:
        right = np.rot90(np.asarray(stored), -1)
    assert np.array_equal(Decoder().decode(data), np.moveaxis(right, 2, 0))
    at = data.find(b"Exif") + 6
    broken = data[:at] + b"\xff" * 8 + data[at + 8 :]
    assert Decoder().decode(broken).shape == (3, 12, 16)


@pytest.mark.parametrize(
    "data",
    [
        saved(WIDE, "PNG"),
        saved(WIDE, "TIFF"),
        saved(Image.frombytes("I;16B", (8, 8), WIDE.astype(">u2").tobytes()), "TIFF"),
        saved(WIDE.astype(np.float32), "TIFF"),
    ],
    ids=["png", "tiff", "big-endian", "float"],
)
def test_values_of_more_than_8_bits_are_refused_or_scaled_by_the_span(data):
    with pytest.raises(ValueError, match=r"values from 0 to 4095 .*--input\.span LOW,HIGH"):
        Decoder().decode(data)
    with pytest.raises(ValueError, match=r"beyond input\.span 0,100"):
        Decoder(span=(0, 100)).decode(data)
    pixels = Decoder(span=(0, 4095)).decode(data)
    assert len(np.unique(pixels)) == 64
    assert (pixels.min(), pixels.max()) == (0, 255)
    assert mode_of(data) == "L"


def test_images_of_all_sizes_are_cut_around_the_center_and_resized():
    decoder = Decoder(size=8)
    for shape in ((8, 8, 3), (8, 24, 3), (40, 16, 3)):
        assert decoder.decode(png_of(make_pictures(1, shape)[0])).shape == (3, 8, 8)
    marked = np.zeros((8, 24), np.uint8)
    marked[:, 8:16] = 200
    assert (decoder.decode(png_of(marked)) == 200).all()


def damaged_files():
    info = PngImagePlugin.PngInfo()
    info.add_text("note", "a" * 2_000_000, zip=True)
    dds, ppm = saved(COLOR, "DDS"), saved(COLOR, "PPM")
    yield "much text", saved(COLOR, "PNG", pnginfo=info)
    yield "header cut", b"P6\n16 "
    yield "maximum is no number", ppm.replace(b"255", b"2x5", 1)
    yield "unknown pixel format", dds[:76] + bytes(32) + dds[108:]
    yield "nothing", b""
    try:
        avif = saved(COLOR, "AVIF")
    except (KeyError, OSError):  # a Pillow without it
        return
    start = avif.find(b"mdat") + 12
    yield "empty payload", avif[:start] + bytes(len(avif) - start)


@pytest.mark.parametrize(
    "data", [data for _, data in damaged_files()], ids=[name for name, _ in damaged_files()]
)
def test_whatever_a_decoder_raises_is_the_problem_of_one_image(data):
    for mode in ("", "RGB"):
        with pytest.raises(ValueError, match=r"does not decode|not an image") as caught:
            Decoder(mode).decode(data)
        assert "\n" not in str(caught.value)


def outcome(data):
    """Return the number of dimensions of an image, or why it does not decode."""
    try:
        return Decoder("RGB").decode(data).ndim
    except ValueError as error:
        return str(error)


def test_damage_anywhere_in_a_file_is_one_sentence_or_an_image():
    random = np.random.default_rng(0)
    files = [saved(COLOR, form) for form in ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM", "TIFF")]
    for _ in range(200):
        data = bytearray(files[random.integers(len(files))])
        for _ in range(random.integers(1, 8)):
            data[random.integers(len(data))] = random.integers(256)
        found = outcome(bytes(data[: random.integers(1, 2 * len(data))]))
        assert found == 3 or "\n" not in found


def test_decoded_pixels_may_have_their_channels_first_or_last():
    for shape in ((3, 8, 10), (8, 10, 3)):
        assert Decoder().decode(np.zeros(shape, np.uint8)).shape == (3, 8, 10)
    assert Decoder().decode(np.zeros((8, 10), np.uint8)).shape == (1, 8, 10)
    with pytest.raises(ValueError, match="as uint8, from 0 to 255, got float32"):
        Decoder().decode(np.zeros((8, 8), np.float32))


INTEGER, REAL = Feature("number", "int64"), Feature("number", "float32")


@pytest.mark.parametrize(
    ("values", "feature", "problem"),
    [
        (pa.array([1, 2**63 + 5], pa.uint64()), INTEGER, "is 9223372036854775813, which int64"),
        (pa.array([1.0, 1e39]), REAL, "is 1e+39, which float32 does not hold"),
        (pa.array([1.0, 0.5]), INTEGER, "is 0.5, which int64 does not hold"),
        (pa.array([1, None]), INTEGER, "is null"),
        (pa.array([True, None]), Feature("number", "bool"), "is null"),
        (pa.array([[1, 2], [3]]), Feature("vector", "int64", (2,)), "has 1 values, but others 2"),
        (pa.array([[1, 2], [3, None]]), Feature("vector", "int64", (2,)), "holds a null"),
        (
            pa.array(["a", "c"]),
            Feature("class", "int64", names=("a", "b")),
            "is 'c', which is none",
        ),
        (pa.array([0, 7]), Feature("class", "int64", names=("a", "b")), "is 7; labels must be 0"),
        (np.array([0, -1]), Feature("class", "int64", names=("a", "b")), "is -1; labels must be"),
    ],
)
def test_a_value_that_would_become_another_one_is_the_problem_of_its_sample(
    values, feature, problem
):
    array, bad = convert(values, feature)
    assert list(bad) == [1]
    assert bad[1].startswith(problem)
    assert (len(array), array.dtype) == (2, feature.dtype)


def test_what_fits_is_kept_exactly():
    for stored in (pa.array([3, 255], pa.uint8()), pa.array([3, 255], pa.uint64())):
        array, bad = convert(stored, INTEGER)
        assert (array.tolist(), array.dtype, bad) == ([3, 255], np.int64, {})
    array, bad = convert(pa.array([0.5, float("inf"), float("nan")]), REAL)
    assert (array[:2].tolist(), np.isnan(array[2]), bad) == ([0.5, np.inf], True, {})
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(2, 2, 3))
    array, bad = convert(tensors, Feature("vector", "float32", (2, 3)))
    assert (array.shape, array[1, 0].tolist(), bad) == ((2, 2, 3), [6, 7, 8], {})
    names = Feature("class", "int64", names=("cat", "dog"))
    for texts in (pa.array(["dog", "cat"]), pa.array(["dog", "cat"]).dictionary_encode()):
        assert convert(texts, names)[0].tolist() == [1, 0]


def test_a_column_of_something_else_is_refused_as_a_whole():
    with pytest.raises(ValueError, match=r"must hold numbers, got string; name the columns"):
        convert(pa.array(["a"]), REAL)
