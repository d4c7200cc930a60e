"""Heads for real vLLM to serve: trained and exported here, answered by a process beside."""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from compared import Case, partings
from learnt import N_DRAFT, NEW_TOKENS, Lesson, overfit, own_counters
from pairwise import AUX, LAYERS, VOCAB, Combination, Family
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from vllm_process import Request, VllmProcess, with_head

from conf.choices import ExportFormat
from conf.schema import DraftSection, Precision, VerifierSection
from models.eagle3 import Eagle3Draft
from models.export.card import CardFacts, DataFacts
from models.export.check import check
from models.export.engines import LAYOUTS
from models.export.write import export
from models.verifier import Verifier

TINY = Lesson(steps=40, rate=3e-3, norms=0.2)
REAL = Lesson(steps=30, rate=1e-3)


class Serving:
    """Every method but ``partings`` asks and goes on: vLLM works while the next head is trained."""

    def __init__(self, vllm: VllmProcess, folder: Path, tokenizer: Path):
        self.vllm = vllm
        self.folder = folder
        self.tokenizer = tokenizer  # a folder that has one for the random verifiers
        self.known: set[str] = set()  # verifiers whose answers without a draft were asked for
        self.cases: dict[Combination, Case] = {}

    def combination(self, one: Combination) -> Case:
        """A head on a tiny random verifier, served in the combination's format; asked for once."""
        if one in self.cases:
            return self.cases[one]
        verifier = tiny(one, self.folder, self.tokenizer)
        case = self.trained(one.name, verifier, random_prompts(), one.section, TINY)
        self.ask(case.name, case, self.exported(case.name, case, one.format), one.format)
        self.cases[one] = case
        return case

    def real(self, path: Path, texts: list[str], section: DraftSection) -> Case:
        """A head on a verifier that has learnt something, in vLLM's plain format."""
        verifier = load(VerifierSection(path=str(path)), self.folder)
        prompts = [encode(verifier, text) for text in texts]
        case = self.trained("real", verifier, prompts, section, REAL)
        head = self.exported(case.name, case, ExportFormat.vllm)
        self.ask(case.name, case, head, ExportFormat.vllm)
        return case

    def trained(
        self,
        name: str,
        verifier: Verifier,
        prompts: list[list[int]],
        section: DraftSection,
        lesson: Lesson,
    ) -> Case:
        path = verifier.facts.path
        if path not in self.known:
            self.known.add(path)
            self.vllm.ask(Request(plain_of(path), path, prompts, NEW_TOKENS))
        draft = overfit(verifier, prompts, section, lesson)
        return Case(name, verifier, draft, prompts, own_counters(verifier, draft, prompts))

    def exported(
        self, name: str, case: Case, kind: ExportFormat, draft: Eagle3Draft | None = None
    ) -> Path:
        """The case's head, or another in its place, in a folder called ``name``."""
        folder = self.folder / "heads" / name
        return write(draft or case.draft, case.verifier, folder, kind)

    def ask(self, name: str, case: Case, head: Path, kind: ExportFormat) -> None:
        """vLLM opens a head of its plain format beside the verifier; speculators' names its own."""
        alone = kind is ExportFormat.speculators
        model = str(head) if alone else case.verifier.facts.path
        beside = None if alone else with_head(head, N_DRAFT)
        self.vllm.ask(Request(name, model, case.prompts, NEW_TOKENS, beside, watch=True))

    def partings(self, name: str, case: Case) -> list[str]:
        """Where the head served as ``name`` and our own code part ways. Waits for vLLM."""
        plain = self.vllm.answer(plain_of(case.verifier.facts.path))
        assert [len(tokens) for tokens in plain.tokens] == [NEW_TOKENS] * len(case.prompts)
        assert plain.drafts == 0
        served = self.vllm.answer(name)
        return list(partings(case, plain, served, self.vllm.states(name)))


def write(draft: Eagle3Draft, verifier: Verifier, folder: Path, kind: ExportFormat) -> Path:
    """Export in float32, and find nothing wrong with it."""
    facts = replace(verifier.facts, aux_layers=draft.config.aux_layers)
    data = DataFacts("answers learnt by heart")
    card = CardFacts(facts.path, facts.path, "float32", None, data, draft_tokens=N_DRAFT)
    export(draft, facts, folder, card, Precision.float32, LAYOUTS[kind])
    assert check(folder, Path(facts.path)) == []
    return folder


def load(section: VerifierSection, cache: Path) -> Verifier:
    section.dtype = Precision.float32
    return Verifier.load(section, cache, torch.device("cpu"), torch.float32)


def tiny(one: Combination, folder: Path, tokenizer: Path) -> Verifier:
    """The combination's verifier, in ``folder`` from now on."""
    place = folder / one.verifier
    if not place.is_dir():
        shutil.copytree(tokenizer, place)
        random_verifier(one.family, one.tied).save_pretrained(place)
    return load(VerifierSection(path=str(place), aux_layers=AUX[one.aux]), folder)


def plain_of(verifier: str) -> str:
    return f"plain-{Path(verifier).name}"


def encode(verifier: Verifier, text: str) -> list[int]:
    turn = [{"role": "user", "content": text}]
    found = verifier.tokenizer.apply_chat_template(turn, add_generation_prompt=True)
    return list(found["input_ids"])


def random_verifier(family: Family, tied: bool) -> LlamaForCausalLM | Qwen3ForCausalLM:
    """Heads of 32, the narrowest that vLLM takes on a CPU; with smaller weights it says one thing
    over and over."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    plain = {"rope_type": "default", "rope_theta": 1e6}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if family is Family.llama:
            heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
            return LlamaForCausalLM(LlamaConfig(**shape, **heads, rope_parameters=scaled))
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}  # together twice the width
        return Qwen3ForCausalLM(Qwen3Config(**shape, **heads, rope_parameters=plain))


def random_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (17, 9, 13, 21)]
