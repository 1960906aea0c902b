"""The settings of a launch: its client endpoints, where its services run, and all settings together."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from specahead.config.access import ClientAccess
from specahead.config.services import DraftSettings, TargetSettings
from specahead.config.setting import Count, Keyed, Port, Seconds, Section, SettingsError, Share, Within


@dataclass(frozen=True, kw_only=True)
class ClientSettings(ClientAccess, group="client endpoints"):
    """The endpoints that clients call."""

    host: str = "127.0.0.1"
    """Address that the client endpoints bind."""
    port: Port = 8000
    """Client HTTP port; 0: any free one."""
    grpc_port: Port = 50051
    """Client gRPC port; 0: any free one."""
    served_model_name: str = ""
    """Model name that clients use; empty: the target's last path component."""
    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral", "qwen3_coder"] = "auto"
    """How the model writes tool calls; auto: as its chat template shows."""
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1"] = "auto"
    """How the model marks its reasoning; deepseek_r1 begins with it, unmarked."""
    generation_config: Literal["auto", "none"] = "auto"
    """How tokens are chosen where a request leaves it open; auto: by the model's generation_config.json."""


@dataclass(frozen=True, kw_only=True)
class Autoscaling(Keyed, group="placement"):
    """How the number of targets follows the load, with drafts in proportion."""

    max_targets: Count = 0
    """Target services that Ray runs at most; 0: no more than --targets."""
    kv_use: Share = 0.7
    """Share of the targets' KV room to use; a load above it asks for more targets."""
    wait: Annotated[float, Within(above=0)] = 5.0
    """Seconds that a new request may be expected to wait, on average over the targets."""
    out_delay: Seconds = 30.0
    """Seconds for which the load must ask for more targets until there are."""
    in_delay: Seconds = 600.0
    """Seconds for which the load must ask for fewer targets until one is drained and ended."""


@dataclass(frozen=True, kw_only=True)
class NodeResources(Keyed, group="placement"):
    """Custom resources of Ray that a node must have to run a service; empty: any node will do."""

    target: str = ""
    """Resource of nodes for targets."""
    draft: str = ""
    """Resource of nodes for drafts."""


@dataclass(frozen=True, kw_only=True)
class ClusterSettings(Section, group="placement"):
    """Where the services run."""

    targets: Count = 0
    """Target services that Ray runs; 0: one on each GPU where the draft runs together with it, else one."""
    drafts: Count = 0
    """Draft services that Ray runs; each serves all targets; 0: one, unless targets run the draft."""
    target_address: str = ""
    """HOST:PORT of a target service that runs already, or several with commas; then Ray is not used."""
    draft_address: str = ""
    """HOST:PORT of a draft service of these targets, or several, for its status in /metrics."""
    autoscaling: Autoscaling = Autoscaling()
    """How the number of targets follows the load, as JSON or a mapping."""
    node_resources: NodeResources = NodeResources()
    """Ray's custom resources that nodes must have to run a target or a draft, as JSON or a mapping."""
    ray_address: str = "auto"
    """Address of a running Ray; auto: find one, else start one; local: start one."""
    namespace: str = "specahead"
    """Ray namespace."""
    join: bool = False
    """Place no services, but serve clients over the services that another launch placed in this namespace of Ray."""

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.autoscaling.max_targets
        if 0 < most < self.targets:
            raise SettingsError(f"autoscaling: max_targets {most} is less than targets {self.targets}")
        placed_by_others = "join" if self.join else "target_address" if self.target_address else ""
        if most and placed_by_others:
            raise SettingsError(f"autoscaling: with {placed_by_others} this launch places no services")
        if self.join and self.target_address:
            raise SettingsError("join and target_address: the services are found by the one or by the other")


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a launch. Settings that both services need have the same value in both."""

    target: TargetSettings = field(default_factory=partial(TargetSettings, max_context=0, host=""))
    draft: DraftSettings = field(default_factory=partial(DraftSettings, max_context=0, host=""))
    clients: ClientSettings = field(default_factory=ClientSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft service."""
        return self.draft.has_draft and not self.target.draft_in_target

    @property
    def draft_name(self) -> str:
        """What clients see of the draft: its id, or the name of its folder."""
        model = self.draft.model
        return Path(model).name if model.startswith(("/", ".", "~")) else model

    @property
    def model_name(self) -> str:
        """What clients call the target."""
        return self.clients.served_model_name or Path(self.target.model).name
