"""How the compiler makes the library of this folder. setup.py reads this file alone, so it imports nothing."""

FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread", "-Wno-psabi")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
INSTRUCTIONS = {
    "avx512_vnni": (*AVX512, "-mavx512vnni"),
    "avx512": AVX512,
    "avx2": AVX2,
    "neon_dotprod": ("-march=armv8.2-a+dotprod",),
    "neon": (),
    "portable": ("-DPORTABLE",),
}
"""Compiler flags of each set of instructions, the fastest first. `portable` runs on every CPU."""
MACHINES = {"x86_64": ("avx512_vnni", "avx512", "avx2", "portable"), "aarch64": ("neon_dotprod", "neon", "portable")}
"""The sets of instructions that a wheel for Linux brings, by machine."""
