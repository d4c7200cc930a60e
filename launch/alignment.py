"""A head's file against the verifier itself: guesses over its own text, under other wirings.

Layer ids one off and another rotary base change no name, size or flag of a file. So the verifier
answers a few of the demo's questions, each answer's streams are had in one forward with those of
the neighbouring layers, and the head guesses at every row as it would in serving, with no decoding.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from conf.runtime import ROOT, progress, say
from conf.schema import (
    ConfigError,
    Device,
    DraftAttentionKind,
    RunSection,
    VerifierSection,
)
from data.chains import Chains, shifted
from data.dialects import RowRefused
from data.distributed import pick_device
from data.eval_prompts import EvalPrompt, read_prompts, take
from data.loader import batch_of, on_device
from data.records import CachedPack, CachedSample, Conversation, TokenizedSample, Turn
from data.render import ChatTemplate
from data.template import encode, encode_prompt
from eval.acceptance import count_hits
from eval.wiring import (
    GUESSES,
    Named,
    Tried,
    Verdict,
    Wiring,
    judge_layers,
    judge_rope,
    neighbours,
    same_table,
    table_of,
)
from models.eagle3 import DraftConfig, Eagle3Draft
from models.export.dialect import described
from models.export.engines import layout_of
from models.export.layout import CONFIG, Layout
from models.export.read import read_head
from models.facts import load_facts
from models.generate import Answer, Request, end_ids, generate
from models.kernels import choose_kernel
from models.rope import Rope, settled
from models.verifier import Verifier
from train.ttt import unroll_own

PROMPTS = ROOT / "data" / "demo" / "eval_prompts.jsonl"
TALKS, TURNS = 12, 2  # the second turn's rows lie where a wrong base shows
NEW_TOKENS = 64  # of an answer


@dataclass(frozen=True)
class Text:
    """A talk with the verifier's own answers, and its streams."""

    sample: TokenizedSample
    streams: dict[int, Tensor]  # n -> [T, D], the stream after n layers


@cache  # --to may name several engines, and the head is one
def wiring_findings(folder: Path, path: Path) -> list[str]:
    """Judge the head in ``folder`` beside the verifier at ``path``.

    Says what was measured; findings alone come back. Raises ConfigError for a head that cannot be
    read, and for a verifier that cannot be loaded or asked.
    """
    cache_folder = Path(RunSection().cache)
    facts = load_facts(VerifierSection(path=str(path), aux_layers=[1]), cache_folder)
    config = described(folder, facts).draft
    verifier = load_beside(path, config)
    own = replace(verifier.facts, aux_layers=config.aux_layers)
    draft = read_head(folder, own, verifier.ends)
    written = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    verdict = misaligned(draft, verifier, own_texts(verifier), names_in(layout_of(written)))
    for note in verdict.notes:
        say(note)
    return verdict.findings


def names_in(layout: Layout) -> Named:
    table = layout.keys["rope"]
    return Named(CONFIG, layout.keys["aux_layers"], f"{table}.rope_theta", table)


def load_beside(path: Path, config: DraftConfig, dtype: torch.dtype = torch.bfloat16) -> Verifier:
    """The verifier with hooks on the head's streams and on their neighbours."""
    device = pick_device(Device.auto, 0)
    folder = Path(RunSection().cache)
    ids = config.aux_layers
    layers = load_facts(VerifierSection(path=str(path), aux_layers=ids), folder).num_layers
    near = {n for one in [ids, *neighbours(ids, layers)] for n in one}
    section = VerifierSection(path=str(path), aux_layers=sorted(near))
    return Verifier.load(section, folder, device, dtype)


def misaligned(
    draft: Eagle3Draft, verifier: Verifier, samples: Sequence[TokenizedSample], named: Named
) -> Verdict:
    """Grade the head's guesses over ``samples``, the verifier's own text, under every wiring.

    Ids are judged with the base that suits the head, and the base with the ids that do: where both
    are wrong, neither shows beside the other. The verifier must have the head's streams and those
    beside them (``load_beside``).
    """
    config, facts = draft.config, verifier.facts
    rope = settled(Rope(config.head_dim, config.max_positions, facts.rope))
    ropes = [config.rope] if is_same(config, rope) else [config.rope, rope]
    layers = [config.aux_layers, *neighbours(config.aux_layers, facts.num_layers)]
    wirings = [Wiring(ids, table) for table, ids in product(ropes, layers)]
    tried = try_all(draft, verifier, samples, wirings)
    best = max(tried, key=lambda one: one.first).wiring  # of equals the file's
    by_ids = [one for one in tried if one.wiring.rope == best.rope]
    by_rope = [one for one in tried if one.wiring.aux_layers == best.aux_layers]
    of_layers = judge_layers(by_ids[0], by_ids[1:], named)
    of_rope = judge_rope(by_rope[0], by_rope[1] if len(ropes) > 1 else None, named)
    return Verdict(
        of_layers.findings + of_rope.findings,
        table_of(tried) + of_layers.notes + of_rope.notes,
    )


def is_same(config: DraftConfig, rope: dict) -> bool:
    own = Rope(config.head_dim, config.max_positions, config.rope)
    return same_table(own, replace(own, parameters=rope))


@torch.no_grad()
def try_all(
    draft: Eagle3Draft,
    verifier: Verifier,
    samples: Sequence[TokenizedSample],
    wirings: Sequence[Wiring],
) -> list[Tried]:
    """One forward of the verifier a text, whose streams go before the next one's come."""
    heads = [rewired(draft, wiring) for wiring in wirings]
    hits: list[list[list[int]]] = [[] for _ in wirings]
    for sample in progress(samples, len(samples), "layers and rotary base", "text"):
        text = text_of(verifier, sample)
        for found, head in zip(hits, heads, strict=True):
            found.append(hits_of(head, text))
    return [Tried(wiring, found) for wiring, found in zip(wirings, hits, strict=True)]


def rewired(draft: Eagle3Draft, wiring: Wiring) -> Eagle3Draft:
    """The same weights, not copied, in a head of another configuration."""
    config = replace(draft.config, aux_layers=wiring.aux_layers, rope=wiring.rope)
    with torch.device("meta"):
        other = Eagle3Draft(config)
    other.load_state_dict(draft.state_dict(), assign=True)
    return other.eval().requires_grad_(False)


def text_of(verifier: Verifier, sample: TokenizedSample) -> Text:
    aux = verifier.states(sample.input_ids[None].to(verifier.device)).aux[0]
    ids = verifier.facts.aux_layers
    return Text(sample, dict(zip(ids, aux.chunk(len(ids), -1), strict=True)))


def hits_of(draft: Eagle3Draft, text: Text) -> list[int]:
    """Leading right guesses at each row whose GUESSES next tokens are the verifier's own."""
    ids, mask, nothing = text.sample.input_ids, text.sample.loss_mask, torch.empty(0)
    aux = torch.cat([text.streams[n] for n in draft.config.aux_layers], -1)
    cached = CachedSample(aux, nothing, nothing, nothing, sample=text.sample)
    pack = CachedPack.of([cached])
    batch = batch_of(pack, Chains.of_answers(mask, pack.starts))
    kernel = choose_kernel(DraftAttentionKind.auto, aux.device, aux.dtype, draft.config.head_dim)
    batch = on_device(batch, aux.device, draft.fc.weight.dtype)
    found = count_hits(unroll_own(draft, batch, kernel, GUESSES).T.cpu(), ids)
    whole = torch.stack([shifted(mask, k) for k in range(1, GUESSES + 2)]).all(0)
    return [hit for hit, counts in zip(found, whole.tolist(), strict=True) if counts]


# ---- the verifier's own text ----------------------------------------------------------------


def own_texts(verifier: Verifier) -> list[TokenizedSample]:
    """Talks of TURNS of the demo's held-out questions, answered greedily."""
    prompts = take(read_prompts([str(PROMPTS)]).prompts, TALKS * TURNS)
    talks = [Conversation(prompt.id, ()) for prompt in prompts[:TALKS]]
    try:
        for turn in range(TURNS):
            asked = prompts[turn * TALKS : (turn + 1) * TALKS]
            talks = answered(verifier, talks, asked, f"the verifier's answers, turn {turn + 1}")
        return [sample_of(talk, verifier) for talk in talks]
    except RowRefused as refusal:
        raise ConfigError(
            f"--verifier {verifier.facts.path}: its chat template refuses a question followed by "
            f"another ({refusal.reason}); layer ids and rotary base need a verifier that chats"
        ) from refusal


def answered(
    verifier: Verifier,
    talks: Sequence[Conversation],
    prompts: Sequence[EvalPrompt],
    words: str,
) -> list[Conversation]:
    """Each talk with its next question and the verifier's answer to that."""
    asked = [
        replace(talk, turns=(*talk.turns, *prompt.turns[-1:]))
        for talk, prompt in zip(talks, prompts, strict=True)
    ]
    requests = [Request(encode_prompt(list(talk.turns), verifier.tokenizer, {})) for talk in asked]
    answers = generate(verifier, requests, NEW_TOKENS, end_ids(verifier))
    found = sorted(
        progress(answers, len(requests), words, "answer"), key=lambda answer: answer.index
    )
    return [with_answer(talk, one, verifier) for talk, one in zip(asked, found, strict=True)]


def with_answer(talk: Conversation, answer: Answer, verifier: Verifier) -> Conversation:
    said = verifier.tokenizer.decode(
        answer.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return replace(
        talk,
        turns=(*talk.turns, Turn("assistant", str(said))),
        answer_ids=(*talk.answer_ids, tuple(answer.ids)),
    )


def sample_of(talk: Conversation, verifier: Verifier) -> TokenizedSample:
    """Every answer that stands in the text as it was generated is supervised."""
    encoded = encode(talk, ChatTemplate(verifier.tokenizer, {}))
    ids, mask = torch.tensor(encoded.input_ids), torch.tensor(encoded.loss_mask)
    return TokenizedSample(talk.id, ids, mask, greedy=True, held_out=True)
