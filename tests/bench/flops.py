"""What the step of the benchmarks' documents computes, as models/flops.py counts it."""

from workload import Shape, answer_length

from models.flops import Counts, Flops, Sizes, eagle3_flops


def chain_rows(shape: Shape, share: int, depth: int) -> list[int]:
    """Rows by step that carry loss, over the batch: rows a-1 <= t <= b-3-k of an answer [a, b)."""
    end = shape.tokens
    first = first_row(shape, share)
    return [shape.batch * max(end - 2 - k - first, 0) for k in range(depth)]


def first_row(shape: Shape, share: int) -> int:
    """The first row of a document that asks: its answer ends with the document."""
    return max(shape.tokens - answer_length(shape, share) - 1, 0)


def sizes_of(shape: Shape) -> Sizes:
    return Sizes(
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        mlp=shape.mlp,
        scored=shape.draft_vocab,
        aux=shape.aux,
    )


def counts_of(shape: Shape, share: int, depth: int) -> Counts:
    """Row t sees t + 1 keys. Fed are x[t+1] of the first row that asks to the last of the longest
    chain; predicted are as many positions as rows ask at step 0."""
    rows = chain_rows(shape, share, depth)
    first = first_row(shape, share)
    each = [count // shape.batch for count in rows]
    pairs = [n * first + n * (n + 1) // 2 for n in each]
    return Counts(
        tokens=shape.batch * shape.tokens,
        rows=rows,
        guesses=rows,
        fed=rows[0],
        targets=rows[0],
        pairs=[shape.batch * count for count in pairs],
        all_pairs=shape.batch * shape.tokens * (shape.tokens + 1) // 2,
    )


def step_flops(shape: Shape, share: int, depth: int) -> Flops:
    return eagle3_flops(sizes_of(shape), counts_of(shape, share, depth))
