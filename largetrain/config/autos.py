"""Turns "auto" and what is absent in the engine JSON into numbers, each with a note that says how.

`Autos` works on a linted engine document, in place. What depends on the number of updates is done by
`complete_schedule`, which can wait until the data are known.
"""

import math
from typing import Any

from largetrain.config.decoder_spec import DecoderSpec
from largetrain.config.document import Document, KeyPath, dotted, shown
from largetrain.config.engine_schema import engine_schema, optimizer_name

# Brown et al. 2020, table 2.1: parameters -> peak learning rate of Adam.
GPT3_LEARNING_RATES = (
    (125e6, 6.0e-4), (350e6, 3.0e-4), (760e6, 2.5e-4), (1.3e9, 2.0e-4),
    (2.7e9, 1.6e-4), (6.7e9, 1.2e-4), (13e9, 1.0e-4), (175e9, 0.6e-4),
)  # fmt: skip
ADAMS = ("Adam", "AdamW")
# The same paper, appendix B.
GPT3_ADAM = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
WARMUP_SHARE = 0.03
PARAMS = ("optimizer", "params")
SCHEDULE = ("scheduler", "params")
ZERO = "zero_optimization"


class Autos:
    """Resolves one engine document; `problems` and `notes` hold a line for each decision."""

    def __init__(self, engine: Document, decoder: DecoderSpec | None, own_optimizer_needed: bool = False) -> None:
        self.engine = engine
        self.own_optimizer_needed = own_optimizer_needed  # for models whose learning rate cannot be guessed
        self.decoder = decoder
        self.problems: list[str] = []
        self.notes: list[str] = []

    def resolve(self) -> None:
        """Everything that does not depend on the number of updates."""
        self._precision()
        self._clipping()
        self._optimizer()
        self._peak()
        self._buckets()
        self._deepspeed_defaults(self.engine.data, engine_schema(), ())

    def _precision(self) -> None:
        for key in ("fp16", "bf16", "bfloat16"):
            if self.engine.get((key, "enabled")) == "auto":
                text = '"auto" leaves the precision open; write true or false.'
                self.problems.append(self.engine.problem((key, "enabled"), text))

    def _clipping(self) -> None:
        path = ("gradient_clipping",)
        value = self.engine.get(path)
        if value is None or value == "auto":
            why = "auto" if value == "auto" else "not given; DeepSpeed clips at 1.0 then. 0 switches clipping off"
            self._put(path, 1.0, why)
        elif value == 0:
            self.notes.append("gradient_clipping = 0 (clipping is off)")

    def _optimizer(self) -> None:
        if "optimizer" not in self.engine.data and self.own_optimizer_needed:
            text = "is missing; write one with its type and params.lr, here or in the run config's engine section."
            self.problems.append(self.engine.problem(("optimizer",), text))
            self.engine.set(("optimizer",), {"type": "AdamW", "params": {"lr": 1e-3}})  # a stand-in, as below
        if "optimizer" not in self.engine.data:
            self.engine.set(("optimizer",), {"type": "AdamW", "params": {"lr": "auto"}})
            self.notes.append("optimizer = AdamW (not given)")
        if not isinstance(self.engine.get(PARAMS), dict):
            self.engine.set(PARAMS, {})
        name = optimizer_name(str(self.engine.get(("optimizer", "type"))))
        defaults = self._class_defaults(name)
        params = self.engine.get(PARAMS)
        if params.get("lr") == "auto":
            self._learning_rate(name)
        elif "lr" not in params and "lr" in defaults:
            self._put((*PARAMS, "lr"), defaults["lr"], f"not given; the default of {name}")
        elif "lr" not in params:
            text = f"the key lr is missing, and {name} has no default for it; write a number."
            self.problems.append(self.engine.problem(PARAMS, text))
            self.engine.set((*PARAMS, "lr"), 1e-3)  # a stand-in, so that the other mistakes are found too
        for key in ("betas", "eps", "weight_decay"):
            if params.get(key) == "auto":
                if name in ADAMS and self.decoder is not None:
                    self._put((*PARAMS, key), GPT3_ADAM[key], "auto: as GPT-3")
                else:
                    self._put((*PARAMS, key), defaults.get(key), f"auto: the default of {name}")

    def _class_defaults(self, name: str | None) -> dict[str, Any]:
        if name is None:
            return {}
        properties = engine_schema()["x-optimizers"][name]["classes"]["default"].get("properties", {})
        return {key: node["default"] for key, node in properties.items() if "default" in node}

    def _learning_rate(self, name: str | None) -> None:
        path = (*PARAMS, "lr")
        if self.decoder is None or name not in ADAMS:
            reason = f"for {name}" if self.decoder is not None else "for a model of your own"
            text = f'"auto" is known for Adam and AdamW on the built-in decoder, not {reason}; write a number.'
            self.problems.append(self.engine.problem(path, text))
            self.engine.set(path, 1e-3)  # a stand-in, so that the other mistakes are found too
            return
        count = self.decoder.parameter_count()
        size, rate = min(GPT3_LEARNING_RATES, key=lambda row: abs(math.log(row[0] / count)))
        self._put(path, rate, f"auto: GPT-3's for {size / 1e6:,.0f}M parameters; this model has {count / 1e6:,.1f}M")

    def _peak(self) -> None:
        """The peak of a warm-up schedule follows the optimizer: DeepSpeed's own default (0.001) would replace it."""
        kind, rate = self.engine.get(("scheduler", "type")), self.engine.get((*PARAMS, "lr"))
        if kind not in ("WarmupLR", "WarmupDecayLR"):
            return
        if not isinstance(self.engine.get(SCHEDULE), dict):
            self.engine.set(SCHEDULE, {})
        params = self.engine.get(SCHEDULE)
        if params.get("warmup_min_lr") == "auto":
            self._put((*SCHEDULE, "warmup_min_lr"), 0.0, "auto")
        if params.get("warmup_max_lr") in (None, "auto"):
            self._put((*SCHEDULE, "warmup_max_lr"), rate, "the optimizer's lr")
        elif params["warmup_max_lr"] != rate:
            peak = params["warmup_max_lr"]
            self.notes.append(
                f"the peak learning rate is scheduler.params.warmup_max_lr = {peak}, not optimizer lr = {rate}"
            )
        low, high = params.get("warmup_min_lr", 0.0), params["warmup_max_lr"]
        if low > high:
            text = f"{shown(low)} is more than the peak {shown(high)}; lower it."
            self.problems.append(self.engine.problem((*SCHEDULE, "warmup_min_lr"), text))

    def _buckets(self) -> None:
        hidden = self.decoder.hidden if self.decoder is not None else None
        sizes = {
            "reduce_bucket_size": (lambda h: h * h, "hidden^2"),
            "stage3_prefetch_bucket_size": (lambda h: 9 * h * h // 10, "0.9 hidden^2"),
            "stage3_param_persistence_threshold": (lambda h: 10 * h, "10 hidden"),
        }
        for key, (size, formula) in sizes.items():
            if self.engine.get((ZERO, key)) != "auto":
                continue
            if hidden is not None:
                self._put((ZERO, key), size(hidden), f"auto: {formula}")
            else:
                default = engine_schema()["properties"][ZERO]["properties"][key]["default"]
                self._put((ZERO, key), default, "auto: DeepSpeed's default")

    def _deepspeed_defaults(self, value: dict[str, Any], node: dict[str, Any], path: KeyPath) -> None:
        """Write DeepSpeed's default for every remaining "auto" of a key whose reader takes it as "not given"."""
        for key, below in list(value.items()):
            below_node = node.get("properties", {}).get(key, {})
            if isinstance(below, dict):
                self._deepspeed_defaults(below, below_node, (*path, key))
            elif below == "auto" and (below_node.get("x-auto") == "default" or key == "use_node_local_storage"):
                self.engine.remove((*path, key))
                self.notes.append(
                    f"{dotted((*path, key))} = {shown(below_node.get('default'))} (auto: DeepSpeed's default)"
                )

    def _put(self, path: KeyPath, value: Any, why: str) -> None:
        self.engine.set(path, value)
        self.notes.append(f"{dotted(path)} = {shown(value)} ({why})")


def complete_schedule(engine: dict[str, Any], total_steps: int) -> list[str]:
    """Fill in what a schedule needs to know of the run's length, in place; one note for each number."""
    notes: list[str] = []
    params = (engine.get("scheduler") or {}).get("params")
    if not isinstance(params, dict):
        return notes
    if params.get("total_num_steps") == "auto":
        params["total_num_steps"] = total_steps
        notes.append(f"scheduler.params.total_num_steps = {total_steps} (auto: the run's updates)")
    total = params.get("total_num_steps", total_steps)
    if params.get("warmup_num_steps") == "auto":
        params["warmup_num_steps"] = max(1, math.ceil(WARMUP_SHARE * total))
        notes.append(f"scheduler.params.warmup_num_steps = {params['warmup_num_steps']} (auto: 3 % of {total})")
    if total != total_steps:
        notes.append(f"the schedule is laid out for {total} updates, the run makes {total_steps}")
    if params.get("warmup_num_steps", 0) > total_steps:
        notes.append(f"the warm-up of {params['warmup_num_steps']} updates is longer than the run of {total_steps}")
    return notes
