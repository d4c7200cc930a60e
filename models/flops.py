"""Training FLOPs of the draft families, counted from shapes alone.

The convention, once. Matrix products only. A product of a row [M] with a matrix [M, N] costs 2·M·N
forward, as much again for the gradient of the matrix where that is trained, and as much for the
gradient of the row where anything before it is trained: 6·M·N in all, 4·M·N where one of the two
gradients is not needed, 2·M·N of a frozen product that nothing trained comes before. Norms,
softmax, embedding look-ups and the optimizer are not counted, and what activation checkpointing
computes twice is counted once.

``attention`` is apart, because it alone is quadratic in length: scores and weighted values of the
rows that ask, over the keys that they may see, each product at 6. That flash kernels make the
scores again in their backward is not counted, nor is what a kernel computes of keys that a mask
hides; the keys of later unroll steps are one a row, and elementwise.
"""

from dataclasses import dataclass

WHOLE, HALF, FORWARD = 6, 4, 2  # FLOPs a multiply-add: both gradients, one of them, none


@dataclass(frozen=True)
class Sizes:
    """Widths of a draft, and what of it is trained."""

    hidden: int  # D
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    scored: int  # tokens that the draft's head scores: its own vocabulary, or the verifier's whole
    layers: int = 1  # decoder layers; of medusa: residual blocks a head
    aux: int = 3  # states that are fused
    verifier: int | None = None  # width of the state that the teacher's head reads; null: D
    states_normed: bool = False  # a trained norm before the fusing matrix
    head_trained: bool = True
    teacher: bool = True  # the loss reads the verifier's distribution (all but ce)

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Of keys and values together."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def teacher_row(self) -> int:
        return FORWARD * (self.verifier or self.hidden) * self.scored * self.teacher

    @property
    def head_row(self) -> int:
        return (WHOLE if self.head_trained else HALF) * self.hidden * self.scored

    @property
    def answer_row(self) -> int:
        """Output projection and gated MLP of a row that asks, in one layer."""
        return WHOLE * (self.queries * self.hidden + 3 * self.hidden * self.mlp)

    def pairs(self, count: int) -> int:
        """Attention of ``count`` pairs of a row and a key that it sees."""
        return 2 * WHOLE * self.queries * count


@dataclass(frozen=True)
class Counts:
    """What there is to compute of some samples; see data/amount.py, which counts it."""

    tokens: int  # T
    rows: list[int]  # [K] chain rows that step k runs
    guesses: list[int]  # [K] of these, rows whose guess carries loss
    fed: int  # distinct rows whose token some chain is fed
    targets: int  # distinct positions that are predicted
    pairs: list[int]  # [K] step-0 keys that the rows of step k see, added up
    all_pairs: int  # and that all T rows would see

    def __add__(self, other: "Counts") -> "Counts":
        def added(ours: list[int], theirs: list[int]) -> list[int]:
            return [one + two for one, two in zip(ours, theirs, strict=True)]

        return Counts(
            self.tokens + other.tokens,
            added(self.rows, other.rows),
            added(self.guesses, other.guesses),
            self.fed + other.fed,
            self.targets + other.targets,
            added(self.pairs, other.pairs),
            self.all_pairs + other.all_pairs,
        )


@dataclass(frozen=True)
class Flops:
    products: int  # by matrices of weights
    attention: int

    @property
    def total(self) -> int:
        return self.products + self.attention


def eagle3_flops(sizes: Sizes, counts: Counts) -> Flops:
    """The unroll of train/ttt.py, trimmed as it is there.

    For all rows: the fusing matrix, and the step-0 keys of the first layer from both halves of its
    input. For a token that some chain is fed, once for all steps: its half of query, key and value
    (the norm before it is trained, so its gradient is needed, though the embedding is frozen). For
    a chain row: the state's half of the query, from step 1 on of key and value, the rest of the
    layer, and the head where its guess carries loss. The teacher's head once a target.

    A later layer reads D and not 2D. All rows pass step 0 of the layers before the last, whole,
    because its outputs are the keys of the next one; the last layer is trimmed as a single one.
    """
    width, chains = sizes.hidden, sum(counts.rows)
    later = sum(counts.rows[1:])
    fusing = WHOLE if sizes.states_normed else HALF
    products = counts.tokens * width * (fusing * sizes.aux * width + 2 * WHOLE * sizes.keys)
    # With several layers step 0 reads no share of it, so one step alone gives it no gradient.
    used = sizes.layers == 1 or len(counts.rows) > 1
    products += counts.fed * (WHOLE if used else FORWARD) * width * (sizes.queries + sizes.keys)
    products += chains * (WHOLE * width * sizes.queries + sizes.answer_row)
    products += later * WHOLE * width * sizes.keys
    attention = sizes.pairs(sum(counts.pairs))
    if sizes.layers > 1:
        lower = sizes.layers - 1  # their inputs: from 2D once, then from D
        whole_row = WHOLE * width * (sizes.queries + sizes.keys) + sizes.answer_row
        everyone = counts.tokens + later  # the rows of step 0 are among all tokens
        products += counts.tokens * (2 * WHOLE * width * sizes.queries + sizes.answer_row)
        products += later * (WHOLE * width * sizes.queries + sizes.answer_row)
        products += (lower - 1) * everyone * whole_row
        products += everyone * WHOLE * width * sizes.keys  # into the last layer
        attention += lower * sizes.pairs(counts.all_pairs + sum(counts.pairs[1:]))
    products += sum(counts.guesses) * sizes.head_row + counts.targets * sizes.teacher_row
    return Flops(products, attention)


def eagle1_flops(sizes: Sizes, counts: Counts) -> Flops:
    """One step: fuse [embedding ; state], one layer, and the frozen head over the vocabulary;
    ``counts`` at depth 1.

    The fusing matrix reads frozen things alone; its half of the state is computed for all rows, and
    again for those that ask. The layer makes keys for all rows, the rest for those that ask. The
    teacher's logits once a target, over the same vocabulary.
    """
    width, rows = sizes.hidden, counts.guesses[0]
    products = (2 * counts.tokens + rows) * HALF * width * width
    products += counts.tokens * WHOLE * width * sizes.keys
    products += rows * (WHOLE * width * sizes.queries + sizes.answer_row)
    products += rows * sizes.head_row + counts.targets * sizes.teacher_row
    return Flops(products, sizes.pairs(counts.pairs[0]))


def medusa_flops(sizes: Sizes, counts: Counts) -> Flops:
    """Head k on the rows of step k: residual blocks [D, D], then a matrix onto the vocabulary.

    The first block reads a frozen state, so its input needs no gradient. Each head makes its
    targets' teacher anew.
    """
    square = sizes.hidden * sizes.hidden
    blocks = HALF * square + (sizes.layers - 1) * WHOLE * square
    each = blocks + sizes.head_row + sizes.teacher_row
    return Flops(sum(counts.guesses) * each, 0)


def model_flops(sizes: Sizes, counts: Counts) -> Flops:
    """A dense Llama: all layers for all rows, the head on the rows whose next token carries loss;
    ``counts`` at depth 1.

    The embedding is trained, so the first layer's input needs its gradient, too.
    """
    whole_row = WHOLE * sizes.hidden * (sizes.queries + sizes.keys) + sizes.answer_row
    products = counts.tokens * sizes.layers * whole_row
    products += counts.guesses[0] * sizes.head_row + counts.targets * sizes.teacher_row
    return Flops(products, sizes.layers * sizes.pairs(counts.all_pairs))


def ngram_flops() -> Flops:
    """Phrases are counted and looked up."""
    return Flops(0, 0)
