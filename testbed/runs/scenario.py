"""Scenario files: one TOML file says what a run trains, on which fleet, over which links.

`load_scenario` reads a file or one of the packaged scenarios, applies `--set key=value`, and checks everything against
the models below. Every mistake of a user raises a ScenarioError, and nothing else, that names the file and the line, or
the option, and says what would be right. A relative path counts from the folder of the file that holds it, and from the
current folder in an override. The server, which owns the models, checks whether it knows a model's name.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from agent.protocol.errors import UserError
from agent.protocol.units import parse_duration
from emulator.links.rate_trace import read_link_trace
from emulator.model.zoo import load_device, load_network
from ps.access.listening import is_loopback, split_endpoint
from ps.planning.share_cap import YIELDING, Cap
from testbed.runs.toml_lines import KeyPath, line_of_each_key, lines_of_table, parse_key, split_syntax_error

# a key, and the keys of its section that it replaces
_INSTEAD = {
    ("model", "name"): ("config",),
    ("model", "config"): ("name",),
    ("fleet", "uniform"): ("kinds", "networks"),
    ("fleet", "kinds"): ("uniform",),
    ("fleet", "networks"): ("uniform",),
    ("churn", "trace"): ("kind", "leave_per_minute", "mean_away"),
    ("churn", "kind"): ("trace",),
}
NO_FLAGS: Mapping[str, str] = MappingProxyType({})


class ScenarioError(UserError):
    """What is wrong with a scenario, where, and what would be right; one line per mistake."""


def _existing_file(path: str) -> str:
    if not Path(path).is_file():
        raise ValueError("there is no such file")
    return path


def _existing_file_or_stdlib(path: str) -> str:
    try:
        return path if path == "stdlib" else _existing_file(path)
    except ValueError as error:
        raise ValueError(f'{error}; give the path of a text file, or "stdlib"') from error


def _known_device(name: str) -> str:
    return load_device(name).name


def _known_network(name: str) -> str:
    return load_network(name).name


def _link_trace(prefix: str) -> str:
    read_link_trace(prefix)
    return prefix


def _duration(text: str) -> str:
    parse_duration(text)
    return text


def parse_percent(text: str) -> float:
    """0.1 from "10%"."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*", text, re.ASCII)
    if not match or not 0 < float(match[1]) < 1e6:
        raise ValueError('it must be a percentage above 0, for example "10%"')
    return float(match[1]) / 100


def _rate(text: str) -> str:
    parse_percent(text)
    return text


def _part(text: str) -> str:
    if parse_percent(text) > 1:
        raise ValueError("there are no more than 100% of the devices")
    return text


Duration = Annotated[str, AfterValidator(_duration)]  # kept as written
Rate = Annotated[str, AfterValidator(_rate)]
Part = Annotated[str, AfterValidator(_part)]
Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]
TracePrefix = Annotated[str, AfterValidator(_link_trace)]  # of two files, .down and .up
FilePath = Annotated[str, AfterValidator(_existing_file)]
TextPath = Annotated[str, AfterValidator(_existing_file_or_stdlib)]
DeviceName = Annotated[str, AfterValidator(_known_device)]
NetworkName = Annotated[str, AfterValidator(_known_network)]


class _Section(BaseModel):
    # strict: "10" is not a number; a scenario means what it says
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Model(_Section):
    name: str | None = Field(default=None, min_length=1)  # a model the server knows
    config: FilePath | None = None  # or a Hugging Face config.json

    @model_validator(mode="after")
    def _exactly_one(self) -> Model:
        if (self.name is None) == (self.config is None):
            raise ValueError('give either name = "opt-tiny" or config = "path/to/config.json", one of the two')
        return self


class Data(_Section):
    text: TextPath = "stdlib"
    batch: int = Field(default=8, ge=1, le=1_000_000)
    sequence: int = Field(default=64, ge=2, le=1_000_000)  # a token and the one after it


class TrainingSection(_Section):
    steps: int = Field(ge=1)
    learning_rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    micro_batches: int = Field(default=1, ge=1)
    wait_for_devices: Duration = "10 min"  # longest wait while no device can go on; then the run stops, keeping results


class FleetSection(_Section):
    phones: int = Field(default=0, ge=0, le=100_000)  # real devices to wait for
    devices: int = Field(ge=0, le=1_000_000)  # emulated ones
    phones_wait: Duration = "10 min"  # longest wait for phones
    pods: int | Literal["auto"] = "auto"
    line_share: float = Field(default=1.0, gt=0, le=1)
    uniform: Literal["paper", "moderate", "extreme"] | None = None  # a fleet from the Cleave authors' evaluation
    kinds: dict[DeviceName, Share] = Field(default_factory=dict)  # or a mix: the share of each device and network
    networks: dict[NetworkName, Share] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_kind_of_fleet(self) -> FleetSection:
        if self.uniform is None and self.devices and not (self.kinds and self.networks):
            raise ValueError(
                "give shares of devices in [fleet.kinds] and of networks in [fleet.networks], at least one each"
            )
        if self.uniform is not None and (self.kinds or self.networks):
            raise ValueError(
                f'uniform = "{self.uniform}" is a whole fleet: leave out [fleet.kinds] and [fleet.networks]'
            )
        return self

    @field_validator("devices")
    @classmethod
    def _at_least_one_device(cls, devices: int, info: ValidationInfo) -> int:
        if not devices and not info.data.get("phones"):
            raise ValueError("it must be greater than or equal to 1, unless phones = 2 says how many real ones train")
        return devices

    @field_validator("pods", mode="before")
    @classmethod
    def _auto_or_a_number(cls, pods: object) -> object:
        if pods == "auto" or (isinstance(pods, int) and not isinstance(pods, bool) and pods >= 1):
            return pods
        raise ValueError('it must be "auto" or a whole number of at least 1')  # one message instead of one per type


class PlannerSection(_Section):
    kind: Literal["packed", "grid"] = "packed"
    keep: bool = True  # devices keep slabs of weights between micro-batches
    most_share: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"  # largest share of a product per device

    @property
    def cap(self) -> Cap:
        return YIELDING if self.most_share == "auto" else Cap(self.most_share, strict=True)


class LinksSection(_Section):
    kind: Literal["model", "kernel", "off"] = "model"
    effects: Literal["rates", "full"] = "full"  # rates: rate and latency; full: also jitter, loss and bufferbloat
    traces: dict[NetworkName, TracePrefix] = Field(default_factory=dict)  # networks whose rates change


class ClockSection(_Section):
    kind: Literal["wall", "scaled", "virtual", "auto"] = "wall"
    scale: float = Field(default=1.0, ge=1, le=10_000, allow_inf_nan=False)  # for kind = "scaled"
    arithmetic: bool = True  # for kind = "virtual"; false: shapes only, no values and no loss

    @model_validator(mode="after")
    def _what_belongs_to_which(self) -> ClockSection:
        if self.kind == "scaled" and "scale" not in self.model_fields_set:
            raise ValueError('kind = "scaled" needs scale, for example scale = 4')
        if self.kind != "scaled" and self.scale != 1:
            raise ValueError(f'scale belongs to kind = "scaled"; kind is "{self.kind}"')
        if self.kind != "virtual" and not self.arithmetic:
            raise ValueError(f'arithmetic = false belongs to kind = "virtual"; kind is "{self.kind}"')
        return self


class ServerSection(_Section):
    host: str = Field(default="127.0.0.1", min_length=1)  # for this machine only, unencrypted
    port: int = Field(default=0, ge=0, le=65535)
    listen: str = ""  # for invited devices elsewhere, encrypted; empty: none
    files: int = Field(default=0, ge=0, le=65535)  # where phones fetch the agent over HTTP; 0: nowhere

    @field_validator("host")
    @classmethod
    def _this_machine(cls, host: str) -> str:
        if not is_loopback(host):
            raise ValueError(
                f"{host} is not only this machine, and anyone could join there; leave it at 127.0.0.1 and write "
                f'listen = "tcp://{host}:5555" for devices that you invite'
            )
        return host

    @field_validator("listen")
    @classmethod
    def _an_address(cls, listen: str) -> str:
        if listen:
            split_endpoint(listen)
        return listen


class Launch(_Section):
    kind: Literal["processes", "docker"] = "processes"
    restarts: int = Field(default=3, ge=0, le=1000)  # per pod process that ends unexpectedly
    image: str | None = Field(default=None, min_length=1)  # docker only, as all below; default "cleave-device"
    subnet: str | None = Field(default=None, min_length=1)  # of the bridges; default: a free one
    server_address: str | None = Field(default=None, min_length=1)  # of this machine, as containers reach it

    @model_validator(mode="after")
    def _what_belongs_to_docker(self) -> Launch:
        for key in ("image", "subnet", "server_address"):
            if self.kind != "docker" and getattr(self, key) is not None:
                raise ValueError(f'{key} belongs to kind = "docker"; kind is "{self.kind}"')
        return self


# a fault, and the keys that it needs besides at, do and its targets
_NEEDS = {"freeze": ("seconds",), "slow": ("factor",), "lie": ("how",), "flap": ("times", "period")}
_NEEDS["stop"] = _NEEDS["disconnect"] = _NEEDS["freeze"]
_MAY_HAVE = {"leave": ("seconds",), "vanish": ("seconds",)}
_OF_PODS = ("kill", "stop", "corrupt", "disconnect", "exhaust")
_OF_CONTAINERS = ("disconnect", "exhaust")
_EXAMPLES = {"seconds": "5", "factor": "4", "how": '"noise"', "times": "3", "period": '"10 s"'}


class Fault(_Section):
    at: Duration  # since the start of the first step
    do: Literal[
        "leave", "vanish", "return", "freeze", "slow", "lie", "mute", "flap",
        "corrupt", "kill", "stop", "disconnect", "exhaust",
    ]  # fmt: skip
    devices: int | None = Field(default=None, ge=1)  # this many, chosen by the seed
    share: Part | None = None  # or this part of the fleet
    network: NetworkName | None = None  # or all devices of one access network
    pods: int | None = Field(default=None, ge=1)  # for faults of whole pods, chosen by the seed; default 1
    # freeze, stop, disconnect: duration; leave, vanish: time until the devices return
    seconds: float | None = Field(default=None, gt=0, le=1e6)
    factor: float | None = Field(default=None, gt=0, le=1e6)  # of slow; 1 is the profile's speed
    how: Literal["noise", "element", "stale", "zeros", "nan", "signs", "bias"] | None = None  # of lie
    times: int | None = Field(default=None, ge=1, le=10_000)  # of flap
    period: Duration | None = None  # of flap: half of it away, half of it back

    @property
    def at_s(self) -> float:
        return parse_duration(self.at)

    @model_validator(mode="after")
    def _what_it_needs(self) -> Fault:
        targets = [key for key in ("devices", "share", "network") if getattr(self, key) is not None]
        if self.do in _OF_PODS:
            if targets:
                raise ValueError(f'"{self.do}" is done to whole pods: write pods = 1 instead of {targets[0]}')
        elif self.pods is not None:
            raise ValueError(f'"{self.do}" is done to devices: write devices = 5, share = "10%" or network instead')
        elif len(targets) != 1:
            raise ValueError(
                f'give one of devices = 5, share = "10%" or network = "uk-ftth" to say which devices "{self.do}" is for'
            )
        needs = _NEEDS.get(self.do, ())
        for key in needs:
            if getattr(self, key) is None:
                raise ValueError(f'"{self.do}" needs {key}, for example {key} = {_EXAMPLES[key]}')
        for key in _EXAMPLES:
            if getattr(self, key) is not None and key not in (*needs, *_MAY_HAVE.get(self.do, ())):
                raise ValueError(f'"{self.do}" has no {key}: leave it out')
        return self


class Churn(_Section):
    trace: FilePath | None = None  # a CSV or JSON file of sessions
    kind: Literal["poisson", "flash", "seti"] | None = None  # or sessions generated from the seed
    leave_per_minute: Rate | None = None  # of poisson: share of the devices present
    mean_away: Duration | None = None  # of poisson
    speed_up: float = Field(default=1.0, gt=0, le=1e6)  # seconds of the trace per second of the run
    offset: Duration = "0 s"  # where in the trace the run starts
    how: Literal["vanish", "leave"] = "vanish"

    @model_validator(mode="after")
    def _one_source(self) -> Churn:
        if (self.trace is None) == (self.kind is None):
            raise ValueError('give either trace = "path.csv" or kind = "poisson", "flash" or "seti", one of the two')
        poisson = {"leave_per_minute": '"30%"', "mean_away": '"20 s"'}
        for key, example in poisson.items():
            if self.kind == "poisson" and getattr(self, key) is None:
                raise ValueError(f'kind = "poisson" needs {key}, for example {key} = {example}')
            if self.kind != "poisson" and getattr(self, key) is not None:
                raise ValueError(f'{key} belongs to kind = "poisson": leave it out')
        if self.mean_away is not None and parse_duration(self.mean_away) == 0:
            raise ValueError("mean_away must be more than 0")
        return self


class Scenario(_Section):
    name: str = Field(max_length=64)
    seed: int = Field(default=0, ge=0, lt=2**63)
    model: Model
    data: Data = Data()
    training: TrainingSection
    fleet: FleetSection
    planner: PlannerSection = PlannerSection()
    links: LinksSection = LinksSection()
    clock: ClockSection = ClockSection()
    server: ServerSection = ServerSection()
    launch: Launch = Launch()
    churn: Churn | None = None
    faults: list[Fault] = []

    @model_validator(mode="after")
    def _equal_parts(self) -> Scenario:
        if self.data.batch % self.training.micro_batches:
            raise ValueError(
                f"training.micro_batches is {self.training.micro_batches}; it must divide data.batch, "
                f"which is {self.data.batch}"
            )
        return self

    @model_validator(mode="after")
    def _time_to_be_modelled(self) -> Scenario:
        if self.links.kind == "off" and self.clock.kind != "wall":
            raise ValueError(f'links.kind is "off": no time is modelled, and clock.kind = "{self.clock.kind}" has none')
        if self.launch.kind == "docker" and self.clock.kind == "virtual":
            raise ValueError('clock.kind is "virtual": nothing is started, and launch.kind = "docker" has no meaning')
        return self

    @model_validator(mode="after")
    def _what_kernel_links_need(self) -> Scenario:
        if self.links.kind == "kernel":
            if self.launch.kind != "docker":
                raise ValueError(
                    'links.kind is "kernel": only containers have interfaces of their own, set launch.kind = "docker", '
                    'or links.kind = "model"'
                )
            if self.clock.kind != "wall":
                raise ValueError(f'links.kind is "kernel": bytes travel in real time, not by "{self.clock.kind}" clock')
        return self

    @model_validator(mode="after")
    def _phones_live_in_real_time(self) -> Scenario:
        if self.fleet.phones and self.clock.kind != "wall":
            raise ValueError(
                f"fleet.phones is {self.fleet.phones}: real devices work in real time, and clock.kind is "
                f'"{self.clock.kind}"; take clock.kind = "wall", or fleet.phones = 0'
            )
        return self

    @model_validator(mode="after")
    def _no_more_than_there_are(self) -> Scenario:
        for fault in self.faults:
            if fault.devices is not None and fault.devices > self.fleet.devices:
                raise ValueError(
                    f'a fault, "{fault.do}" at {fault.at}, is for {fault.devices} devices; '
                    f"fleet.devices is {self.fleet.devices}"
                )
        return self

    @model_validator(mode="after")
    def _faults_of_containers(self) -> Scenario:
        for fault in self.faults:
            if fault.do in _OF_CONTAINERS and self.launch.kind != "docker":
                raise ValueError(
                    f'a fault, "{fault.do}" at {fault.at}, is for containers: it needs launch.kind = "docker"'
                )
        return self

    @model_validator(mode="after")
    def _traces_that_are_used(self) -> Scenario:
        for network in self.links.traces:
            if network not in self.fleet.networks:
                raise ValueError(
                    f'[links.traces] names "{network}", which no device has; [fleet.networks] has '
                    f"{', '.join(self.fleet.networks) or 'none'}"
                )
        return self

    @field_validator("name")
    @classmethod
    def _fit_for_a_folder(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError('it names a folder: letters, digits, ".", "_" and "-" only')
        return name


# ---------------------------------------------------------------------------------------------------- loading


def load_scenario(
    path_or_name: str, overrides: Mapping[str, str] = NO_FLAGS, flags: Mapping[str, str] = NO_FLAGS
) -> Scenario:
    """The checked scenario of a TOML file, or of a packaged scenario by its bare name.

    `overrides` maps dotted keys to values as text ("training.steps" -> "10"), read as TOML if valid, else as plain
    text. `flags` says how the user spelled an override ("fleet.devices" -> "--devices"); by default an error names
    `--set fleet.devices`.
    """
    file_name, text, folder, default_name = _read(path_or_name)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line, reason = split_syntax_error(error, text)
        raise ScenarioError(f"{file_name}, line {line}: {reason}") from None
    _resolve_paths(values, folder)
    values.setdefault("name", default_name)
    origins: dict[KeyPath, str] = {key: f"{file_name}, line {line}" for key, line in line_of_each_key(text).items()}
    origins[()] = file_name
    for key, value in overrides.items():
        _override(values, origins, key, value, flags.get(key, f"--set {key}"))
    try:
        return Scenario.model_validate(values)
    except ValidationError as error:
        raise ScenarioError("\n".join(_explain_all(error, origins))) from None


def parse_assignments(assignments: Iterable[str]) -> dict[str, str]:
    """{"training.steps": "10"} from ["training.steps=10"], as given after --set."""
    parsed = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip():
            raise ScenarioError(f'--set "{assignment}": write key=value, for example --set training.steps=10')
        parsed[key.strip()] = value.strip()
    return parsed


def scenario_names() -> list[str]:
    """The packaged scenarios."""
    folder = resources.files("testbed") / "scenarios"
    return sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml"))


def _read(path_or_name: str) -> tuple[str, str, Path, str]:
    """File name for messages, text, folder that relative paths start from, default name of the scenario."""
    names = scenario_names()
    if path_or_name in names:
        file_name = f"{path_or_name}.toml"
        packaged = resources.files("testbed") / "scenarios" / file_name
        return file_name, packaged.read_text(encoding="utf-8"), Path.cwd(), path_or_name
    path = Path(path_or_name).expanduser()
    if not path.is_file():
        looks_like_a_path = path.suffix == ".toml" or len(path.parts) > 1
        problem = f"there is no file {path_or_name}" if looks_like_a_path else f'unknown scenario "{path_or_name}"'
        nearest = difflib.get_close_matches(path.name.removesuffix(".toml"), names, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
        raise ScenarioError(f"{problem}; {hint}packaged scenarios: {', '.join(names)}; or give the path of a TOML file")
    try:
        return path.name, path.read_text(encoding="utf-8"), path.absolute().parent, path.stem
    except UnicodeDecodeError:
        raise ScenarioError(f"{path_or_name} is not a text file in UTF-8; a scenario is a TOML file") from None
    except OSError as error:
        raise ScenarioError(f"{path_or_name} cannot be read: {error.strerror}") from None


def _resolve_paths(values: dict[str, Any], folder: Path) -> None:
    links = values.get("links")
    traces = links.get("traces") if isinstance(links, dict) else None
    paths = [(values.get(section), key) for section, key in (("model", "config"), ("data", "text"), ("churn", "trace"))]
    paths += [(traces, network) for network in traces] if isinstance(traces, dict) else []
    for table, key in paths:
        if isinstance(table, dict) and isinstance(table.get(key), str) and table[key] != "stdlib":
            table[key] = str(folder / Path(table[key]).expanduser())


def _override(values: dict[str, Any], origins: dict[KeyPath, str], key: str, value: str, flag: str) -> None:
    path = parse_key(key)
    if path is None:
        raise ScenarioError(f"{flag}: this is not a key; write key=value, for example --set training.steps=10")
    table = values
    for depth, part in enumerate(path[:-1], start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ScenarioError(f"{flag}: {'.'.join(path[:depth])} is a value, it has no keys")
    table[path[-1]] = _parse_value(value)
    for given, alternatives in _INSTEAD.items():
        if path[: len(given)] == given:
            for alternative in alternatives:
                values[given[0]].pop(alternative, None)  # only one is allowed: setting it removes its alternatives
    _resolve_paths(values, Path.cwd())  # paths from the file are already absolute
    for known in [known for known in origins if known[: len(path)] == path]:
        del origins[known]
    origins[path] = flag


def _parse_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


# ---------------------------------------------------------------------------------------------------- explaining


def _explain_all(error: ValidationError, origins: Mapping[KeyPath, str]) -> list[str]:
    """One line per mistake; a misspelt key is not also reported as missing."""
    details = error.errors()
    unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
    meant = {(*loc[:-1], *_nearest_key(str(loc[-1]), loc[:-1])) for loc in unknown}
    return [
        _explain(detail, origins) for detail in details if detail["type"] != "missing" or detail["loc"] not in meant
    ]


def _explain(detail: Mapping[str, Any], origins: Mapping[KeyPath, str]) -> str:
    """One line for one of pydantic's errors."""
    path: KeyPath = tuple(str(part) for part in detail["loc"] if part != "[key]")
    where = next(origins[path[:depth]] for depth in range(len(path), -1, -1) if path[:depth] in origins)
    key, table = (path[-1] if path else ""), path[:-1]
    inside = f"in {_heading(table)}" if table else "at the top"
    match detail["type"]:
        case "extra_forbidden":
            return f'{where}: unknown key "{key}" {inside}{_suggest(key, table)}'
        case "missing":
            return f"{where}: [{key}] is missing" if _fields_of(path) else f'{where}: key "{key}" is missing {inside}'
        case "value_error":
            problem = str(detail["ctx"]["error"])
        case "model_type":
            problem = f"it must be a table, {_heading(path)}"
        case _:
            problem = str(detail["msg"]).replace("Input should be", "it must be").replace("'", '"')
    value = detail["input"]
    if "[key]" in detail["loc"] or isinstance(value, (dict, BaseModel)):
        return f"{where}: {problem}"
    return f'{where}: "{key}" {inside} is {json.dumps(value, default=str, ensure_ascii=False)}; {problem}'


def _heading(table: KeyPath) -> str:
    """The table's header in a file: [fleet.kinds], or [[faults]] for an item of a list."""
    name = ".".join(part for part in table if not part.isdigit())
    return f"[[{name}]]" if any(part.isdigit() for part in table) else f"[{name}]"


def _suggest(key: str, table: KeyPath) -> str:
    nearest = _nearest_key(key, table)
    if nearest:
        return f'; did you mean "{nearest[0]}"?'
    homes = [section for section in Scenario.model_fields if key in _fields_of((section,))]
    if homes:
        return f"; it belongs in {_heading((homes[0], '0') if homes[0] == 'faults' else (homes[0],))}"
    return f"; known keys: {', '.join(_fields_of(table))}"


def _nearest_key(key: str, table: Iterable[object]) -> list[str]:
    return difflib.get_close_matches(key, _fields_of(table), n=1)


def _fields_of(table: Iterable[object]) -> list[str]:
    """The keys that a table may have; none where the user chooses the keys."""
    section: Any = Scenario
    for part in table:
        if str(part).isdigit():
            continue  # index in a list of tables
        section = section.model_fields[part].annotation
        section = next((s for s in get_args(section) if isinstance(s, type) and issubclass(s, BaseModel)), section)
    return list(section.model_fields) if isinstance(section, type) and issubclass(section, BaseModel) else []


# ---------------------------------------------------------------------------------------------------- writing


def dump_scenario(scenario: Scenario) -> str:
    """The resolved scenario as TOML: every key is present, and it loads back to the same scenario."""
    return "\n".join(lines_of_table(scenario.model_dump(exclude_none=True))) + "\n"
