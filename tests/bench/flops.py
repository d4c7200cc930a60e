"""How many floating-point operations the exact step needs, counted from its shapes alone.

Matrix products only. A product of [R, M] with [M, N] costs 2·R·M·N; one that is trained costs
that three times (forward, gradient of the weight, gradient of the input), twice where no input
gradient is needed, once for the teacher. The exact step computes:

- for all tokens, once: ``fc``, and the keys and values of step 0;
- for a chain row at a step: query, output projection, MLP and draft head, and from step 1 on its
  key and value (those of step 0 are counted with all tokens);
- for each position that some row predicts: the teacher's logits over the draft vocabulary.

Attention's products with step-0 keys are counted apart: they alone are quadratic in length. (With
the later steps' keys they are elementwise.)

Query, key and value read the embedding, which is frozen, beside the state: half their input needs
no gradient. Neither do the verifier's states that ``fc`` reads.
"""

from workload import Shape, answer_length

TRAINED, FROZEN_INPUT, FORWARD = 6, 4, 2  # FLOPs a multiply-add of the product


def chain_rows(shape: Shape, share: int, depth: int) -> list[int]:
    """Rows by step that carry loss, over the batch: rows a-1 <= t <= b-3-k of an answer [a, b)."""
    end = shape.tokens
    first = max(end - answer_length(shape, share) - 1, 0)
    return [shape.batch * max(end - 2 - k - first, 0) for k in range(depth)]


def projection(shape: Shape, outputs: int) -> int:
    """One row of q, k or v: ``outputs`` wide, reading [embedding ; state]."""
    return shape.hidden * outputs * (FROZEN_INPUT + TRAINED)


def needed_flops(shape: Shape, rows: list[int], teacher_rows: int, tokens: int) -> int:
    """``rows`` by step, over the batch; ``tokens``: all of the batch's."""
    queries = shape.heads * shape.head_dim
    key_value = 2 * projection(shape, shape.kv_heads * shape.head_dim)
    everywhere = tokens * (FROZEN_INPUT * shape.aux * shape.hidden * shape.hidden + key_value)
    inner = queries * shape.hidden + 3 * shape.hidden * shape.mlp  # o, then gate, up and down
    inner += shape.hidden * shape.draft_vocab
    row = projection(shape, queries) + TRAINED * inner
    chain = sum(rows) * row + sum(rows[1:]) * key_value
    teacher = FORWARD * teacher_rows * shape.hidden * shape.draft_vocab
    return everywhere + chain + teacher


def attention_flops(shape: Shape, share: int, rows: list[int]) -> int:
    """Scores and weighted values of the ``rows`` that ask at each step, over the batch.

    A row sees the step-0 keys up to its own, and no more are counted. Two products, each trained;
    that flash kernels make the scores again in their backward is not counted.
    """
    first = max(shape.tokens - answer_length(shape, share) - 1, 0)
    pairs = 0
    for asking in (count // shape.batch for count in rows):
        pairs += shape.batch * (asking * first + asking * (asking + 1) // 2)
    return 2 * TRAINED * shape.heads * shape.head_dim * pairs
