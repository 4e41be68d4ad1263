"""Algorithm 1 for one problem, one candidate after the other: what every search must come to."""

from dataclasses import dataclass, field, replace

from kvcore.config import SearchConfig
from kvcore.engine.events import Finish, GenerateSpec
from kvcore.search.trajectory import candidate_key
from support.fake_engine import EOS, Draft, head_logits, logprob

ABORTS = (Finish.ENTROPY, Finish.GZIP, Finish.REPETITION)


@dataclass
class OracleResult:
    steps: list[tuple] = field(default_factory=list)  # (source, index, ids, flag)
    finish: str = ""
    generated: dict[str, int] = field(default_factory=lambda: {"base": 0, "helper": 0})
    aborted: int = 0


def text_of(ids):
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def solve_slowly(
    scripts,
    prompts,
    score,
    config: SearchConfig,
    counts,
    *,
    key=0,
    context_len=4096,
    scorer_room=None,
):
    """Runs Algorithm 1.

    Args:
        scripts, prompts, counts: by source; prompts as ids.
        score: (committed steps' ids, candidate's ids, source, index, step) -> number, or None for a
            candidate that does not fit the scorer.
        scorer_room: committed steps' ids -> tokens that the scorer still takes.
    """
    result = OracleResult()
    context = {source: list(prompts[source]) for source in scripts}
    committed = []
    while True:
        limit = min(context_len, config.max_tokens)
        room = min(limit - len(context[source]) for source in scripts)
        if scorer_room is not None:
            room = min(room, scorer_room(committed))
        drafts = []
        for source in scripts:
            for index in range(counts[source]):
                spec = GenerateSpec(
                    replace(
                        config.sampling,
                        max_new_tokens=min(config.sampling.max_new_tokens, room),
                    ),
                    rng_key=candidate_key(config.seed, key, len(committed), source, index),
                    stop_at_step=True,
                    detect=source == "base" and config.detector is not None,
                )
                draft = scripts[source](tuple(context[source]), spec)
                if len(draft.tokens) > spec.sampling.max_new_tokens:
                    draft = Draft(draft.tokens[: spec.sampling.max_new_tokens], Finish.LENGTH)
                result.generated[source] += len(draft.tokens)
                result.aborted += draft.finish in ABORTS
                drafts.append((source, index, draft))
        decision = _decide(drafts, score, committed)
        if decision is None:
            result.finish = "max_tokens"
            return result
        source, index, draft, ids, flag = decision
        result.steps.append((source, index, tuple(ids), flag))
        committed.append(list(ids))
        for model in context:
            context[model] += ids
        if flag in ("", "capped") and draft.finish is Finish.EOS:
            result.finish = "eos"
        elif len(committed) >= config.max_steps:
            result.finish = "max_steps"
        elif any(len(context[m]) >= limit for m in context) or (
            scorer_room is not None and scorer_room(committed) < 1
        ):
            result.finish = "max_tokens"
        if result.finish:
            return result


def _decide(drafts, score, committed):
    best, offered = None, False
    for source, index, draft in drafts:
        blank = text_of(draft.tokens).strip() == "" and draft.finish is not Finish.EOS
        if draft.finish in ABORTS or blank:
            continue
        offered = True
        value = score(committed, draft.tokens, source, index, len(committed))
        if value is not None and (best is None or value > best[0]):
            best = (value, source, index, draft)
    if best is not None:
        _, source, index, draft = best
        return source, index, draft, draft.tokens, "capped" if draft.finish is Finish.LENGTH else ""
    if offered:
        return None
    for source, index, draft in drafts:
        if draft.finish not in ABORTS:
            return source, index, draft, draft.tokens, "blank"
    known = [d for d in drafts if d[2].max_entropy == d[2].max_entropy]
    source, index, draft = min(known, key=lambda d: d[2].max_entropy) if known else drafts[0]
    return source, index, draft, draft.tokens[: max(1, draft.fired_at - 1)], "aborted_prefix"


def prm_score(head, committed, ids, limit):
    """Logit difference of the fake token head for a candidate after committed steps.

    None if they have more than ``limit`` tokens together.
    """
    whole = list(head)
    for step in [*committed, ids]:
        whole += [*text_of(step).strip().encode(), 257]
    if len(whole) > limit:
        return None
    negative, positive = head_logits(whole)
    return positive - negative


def loglik_score(context, ids):
    """Mean fake log-probability of ``ids`` after ``context``."""
    terms = [logprob([*context, *ids[:i]], t) for i, t in enumerate(ids)]
    return sum(terms) / len(terms)


__all__ = ["EOS", "OracleResult", "loglik_score", "prm_score", "solve_slowly", "text_of"]
