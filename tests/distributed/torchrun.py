"""The command line under torchrun, on machines that are all this one."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def launched(folder: Path, launch: str, fields: Mapping[str, Any]) -> "subprocess.Popen[bytes]":
    """torchrun with a training, whose working folder has its output in the file `output`."""
    command = [sys.executable, "-m", "torch.distributed.run", *launch.split(), "--local-addr", "127.0.0.1"]
    command += ["-m", "fused_lwlr", "train", *(f"--{name.replace('_', '-')}={value}" for name, value in fields.items())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    folder.mkdir(exist_ok=True)
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
