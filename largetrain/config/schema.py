"""The run YAML: every section and key, with its type, range, default and meaning.

The attribute docstrings are the reference that `largetrain config --reference` prints.
No section bears the name of a key of the engine JSON, so that `--set` can tell them apart.
Imports neither torch nor deepspeed.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

STRICT = ConfigDict(
    extra="forbid",
    strict=True,
    frozen=True,
    use_attribute_docstrings=True,
    allow_inf_nan=False,
    protected_namespaces=(),
)
Auto = Literal["auto"]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
# Upper ends are far beyond any machine; they keep a slip of the keyboard from looping or overflowing somewhere below.
Count = Annotated[int, Field(gt=0, le=10**12)]
CountOrNone = Annotated[int, Field(ge=0, le=10**12)]
Size = Annotated[int, Field(gt=0, le=10**8)]
Layers = Annotated[int, Field(gt=0, le=10**5)]
Processes = Annotated[int, Field(ge=0, le=10**4)]


class Section(BaseModel):
    """A strict, frozen section: unknown keys and loose types are refused."""

    model_config = STRICT


class ModelBase(Section):
    """What every model section has."""

    target: str | None = None
    """`package.module:Name` of your own torch.nn.Module; replaces the built-in model."""
    args: dict[str, Any] = {}
    """Keyword arguments of `target`."""


class DataBase(Section):
    """What every data section has."""

    target: str | None = None
    """`package.module:Name` of your own map-style dataset of dicts; replaces the built-in sources."""
    args: dict[str, Any] = {}
    """Keyword arguments of `target`; `split` ("train" or "validation") is added."""
    workers: Processes = 0
    """Loader processes per rank."""


class ModelConfig(ModelBase):
    """What is trained: a decoder-only transformer by preset and sizes, or your own class by `target`."""

    preset: str = "demo"
    """A named size (see `largetrain config --reference`); every other key of this section overrides it."""
    style: Literal["gpt", "llama"] | None = None
    """`gpt`: learned positions, LayerNorm, GELU, biases. `llama`: rotary, RMSNorm, SwiGLU, no biases."""
    vocab_size: Size | Auto = "auto"
    """Rows of the embedding; `auto` takes the tokenizer's size."""
    layers: Layers | None = None
    """Transformer blocks."""
    hidden: Size | None = None
    """Width of the residual stream."""
    heads: Size | None = None
    """Attention heads; must divide `hidden`."""
    kv_heads: Size | None = None
    """Key/value heads (grouped-query attention); must divide `heads`. Absent: as `heads` when that is given."""
    ffn_hidden: Size | None = None
    """Inner width of the feed-forward layer. Absent: follows `hidden` or `style` when one of them is given."""
    seq_len: Size | None = None
    """Tokens per sample, and the longest context."""
    tie_embeddings: bool | None = None
    """Share the input embedding with the output head."""
    dropout: Fraction = 0.0
    """Dropout on the embedding, the attention weights and each residual branch."""
    norm_eps: PositiveFloat | None = None
    """Epsilon of LayerNorm or RMSNorm."""
    rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies (`llama`)."""
    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass instead of keeping them."""
    loss_chunk_tokens: Size | Auto = "auto"
    """Tokens per chunk of the output head and loss, so that large logits never exist at once; `auto`: as many as make
    64 Mi logits, 256 MiB in fp32. A batch that needs several chunks computes the head twice."""


class DataConfig(DataBase):
    """Where the text comes from and how it is cut into samples."""

    source: str | list[str] = "builtin"
    """`builtin` (Python's language reference and standard library), or files and folders of .txt, .jsonl, .jsonl.gz."""
    validation: str | list[str] | None = None
    """Separate validation files; absent: `validation_fraction` of the documents of `source`."""
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Share held out when `validation` is absent: documents chosen by content, or the end of the text where there are
    too few of them."""
    tokenizer: str = "bytes"
    """`bytes` (256 values and an end-of-text token), or the path of a Hugging Face `tokenizer.json`; its end-of-text
    token comes from `tokenizer_config.json` beside it or from the usual names."""
    text_key: str = "text"
    """Key of the text in each JSON line."""
    on_bad_input: Literal["error", "skip"] = "error"
    """Undecodable text or broken JSON lines: stop with file and line, or skip and count."""
    cache: str | None = None
    """Folder of tokenized files, keyed by content; absent: `$XDG_CACHE_HOME/largetrain`."""


class EvaluationConfig(Section):
    """Evaluation in the loop, on every validation sample exactly once."""

    every_steps: CountOrNone = 0
    """Updates between evaluations; 0: only at the end of training."""
    every_epochs: PositiveFloat | None = None
    """The same in passes over the training data; give one of the two."""
    at_end: bool = True
    """Evaluate after the last update."""
    max_samples: Count | None = None
    """Use only the first so many validation samples; absent: all."""


class CheckpointsConfig(Section):
    """When the run's state is written."""

    every_steps: CountOrNone = 0
    """Updates between checkpoints; 0: only at the end of training."""
    every_epochs: PositiveFloat | None = None
    """The same in passes over the training data; give one of the two."""
    at_end: bool = True
    """Write one after the last update."""
    every_minutes: PositiveFloat | None = None
    """Also write one when so many minutes have passed since the last."""
    asynchronous: bool = True
    """Write in the background: training stops only while the state is copied to host memory, of which it takes as much
    again. The last one, and one on a signal, are waited for."""
    keep_last: CountOrNone = 2
    """Newest checkpoints of this run to keep; 0 keeps all."""
    keep_every_steps: CountOrNone = 0
    """Checkpoints whose step is a multiple of this are never deleted; 0: none for this reason."""
    milestones: list[Count] = []
    """Updates after which a checkpoint is written and never deleted."""
    best: str | None = None
    """Figure of the evaluation, such as `top1`, `miou` or `loss`, whose best value is kept: a checkpoint is written at
    each new best, `checkpoints/best` names it, and it is never deleted. Of `loss` and `perplexity` the smallest is
    best, of all others the largest."""


class LoggingConfig(Section):
    """What is reported, and how often."""

    every_steps: Count = 10
    """Updates between lines on a redirected terminal; the metrics file has every update."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of one device, for MFU; absent: known figures by device name."""


class GuardConfig(Section):
    """When a run that does not learn is stopped."""

    max_skipped_in_a_row: Count = 25
    """Stop, with a checkpoint, after so many skipped updates in a row (non-finite loss or gradients)."""


class RuntimeConfig(Section):
    """The process itself."""

    threads: Annotated[int, Field(gt=0, le=10**4)] | Auto = "auto"
    """CPU threads per rank; `auto`: OMP_NUM_THREADS if set, else the host's cores divided by its ranks."""
    timeout_s: Annotated[int, Field(gt=0, le=10**7)] = 1800
    """Longest wait of a collective before the run is given up, in seconds."""


class ScheduleConfig(Section):
    """Learning rate over the updates; takes the place of the engine JSON's `scheduler`, which has no step and no poly
    decay. Update k of T, with a warm-up of W updates, takes the optimizer's rate times: k / W during the warm-up (from
    `warmup_start`), then the decay at x = (k - 1 - W) / (T - W), never less than `final`."""

    type: Literal["constant", "step", "poly", "cosine"] = "cosine"
    """`constant`; `step`: `gamma` at each milestone; `poly`: (1 - x) ** `power`; `cosine`: (1 + cos(pi x)) / 2."""
    warmup: Annotated[float, Field(ge=0.0, le=1e9)] = 0.0
    """Length of the warm-up in epochs."""
    warmup_start: Fraction = 0.0
    """Factor that the warm-up starts from."""
    milestones: list[PositiveFloat] = []
    """Epochs after which `step` multiplies by `gamma`."""
    gamma: PositiveFloat = 0.1
    """Factor at each milestone of `step`."""
    power: PositiveFloat = 0.9
    """Exponent of `poly`."""
    final: Fraction = 0.0
    """Smallest factor that the decay reaches."""


class ParametersConfig(Section):
    """What differs between parameters, beside the engine JSON's optimizer."""

    norm_weight_decay: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    """Weight decay of normalisation layers' parameters; absent: the optimizer's."""
    bias_weight_decay: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    """Weight decay of biases; absent: the optimizer's."""
    lr_factors: dict[str, Annotated[float, Field(ge=0.0, le=1e6)]] = {}
    """Parameter name prefix, such as `backbone` or `classifier`, -> factor on the learning rate; 0 freezes. The longest
    prefix that fits holds."""
    lr_for_batch: Count | None = None
    """Global batch that the optimizer's learning rate is meant for: it is multiplied by global batch / this (Goyal et
    al. 2017). Absent: the rate is as written for any batch."""


class EmaConfig(Section):
    """An exponential moving average of the weights, evaluated beside them and kept in checkpoints (backend `ddp`)."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.9999
    """Share of the average that each step keeps."""
    every_steps: Count = 1
    """Updates between steps of the average."""
    warmup_epochs: Annotated[float, Field(ge=0.0, le=1e9)] = 0.0
    """During the first so many epochs the average is a copy of the weights."""


class ParallelConfig(Section):
    """How a model is divided over ranks; what is left of the ranks is data parallelism."""

    tensor_parallel: Size = 1
    """Ranks that share each matrix of every layer (Shoeybi et al. 2019); keep them on one host."""
    sequence_parallel: bool = False
    """Divide norms, dropout and residuals over the tensor-parallel ranks too, along the sequence (Korthikanti et al.
    2022): less memory for activations, for two more all-gathers in each layer."""
    pipeline_stages: Size = 1
    """Groups of ranks that each hold some of the layers; micro-batches (gradient_accumulation_steps) pass through."""
    partition: str | list[Size] = "cost"
    """How layers are divided into stages: `cost` (estimated time), `parameters`, `uniform`, `time` (measured at the
    start), `type:REGEX` (equally many layers whose class name fits), or the number of layers of each stage."""
    pipeline_schedule: Literal["1f1b", "dualpipev"] = "1f1b"
    """`1f1b` (Narayanan et al. 2021), or `dualpipev` (DeepSeek-AI 2024): every stage holds two runs of layers, the
    first and the last one the ends of the model, and waits about a quarter less; sends twice as much, keeps more
    activations, and takes at least 2 x pipeline_stages micro-batches. A `partition` list then names the runs."""
    recompute_stages: list[CountOrNone] | None = None
    """Stages whose blocks are recomputed in the backward pass, where `model.activation_checkpointing` is not for all:
    early stages hold most micro-batches."""
    ulysses: Size = 1
    """Ranks that share each sequence, and exchange heads for positions around attention (Jacobs et al. 2023)."""

    @property
    def runs(self) -> int:
        """Runs of layers that the model is cut into."""
        return self.pipeline_stages * (2 if self.pipeline_schedule == "dualpipev" else 1)


class RunConfig(Section):
    """One run: model, data, length, evaluation, checkpoints, logging. The task decides what model and data hold."""

    task: str = "language_modeling"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "demo"
    """Name of the run; part of the default output folder."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 1234
    """Seed of initial weights, data order, dropout and augmentation."""
    steps: Count | None = None
    """Optimizer updates to run; give this or `epochs`. Neither: 300 steps."""
    epochs: Annotated[float, Field(gt=0.0, le=1e9)] | None = None
    """Passes over the training data instead of `steps`."""
    max_minutes: PositiveFloat | None = None
    """Stop with a checkpoint and exit code 75 so many minutes after the process started, for a job with a time limit;
    leave time to write it. `--resume auto` goes on."""
    init_from: str | None = None
    """Weights to begin with, at update 0 with a fresh optimizer: a checkpoint or run of ours, a .safetensors file, a
    PyTorch file of a state_dict, or a folder with a Hugging Face GPT-2 or Llama model. A resumed run has its own."""
    init_missing: list[str] = []
    """Prefixes of parameter names that `init_from` may lack or have in another shape, such as a new `classifier`; they
    keep their random values. Any other difference is an error."""
    output: str | None = None
    """Output folder; absent: `runs/<name>-<time>/`."""
    backend: Literal["auto", "deepspeed", "pipeline", "ddp"] = "auto"
    """What runs the optimizer steps. `auto`: `pipeline` with several `parallel.pipeline_stages`, `ddp` for a model with
    trained batch normalisation or with at least half of its parameters in convolutions, else `deepspeed`."""
    sync_batch_norm: Literal["auto", "on", "off"] | bool = "auto"
    """Batch statistics over all ranks. `auto`: on with several ranks and either dense prediction, fewer than 16 images
    per rank, or a batch norm that sees 1x1 maps."""
    sync_batch_norm_ranks: Count | Literal["all", "node"] = "all"
    """Ranks that share batch statistics: all, those of one host, or so many neighbours."""
    model: ModelBase = ModelConfig()
    data: DataBase = DataConfig()
    engine: dict[str, Any] = {}
    """Keys of the engine JSON that this run needs otherwise; they go over the file of `--ds_config`. An optimizer or
    scheduler with a `type` replaces the file's whole section; null takes a key out."""
    parallel: ParallelConfig = ParallelConfig()
    schedule: ScheduleConfig | None = None
    parameters: ParametersConfig = ParametersConfig()
    ema: EmaConfig | None = None
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    logging: LoggingConfig = LoggingConfig()
    guard: GuardConfig = GuardConfig()
    runtime: RuntimeConfig = RuntimeConfig()


class LanguageRun(RunConfig):
    """Next-token prediction on text."""

    task: Literal["language_modeling"] = "language_modeling"
    """`language_modeling`, `classification` or `segmentation`: decides which keys model and data have."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
