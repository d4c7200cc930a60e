"""Where an answer that calls tools lies in the text.

Templates write a call in a shape of their own, so there is no text of ours to look for. The answer
as it was generated is what ``whole(turns up to it)`` writes after the prompt, up to the token that
ends it. The same text must stand in the full render after that prompt, without its front where
the template drops the thoughts of earlier turns.
"""

from data.dialects import RowRefused
from data.records import Turn
from data.render import ChatTemplate, Span, Turns

NO_CALL = "the template leaves out a tool call"
MARK = "\ue0a8"  # private-use character that stands for an answer


def call_span(full: str, turns: Turns, template: ChatTemplate) -> Span:
    """The span in ``full`` of the answer that ends ``turns``, its end of turn included."""
    prompt = template.prompt(turns[:-1])
    through = template.whole(turns).rstrip()
    header = template.whole((*turns[:-1], Turn("assistant", MARK))).partition(MARK)[0]
    answer = through[reach(through, prompt, header) :]
    if not shows_calls(answer, turns[-1]):
        raise RowRefused(NO_CALL)
    ceiling = reach(full, prompt, header)  # the answer starts there, or before
    known = full.startswith(prompt)
    token = template.last_special(answer)
    for ended in (answer, answer[: len(answer) - len(token)].rstrip()):
        for k in range(len(ended)):
            shown = ended[k:]
            if not shows_calls(shown, turns[-1]):
                break
            if known:
                at = ceiling if full.startswith(shown, ceiling) else -1
            else:
                lowest = max(0, ceiling - len(answer))
                at = full.rfind(shown, lowest, ceiling + len(shown))
            if at < 0:
                continue
            end = at + len(shown)
            other = template.special.match(full, end) if len(ended) < len(answer) else None
            return at, other.end() if other else end
    raise RowRefused(NO_CALL)


def reach(text: str, prompt: str, header: str) -> int:
    """How far ``text`` is what stands before an answer: the prompt, or at least its header."""
    if text.startswith(prompt):
        return len(prompt)
    pairs = enumerate(zip(text, header, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(text), len(header)))


def shows_calls(text: str, turn: Turn) -> bool:
    return all(call.name in text for call in turn.calls)
