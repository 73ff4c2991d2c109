"""Typed values: what a user may write, and the one form that goes on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlmsub.core.values import MemorySize, Mount, TimeLimit, image, number

PATHS = st.from_regex(r"/[A-Za-z0-9 ._/=+@-]{0,20}", fullmatch=True).filter(lambda path: " /" not in path)


@given(PATHS, PATHS, st.sampled_from(["", "ro", "rw"]))
def test_mounts_come_back_as_they_were(source: str, target: str, flags: str) -> None:
    mount = Mount(source, target, flags)
    assert Mount.parse(mount.render()) == mount


def test_a_lone_path_is_mounted_at_its_own_place() -> None:
    assert Mount.parse("/data").render() == "/data:/data"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("/a:/b,/c:/d", "comma"),
        ("/a:/b:bogus", "ro or rw"),
        ("/a:/b:ro:x", "ro or rw"),
        ("rel:/b", "source must be an absolute path"),
        ("/a:rel", "target must be an absolute path"),
        ("./rel:/b", "source must be an absolute path"),
        ("", "source must be an absolute path"),
        ("/a /b", "blank"),  # reports.md, inputs.md 13: mounts separated by blanks
        ("/a\n:/b", "Pyxis cannot express"),
    ],
)
def test_mounts_that_pyxis_cannot_express(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Mount.parse(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [("0", 0), ("12", 12), ("007", 7), ("", None), ("-1", None), ("+1", None), ("1.0", None), ("²", None), ("٣", None),
     (" 1", None), ("1_0", None), ("9" * 12, 999_999_999_999), ("9" * 13, None), ("9" * 5000, None)],
)  # fmt: skip
def test_whole_numbers(text: str, found: int | None) -> None:
    assert number(text) == found


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("foo.sqsh", "/home/me/foo.sqsh"),
        ("./foo.sqsh", "/home/me/foo.sqsh"),
        ("/p/foo.sqsh", "/p/foo.sqsh"),
        ("/p/rootfs", "/p/rootfs"),
        ("dir/foo.squashfs", "/home/me/dir/foo.squashfs"),
        ("nvcr.io/x/y:t", "nvcr.io#x/y:t"),
        ("nvcr.io#x/y:t", "nvcr.io#x/y:t"),
        ("docker://nvcr.io/x/y:t", "nvcr.io#x/y:t"),
        ("registry.example:5000/x/y", "registry.example:5000#x/y"),
        ("localhost/x", "localhost#x"),
        ("ubuntu:22.04", "ubuntu:22.04"),
        ("library/ubuntu:22.04", "library/ubuntu:22.04"),
    ],
)
def test_images_in_the_form_that_pyxis_gets(text: str, ref: str) -> None:
    assert image(text, base="/home/me") == ref
    assert image(ref, base="/elsewhere") == ref


@pytest.mark.parametrize("text", ["", "a b", "a,b", "/p/a b.sqsh", "a\nb"])
def test_what_is_no_image(text: str) -> None:
    with pytest.raises(ValueError, match="not an image"):
        image(text, base="/")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30 * 60),
        ("30:15", 30 * 60 + 15),
        ("4:00:00", 4 * 3600),
        ("04:00:00", 4 * 3600),
        ("1-2", 26 * 3600),
        ("1-2:30", 26 * 3600 + 30 * 60),
        ("1-02:30:05", 26 * 3600 + 30 * 60 + 5),
        (" 10 ", 600),
        ("90:00", 90 * 60),
    ],
)
def test_time_limits_as_sbatch_reads_them(text: str, seconds: int) -> None:
    assert TimeLimit.parse(text) == TimeLimit(seconds)


@given(st.integers(1, 40 * 86400))
def test_time_limits_come_back_as_they_were(seconds: int) -> None:
    assert TimeLimit.parse(TimeLimit(seconds).render()) == TimeLimit(seconds)


@pytest.mark.parametrize("text", ["", "x", "1:2:3:4", "-5", "4h", "1-", "0", "00:00:00", "1.5", "1-2:3:4:5"])
def test_what_is_no_time_limit(text: str) -> None:
    with pytest.raises(ValueError, match="time limit"):
        TimeLimit.parse(text)


@pytest.mark.parametrize(
    ("text", "rendered"),
    [("0", "0"), ("512", "512M"), ("512M", "512M"), ("2G", "2048M"), ("2gb", "2048M"), ("1T", "1048576M"),
     ("1025K", "2M"), ("1K", "1M"), ("0G", "0")],
)  # fmt: skip
def test_memory_in_mib(text: str, rendered: str) -> None:
    assert MemorySize.parse(text).render() == rendered


@given(st.integers(0, 10**7))
def test_memory_comes_back_as_it_was(mib: int) -> None:
    assert MemorySize.parse(MemorySize(mib).render()) == MemorySize(mib)


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5G", "all", "2P"])
def test_what_is_no_memory_size(text: str) -> None:
    with pytest.raises(ValueError, match="memory size"):
        MemorySize.parse(text)
