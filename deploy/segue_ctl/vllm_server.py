"""How the local cluster starts a vLLM server: its command line and environment, on CPUs or NVIDIA GPUs.

Pure: decides, starts nothing. The GPU side follows vLLM's documentation and is untested.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KV_CACHE_BYTES = 402_653_184
"""Per engine on a CPU: room for 17,000 tokens of SmolLM2-135M in bfloat16."""
MAX_MODEL_LEN = 8_192
BLOCK_SIZE = 32
_GPU_SHARE = "0.40"
"""Of a GPU's memory, when two engines share one."""


@dataclass(frozen=True)
class EngineSpec:
    """One engine of the cluster.

    cpus: the cores it may use (None: any). protected: it has the connector and a daemon beside it.
    """

    name: str
    cpus: frozenset[int] | None = None
    protected: bool = True
    extra_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class EnginePlace:
    """Where it lives: its port, the daemon's socket, its position among the engines."""

    port: int
    socket: Path
    index: int
    gpus: int = 0


@dataclass(frozen=True)
class Command:
    """What to execute."""

    argv: tuple[str, ...]
    env: dict[str, str]


def count_gpus() -> int:
    """NVIDIA GPUs that this machine's driver answers for."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    answer = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
    return (
        sum(line.startswith("GPU ") for line in answer.stdout.splitlines()) if answer.returncode == 0 else 0
    )


def vllm_command(
    spec: EngineSpec, place: EnginePlace, model_dir: Path, environ: Mapping[str, str] = os.environ
) -> Command:
    """The command of one vLLM server that offers `model_dir` under the folder's name."""
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(model_dir), "--served-model-name", model_dir.name]
    argv += ["--host", "127.0.0.1", "--port", str(place.port)]
    argv += ["--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN), "--dtype", "bfloat16"]
    env = dict(environ) | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if place.gpus:
        env["CUDA_VISIBLE_DEVICES"] = str(place.index % place.gpus)
        if place.gpus == 1:
            argv += ["--gpu-memory-utilization", _GPU_SHARE]
    else:
        argv += ["--block-size", str(BLOCK_SIZE), "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override --kv-cache-memory-bytes
        if spec.cpus:
            env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(cpu) for cpu in sorted(spec.cpus))
    if spec.protected:
        argv += ["--kv-transfer-config", json.dumps(_connector(spec, place))]
    return Command((*argv, *spec.extra_args), env)


def _connector(spec: EngineSpec, place: EnginePlace) -> dict[str, object]:
    return {
        "kv_connector": "SegueConnector",
        "kv_connector_module_path": "segue_shim.vllm_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(place.socket), "engine": spec.name},
    }


def one_core_each(count: int) -> list[frozenset[int] | None]:
    """A core for each of `count` engines out of those usable here; None each if there are too few."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < count:
        return [None] * count
    return [frozenset({cpu}) for cpu in usable[:count]]
