"""The model card of an exported head: what it is, what it was made from, what was measured."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from conf.runtime import say
from conf.schema import ConfigError, DraftFamily, RunConfig
from models.eagle1 import Eagle1Config
from models.eagle3 import DraftConfig
from models.export.card_head import head_part, how_learnt
from models.token_strings import FILE as TOKENS
from models.verifier import weights_fingerprint

UNKNOWN = "not measured"
LIMITS = [
    "- Not a language model: without its verifier it says nothing useful.",
    "- Not a head for another verifier: a fine-tuned or quantised copy has other states,",
    "  and drafts made from them are accepted less often. Answers stay right, the gain",
    "  shrinks.",
    "- Not a promise of speed: acceptance falls on text unlike the training data, and the",
    "  speed-up depends on machine, engine, batch size and chain length. Measure your own.",
]


@dataclass(frozen=True)
class DataFacts:
    """What the head was trained on; None where it is not recorded."""

    origin: str  # files, or a sentence
    samples: int | None = None
    tokens: int | None = None  # supervised ones
    agreement: float | None = None  # share of them that are the verifier's own top choice


@dataclass(frozen=True)
class Figures:
    """What was measured; None where nothing was."""

    tau: float | None = None  # tokens a round, the verifier's own included
    floor_tau: float | None = None  # of an n-gram table on the same text
    held_out_tau: float | None = None  # on held-out training conversations, during training
    alpha_by_depth: list[float | None] = field(default_factory=list)  # of rounds that got there
    speedup_decode: float | None = None
    speedup_end_to_end: float | None = None
    checked: int | None = None  # prompts compared with plain greedy decoding
    identical: int | None = None  # of them, token-identical
    n_draft: int | None = None  # chain length of tau and alpha
    best_n: int | None = None  # chain length of the speed-up
    temperature: float = 0.0
    dtype: str = "float32"  # of tau, alpha and the comparison
    speed_dtype: str = "bfloat16"
    machine: str = "CPU"  # class of the machine that measured


@dataclass(frozen=True)
class CardFacts:
    verifier: str  # as the configuration names it
    served_verifier: str  # hub name or folder that an engine can open
    verifier_dtype: str  # of the states the head learnt from
    verifier_fingerprint: str | None  # of its weights
    data: DataFacts
    training: list[str] = field(default_factory=list)  # settings, a sentence each
    figures: Figures = field(default_factory=Figures)
    draft_tokens: int = 4  # num_speculative_tokens where no best N was measured
    licence: str | None = None  # as hubs spell it: apache-2.0
    revision: str | None = None  # of the verifier on its hub
    tokens: Path | None = None  # file of the token strings beside the head

    @property
    def serve_n(self) -> int:
        return self.figures.best_n or self.draft_tokens


def card_of_run(head: Path, cfg: RunConfig, data: DataFacts | None, verifier: Path) -> CardFacts:
    """Gather a card from a run's configuration and from what it measured so far.

    ``head`` is a folder inside the run's, ``verifier`` the one with the weights. Raises
    ConfigError for a report that is not one.
    """
    section, optim = cfg.verifier, cfg.optim
    # EAGLE-1 is trained one step deep, and drafts as far as anyone has measured.
    deepest = cfg.eval.n_draft if cfg.draft.family is DraftFamily.eagle1 else cfg.ttt.depth
    limit = "" if optim.max_steps is None else f", at most {optim.max_steps} steps"
    return CardFacts(
        verifier=section.path,
        served_verifier=section.path if is_hub_name(section.path) else str(verifier.resolve()),
        verifier_dtype=section.dtype.value,
        verifier_fingerprint=weights_fingerprint(verifier),
        data=data or DataFacts(", ".join(cfg.data.path)),
        training=[
            *how_learnt(cfg),
            f"AdamW, peak learning rate {optim.lr:g}, {optim.packs_per_step} packs of "
            f"{optim.micro_batch_tokens:,} tokens a step, "
            f"{optim.epochs:g} epochs{limit}",
            f"samples of at most {cfg.data.max_length} tokens, {cfg.engine.precision.value}, "
            f"seed {cfg.run.seed}",
            *([f"started from the weights of {cfg.draft.init}"] if cfg.draft.init else []),
        ],
        figures=read_figures(head),
        draft_tokens=min(cfg.eval.n_draft, deepest),
        licence=cfg.export.licence,
        revision=revision_of(verifier),
        tokens=head / TOKENS if (head / TOKENS).is_file() else None,
    )


def is_hub_name(path: str) -> bool:
    return not path.startswith("wheel:") and not Path(path).expanduser().is_dir()


def revision_of(verifier: Path) -> str | None:
    """The commit in the path of a hub's cache, .../snapshots/COMMIT; None for another folder."""
    return verifier.name if verifier.parent.name == "snapshots" else None


def read_figures(head: Path) -> Figures:
    """Figures of eval/report.json in the run and of acceptance.json beside the head, if there.

    A report that was made of another head is left out, with a word.
    """
    held_out = read_json(head / "acceptance.json").get("tau")
    report = read_json(head.parent / "eval" / "report.json")
    if not report:
        return Figures(held_out_tau=held_out)
    try:
        settings, lossless = report["settings"], report["lossless"]
        measured = report["data"]["held_out_tau"]
        if Path(settings["draft"]).name != head.name or measured != held_out:
            say(f"{head.parent / 'eval' / 'report.json'} is of another head: left out of the card")
            return Figures(held_out_tau=held_out)
        figures = Figures(
            tau=report["tau"],
            floor_tau=report["ngram_floor"]["tau"],
            held_out_tau=held_out,
            alpha_by_depth=report["alpha_by_depth"],
            speedup_decode=report["speedup_decode"],
            speedup_end_to_end=report["speedup_end_to_end"],
            checked=lossless["checked"],
            identical=lossless["identical"],
            n_draft=settings["eval"]["n_draft"],
            best_n=settings["best_n"],
            temperature=settings["eval"]["temperature"],
            dtype=settings["counters_dtype"],
            speed_dtype=settings["eval"]["speed_dtype"],
            machine="CPU" if settings["device"] == "CPU" else "GPU",
        )
        return refuse_odd(figures, head.parent / "eval" / "report.json")
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{head.parent}/eval/report.json: {error} missing; run python -m eval.main again"
        ) from error


def refuse_odd(figures: Figures, report: Path) -> Figures:
    """Raise ConfigError for a figure that is no number: a card would print it."""
    alphas = figures.alpha_by_depth
    numbers = [figures.tau, figures.floor_tau, figures.speedup_decode, figures.speedup_end_to_end]
    shares: list[object] = [*numbers, *(alphas if isinstance(alphas, list) else ["no list"])]
    counts = [figures.checked, figures.identical, figures.n_draft, figures.best_n]
    fine = all(type(n) in (int, float, NoneType) for n in shares)
    if not fine or not all(n is None or (type(n) is int and n >= 0) for n in counts):
        raise ConfigError(f"{report}: figures that are no numbers; run python -m eval.main again")
    return figures


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not a report ({error}); run its stage again") from error


@dataclass(frozen=True)
class Subject:
    """What a card is about, and what only this family says."""

    tag: str
    title: str  # before the verifier's name
    opening: list[str]
    about: dict[str, list[str]]  # lines by the title of their section
    limits: list[str] = field(default_factory=lambda: LIMITS)  # what it is not


def write_card(card: CardFacts, draft: DraftConfig | Eagle1Config, commands: list[str]) -> str:
    """The text of README.md for a head that ``commands`` serve."""
    version = 1 if isinstance(draft, Eagle1Config) else 3
    opening = [
        f"A draft head for speculative decoding: it guesses tokens that `{card.verifier}` then",
        "verifies, so that several tokens come out of one verifier step and the text stays the",
        "verifier's own. Made with Eyrie.",
    ]
    about = {"Verifier": verifier_part(card, draft), "Head": head_part(draft)}
    title = f"EAGLE-{version} draft head"
    return written(card, Subject(f"eagle{version}", title, opening, about), commands)


def written(card: CardFacts, subject: Subject, commands: list[str]) -> str:
    """README.md: what every family's card says, around what its subject does."""
    sections = {
        "Serve": ["```bash", *commands, "```"],
        **subject.about,
        "Training": training_part(card),
        "Figures": figures_part(card.figures),
        "What it is not": subject.limits,
    }
    name = card.verifier.rstrip("/").rpartition("/")[2]
    lines = [*front_matter(card, subject.tag), f"# {subject.title} for {name}", ""]
    lines += subject.opening
    for title, body in sections.items():
        lines += ["", f"## {title}", "", *body]
    return "\n".join([*lines, ""])


def front_matter(card: CardFacts, kind: str = "eagle3") -> list[str]:
    hub_name = card.served_verifier.count("/") == 1 and card.served_verifier[0] not in "./~"
    base = [f"base_model: {card.served_verifier}"] if hub_name else []
    tags = f"tags: [{kind}, speculative-decoding, draft-head]"
    return ["---", *base, f"license: {card.licence or 'unknown'}", tags, "---", ""]


def verifier_part(card: CardFacts, draft: DraftConfig | Eagle1Config) -> list[str]:
    ids = ", ".join(map(str, draft.aux_layers))
    return [
        f"- `{card.verifier}`, revision {card.revision or 'not recorded'}, weights fingerprint "
        f"{card.verifier_fingerprint or 'not recorded'}",
        f"- states captured in {card.verifier_dtype}, after {ids} decoder layers",
        f"- width {draft.hidden_size}, {draft.vocab_size:,} tokens",
    ]


def training_part(card: CardFacts) -> list[str]:
    data = card.data

    def count(value: int | None) -> str:
        return "not recorded" if value is None else f"{value:,}"

    agreement = "not recorded" if data.agreement is None else f"{data.agreement:.1%}"
    return [
        f"- data: {data.origin}",
        f"- samples: {count(data.samples)}; supervised tokens: {count(data.tokens)}",
        f"- of these tokens the verifier's own top choice: {agreement}",
        *(f"- {setting}" for setting in card.training),
    ]


def figures_part(figures: Figures) -> list[str]:
    """One table; a figure without a measurement says so."""

    def number(value: float | None, form: str = "{:.2f}") -> str:
        return UNKNOWN if value is None else form.format(value)

    chain = "" if figures.n_draft is None else f"chain of {figures.n_draft}, "
    best = "" if figures.best_n is None else f"chain of {figures.best_n}, "
    how = "greedy" if figures.temperature == 0 else f"temperature {figures.temperature:g}"
    exact = f"{chain}{how}, {figures.dtype}, {figures.machine}"
    fast = f"{best}{how}, {figures.speed_dtype}, {figures.machine}, one sequence at a time"
    alpha = ", ".join("–" if a is None else f"{a:.2f}" for a in figures.alpha_by_depth)
    lossless = f"{figures.identical} of {figures.checked}" if figures.checked else UNKNOWN
    rows = [
        ("τ, tokens a round", number(figures.tau), exact),
        ("τ of an n-gram table on the same text", number(figures.floor_tau), "the floor"),
        ("τ on held-out conversations", number(figures.held_out_tau), "during training, greedy"),
        ("α by draft position", alpha or UNKNOWN, f"of the rounds that got there; {exact}"),
        ("prompts token-identical to plain decoding", lossless, exact),
        ("speed-up, decoding alone", number(figures.speedup_decode, "{:.2f}×"), fast),
        ("speed-up, prefill included", number(figures.speedup_end_to_end, "{:.2f}×"), fast),
    ]
    table = [f"| {name} | {value} | {'' if value == UNKNOWN else by} |" for name, value, by in rows]
    return ["| | value | measured with |", "|---|---|---|", *table]
