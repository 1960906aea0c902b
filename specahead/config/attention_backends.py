"""What may attend, by name. Without torch, so that command lines open at once."""

ATTENTION_BACKENDS = ("auto", "triton", "torch")
ATTENTION_HELP = "what attends; auto: torch on a CPU; on a GPU triton, and in prompts cuDNN where it can"


def check_attention_backend(chosen: str, device: str, deterministic: bool, enforce_eager: bool) -> None:
    """Raises ValueError for a backend that is none, or that does not fit the device or the other settings.

    device: "cpu", a CUDA device, or "auto" where that is not known yet.
    """
    if chosen not in ATTENTION_BACKENDS:
        raise ValueError(f"attention_backend is {chosen!r}, expected {', '.join(ATTENTION_BACKENDS)}")
    if device == "cpu" and chosen == "triton":
        raise ValueError(
            f"attention_backend {chosen!r} runs on CUDA devices and the device is 'cpu': choose torch or auto, or use "
            "a GPU"
        )
    if deterministic and chosen == "torch":
        raise ValueError(
            f"attention_backend {chosen!r} rounds by what else is in the batch, which deterministic rules out: choose "
            "triton or auto, or leave deterministic out"
        )
    if chosen == "torch" and device.startswith("cuda") and not enforce_eager:
        raise ValueError(
            "attention_backend 'torch' cannot be captured in CUDA graphs: pass --enforce-eager, or choose triton"
        )
