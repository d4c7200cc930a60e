"""A head that knows some of a verifier's own answers by heart, and what our own code makes of it.

Half of the prompts are learnt, the others are new to the head, so drafts are accepted in part.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from conf.schema import DraftSection, HeadInit, LossKind, TTTSection
from conf.shapes import chain
from data.chains import Chains
from data.loader import batch_of
from data.records import CachedPack, CachedSample, TokenizedSample
from data.states import states_of
from eval.acceptance import Counters, total
from eval.decode import DecodeSettings, decode
from models.eagle3 import DraftConfig, Eagle3Draft
from models.kernels import CPU_FLASH
from models.memory import DraftCache
from models.verifier import Verifier, VerifierEnds
from models.vocab import DraftVocab, draft_vocab_size
from train.loss import Distillation
from train.ttt import TrainingTimeTest

N_DRAFT = 4
NEW_TOKENS = 40
# No end of sequence: vLLM ignores it too, so that both loops end at the same token.
SETTINGS = DecodeSettings(max_new_tokens=NEW_TOKENS, eos_ids=[], shape=chain(N_DRAFT))


@dataclass(frozen=True)
class Lesson:
    """How a head is trained."""

    steps: int
    rate: float
    norms: float = 0.0  # noise on the norms' weights at the start: one that got lost then shows


def overfit(
    verifier: Verifier, prompts: list[list[int]], section: DraftSection, lesson: Lesson
) -> Eagle3Draft:
    """A head that knows the verifier's own answers to the first half of ``prompts``."""
    learnt = prompts[: len(prompts) // 2]
    answers = [decode(verifier, None, [ids], SETTINGS).generations[0].tokens for ids in learnt]
    samples = [cached(verifier, *pair) for pair in zip(learnt, answers, strict=True)]
    tokens = torch.tensor([token for ids in answers for token in ids])
    counts = torch.bincount(tokens, minlength=verifier.facts.vocab_size)
    vocab = DraftVocab.from_counts(counts, draft_vocab_size(section, len(counts)))
    config = verifier.model.config
    ends = VerifierEnds(verifier.embedding, verifier.head.weight, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draft = Eagle3Draft(DraftConfig.of(section, verifier.facts))
        draft.initialise(ends, vocab, HeadInit.verifier)
        for module in draft.modules():
            if isinstance(module, nn.RMSNorm):
                module.weight.data += lesson.norms * torch.randn_like(module.weight)
    teach(draft, samples, Distillation(LossKind.kl, ends.head[vocab.target_ids], config), lesson)
    return draft.eval().requires_grad_(False)


def teach(
    draft: Eagle3Draft, samples: list[CachedSample], loss: Distillation, lesson: Lesson
) -> None:
    """The trainer's own unroll and loss, all samples in one pack."""
    ttt = TTTSection(depth=N_DRAFT)
    module = TrainingTimeTest(draft, loss, ttt, CPU_FLASH)
    mask = torch.cat([one.sample.loss_mask for one in samples])
    chains = Chains.of(mask, CachedPack.of(samples).starts, ttt.depth, ttt.supervise)
    batch = batch_of(CachedPack.of(samples), chains)
    weights = torch.full((len(samples),), 1 / chains.counts[0])
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lesson.rate, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(lesson.steps):
        optimizer.zero_grad()
        module(batch, weights).loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()


def cached(verifier: Verifier, prompt: list[int], answer: list[int]) -> CachedSample:
    """What the cache would hold of one prompt and its answer."""
    ids = torch.tensor(prompt + answer)
    mask = torch.arange(len(ids)) >= len(prompt)
    sample = TokenizedSample("", ids, mask, greedy=True, held_out=False)
    return CachedSample(sample=sample, **vars(states_of(verifier, [sample], verifier.dtype)[0]))


def own_counters(verifier: Verifier, draft: Eagle3Draft, prompts: list[list[int]]) -> Counters:
    """Of our own loop, one prompt at a time."""
    found = []
    for ids in prompts:
        made = decode(verifier, draft, [ids], SETTINGS).generations[0]
        found.append(Counters.of(made.rounds, len(made.tokens), N_DRAFT))
    return total(found)


@torch.no_grad()
def first_guess(verifier: Verifier, draft: Eagle3Draft, ids: list[int]) -> dict[str, Tensor]:
    """Our own prefill of a prompt: what vLLM's hooks record, by the same names."""
    states = verifier.states(torch.tensor([ids]))
    token = verifier.logits_from(states.last[:, -1]).argmax(-1)
    shifted = torch.cat([torch.tensor([ids[1:]]), token[None]], 1)
    positions = torch.arange(len(ids))[None]
    inputs: list[Tensor] = []
    hook = draft.fc.register_forward_pre_hook(lambda _module, args: inputs.append(args[0][0]))
    fused = draft.fuse(states.aux)
    hook.remove()
    caches = [DraftCache(len(ids)) for _ in draft.stack]
    normed = draft(draft.share_of(shifted), fused, positions, caches).normed
    spread = torch.full((draft.config.vocab_size,), float("-inf"))
    own_ids = torch.arange(draft.config.draft_vocab_size)
    spread[draft.to_target_ids(own_ids)] = draft.logits(normed[0, -1])
    return {
        "input_ids": shifted[0],
        "positions": positions[0],
        "fc_input": inputs[0],
        "fc_output": fused[0],
        "logits": spread[None],
    }


def moved(draft: Eagle3Draft, shift: int) -> Eagle3Draft:
    """The same head, said to read each aux layer ``shift`` layers further on."""
    layers = [n + shift for n in draft.config.aux_layers]
    head = Eagle3Draft(replace(draft.config, aux_layers=layers))
    head.load_state_dict(draft.state_dict())
    return head
