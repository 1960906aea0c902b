"""Settings of a launch, frozen and resolved once: flags, then environment, then file, then defaults."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

import models
from engine.attention_backends import ATTENTION_BACKENDS, ATTENTION_HELP, check_attention_backend

ENVIRONMENT_PREFIX = "SPECAHEAD_"


class SettingsError(ValueError):
    """A setting that cannot be used; the message names it and where it came from."""


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """Each field is a flag (--grpc-port), an environment variable (SPECAHEAD_GRPC_PORT) and a key of the file."""

    target: str = _setting(str(models.TARGET), "target model: Hugging Face id or folder")
    draft: str = _setting(str(models.DRAFT), "draft model: Hugging Face id or folder")
    plan: str = _setting(str(models.PLAN), "plan file made by `specahead calibrate` for the pair")
    budget: float = _setting(0.0, "share of the KV blocks that approximate reads; 0: the plan's")
    sparsity: str = _setting("", "sparsity method that approximate uses by default; empty: the plan's")
    served_model_name: str = _setting(
        "", "model name that clients use; empty: the target's last path component"
    )
    host: str = _setting("127.0.0.1", "address that the client endpoints bind")
    grpc_port: int = _setting(50051, "client gRPC port; 0: any free one")
    http_port: int = _setting(8000, "client HTTP port; 0: any free one")
    service_host: str = _setting("127.0.0.1", "address that draft and target services bind")
    target_port: int = _setting(0, "port of the target service; 0: any free one")
    gamma: int = _setting(4, "tokens drafted a round")
    ahead: bool = _setting(
        True, "draft the next round while one is verified, where verdicts are mostly foreseen"
    )
    draft_waves: int = _setting(
        0,
        "parts that sessions are drafted in, so one is verified while the next is drafted; 0: 2 on a GPU, else 1",
    )
    draft_read_share: float = _setting(
        1.0, "share of the KV that the later draft steps of a round read (GPU only)"
    )
    synthetic_acceptance: float = _setting(
        -1.0, "keep drafted tokens with this probability, for measurements; negative: the target decides"
    )
    max_context: int = _setting(0, "longest prompt and output together; 0: what both models allow")
    max_sessions: int = _setting(64, "sessions that run at once; more are queued")
    max_queued: int = _setting(1024, "sessions that may be queued; more are refused")
    target_kv_tokens: int = _setting(0, "KV room of the target, in tokens over all sessions; 0: by memory")
    draft_kv_tokens: int = _setting(0, "KV room of the draft, in tokens over all sessions; 0: by memory")
    kv_memory: float = _setting(0.0, "GiB of KV of each service; 0: by gpu_memory_utilization")
    host_kv_memory: float = _setting(
        0.0,
        "GiB of host memory as the home of the target's KV, kv_memory being what lies on its GPU; 0: none",
    )
    gpu_memory_utilization: float = _setting(0.9, "share of its GPU's memory that a service may take")
    load_format: str = _setting("auto", "auto, or dummy for random weights")
    enforce_eager: bool = _setting(False, "capture no CUDA graphs, for debugging")
    deterministic: bool = _setting(
        False, "the target's tokens do not depend on the batch nor on drafting, at some cost (GPU only)"
    )
    attention_backend: str = _setting("auto", f"{', '.join(ATTENTION_BACKENDS)}: {ATTENTION_HELP}")
    prefill_chunk: int = _setting(512, "prompt tokens that one step may run")
    draft_timeout: float = _setting(
        1.0, "seconds that the target waits for a proposal before decoding plainly"
    )
    resume_timeout: float = _setting(60.0, "seconds that requests wait for a lost target before they fail")
    shutdown_grace: float = _setting(10.0, "seconds that requests in flight get to finish at shutdown")
    device: str = _setting("auto", "cpu, cuda, or auto")
    dtype: str = _setting("auto", "float32, bfloat16, float16, or auto")
    threads: int = _setting(0, "CPU threads of each model; 0: half the cores")
    target_address: str = _setting(
        "", "HOST:PORT of a target service that runs already; then Ray is not used"
    )
    draft_address: str = _setting("", "HOST:PORT of its draft service, for its status in /metrics")
    ray_address: str = _setting("auto", "address of a running Ray; auto: find one, else start one")
    namespace: str = _setting("specahead", "Ray namespace")

    @property
    def model_name(self) -> str:
        return self.served_model_name or Path(self.target).name


def resolve_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[Settings, bool]:
    """Settings, and whether only to print them (--dry-run). Raises SettingsError; argparse exits on unknown flags."""
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.launch",
        description="Launch draft and target services and the client endpoints.",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of settings (keys as flags, with underscores)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resulting settings and exit")
    for item in dataclasses.fields(Settings):
        flag = "--" + item.name.replace("_", "-")
        text = f"{item.metadata['help']} (default: {item.default!r})"
        if item.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            parser.add_argument(flag, metavar=item.name.upper(), help=text)
    flags = vars(parser.parse_args(arguments))
    dry_run, file = flags.pop("dry_run"), flags.pop("config")
    sources: list[tuple[str, Mapping[str, Any]]] = [
        ("flag", {name: value for name, value in flags.items() if value is not None}),
        ("environment", _from_environment(environment)),
        (file or "file", _from_file(file) if file else {}),
    ]
    values: dict[str, Any] = {}
    for source, given in reversed(sources):
        for name, value in given.items():
            values[name] = _convert(name, value, source)
    settings = Settings(**values)
    _check(settings)
    return settings, dry_run


def _from_environment(environment: Mapping[str, str]) -> dict[str, str]:
    names = {item.name for item in dataclasses.fields(Settings)}
    lowered = {
        key: key.removeprefix(ENVIRONMENT_PREFIX).lower()
        for key in environment
        if key.startswith(ENVIRONMENT_PREFIX)
    }
    unknown = [key for key, name in lowered.items() if name not in names]
    if unknown:
        raise SettingsError(f"environment: no such setting: {', '.join(unknown)}")
    return {name: environment[key] for key, name in lowered.items()}


def _from_file(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error
    names = {item.name for item in dataclasses.fields(Settings)}
    if not isinstance(content, dict) or set(content) - names:
        unknown = (
            sorted(map(str, set(content) - names)) if isinstance(content, dict) else type(content).__name__
        )
        raise SettingsError(f"{path}: no such setting: {unknown}")
    return content


def _convert(name: str, value: Any, source: str) -> Any:
    kind = {item.name: item.type for item in dataclasses.fields(Settings)}[name]
    try:
        if kind is bool:
            if isinstance(value, bool):
                return value
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
                str(value).lower()
            ]
        if not isinstance(value, str | int | float):  # a file's may be anything
            raise TypeError
        return kind(str(value))  # type: ignore[operator]  # by its spelling: 4.5 and true are no integers
    except (ValueError, TypeError, KeyError):
        expected = getattr(kind, "__name__", kind)
        raise SettingsError(f"{source}: {name} is {value!r}, expected {expected}") from None


def _check(settings: Settings) -> None:
    checks = [
        (1 <= settings.gamma <= 64, "gamma must lie in 1 … 64"),
        (0 <= settings.budget <= 1, "budget must lie in (0, 1], or be 0 for the plan's"),
        (
            all(0 <= port < 65536 for port in (settings.grpc_port, settings.http_port, settings.target_port)),
            "ports must lie in 0 … 65535",
        ),
        (settings.max_sessions >= 1 and settings.max_queued >= 0, "max_sessions >= 1 and max_queued >= 0"),
        (settings.load_format in ("auto", "dummy"), "load_format must be auto or dummy"),
        (0 < settings.gpu_memory_utilization <= 1, "gpu_memory_utilization must lie in (0, 1]"),
        (0 < settings.draft_read_share <= 1, "draft_read_share must lie in (0, 1]"),
        (settings.draft_waves >= 0, "draft_waves must not be negative"),
        (settings.kv_memory >= 0, "kv_memory must not be negative"),
        (settings.host_kv_memory >= 0, "host_kv_memory must not be negative"),
        (settings.prefill_chunk >= 2, "prefill_chunk must be at least 2"),
        (settings.draft_timeout > 0 and settings.resume_timeout >= 0, "timeouts must be positive"),
    ]
    try:
        check_attention_backend(
            settings.attention_backend, settings.device, settings.deterministic, settings.enforce_eager
        )
    except ValueError as error:
        raise SettingsError(str(error)) from None
    bundled = str(models.TARGET), str(models.DRAFT)
    if (settings.target, settings.draft) != bundled and settings.plan == str(models.PLAN):
        checks.append(
            (
                False,
                "the bundled plan fits the bundled pair only: make one with `specahead calibrate` and pass --plan",
            )
        )
    for holds, message in checks:
        if not holds:
            raise SettingsError(message)
