"""The compiler takes the adapters' kernels, which the interpreter alone would not tell."""

import json
import os
import subprocess
import sys


def test_every_kernel_compiles_for_hopper_and_waits_for_the_kernel_before_it() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.model.kernels.compile_for_hopper"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    waits = json.loads(done.stdout)
    assert {name: len(counts) for name, counts in waits.items()} == {
        "_shrink_rows_kernel": 4,
        "_shrink_tiles_kernel": 4,
        "_expand_rows_kernel": 4,
        "_expand_tiles_kernel": 4,
    }
    # A program that ended without waiting would let the next kernel start beside the one before this one.
    assert all(count == 1 for counts in waits.values() for count in counts)
