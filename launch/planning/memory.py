"""The memory of a plan: what one GPU holds while it captures and while it trains."""

from dataclasses import dataclass, fields, replace

from conf.schema import Precision, StateBackend
from data.loader import AHEAD
from data.shard_plan import MIN_SHARDS
from launch.planning.question import Question
from train.loss import CHUNK_LOGITS

STREAM = 4  # bytes of the residual stream, the optimizer's numbers and softmax: fp32
MIB = 1 << 20
BUCKET = 5e8  # elements; DeepSpeed's reduce_bucket_size unless engine.deepspeed has another


@dataclass(frozen=True)
class Parts:
    """Bytes on one GPU, by what holds them."""

    weights: float = 0.0  # trained ones, or the verifier's
    frozen: float = 0.0  # embedding and teacher
    gradients: float = 0.0
    optimizer: float = 0.0
    states: float = 0.0  # the verifier's, of one batch
    kept: float = 0.0  # for the backward
    work: float = 0.0  # comes and goes: the largest of what is never there together

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))


def capture_memory(asked: Question) -> Parts:
    """Weights + states + work.

    Weights: 2 bytes a parameter in bf16, 4 in fp32. Split over all ranks with
    capture.tensor_parallel, of which embedding, norm and head stay whole; with
    capture.backend=layers one decoder layer beside these. States: batch_tokens rows of A streams
    as hooked, their concatenation, and the packed copy with its rounded twin; the last state
    likewise. On a CPU also two shards, one filled and one written, of the size that
    data/shard_plan.py gives them. Work: what one layer computes, residual and its norm, query,
    keys, values, output (3*D + 2*Q) and three products of the MLP (3*I); then, these gone, the
    copies of the states.
    """
    cfg, verifier = asked.cfg, asked.verifier
    width = 2 if cfg.verifier.dtype is Precision.bfloat16 else 4
    layers = verifier.parameters - verifier.outside
    if cfg.capture.backend is StateBackend.layers:
        layers = verifier.largest_layer
    elif cfg.capture.tensor_parallel:
        layers /= asked.gpus
    rows = max(cfg.capture.batch_tokens, asked.sample.tokens)
    aux = len(verifier.facts.aux_layers) * verifier.width
    inner = 3 * verifier.width + 2 * verifier.queries + 3 * verifier.mlp
    share = asked.sample.asking / asked.sample.tokens
    packed = aux + share * verifier.width
    host = 0.0
    if asked.device == "cpu":
        host = 2 * min(cfg.capture.shard_mib * MIB, asked.stored_bytes / MIN_SHARDS)
    return Parts(
        weights=width * (layers + verifier.outside),
        states=rows * width * aux + host,
        work=rows * width * max(inner, aux + verifier.width + 2 * packed),
    )


def training_memory(asked: Question, stage: int, recompute: bool | None = None) -> Parts:
    """P trained parameters of w bytes, on W ranks at a ZeRO stage; one pack is one forward.

    Weights w*P (stage 3: a W-th). Gradients w*P: at every stage whole, because the engine reduces
    them once, after the last pack (stage 3 frees them with its weights: a W-th). Optimizer: fp32
    copy and two moments, 12*P, from stage 1 on a W-th; plain fp32 training at stage 0 has no copy:
    8*P. Frozen: embedding [V, D] and teacher [Vd, D]. States: aux [T, A*D] and last of rows that
    ask; on a CPU also the packs that the loader read ahead. Kept: see ``kept_bytes``. Work: the
    loss's blocks, or the fp32 gradient of a rank's share with the bucket in which DeepSpeed
    reduces it, whichever is more.
    """
    cfg, draft, ranks = asked.cfg, asked.draft, asked.gpus
    width, count = asked.weight_bytes, draft.trainable
    share = 1 / ranks if stage >= 1 else 1.0
    whole = 1 / ranks if stage == 3 else 1.0
    moments = 8 if stage == 0 and width == 4 else 12
    sample, rows = asked.sample, asked.pack_samples
    aux = draft.sizes.aux * draft.sizes.hidden
    states = rows * (sample.tokens * aux + sample.asking * draft.sizes.hidden)
    host = 0.0
    if asked.device == "cpu":
        a_step = asked.stored_bytes / asked.epoch_steps
        host = min(asked.stored_bytes, (AHEAD + 1) * a_step / ranks)
    bucket = min(BUCKET, 1.0 * count) * width if ranks > 1 else 0.0
    again = cfg.engine.recompute if recompute is None else recompute
    return Parts(
        weights=width * count * whole,
        frozen=width * draft.frozen,
        gradients=width * count * whole,
        optimizer=moments * count * share,
        states=width * states + host,
        kept=kept_bytes(asked, again),
        work=max(loss_bytes(asked), STREAM * count * share + bucket),
    )


def kept_bytes(asked: Question, recompute: bool) -> float:
    """What the forward leaves for the backward, of one pack; w is a weight's bytes, f 4.

    All T rows: the fused state (f*D), its norm, the token's embedding, before and after its norm
    (3*w*D), and keys with values (w*KV); with a norm before fc, its output (w*A*D). Fed tokens:
    their share of query, key and value (w*(Q + KV)), and embedding and norm (2*w*D). A chain row at
    a step: the stream before each of three norms (3*f*D) and their outputs (3*w*D), query,
    attention's output and own keys (w*(2*Q + KV)), gate and up (2*w*I). On a CPU, where a norm is
    several operations, the stream scaled but not weighted too (3*f*D). With recompute: the stream
    (f*D), what the head reads and own keys (w*(D + KV)), and one step's inside.
    """
    sizes, counts = asked.draft.sizes, asked.sample.counts
    w, wide = asked.weight_bytes, sizes.hidden
    each = 3 * w * wide + w * sizes.keys + STREAM * wide
    each += w * sizes.aux * wide * sizes.states_normed
    fed = w * (sizes.queries + sizes.keys + 2 * wide)
    streams = 6 if asked.device == "cpu" else 3
    inside = w * (3 * wide + 2 * sizes.queries + sizes.keys + 2 * sizes.mlp)
    inside += streams * STREAM * wide
    chains = sum(counts.rows) * inside
    if recompute:
        least = STREAM * wide + w * (wide + sizes.keys)
        chains = sum(counts.rows) * least + counts.rows[0] * inside
    deeper = (sizes.layers - 1) * (counts.tokens + sum(counts.rows[1:])) * inside
    return asked.pack_samples * (counts.tokens * each + counts.fed * fed + chains + deeper)


def loss_bytes(asked: Question) -> float:
    """States of all guesses (w*D each) and blocks of CHUNK_LOGITS logits: they and their softmax in
    fp32, the gradient in w bytes, the teacher's logits and softmax a target, of which a block has
    a K-th, and the teacher once a guess (f) where a sample ends; beside them the head's gradient in
    fp32."""
    sizes, counts = asked.draft.sizes, asked.sample.counts
    guesses = asked.pack_samples * sum(counts.guesses)
    block = min(CHUNK_LOGITS[asked.device], guesses * sizes.scored)
    targets = block * counts.targets / max(1, sum(counts.guesses))
    w = asked.weight_bytes
    logits = block * (3 * STREAM + w * (w < STREAM)) + 2 * STREAM * targets
    head = STREAM * sizes.scored * sizes.hidden * sizes.head_trained
    return guesses * w * sizes.hidden + logits + head


def online_memory(asked: Question) -> float:
    """With capture.mode=online every GPU holds a whole verifier beside what training holds."""
    together = replace(asked.cfg.capture, tensor_parallel=False, backend=StateBackend.transformers)
    whole = replace(asked, cfg=replace(asked.cfg, capture=together))
    return capture_memory(whole).total + training_memory(asked, asked.cfg.engine.zero_stage).total


def online_fits(asked: Question) -> bool:
    return online_memory(asked) <= asked.hardware.usable
