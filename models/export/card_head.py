"""What a card says of the head itself and of how it learnt, by family."""

from conf.schema import DraftFamily, RunConfig
from models.eagle1 import Eagle1Config
from models.eagle3 import DraftConfig


def how_learnt(cfg: RunConfig) -> list[str]:
    """Depth, rows and loss, a sentence each."""
    ttt, averaged = cfg.ttt, f"averaged by {cfg.loss.normalise.value}"
    if cfg.draft.family is DraftFamily.eagle1:
        return [
            f"one step deep, rows by {ttt.supervise.value}, noise on the states that are read",
            f"loss SmoothL1 of the final state + 0.1 cross-entropy of its logits, {averaged}",
        ]
    return [
        f"unroll depth {ttt.depth}, step weights {ttt.decay:g}^k, rows by {ttt.supervise.value}",
        f"loss {cfg.loss.kind.value}, {averaged}",
    ]


def head_part(draft: DraftConfig | Eagle1Config) -> list[str]:
    several = isinstance(draft, DraftConfig) and draft.layers > 1
    layers = f"{draft.layers} decoder layers, each" if several else "one decoder layer"
    layer = (
        f"- {layers}: {draft.num_heads} heads of {draft.head_dim} over "
        f"{draft.num_kv_heads} key-value heads, MLP {draft.intermediate_size}"
    )
    if isinstance(draft, Eagle1Config):
        return [
            layer,
            "- guesses the verifier's final state, after its final norm; the verifier's head "
            f"reads it: all {draft.vocab_size:,} tokens",
            f"- positions up to {draft.max_positions:,}",
        ]
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
    switches = ", ".join(f"{flag} {str(getattr(draft, flag)).lower()}" for flag in flags)
    return [
        layer,
        f"- draft vocabulary {draft.draft_vocab_size:,} of {draft.vocab_size:,} tokens, own head",
        f"- positions up to {draft.max_positions:,}; {switches}",
    ]
