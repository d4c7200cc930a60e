"""The n-gram family: its logits against a plain search, lossless alone and in batches, replayed."""

import random
from dataclasses import replace
from math import log

import pytest
import torch
from torch import Tensor

from conf.schema import ConfigError, DraftSection, Phrases
from conf.shapes import parse_shape
from data.records import CachedSample, TokenizedSample
from eval.acceptance import Counters, total
from eval.decode import DecodeSettings, decode
from eval.drafters.phrases import RARE, RECENT, STEP, PhraseDrafter
from eval.ngram import floor_config, table_walk
from eval.proof.chi_square import chi_square_p
from eval.proof.first_token import prove_first_token
from eval.replay import Place, replay
from eval.verify import AcceptRule
from models.draft_file import load_draft, read_config, save_draft
from models.phrases import PhraseConfig, PhraseTable
from models.sampling import Sampling, probabilities
from models.verifier import Verifier, VerifierStates

CPU = torch.device("cpu")
SHAPES = ["4", "2x2x2", "dynamic:nodes=9,depth=4,top_k=3"]
PROMPTS = [[1, 5, 9, 40, 5, 9], [7], [3, 30, 31, 2, 30, 31, 2, 30]]
SETTINGS = DecodeSettings(20, [])


def config(source: Phrases, order: int = 3, vocab_size: int = 128) -> PhraseConfig:
    return PhraseConfig(vocab_size, order, source.value)


def counted(source: Phrases, texts: list[list[int]], order: int = 3) -> PhraseTable:
    if source is Phrases.context:
        return PhraseTable(config(source, order))
    return PhraseTable.counted(config(source, order), texts)


def states(tokens: Tensor) -> VerifierStates:
    """None are read."""
    return VerifierStates(tokens.new_zeros(*tokens.shape, 0), tokens.new_zeros(*tokens.shape, 0))


def begun(table: PhraseTable, texts: list[list[int]]) -> PhraseDrafter:
    """Each text but its last token is the prompt."""
    drafter = PhraseDrafter(table, len(texts), CPU)
    longest = max(map(len, texts))
    prompts = torch.tensor([[*text[:-1], *[0] * (longest - len(text))] for text in texts])
    roots = torch.tensor([[text[-1]] for text in texts])
    drafter.begin(prompts, states(prompts), roots, [len(text) - 1 for text in texts])
    return drafter


def searched(
    context: list[int], source: Phrases, texts: list[list[int]], order: int
) -> dict[int, float]:
    """The rule, read aloud: every ending from the longest, the text's followers, the table's."""
    found: dict[int, float] = {}
    for size in range(order - 1, -1, -1):
        if size > len(context):
            continue
        ending, level = context[len(context) - size :], -2 * STEP * (order - 1 - size)
        if size and source is not Phrases.table:
            places = [at for at in range(size, len(context)) if context[at - size : at] == ending]
            recent = list(dict.fromkeys(context[at] for at in places[::-1][:RECENT]))
            for rank, token in enumerate(recent):
                found.setdefault(token, level - rank * log(2))
        if source is not Phrases.context:
            after = [
                text[at]
                for text in texts
                for at in range(size, len(text))
                if text[at - size : at] == ending
            ]
            for token in set(after):
                share = log(after.count(token) / len(after))
                found.setdefault(token, level - STEP + max(share, -RARE))
    return found


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("source", Phrases)
def test_logits_are_those_of_a_plain_search(source: Phrases, order: int):
    """After rounds, deep in trees, whatever was accepted: a function of the tokens alone."""
    chance = random.Random(order)
    texts = [[chance.choice([1, 2, 3, 4, 9]) for _ in range(30)] for _ in range(3)]
    table = counted(source, texts, order)
    held = [[chance.choice([1, 2, 3, 4]) for _ in range(size)] for size in (25, 2, 9)]
    drafter = begun(table, held)
    lowest = -STEP * (2 * order + 1)
    for _ in range(3):
        logits, paths = drafter.start(), [[[]] for _ in held]
        for level in range(3):
            for row, text in enumerate(held):
                for node, path in enumerate(paths[row]):
                    wanted = searched([*text, *path], source, texts, order)
                    ours = logits[row, node]
                    seen = torch.tensor(sorted(wanted), dtype=torch.long)
                    values = torch.tensor([wanted[token] for token in sorted(wanted)])
                    torch.testing.assert_close(ours[seen], values)
                    others = torch.ones(128, dtype=torch.bool).index_fill(0, seen, False)
                    assert bool((ours[others] == lowest).all()) and bool((values > lowest).all())
            ids = torch.tensor([[chance.choice([1, 2, 3]) for _ in range(2)] for _ in held])
            parents = torch.tensor(
                [[chance.randrange(len(paths[row])) for _ in range(2)] for row in range(len(held))]
            )
            if level < 2:
                logits = drafter.step(ids, parents)
                paths = [
                    [[*of_one[parent], token] for token, parent in zip(*pair, strict=True)]
                    for of_one, *pair in zip(paths, ids.tolist(), parents.tolist(), strict=True)
                ]
        new = torch.tensor([[chance.choice([1, 2, 3]) for _ in range(3)] for _ in held])
        counts = [3, 1, 2][: len(held)]
        drafter.feed(new, states(new), counts)
        held = [[*t, *n[:c]] for t, n, c in zip(held, new.tolist(), counts, strict=True)]
        if len(held) == 3:
            drafter.keep([2, 0])
            held = [held[2], held[0]]


def test_the_longer_phrase_wins_and_the_text_comes_before_the_table():
    table = counted(Phrases.both, [[1, 2, 7, 2, 8, 2, 8]], 3)
    assert int(begun(table, [[1, 2, 9, 1, 2]]).start().argmax()) == 9  # both know (1, 2)
    assert int(begun(table, [[2, 9, 1, 2]]).start().argmax()) == 7  # the text knows (2) alone
    assert int(begun(table, [[2, 9, 4, 2]]).start().argmax()) == 9  # (4, 2): nobody; (2): the text
    assert int(begun(table, [[4, 5]]).start().argmax()) == 2  # neither: the most frequent token


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("source", Phrases)
def test_greedy_text_is_the_verifiers_own(verifier: Verifier, source: Phrases, name: str):
    """Alone and in a ragged batch; the table has seen two of the answers, so guesses stand."""
    plain = decode(verifier, None, PROMPTS, SETTINGS).generations
    seen = [[*ids, *one.tokens] for ids, one in zip(PROMPTS[:2], plain[:2], strict=True)]
    table = counted(source, seen)
    shaped = replace(SETTINGS, shape=parse_shape(name, "eval.trees"))
    together = decode(verifier, table, PROMPTS, shaped).generations
    assert [one.tokens for one in together] == [one.tokens for one in plain]
    alone = decode(verifier, table, PROMPTS[2:], shaped).generations[0]
    assert alone.rounds == together[2].rounds and alone.tokens == plain[2].tokens
    if source is not Phrases.context:
        assert sum(r.accepted for r in together[0].rounds) > 10


def captured(prompt: list[int], answer: list[int]) -> CachedSample:
    """A sample without states."""
    ids = torch.tensor([*prompt, *answer])
    mask = torch.arange(len(ids)) >= len(prompt)
    sample = TokenizedSample("", ids, mask, greedy=True, held_out=True)
    rows = torch.zeros(len(answer))
    return CachedSample(
        sample=sample, aux=torch.zeros(len(ids), 0), last=rows[:, None][:, :0],
        argmax=rows.long(), lse=rows,
    )  # fmt: skip


@pytest.mark.parametrize("source", Phrases)
def test_a_replay_gives_the_loops_counters(verifier: Verifier, source: Phrases):
    """Without a state; rounds whose guesses reach past the text are the walk's."""
    plain = decode(verifier, None, PROMPTS, SETTINGS).generations
    table = counted(source, [[*PROMPTS[0], *plain[0].tokens], [*PROMPTS[2], *plain[1].tokens]])
    shaped = replace(SETTINGS, shape=parse_shape("3", "eval.n_draft"))
    samples = [captured(ids, one.tokens) for ids, one in zip(PROMPTS, plain, strict=True)]
    found = replay(table, samples, 3, Place(CPU, torch.float32))
    live = decode(verifier, table, PROMPTS, shaped).generations
    ours = [Counters.of(one.rounds, len(one.tokens), 3) for one in live]
    assert [one.rounds for one in found] == [one.rounds for one in ours]
    for one, other in zip(found, ours, strict=True):
        assert one.tokens == other.tokens and 0 <= other.accepted - one.accepted < 3
    if source is Phrases.table:
        walked = [
            table_walk(table, one.sample.input_ids.tolist(), len(ids) - 1, len(ids) + 18, 3)
            for ids, one in zip(PROMPTS, samples, strict=True)
        ]
        assert total(walked) == total(found) and total(found).accepted > 0


def test_the_first_token_has_the_verifiers_distribution(verifier: Verifier):
    """Every accept rule on guesses drawn or chosen from phrases, and a wrong rule that shows."""
    table = counted(Phrases.both, [[5, 9, 40, 5, 9, 41], [30, 31, 2, 30, 31, 9]])
    found = prove_first_token(verifier, table, PROMPTS[:2], 10_000)
    assert {one.rule for one in found} == set(AcceptRule) - {AcceptRule.greedy, AcceptRule.typical}
    assert all(one.as_expected for one in found), found
    assert any(one.control for one in found)


RULES = {
    "3": [AcceptRule.rejection, AcceptRule.argmax_draft],
    "2x2": [AcceptRule.tree_one_hot, AcceptRule.tree_without_replacement],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_sampled_text_has_the_verifiers_distribution(verifier: Verifier, name: str):
    """The second token of 2,000 sampled answers against its exact distribution, by chi-square."""
    table = counted(Phrases.both, [[5, 9, 40, 5, 9, 41], [30, 31, 2, 30, 31, 9]])
    sampling, count = Sampling(0.7, top_k=4), 2000
    first = verifier.logits_from(verifier.states(torch.tensor([PROMPTS[0]])).last[:, -1])
    chance = probabilities(first, sampling)[0]
    exact = torch.zeros(128, dtype=torch.float64)
    for token in chance.nonzero().flatten().tolist():
        text = torch.tensor([[*PROMPTS[0], token]])
        after = verifier.logits_from(verifier.states(text).last[:, -1])
        exact += chance[token].double() * probabilities(after, sampling)[0].double()
    for rule in RULES[name]:
        settings = DecodeSettings(
            3, [], parse_shape(name, "eval.trees"), sampling=sampling, rule=rule
        )
        runs = decode(verifier, table, [PROMPTS[0]] * count, settings).generations
        tokens = torch.tensor([one.tokens[1] for one in runs])
        counts = torch.bincount(tokens, minlength=128).double()
        assert chi_square_p(counts, exact * count) > 1e-4
        shifted = exact.roll(1)
        assert chi_square_p(counts, shifted * count) < 1e-4  # else the test shows nothing


def test_a_table_on_disk_is_the_same(tmp_path):
    table = counted(Phrases.both, [[1, 2, 3, 1, 2, 4], [1, 9]], 4)
    save_draft(tmp_path, table.config, table.state_dict())
    assert read_config(tmp_path) == table.config
    again = load_draft(tmp_path, CPU, torch.bfloat16)
    assert isinstance(again, PhraseTable)
    for name, tensor in table.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor) and tensor.dtype == torch.int32
    text = [[1, 2, 5, 1, 2]]
    assert torch.equal(begun(again, text).start(), begun(table, text).start())
    (tmp_path / "draft.json").write_text(
        table.config.to_json().replace('"order": 4', '"order": 99')
    )
    with pytest.raises(ConfigError, match=r"order=99: must be a whole number in 1\.\.16"):
        load_draft(tmp_path, CPU, torch.float32)


def test_a_table_is_counted_by_hand():
    table = PhraseTable.counted(floor_config(16), [[1, 2, 1, 3], [1, 3]])
    assert table.after((1,)) is not None
    assert table.after((1,)).tokens == [3, 2] and table.after((1,)).counts == [2, 1]
    assert table.after((3,)) is None  # nothing follows across texts
    assert table.after(()).tokens == [1, 3, 2]
    of_section = PhraseConfig.of(DraftSection(order=5), type("F", (), {"vocab_size": 7}))
    assert (of_section.vocab_size, of_section.longest, of_section.looks_up) == (7, 4, True)
