"""What a person can choose among: the enumerations of the knobs."""

from enum import Enum


class Stage(Enum):
    prepare = "prepare"
    capture = "capture"
    train = "train"
    eval = "eval"
    export = "export"


class Precision(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class StateDtype(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    fp8 = "float8_e4m3fn"  # half the bytes; a scale a row and state


class CaptureMode(Enum):
    cache = "cache"  # write the states once, read them every epoch
    online = "online"  # compute them when a step needs them, and write nothing


class Verify(Enum):
    sampled = "sampled"  # every shard's index, and some samples of the cache
    full = "full"  # every byte


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Gpu(Enum):
    a100_40 = "a100_40"  # 40 GB
    a100 = "a100"  # 80 GB
    h100 = "h100"  # SXM, 80 GB
    h200 = "h200"  # SXM, 141 GB


class Attention(Enum):
    sdpa = "sdpa"
    eager = "eager"
    flash_attention_2 = "flash_attention_2"  # needs flash-attn and CUDA; for capture alone


class StateBackend(Enum):
    transformers = "transformers"  # the whole verifier in memory, of one rank or of all together
    layers = "layers"  # one decoder layer in memory at a time
    vllm = "vllm"  # an installed vLLM computes them; needs a GPU
    dumped = "dumped"  # another program computed them: its files


class MissingStates(Enum):
    refuse = "refuse"  # stop, and name them
    compute = "compute"  # let the verifier compute them, one layer in memory at a time


class AnswerBackend(Enum):
    builtin = "builtin"  # the verifier runs in this process
    openai = "openai"  # a server that speaks OpenAI's protocol answers: vLLM, SGLang


class DraftAttentionKind(Enum):
    auto = "auto"  # the fastest that runs on the machine
    flash_attn = "flash_attn"  # needs flash-attn and CUDA
    torch_flash = "torch_flash"  # PyTorch's own flash kernel, on CUDA and CPU
    plain = "plain"  # explicit scores, memory quadratic in the length


class DraftFamily(Enum):
    eagle3 = "eagle3"  # token prediction from fused states, unrolled on its own output
    eagle1 = "eagle1"  # regression of the verifier's last state
    medusa = "medusa"  # one head a position ahead, on the verifier's last state
    model = "model"  # a small causal language model with the verifier's tokenizer
    ngram = "ngram"  # no weights: phrases of the context, and a table of the training answers


class Phrases(Enum):
    context = "context"  # those of the sequence itself: prompt lookup
    table = "table"  # those of the training answers
    both = "both"  # the longer phrase, of equally long ones that of the sequence


class HeadInit(Enum):
    verifier = "verifier"  # start from the verifier's rows, then train
    frozen = "frozen"  # the verifier's rows, never trained
    random = "random"


class Supervise(Enum):
    span = "span"  # a chain lives inside one answer
    any = "any"  # every row whose label is supervised (the official rule)


class LayerInit(Enum):
    random = "random"
    verifier = "verifier"  # what fits of the verifier's last decoder layer


class Feed(Enum):
    data = "data"  # the tokens of the training text
    own = "own"  # the draft's own likeliest tokens, as in serving


class StepWeights(Enum):
    decay = "decay"  # decay**k at step k
    reached = "reached"  # the chance that a round gets there: what the guesses before it overlap
    missed = "missed"  # decay**k, twice where the likeliest guess is wrong


class LossKind(Enum):
    kl = "kl"
    ce = "ce"
    tv = "tv"
    lk = "lk"
    mix = "mix"  # kl where draft and verifier differ, tv where they nearly agree


class OptimKind(Enum):
    adamw = "adamw"
    muon = "muon"  # for the matrices inside the draft; AdamW for its head and its norms


class Normalise(Enum):
    token = "token"  # every supervised token weighs the same
    sequence = "sequence"  # every sample weighs the same


class EvalRule(Enum):
    auto = "auto"  # greedy at temperature 0; else rejection, or argmax_draft for a dynamic tree
    argmax_draft = "argmax_draft"  # the draft's likeliest tokens, with their target probability
    rejection = "rejection"  # draws of the draft, by the ratio of the probabilities
    # Medusa's, LOSSY: the likeliest tokens, where the verifier finds them likely enough; the text
    # is then not the verifier's. auto never takes it.
    typical = "typical"


class Benchmark(Enum):
    spec_bench = "spec_bench"
    mt_bench = "mt_bench"
    humaneval = "humaneval"
    gsm8k = "gsm8k"
    mbpp = "mbpp"
    alpaca = "alpaca"


class StepKind(Enum):
    auto = "auto"  # the fastest of those that run on the device; on a CPU eager alone
    eager = "eager"
    compiled = "compiled"  # torch.compile; on a CPU it needs a C++ compiler, and minutes
    graphed = "graphed"  # CUDA graphs


class ExportFormat(Enum):
    vllm = "vllm"
    speculators = "speculators"  # vLLM serves it by its folder alone
    sglang = "sglang"
    llamacpp = "llamacpp"  # for the converter to GGUF
    trtllm = "trtllm"  # as ModelOpt writes it
