"""Every knob of Eyrie, once: its type, its default, and what it means."""

from dataclasses import dataclass, field
from typing import Any

from conf.choices import (
    AnswerBackend,
    Attention,
    CaptureMode,
    Device,
    DraftAttentionKind,
    DraftFamily,
    EvalRule,
    ExportFormat,
    Feed,
    Gpu,
    HeadInit,
    LayerInit,
    LossKind,
    MissingStates,
    Normalise,
    OptimKind,
    Phrases,
    Precision,
    Stage,
    StateBackend,
    StateDtype,
    StepKind,
    StepWeights,
    Supervise,
    Verify,
)

MISSING: Any = "???"  # what OmegaConf reads as "must be given"; the schema needs no library
HUB = "hub:"  # opens the name of a hub data set among paths


FULL = "full"  # of draft.vocab_size: the head scores every token of the verifier
MOST_LAYERS = 16  # of a draft: it runs once a guess, a deeper one is a verifier of its own


class ConfigError(ValueError):
    """A setting a person can mend. The message names knob, value, rule and way out."""


class JobError(RuntimeError):
    """What stopped a job whose settings were in order. The message names it and the way out."""


@dataclass
class RunSection:
    name: str = "demo"  # runs/<name>/ holds everything this run writes
    root: str = "runs"  # folder of all runs
    cache: str = "cache"  # prepared data and hidden states, shared by runs
    seed: int = 0  # data order and initialisation
    device: Device = Device.auto  # auto takes CUDA where it is there


@dataclass
class VerifierSection:
    path: str = MISSING  # local directory, hub name, or wheel:<distribution>==<version>
    dtype: Precision = Precision.bfloat16  # precision of regenerate and capture
    attention: Attention = Attention.sdpa  # the library's attention implementation
    # Streams after n decoder layers, -1 after the last; null: [2, L//2, L-3]
    aux_layers: list[int] | None = None
    trust_remote_code: bool = False  # run Python code that ships with the weights


@dataclass
class DraftSection:
    family: DraftFamily = DraftFamily.eagle3
    vocab_size: int | str = 32000  # most frequent supervised tokens; full: the verifier's every one
    head_init: HeadInit = HeadInit.verifier
    # A head whose weights and vocabulary training starts from: a best/ folder, or one that others
    # published; null: a new one. Its own rows begin the head, but for head_init=frozen.
    init: str | None = None
    layers: int = 1  # decoder layers; of medusa: residual blocks a head
    layer_init: LayerInit = LayerInit.random  # what the decoder layers start from
    # First guesses on which a linear start is fitted, where draft.init brings none; null: no fit
    fit_rows: int | None = None
    width: int | None = None  # of model without init; null: a quarter of the verifier's
    intermediate_size: int | None = None  # MLP width; null: as models/layer_shape.py says
    max_positions: int | None = None  # position limit; null: the verifier's
    norm_before_residual: bool = False  # layer-0 residual is the normed state
    norm_before_fc: bool = False  # one RMSNorm over the concatenated aux states
    fc_norm: bool = False  # one RMSNorm an aux state
    norm_output: bool = False  # feed back the state after the final norm (EAGLE-3.1)
    qk_norm: bool = False  # one RMSNorm over each head of query and key before RoPE (Qwen3)
    phrases: Phrases = Phrases.both  # of ngram: where phrases are looked up
    order: int = 4  # of ngram: tokens of the longest phrase, the guessed one included


@dataclass
class DataSection:
    # Conversation files (json, jsonl, either also .gz or .zst; parquet), folders of them, and hub
    # data sets as hub:OWNER/NAME, hub:OWNER/NAME:CONFIG or hub:OWNER/NAME:CONFIG@SPLIT (train)
    path: list[str] = field(default_factory=list)
    max_length: int = 2048  # tokens a sample; longer ones are cut after the last whole token
    valid_share: float = 0.05  # share of conversation ids held out for acceptance
    max_samples: int | None = None  # read at most so many conversations
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # arguments for the chat template
    last_turn_only: bool = False  # supervise the last answer of a conversation alone
    drop_cut: bool = False  # leave out rows whose answer was cut by a length limit
    weights: list[float] | None = (
        None  # one an entry of path: that share of its conversations is taken; null: all of each
    )
    dedupe: bool = False  # leave out exact copies; sampled answers may well repeat each other
    workers: int | None = None  # processes; null: one a core, 16 at most, 1 for a few rows


@dataclass
class RegenerateSection:
    prompts: list[str] = field(default_factory=list)  # files whose user turns are answered
    output: str = "answers.jsonl"  # written in prompt order; a rerun continues it
    max_new_tokens: int = 512  # limit of one answer; a cut answer is marked
    greedy: bool = True  # one greedy answer a prompt
    samples: int = 0  # sampled answers a prompt, besides
    temperature: float = 0.7  # of the sampled answers
    top_p: float = 0.95  # of the sampled answers
    backend: AnswerBackend = AnswerBackend.builtin
    batch_size: int = 64  # builtin: answers generated side by side
    base_url: str | None = None  # openai: the server, as http://localhost:8000/v1
    model: str | None = None  # openai: the verifier's name there; null: the only one it serves
    api_key_env: str | None = None  # openai: environment variable that holds the key
    concurrency: int = 64  # openai: requests under way at once
    retries: int = 5  # openai: more tries of a request that failed for no fault of its own
    timeout: float = 600.0  # openai: seconds until an answer must be there
    breaker: int = 5  # openai: requests that fail one after the other, tries and all, end the job


@dataclass
class CaptureSection:
    mode: CaptureMode = CaptureMode.cache  # online holds the verifier beside the draft
    dtype: StateDtype = StateDtype.bfloat16  # precision of the stored states
    batch_tokens: int = 4096  # tokens of one verifier forward, padding included
    shard_mib: int = 1024  # size of one shard
    verify: Verify = Verify.sampled  # what of a cache that is there is compared with its checksums
    tolerance: float | None = None  # error allowed of logits from the stored states, relative to
    # their root mean square; null: 0.02, in fp8 0.1 (another layer's state is 1 away)
    backend: StateBackend = StateBackend.transformers  # who computes the states
    tensor_parallel: bool = False  # of transformers: all ranks hold one verifier together
    chunk_tokens: int = 65536  # of layers: tokens that pass a layer while it is in memory, and that
    # a shard holds at least; of vllm: tokens handed to it together, never more than a shard's
    dumped: str | None = None  # of dumped: folder of vLLM's or speculators' hidden-state files
    missing: MissingStates = MissingStates.refuse  # of dumped: samples without a file
    vllm_python: str | None = None  # of vllm: the Python that has it; null: the one that runs this
    vllm_args: dict[str, Any] = field(default_factory=dict)  # of vllm: more arguments for its LLM
    parts: int = 1  # captures, each started by itself, that share the shards of one cache
    part: int = 0  # which of them this one is: it writes the shards whose number leaves that rest
    # Also keep shards and manifest there, and read them from there: an fsspec URL, as
    # s3://BUCKET/PREFIX or file:///MOUNTED/FOLDER; null: in run.cache alone
    store: str | None = None
    stage_gib: float | None = None  # of store: GiB of its shards on the disk of run.cache at most,
    # the least recently used make room; null: all that were written or read stay
    min_agreement: float = 0.15  # no training below this share of top-1 choices; 0: train anyway


@dataclass
class PreviewSection:
    samples: int = 200  # on the page that data.preview writes
    page: str | None = None  # its file; null: preview.html beside the prepared samples


@dataclass
class TTTSection:
    depth: int = 7  # unroll steps K: as deep as you will draft, or less with draft.norm_output
    decay: float = 0.8  # weight of step k is decay**k
    weights: StepWeights = StepWeights.decay  # what step k of a chain weighs
    supervise: Supervise = Supervise.span
    feed: Feed = Feed.data  # tokens that steps after the first are fed with


@dataclass
class LossSection:
    kind: LossKind = LossKind.kl
    normalise: Normalise = Normalise.token


@dataclass
class OptimSection:
    kind: OptimKind = OptimKind.adamw
    lr: float = 1e-4  # peak learning rate
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0
    average: float | None = None  # decay of an average of the weights, which is measured and kept
    # as best/ in their place; null: the weights themselves
    clip: float = 0.5  # largest global gradient norm
    warmup_share: float = 0.04  # share of all steps with rising learning rate
    min_lr_share: float = 0.1  # end of the cosine, as a share of lr
    packs_per_step: int = 8  # packs an optimizer step, over all ranks
    micro_batch_tokens: int = (
        8192  # tokens of a pack, a rank's forward; a longer sample is one alone
    )
    epochs: float = 2.0  # passes over the training samples
    max_steps: int | None = None  # stop here, whatever epochs says
    flops: float | None = None  # training FLOPs in place of epochs: passes that cost as much


@dataclass
class EngineSection:
    precision: Precision = Precision.bfloat16  # bfloat16 keeps float32 masters
    zero_stage: int = 1  # DeepSpeed ZeRO stage 0..3
    attention: DraftAttentionKind = DraftAttentionKind.auto  # kernel of the draft's attention
    compile: bool = False  # torch.compile around the products; on a CPU it needs a C++ compiler
    recompute: bool = False  # keep an unroll step's states and keys only, compute the rest twice
    threads: int | None = None  # CPU threads a rank; null: cores divided by local ranks
    timeout_minutes: float = 60.0  # a rank that stands still so long ends the job
    deepspeed: dict[str, Any] = field(default_factory=dict)  # passed through to DeepSpeed as it is


@dataclass
class LogSection:
    every: int = 10  # steps between two metric lines
    valid_every: int = 100  # steps between two held-out acceptance runs
    save_every: int = 200  # steps between two checkpoints
    breakdown: int = 0  # print where the time of so many steps goes, from the fourth on; 0: none
    keep: int = 2  # checkpoints kept, the best head apart
    wandb: bool = False  # also log to Weights & Biases (offline unless logged in)
    project: str = "eyrie"  # its project


@dataclass
class EvalSection:
    prompts: list[str] = field(
        default_factory=list
    )  # prompt files; a task name a line is reported on its own; gsm8k:FILE for a named set
    head: str | None = None  # folder of the head to measure, published ones too; null: the run's
    max_prompts: int | None = None  # for counters and losslessness; null: all
    speed_prompts: int = 12  # for the speed measurement
    max_new_tokens: int = 64
    stop: list[str] = field(
        default_factory=list
    )  # an answer ends with the token that completes one
    n_draft: int = 4  # draft tokens a round, for counters and losslessness
    n_sweep: list[int] = field(default_factory=lambda: [1, 2, 3, 4, 5])  # chain lengths timed
    trees: list[str] = field(default_factory=list)  # timed too, as 2x2x2; conf/shapes.py has all
    valid_depth: int = 5  # draft tokens a round of the held-out acceptance during training
    batch: int = 1  # sequences side by side, for counters and losslessness
    batch_sizes: list[int] = field(default_factory=lambda: [1])  # of the speed measurement
    repeats: int = 1  # times every method answers every timed prompt; the median counts
    speed_dtype: Precision = Precision.bfloat16
    step: StepKind = StepKind.auto  # how the verifier's steps run, with and without the draft
    assistant: str | None = None  # folder of a small model, for the library's assisted generation
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # keep so many of the likeliest tokens; 0: all
    top_p: float = 1.0  # keep the fewest likeliest tokens that hold this mass
    min_p: float = 0.0  # keep tokens at least so likely, relative to the likeliest
    rule: EvalRule = EvalRule.auto
    temperatures: list[float] = field(default_factory=list)  # acceptance is measured there, too
    bootstrap: int = 2000  # resamples behind an interval


@dataclass
class ExportSection:
    formats: list[ExportFormat] = field(default_factory=lambda: [ExportFormat.vllm])
    licence: str | None = None  # of the head, for its card, as hubs spell it: apache-2.0


@dataclass
class PlanSection:
    """Of launch.plan alone; no stage reads it."""

    tokens: float = 1e9  # of the training samples, prompts included
    supervised_share: float = 0.5  # of them: tokens of answers
    sample_tokens: int = 1024  # of a sample on average: one prompt and its answer
    gpus: int = 8
    gpu: Gpu = Gpu.h100
    node_gpus: int = 8  # GPUs of one machine
    price: float | None = None  # of one GPU for an hour, in any currency; null: no cost is said
    train_mfu: float = 0.4  # assumed share of the GPU's peak that training reaches
    forward_mfu: float = 0.5  # and the verifier's forward
    read_gbs: float = 4.0  # gigabytes a second that one machine reads and writes of the cache
    disk_tb: float | None = None  # terabytes there are for the cache; null: not judged
    check: bool = False  # also run a small job on this machine, and compare the plan with it


@dataclass
class RunConfig:
    stages: list[Stage] = field(default_factory=lambda: list(Stage))
    run: RunSection = field(default_factory=RunSection)
    verifier: VerifierSection = field(default_factory=VerifierSection)
    draft: DraftSection = field(default_factory=DraftSection)
    data: DataSection = field(default_factory=DataSection)
    regenerate: RegenerateSection = field(default_factory=RegenerateSection)
    preview: PreviewSection = field(default_factory=PreviewSection)
    capture: CaptureSection = field(default_factory=CaptureSection)
    ttt: TTTSection = field(default_factory=TTTSection)
    loss: LossSection = field(default_factory=LossSection)
    optim: OptimSection = field(default_factory=OptimSection)
    engine: EngineSection = field(default_factory=EngineSection)
    log: LogSection = field(default_factory=LogSection)
    eval: EvalSection = field(default_factory=EvalSection)
    export: ExportSection = field(default_factory=ExportSection)
    plan: PlanSection = field(default_factory=PlanSection)
