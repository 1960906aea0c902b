"""What a service process needs to open its model."""

from dataclasses import dataclass

LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True)
class ModelSettings:
    """What a service process needs to open its model.

    kv_tokens: room in all. 0: kv_memory GiB of it, or if that is 0 too what gpu_memory_utilization (a share of the
    GPU's whole memory) leaves beside the weights, but no more than max_sessions of max_context tokens need; on a CPU
    DEFAULT_KV_TOKENS. max_context 0: the model's. threads 0: torch's choice. enforce_eager: capture no CUDA graphs.
    step_queries: tokens of a sequence that most steps run, γ + 1. deterministic: on a GPU, tokens do not depend on
    what runs beside a sequence nor on whether it was drafted (engine.model_runner.ModelRunner). attention_backend: one
    of engine.attention_backends.ATTENTION_BACKENDS. host_kv_memory: GiB of host memory as the backing store of all
    sessions' KV, of which the room above is what lies on the device at once; 0: all KV lies on the device.
    dense_layers: that sparse sessions read wholly, whose KV then stays on the device. group_size: tokens of a group
    whose means are kept there, counted where there is a backing store; 0: none.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    kv_tokens: int = 0
    threads: int = 0
    max_context: int = 0
    max_sessions: int = 64
    kv_memory: float = 0.0
    gpu_memory_utilization: float = 0.9
    load_format: str = "auto"
    enforce_eager: bool = False
    step_queries: int = 5
    deterministic: bool = False
    attention_backend: str = "auto"
    host_kv_memory: float = 0.0
    dense_layers: tuple[int, ...] = ()
    group_size: int = 0
