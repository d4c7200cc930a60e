"""Two sequences in one batch, one of which rolls back: what is committed and what the cache holds.

The token emitted last has no row yet: it is fed as the root of the next forward. So a sequence of T
committed tokens owns T - 1 rows, and rolling back is advancing by less. Rows beyond the logical
length stay where they are, unseen, until the next forward writes over them.
"""

from dataclasses import dataclass, field

from eval.arithmetic.checks import Check, exactly
from eval.tables import aligned

N = 4  # guesses a round
WRONG = "×"  # of a guess that is not the verifier's token


@dataclass
class Sequence:
    """``text`` are tokens by name; ``rows`` the tokens whose keys and values the cache holds."""

    name: str
    text: list[str]
    rows: list[str] = field(default_factory=list)
    length: int = 0  # logical: rows that belong to the text

    def feed(self, tokens: list[str]) -> None:
        """One forward: rows length, length+1, ... are written; the length stays."""
        end = self.length + len(tokens)
        self.rows = self.rows[: self.length] + tokens + self.rows[end:]

    def commit(self, accepted: int, guesses: list[str], own: str) -> None:
        """Root and guesses that stand keep their rows; the verifier's own token has none."""
        self.text += [*guesses[:accepted], own]
        self.length += 1 + accepted

    def foreign_rows(self, length: int) -> int:
        """Of the first ``length`` rows: missing, or of a token that is not the text's."""
        held = [*self.rows[:length], *[""] * (length - len(self.rows))]
        return sum(row != token for row, token in zip(held, self.text, strict=False))


@dataclass(frozen=True)
class Event:
    """How one sequence stands after one action."""

    action: str
    sequence: str
    text: list[str]
    rows: list[str]
    length: int
    foreign: int  # rows below the length that are not the text's; 0 or the cache is wrong
    foreign_with_own: int  # the same if the verifier's own token were counted as cached


def two_rounds() -> list[Event]:
    """A accepts all guesses of the first round, B's second guess fails; then the other way round.

    Both are fed as many tokens in each forward, and each moves on by what it accepted.
    """
    batch = [
        Sequence("A", ["a0", "a1", "a2"]),
        Sequence("B", ["b0", "b1"]),
    ]
    events: list[Event] = []
    for one in batch:
        one.feed(list(one.text))
        one.length = len(one.text)
        one.text.append(token_after(one, 0))  # prefill's token, the first root
        events.append(note("prefill", one))
    for number, outcome in enumerate(([N, 1], [1, N]), start=1):
        proposals = [guess(one, accepted) for one, accepted in zip(batch, outcome, strict=True)]
        for one, guesses in zip(batch, proposals, strict=True):
            one.feed([one.text[-1], *guesses])
            events.append(note(f"round {number}: {1 + N} tokens fed", one))
        for one, guesses, accepted in zip(batch, proposals, outcome, strict=True):
            one.commit(accepted, guesses, token_after(one, accepted))
            events.append(note(f"round {number}: {accepted} of {N} stand", one))
    return events


def token_after(sequence: Sequence, ahead: int) -> str:
    """The verifier's token ``ahead`` places after the next one."""
    return f"{sequence.name.lower()}{len(sequence.text) + ahead}"


def guess(sequence: Sequence, right: int) -> list[str]:
    """``N`` guesses of which the first ``right`` are the verifier's tokens."""
    names = [token_after(sequence, ahead) for ahead in range(N)]
    return [name if ahead < right else name + WRONG for ahead, name in enumerate(names)]


def note(action: str, one: Sequence) -> Event:
    return Event(
        action,
        one.name,
        list(one.text),
        list(one.rows),
        one.length,
        one.foreign_rows(one.length),
        one.foreign_rows(len(one.text)),
    )


def with_one_length(events: list[Event]) -> int:
    """Rows that a cache with one length a batch computes twice in the first round.

    It can keep no more than the shorter advance of the two.
    """
    advance = {one.sequence: one.length for one in events if one.action.startswith("round 1")}
    start = {one.sequence: one.length for one in events if one.action == "prefill"}
    moved = [advance[name] - start[name] for name in start]
    return sum(moved) - len(moved) * min(moved)


def rollback_lines(events: list[Event]) -> list[str]:
    """The story, a line a sequence and action; | ends the logical length."""
    rows = [
        [one.action, one.sequence, " ".join(one.text), shown_rows(one), str(one.length)]
        for one in events
    ]
    head = ["", "", "committed, the root last", "cache rows | beyond the length", "length"]
    return aligned(head, rows)


def shown_rows(event: Event) -> str:
    rows = [*event.rows[: event.length], "|", *event.rows[event.length :]]
    return " ".join(rows)


def rollback_checks(events: list[Event]) -> list[Check]:
    """Lengths of both, no foreign row ever, and that the wrong count of rows is seen."""
    last = {one.sequence: one for one in events}
    after_first = {one.sequence: one for one in events if "round 1" in one.action}
    return [
        exactly("A after 3 + root: all 4 stand, length", after_first["A"].length, 3 + 1 + N),
        exactly("B after 2 + root: guess 2 fails, length", after_first["B"].length, 2 + 1 + 1),
        exactly("A a round later, 1 stands, length", last["A"].length, 3 + 1 + N + 1 + 1),
        exactly("B a round later, all 4 stand, length", last["B"].length, 2 + 1 + 1 + 1 + N),
        exactly("rows below a length that are not the text's", sum(e.foreign for e in events), 0),
        exactly(
            "the same if B's own token were counted as cached", after_first["B"].foreign_with_own, 1
        ),
        exactly(
            "rows that one length for both would compute twice", with_one_length(events), N - 1
        ),
    ]
