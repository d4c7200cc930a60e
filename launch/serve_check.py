"""Entry: whether a vLLM server accepts what the report says, and if not, why.

python -m launch.serve_check runs/demo
python -m launch.serve_check runs/demo --url http://localhost:8000

Starts the installed vLLM twice, without the head and with it, or asks a server that runs; answers
the report's prompts, reads the server's counters and lays them beside the report's.
"""

import json
import os
import sys
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import split

from conf.compose import load_saved, sentence_on_error
from conf.runtime import cache_dir, say, write_atomically
from conf.schema import ConfigError, RunConfig
from eval.parser import Parser
from eval.report import EvalReport
from eval.report_file import read_report
from launch.served.cause import Evidence, find_causes
from launch.served.client import Ends, ServedClient, address_of
from launch.served.compare import compare
from launch.served.evidence import (
    HeadSide,
    ServerSide,
    TemplateSide,
    head_side,
    other_verifier,
    quantisation_of,
    template_side,
)
from launch.served.identity import Identity, compare_answers
from launch.served.page import Outcome, as_json, page
from launch.served.run import Asking, Question, Served, ask_all, choose_questions, longest
from launch.served.server import BUILT, QUANTISED, ServerPlan, find_python, vllm_server
from models.bundled import resolve
from models.verifier import load_facts, load_tokenizer

START_TIMEOUT = 900.0  # seconds; large verifiers load and compile for minutes
ROUND_UP = 256  # positions of a server that is started: a multiple
DTYPES = ("auto", "float32", "bfloat16", "float16")
OWN_ALONE = ("vllm_python", "server_args", "start_timeout", "n")  # of a server that is started


@dataclass(frozen=True)
class Job:
    """All that is known before a server is asked."""

    run: Path
    cfg: RunConfig
    report: EvalReport
    questions: list[Question]
    asking: Asking
    head: HeadSide


@dataclass(frozen=True)
class Told:
    """What is known of the server besides what it answers; None: not known."""

    dtype: str | None
    quantisation: str | None = None


@dataclass(frozen=True)
class Found:
    """What the server with the head gave, beside the one without."""

    served: Served
    plain: Served | None
    identity: Identity | None
    server: ServerSide
    template: TemplateSide


def parser() -> Parser:
    words = Parser(
        prog="python -m launch.serve_check",
        description="Compare a vLLM server's acceptance with the report of a run.",
    )
    add = words.add_argument
    add("run", nargs="?", type=Path, default=Path("runs/demo"), help="default: %(default)s")
    add("--head", type=Path, help="the exported folder served; default RUN/export/vllm")
    add("--url", metavar="URL", help="a server that runs with the head, as http://HOST:PORT")
    add("--plain-url", metavar="URL", help="with --url: one without the head, for comparison")
    add("--api-key-env", metavar="NAME", help="with --url: environment variable with the key")
    add("--vllm-python", metavar="PATH", help="interpreter that has vllm; default .venv-vllm's")
    add("--server-args", metavar="WORDS", help="more arguments for the server that is started")
    add("--start-timeout", type=seconds, metavar="SECONDS", help=f"default: {START_TIMEOUT:g}")
    add("--prompts", type=count, metavar="COUNT", help="of the report; default: all of them")
    add("--tokens", type=count, help="most of an answer; default: as in the report")
    add("--n", type=count, help="guesses a round; default: as in the report")
    add("--dtype", choices=DTYPES, help="the server's; default: that of the head's training states")
    add("--chat", action="store_true", help="send messages, through the server's own template")
    add("--timeout", type=seconds, default=600.0, help="seconds an answer may take (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every figure there, too")
    return words


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise ValueError(text)
    return value


def main(argv: list[str] | None = None) -> int:
    """Exit code 0: as the report says; 1: it differs; 2: bad input, in one sentence."""
    words = parser()
    chosen = words.parse_args(argv)
    for name in OWN_ALONE if chosen.url else ("plain_url", "api_key_env"):
        if getattr(chosen, name) is not None:
            option = f"--{name.replace('_', '-')}"
            words.error(f"{option}: has no effect {'with' if chosen.url else 'without'} --url")
    try:
        split(chosen.server_args or "")
    except ValueError as error:
        words.error(f"--server-args={chosen.server_args}: {error}; close the quotation")
    with sentence_on_error():
        job = prepare(chosen)
        say(
            f"{len(job.questions)} prompts of {job.run}, greedy, at most "
            f"{job.asking.ends.tokens} tokens an answer"
        )
        for finding in job.head.findings:  # now, as some end the server at its first answer
            say(f"warning: {job.head.folder}: {finding}")
        outcome = ask_running(job, chosen) if chosen.url else ask_started(job, chosen)
        say()
        for line in page(outcome):
            say(line)
        if chosen.json:
            write_atomically(chosen.json, json.dumps(as_json(outcome), indent=2) + "\n")
        return outcome.code


def prepare(chosen: Namespace) -> Job:
    """Raises ConfigError for a run, report, head or prompts that cannot be had."""
    run = chosen.run.expanduser()
    cfg = load_saved(run / "config.yaml")
    report = read_report(run)
    head = head_side(chosen.head or run / "export" / "vllm", run)
    section = report.settings.eval
    tokenizer = load_tokenizer(cfg.verifier, cache_dir(cfg))
    ends = Ends(
        tokens=chosen.tokens or section.max_new_tokens,
        stop_ids=stop_ids(cfg, tokenizer.eos_token_id),
        stop=list(section.stop),
    )
    asking = Asking(tokenizer, cfg.data.template_kwargs, ends, chosen.chat)
    return Job(run, cfg, report, choose_questions(report, chosen.prompts), asking, head)


def stop_ids(cfg: RunConfig, tokenizer_eos: object) -> list[int]:
    """Tokens that end an answer, those of our own loop: a server may know fewer of them."""
    found = set(load_facts(cfg.verifier, cache_dir(cfg)).eos_ids)
    if isinstance(tokenizer_eos, int):
        found.add(tokenizer_eos)
    path = resolve(cfg.verifier.path, cache_dir(cfg)) / "generation_config.json"
    if path.is_file():
        ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        found.update([ends] if isinstance(ends, int) else ends or [])
    return sorted(found)


# ---- a server that runs ------------------------------------------------------------------------


def ask_running(job: Job, chosen: Namespace) -> Outcome:
    """``--url``, and ``--plain-url`` where it is given."""
    dtype = None if chosen.dtype == "auto" else chosen.dtype
    bare = None
    with ExitStack() as stack:
        guided = stack.enter_context(client_of(chosen.url, "--url", chosen))
        if chosen.plain_url:
            plain = stack.enter_context(client_of(chosen.plain_url, "--plain-url", chosen))
            bare = without_head(job, plain)
        return judge(job, look(job, guided, bare, Told(dtype)))


def client_of(url: str, option: str, chosen: Namespace) -> ServedClient:
    name = chosen.api_key_env
    if name is not None and name not in os.environ:
        raise ConfigError(f"--api-key-env={name}: there is no such variable; export it first")
    return ServedClient(address_of(url, option), chosen.timeout, os.environ.get(name or "", ""))


# ---- a server that is started ------------------------------------------------------------------


def ask_started(job: Job, chosen: Namespace) -> Outcome:
    """One server after the other: two would share the machine, and their speeds."""
    plan, logs = plan_of(job, chosen), job.run / "serve_check"
    with (
        vllm_server(replace(plan, head=None), logs / "plain.log") as running,
        ServedClient(running.url, chosen.timeout) as client,
    ):
        bare = without_head(job, client)
    with (
        vllm_server(plan, logs / "head.log") as running,
        ServedClient(running.url, chosen.timeout) as client,
    ):
        asked = None if plan.dtype == "auto" else plan.dtype
        told = Told(running.built(BUILT) or asked, running.built(QUANTISED))
        return judge(job, look(job, client, bare, told))


def plan_of(job: Job, chosen: Namespace) -> ServerPlan:
    n_draft = chosen.n or job.report.settings.eval.n_draft
    needed = longest(job.questions, job.asking) + n_draft + 1
    most = load_facts(job.cfg.verifier, cache_dir(job.cfg)).max_positions
    trusted = ["--trust-remote-code"] if job.cfg.verifier.trust_remote_code else []
    return ServerPlan(
        python=find_python(chosen.vllm_python),
        verifier=str(resolve(job.cfg.verifier.path, cache_dir(job.cfg)).resolve()),
        dtype=chosen.dtype or job.cfg.verifier.dtype.value,
        length=min(most, -(-needed // ROUND_UP) * ROUND_UP),
        head=job.head.folder.resolve(),
        n_draft=n_draft,
        patience=chosen.start_timeout or START_TIMEOUT,
        more=[*trusted, *split(chosen.server_args or "")],
    )


# ---- what it came to ---------------------------------------------------------------------------


def without_head(job: Job, client: ServedClient) -> Served:
    """Raises ConfigError when the server speculates all the same."""
    if client.counters().by_position:
        raise ConfigError(
            f"{client.url}: speculates, and must serve the verifier alone; start it without "
            "--speculative-config"
        )
    return ask_all(client, job.questions, job.asking, "without the head")


def look(job: Job, client: ServedClient, bare: Served | None, told: Told) -> Found:
    """Ask the server with the head everything. Raises ConfigError where it cannot be compared."""
    facts = load_facts(job.cfg.verifier, cache_dir(job.cfg))
    room, root = client.model.max_len, client.model.root
    needed = min(longest(job.questions, job.asking), facts.max_positions)
    if room is not None and room < needed:
        raise ConfigError(
            f"--tokens={job.asking.ends.tokens}: prompts and answers need up to {needed} positions "
            f"and the server has {room}; start it with a larger --max-model-len, or ask less"
        )
    template = template_side(client, job.questions, job.asking)
    served = ask_all(client, job.questions, job.asking, "with the head")
    identity = None if bare is None else compare_answers(bare, served, client)
    server = ServerSide(told.dtype, told.quantisation, other_verifier(job.cfg, root))
    return Found(served, bare, identity, server, template)


def judge(job: Job, found: Found) -> Outcome:
    comparison = compare(job.questions, found.served, job.report.settings.eval.bootstrap)
    evidence = Evidence(
        run=job.run,
        report=job.report,
        facts=load_facts(job.cfg.verifier, cache_dir(job.cfg)),
        trained_dtype=job.cfg.verifier.dtype.value,
        own_quantisation=quantisation_of(resolve(job.cfg.verifier.path, cache_dir(job.cfg))),
        questions=job.questions,
        served=found.served,
        comparison=comparison,
        head=job.head,
        server=found.server,
        template=found.template,
        by_chat=job.asking.by_chat,
    )
    return Outcome(
        run=job.run,
        report=job.report,
        comparison=comparison,
        served=found.served,
        plain=found.plain,
        identity=found.identity,
        tokens=job.asking.ends.tokens,
        dtype=found.server.dtype,
        causes=find_causes(evidence),
    )


if __name__ == "__main__":
    sys.exit(main())
