"""Compiles FlashInfer's kernels into the installed package, where it finds them without nvcc and without ninja.

    FLASHINFER_CUDA_ARCH_LIST="8.0 9.0a" python deploy/kernels.py

Needs nvcc, and no GPU. These are the kernels of every model that WideBeam runs by FlashInfer; what lies in FlashInfer's
ordinary cache would be looked at by ninja again at each start.
"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import torch
from flashinfer.jit import build_jit_specs, env
from flashinfer.jit.attention import gen_batch_prefill_module

from widebeam.model.flashinfer import DTYPES, HEAD_DIMS

PLAIN = (0, False, False, False)  # positions not encoded; no sliding window, no soft cap, no half-precision scores


def main() -> None:
    archs = os.environ["FLASHINFER_CUDA_ARCH_LIST"].split(" ")
    backends = ["fa2", "fa3"] if any(arch.startswith("9.") for arch in archs) else ["fa2"]
    specs = [
        gen_batch_prefill_module(backend, dtype, dtype, dtype, torch.int32, size, size, *PLAIN)
        for backend, dtype, size in itertools.product(backends, DTYPES, HEAD_DIMS)
    ]
    build_jit_specs(specs, verbose=True)
    for spec in specs:
        place = Path(spec.aot_path)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(Path(env.FLASHINFER_JIT_DIR) / spec.name / place.name, place)
        print(place)


if __name__ == "__main__":
    main()
