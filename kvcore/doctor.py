"""``kvcore doctor``: what this installation can do on this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import kvcore

REFUSED = (
    "sliding-window layers",
    "ALiBi position biases",
    "attention sinks",
    "layers that share keys and values",
    "quantised weights and fp8 KV caches",
    "dynamic and longrope position scaling",
    "every other model type",
)
_LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
_ISA_LEVELS = ("base", "v3", "v4", "bf16")


def report() -> dict[str, Any]:
    """Everything the doctor knows, as plain values that ``json.dumps`` takes.

    ``extension.error`` and ``models.error`` say why a part cannot be used; they are None otherwise.
    Never raises: a part that fails is reported.
    """
    return {
        "versions": _versions(),
        "extension": _extension(),
        "cuda": _cuda(),
        "memory": _memory(),
        "models": _models(),
        "policies": _policies(),
    }


def usable(data: dict[str, Any]) -> bool:
    """Whether models can be run: nothing in the report is called UNUSABLE."""
    errors = (data["extension"]["error"], data["models"]["error"])
    return errors == (None, None) and None not in data["versions"].values()


def render(data: dict[str, Any] | None = None) -> str:
    """A report (a new one if None) as text, one fact a line."""
    return "\n".join(_lines(report() if data is None else data))


def _versions() -> dict[str, str | None]:
    """None where a library is not installed."""
    versions: dict[str, str | None] = {
        "kvcore": kvcore.__version__,
        "python": platform.python_version(),
    }
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _extension() -> dict[str, Any]:
    try:
        from kvcore import native

        extension = native._C
        return {
            "error": None,
            "gzip_bytes": native.GOLDEN_GZIP_BYTES,  # checked by the import
            "isa": extension.isa(),
            "isa_supported": [name for name in _ISA_LEVELS if extension.isa_supported(name)],
            "threads": extension.num_threads(),
            "parallel_backend": extension.parallel_backend(),
            "dlpack": extension.uses_dlpack(),
            "cuda_kernels": extension.cuda_built(),
        }
    except Exception as error:  # a library that cannot be loaded, a bad environment variable
        return {"error": _reason(error)}


def _cuda() -> dict[str, Any]:
    try:
        import torch

        seen = torch.cuda.is_available()
        device = torch.cuda.get_device_name(0) if seen else None
    except Exception:  # what is wrong with torch, the other parts say
        return {"torch_sees_device": False, "device": None}
    return {"torch_sees_device": seen, "device": device}


def _memory() -> dict[str, int | None]:
    """Bytes; None where the system does not say."""

    def pages(name: str) -> int | None:
        try:
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):
            return None

    available = pages("SC_AVPHYS_PAGES")
    try:  # counts what the page cache would give back, unlike the free pages
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    available = int(line.split()[1]) * 1024
    except OSError:
        pass
    return {"total": pages("SC_PHYS_PAGES"), "available": available}


def _models() -> dict[str, Any]:
    try:
        import torch

        from kvcore.models.fusion import trial_fusions
        from kvcore.models.prepack import can_prepack
        from kvcore.models.support import MODEL_TYPES

        return {
            "error": None,
            "supported": list(MODEL_TYPES),
            "refused": list(REFUSED),
            "packed_linears": {
                str(dtype).removeprefix("torch."): can_prepack(dtype)
                for dtype in (torch.float32, torch.bfloat16)
            },
            "fused": {
                str(dtype).removeprefix("torch."): trial_fusions(dtype)
                for dtype in (torch.float32, torch.bfloat16)
            },
        }
    except Exception as error:
        return {"error": _reason(error)}


def _policies() -> dict[str, Any]:
    """Eviction policies by name, each with its line, and why others cannot be used."""
    from kvcore.policies.registry import failures, policies

    return {
        "available": {name: policy.summary for name, policy in policies().items()},
        "failed": [str(failure) for failure in failures()],
    }


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"


def _cuda_line(extension: dict[str, Any], cuda: dict[str, Any]) -> str:
    if extension.get("cuda_kernels"):
        seen = cuda["torch_sees_device"]
        return f"kernels built; {cuda['device'] if seen else 'torch sees no device'}"
    built = "this version ships no CUDA kernels: everything runs on the CPU"
    return f"{built} (torch sees {cuda['device']})" if cuda["torch_sees_device"] else built


def _fused_line(fused: dict[str, dict[str, list[str]]]) -> str:
    """By element type the kinds of layers that are fused, and the model types if not all."""
    parts = []
    for dtype, by_type in fused.items():
        for kind in sorted({kind for kinds in by_type.values() for kind in kinds}):
            types = [name for name, kinds in by_type.items() if kind in kinds]
            some = "" if len(types) == len(by_type) else f" of {', '.join(types)}"
            parts.append(f"{kind}{some} in {dtype}")
    return "; ".join(parts) or "none"


def _lines(data: dict[str, Any]) -> list[str]:
    facts = [
        (name, version or "UNUSABLE: not installed") for name, version in data["versions"].items()
    ]
    extension, models, memory = data["extension"], data["models"], data["memory"]
    if extension["error"]:
        facts.append(("extension", f"UNUSABLE: {extension['error']}"))
    else:
        supported = ", ".join(extension["isa_supported"])
        facts += [
            ("instruction set", f"{extension['isa']} (this CPU and build: {supported})"),
            ("threads", f"{extension['threads']}, {extension['parallel_backend']}"),
            ("gzip sizes", f"the classic zlib's ({extension['gzip_bytes']:,} bytes as expected)"),
            ("tensors", "through DLPack" if extension["dlpack"] else "by attributes (slower)"),
        ]
    facts += [
        ("CUDA", _cuda_line(extension, data["cuda"])),
        ("memory", f"{_gib(memory['available'])} available of {_gib(memory['total'])}"),
    ]
    if models["error"]:
        facts.append(("models", f"UNUSABLE: {models['error']}"))
    else:
        packed = [name for name, is_packed in models["packed_linears"].items() if is_packed]
        facts += [
            ("packed linears", ", ".join(packed) or "none: stock ones are slower"),
            ("fused layers", _fused_line(models["fused"])),
            ("model types", ", ".join(models["supported"])),
            ("refused", "; ".join(models["refused"])),
        ]
    policies = data["policies"]
    facts.append(("policies", ", ".join(policies["available"])))
    facts += [("not usable", f"policy {failure}") for failure in policies["failed"]]
    width = max(len(name) for name, _ in facts)
    return [f"{name:<{width}}  {value}" for name, value in facts]
