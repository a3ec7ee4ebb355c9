"""The parcels of benchmarks/engines_gpu.py: what is left out of a CUDA library and of a wheel, and unpacking."""

import re
import struct
import zipfile
from pathlib import Path

import pytest

from benchmarks.engines.kinds import KINDS
from benchmarks.engines.parcels import Cut, Parcels, packed
from benchmarks.engines.strip import CUBIN, MAGIC, PTX, Entry, is_of, strip
from redrafter.errors import ConfigError

ENTRY = 64  # bytes of an entry's header


def fatbin(*entries: tuple[int, int, bytes]) -> bytes:
    """Device code of several kinds and architectures, as nvcc writes it into a library."""
    body = b""
    for kind, architecture, code in entries:
        header = struct.pack("<HHIQ", kind, 0, ENTRY, len(code)).ljust(28, b"\0") + struct.pack("<I", architecture)
        body += header.ljust(ENTRY, b"\0") + code
    return MAGIC + struct.pack("<HHQ", 1, 16, len(body)) + body


def test_strip_keeps_the_code_of_one_gpu_and_every_address() -> None:
    several = fatbin((CUBIN, 80, b"a" * 32), (CUBIN, 90, b"b" * 32), (PTX, 90, b"c" * 32))
    compiled = fatbin((CUBIN, 75, b"d" * 32), (PTX, 80, b"e" * 32), (PTX, 120, b"f" * 32))
    others = fatbin((CUBIN, 120, b"g" * 64), (CUBIN, 100, b"h" * 32))
    unknown = MAGIC + struct.pack("<HHQ", 1, 16, 48) + b"?" * 48
    cut_off = MAGIC + b"\1\0"
    library = b"start" + several + b"between" + compiled + others + unknown + b"end" + cut_off
    kept = strip(library, 90)
    assert len(kept) == len(library)
    for part, alone in [
        (several, fatbin((CUBIN, 90, b"b" * 32))),
        (compiled, fatbin((PTX, 80, b"e" * 32))),
        (others, fatbin((CUBIN, 100, b"h" * 32))),
        (unknown, unknown),
    ]:
        at = library.index(part)
        assert kept[at : at + len(part)] == alone.ljust(len(part), b"\0")
    assert kept.startswith(b"start")
    assert kept.endswith(b"end" + cut_off)


def test_strip_keeps_the_code_of_chosen_sources() -> None:
    def code(source: str) -> bytes:
        return f"..._INTERNAL_0123abcd_9_{source}_cu_0123...".encode().ljust(96, b"x")

    ours = fatbin((CUBIN, 80, code("fwd_bf16")), (CUBIN, 90, code("fwd_bf16")))
    others = [fatbin((CUBIN, 90, code(name))) for name in ("fwd_fp16", "fwd_bf16_softcap", "old_fwd_x")]
    smallest = fatbin((CUBIN, 90, b"y" * 32))
    kept = strip(b"".join([ours, *others, smallest]), 90, "fwd_bf16|fwd_x")
    alone = fatbin((CUBIN, 90, code("fwd_bf16"))).ljust(len(ours), b"\0")
    assert kept == alone + b"".join(smallest.ljust(len(other), b"\0") for other in others) + smallest
    with pytest.raises(ConfigError, match="no device code was compiled from a file named fwd_bf16"):
        strip(others[0], 90, "fwd_bf16")


@pytest.mark.parametrize(
    ("source", "sent"),
    [
        ("flash_fwd_hdim128_bf16_paged_split_sm90", True),
        ("flash_fwd_hdim64_bf16_packgqa_sm90", True),
        ("flash_fwd_combine", True),
        ("flash_prepare_scheduler", True),
        ("flash_fwd_hdim128_fp16_paged_split_sm90", False),
        ("flash_fwd_hdim128_bf16_paged_softcap_sm90", False),
        ("flash_fwd_hdim192_bf16_paged_sm90", False),
        ("flash_bwd_hdim128_bf16_sm90", False),
    ],
)
def test_flash_attention_is_sent_for_bf16_and_two_head_sizes(source: str, sent: bool) -> None:
    (cut,) = KINDS["sglang"].parcels.cuts  # type: ignore[union-attr]
    assert re.search(cut.stripped, "sgl_kernel/flash_ops.abi3.so")
    code = f"_INTERNAL_0123abcd_9_{source}_cu_0123".encode()
    assert is_of(code, Entry(CUBIN, 90, 0, len(code)), cut.sources) == sent


def test_parcels_are_as_few_as_fit() -> None:
    sizes = {"a": 30, "b": 25, "c": 12, "d": 10, "e": 3}
    assert packed(sizes, 40) == [["a", "d"], ["b", "c", "e"]]
    with pytest.raises(ConfigError, match="a has 30 bytes, a parcel at most 20"):
        packed(sizes, 20)


def test_a_wheel_is_cut_and_unpacked(tmp_path: Path) -> None:
    """Each file goes to the first archive that wants it; the parcels give back what was kept."""
    wheel = tmp_path / "whole.whl"
    wanted = b"_INTERNAL_0123abcd_9_wanted_cu_"
    code = b"x" + fatbin((CUBIN, 80, b"a" * 32), (CUBIN, 90, wanted)) + fatbin((CUBIN, 90, b"b" * 40))
    with zipfile.ZipFile(wheel, "w") as made:
        for name, data in {"p/big.so": b"1", "p/_C.so": code, "p/fa.so": b"2", "p/a.py": b"pass"}.items():
            made.writestr(name, data)
    cut = Cut("whole==1", (("big", ""), ("fa", "fa.zip"), ("", "rest.zip")), stripped="_C", sources="wanted")
    listed = tmp_path / "wheels.txt"
    listed.write_text("")
    parcels = Parcels(
        requirements=listed,
        cuts=(cut,),
        stubs={"s/__init__.py": "stub = 1\n"},
        compiled="p",
        variables={"CACHE": "{folder}/cache"},
    )
    folder = tmp_path / "engine"
    for part in ("p1", "p10"):
        (folder / part).mkdir(parents=True)
    cut.write(wheel, folder / "p1")
    (folder / "p1" / "fa.zip").rename(tmp_path / "fa.zip")
    with pytest.raises(ConfigError, match="1 archives of 2"):
        parcels.unpack(folder)
    (tmp_path / "fa.zip").rename(folder / "p10" / "fa.zip")
    parcels.unpack(folder)
    files = {str(p.relative_to(folder / "site")) for p in (folder / "site" / "p").iterdir() if p.is_file()}
    assert files == {"p/_C.so", "p/fa.so", "p/a.py"}
    assert (folder / "site" / "p" / "_C.so").read_bytes() == strip(code, 90, "wanted")
    assert strip(code, 90, "wanted") != strip(code, 90)
    assert (folder / "stubs" / "s" / "__init__.py").read_text() == "stub = 1\n"
    environment = parcels.environment(folder, tmp_path)
    assert environment["CACHE"] == f"{folder}/cache"
    assert environment["PYTHONPATH"].split(":")[0] == str(folder / "site")


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_an_engine_lists_its_wheels_once_with_versions(name: str) -> None:
    parcels = KINDS[name].parcels
    assert parcels is not None
    lines = parcels.requirements.read_text().split()
    assert all("==" in line for line in lines)
    assert len({line.split("==")[0] for line in lines}) == len(lines)
    for cut in parcels.cuts:
        assert cut.archives[-1][0] == "", "every file has an archive"
