"""The draft families, what is published of each, and which one is advised.

Figures: MT-Bench and Spec-Bench tables of the papers and of Spec-Bench's own page (A100, batch 1,
greedy). They rank the families; none of them predicts a head of yours.
"""

from dataclasses import dataclass

from eval.advice.question import Figures, Question, Stack
from models.drafts import AnyConfig
from models.eagle1 import Eagle1Config
from models.medusa import MedusaConfig
from models.phrases import PhraseConfig
from models.small_model import ModelConfig

FROM_TRAINING = 60_000  # dialogues: the smallest set that a published head was trained on
DEAR = 0.05  # Leviathan (2211.17192): useful draft models cost less a step


@dataclass(frozen=True)
class Family:
    name: str
    vllm: str  # its method there; empty: none
    sglang: str  # its algorithm there; empty: none
    drafts_with_model: bool
    training: str
    published: str


VANILLA = Family(
    "vanilla draft model",
    "draft_model",
    "STANDALONE",
    True,
    "none, given a model of the same tokenizer about 100 times smaller",
    "Vicuna-7B 1.52x, 2.28 tokens a round; T5-small for T5-XXL alpha .75, c .02, 3.4x",
)
NGRAM = Family(
    "n-gram or prompt lookup",
    "ngram",
    "NGRAM",
    False,
    "none",
    "Vicuna-7B 1.66x, 1.75 tokens a round; pays where answers copy the prompt",
)
MEDUSA = Family(
    "Medusa",
    "medusa",
    "",
    True,
    "60,000 dialogues, hours on one A100",
    "Vicuna-7B 1.71x, 2.31 tokens a round; its typical acceptance is lossy and refused",
)
EAGLE1 = Family(
    "EAGLE-1",
    "eagle",
    "EAGLE",
    True,
    "68,000 dialogues",
    "Vicuna-7B 2.10x, 3.58 tokens a round",
)
EAGLE2 = Family(
    "EAGLE-2 tree over EAGLE-1 weights",
    "",
    "EAGLE",
    True,
    "none beyond an EAGLE-1 head: the same weights and acceptance",
    "Vicuna-7B 2.36x, 4.34 tokens a round",
)
EAGLE3 = Family(
    "EAGLE-3",
    "eagle3",
    "EAGLE3",
    True,
    "from 68,000 dialogues, better with every doubling to 532,000, answered by the verifier itself",
    "Vicuna-13B 3.02x, 5.71 tokens a round; EAGLE-2 there 2.46x, 4.43",
)
FAMILIES = [VANILLA, NGRAM, MEDUSA, EAGLE1, EAGLE2, EAGLE3]


@dataclass(frozen=True)
class FamilyAdvice:
    family: Family
    why: list[str]  # sentences
    others: list[Family]  # that could be had in its place; none where a head exists


def family_of_report(floor: str, config: AnyConfig | None) -> FamilyAdvice:
    """A report is of a draft that exists: its own family, EAGLE-3 where its folder is gone;
    ``floor`` compares it with an n-gram."""
    match config:
        case MedusaConfig():
            family, words = MEDUSA, "Medusa heads"
        case Eagle1Config():
            family, words = EAGLE1, "an EAGLE-1 head"
        case ModelConfig():
            family, words = VANILLA, "a small draft model"
        case PhraseConfig():
            family, words = NGRAM, "an n-gram table"
        case _:
            family, words = EAGLE3, "an EAGLE-3 head"
    why = [f"The report is of {words}, and it is judged by what was measured of it.", floor]
    return FamilyAdvice(family, why, [])


def choose_family(figures: Figures, question: Question) -> FamilyAdvice:
    """From what may be trained, what a draft's step costs, and what the stack has."""
    if question.dialogues == 0:
        chosen = NGRAM if figures.c == 0 else VANILLA
        why = ["Nothing is to be trained."]
        if chosen is NGRAM:
            why.append("c = 0 is a table look-up: guesses come from the prompt and cost nothing.")
        elif figures.c > DEAR:
            why.append(
                f"c = {figures.c:g} is dear for a draft model: {DEAR:g} or less is usual, and a "
                "smaller model of lower alpha gained more in the paper (c .02 3.4x, c .11 1.7x)."
            )
    else:
        chosen = EAGLE3
        why = [
            "Of the families trained on the verifier's states EAGLE-3 alone has no limit from "
            "predicting features, and it gains most from more data; at equal data it was ahead of "
            "EAGLE-2 in its paper.",
        ]
        if question.dialogues is not None and question.dialogues < FROM_TRAINING:
            why.append(
                f"{question.dialogues} dialogues are fewer than any published head had "
                f"({FROM_TRAINING}): measure acceptance on held-out prompts before serving."
            )
    if question.stack is Stack.vllm and chosen is EAGLE3:
        why.append("EAGLE-2's tree is no way out on vLLM: it verifies chains alone.")
    return FamilyAdvice(chosen, why, [one for one in FAMILIES if one is not chosen])
