"""The front door of an engine: a checkpoint in, texts out."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from kvcore.config import (
    DetectorConfig,
    EngineConfig,
    EvictionConfig,
    SamplingParams,
    require,
    require_bool,
)
from kvcore.engine import generate as texts
from kvcore.engine.outputs import Output
from kvcore.engine.prompts import prompt_ids
from kvcore.models.loader import load_checkpoint

if TYPE_CHECKING:
    from kvcore.engine.engine import Engine


class FrontDoor:
    """Verbs of ``Engine`` that stand on its six: load, generate, stream."""

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        eviction: EvictionConfig | None = None,
        dtype: str | torch.dtype | None = None,
        device: str = "cpu",
        config: EngineConfig | None = None,
        detector: DetectorConfig | None = None,
        prepack: bool = True,
    ) -> Engine:
        """Load a model and make an engine for it.

        Args:
            source: a checkpoint directory, a hub id ("Qwen/Qwen2.5-0.5B-Instruct"), which is
                downloaded once, or an embedded model ("demo:base").
            eviction: what is kept of the KV cache, in entries per lane; None keeps everything.
            dtype: "float32", "bfloat16" or "float16"; None takes the checkpoint's.
            device: only "cpu" in this version.
            config: sequences at once, context in tokens, bytes of KV cache.
            detector: for generations with ``detect=True``.
            prepack: keep linear weights in oneDNN's packed layout, where that is faster.
        Raises:
            ValueError: no such model, a hub model that cannot be had (the message says how to get
                it), a damaged or unsupported one, or a setting that does not fit it.
        """
        for name, value, kind in (
            ("eviction", eviction, EvictionConfig),
            ("config", config, EngineConfig),
            ("detector", detector, DetectorConfig),
        ):
            ok = value is None or isinstance(value, kind)
            require(ok, name, f"{kind.__name__} or None", value)
        model = load_checkpoint(source, dtype=dtype, device=device, prepack=prepack)
        make = cast("type[Engine]", cls)
        return make(model, config, eviction=eviction, detector=detector)

    def generate(
        self,
        prompts: Any,
        sampling: SamplingParams | str | None = None,
        *,
        n: int = 1,
        stop: str | Sequence[str] | None = None,
        logprobs: int | None = None,
        seed: int = 0,
        detect: bool = False,
        template_args: Mapping[str, Any] | None = None,
        progress: bool = False,
    ) -> list[Output]:
        """Continue prompts until each ends; they share the engine's batches.

        Args:
            prompts: one prompt or a list of prompts of one kind:

                * a text, which the model simply continues, after the special tokens that its
                  tokenizer puts in front of texts. Names of special tokens in it are text.
                * token ids, as a list, array or tensor of ints.
                * a conversation, a list of ``{"role": ..., "content": ...}``: the chat template and
                  its generation prompt are put around it, and what the messages say stays text.
            sampling: None takes ``SamplingParams()``; "model" what the checkpoint's
                ``generation_config.json`` says (``LoadedModel.sampling``).
            n: continuations of each prompt, which share the prompt's cache where nothing is
                evicted.
            stop: strings at which a text ends; it does not contain them.
            logprobs: give the log-probability of every token, and of so many most likely ones.
            seed: of all draws. A draw is a function of the seed, the prompt, how often the same
                prompt was continued before in this call, and the token's place: not of the other
                prompts.
            detect: end what degenerates, by the engine's detector.
            template_args: keywords of the chat template.
            progress: show a bar on standard error.
        Returns:
            ``n`` outputs for each prompt, in their order. A sequence that fails has
            ``finish_reason`` "error"; the others go on. Ctrl-C keeps what is finished: the rest has
            ``finish_reason`` "abort" and what there was of its text. If nothing is finished,
            ``KeyboardInterrupt`` is raised, with the outputs as its attribute ``outputs``.
        Raises:
            ValueError: a bad argument, a reward model, or other sequences of this engine have work
                or events to be read; nothing has changed.

        No sequence stays behind, and idle ones that were there before are left alone.
        """
        engine = cast("Engine", self)
        request = texts.Request.of(
            engine, sampling, n=n, stop=stop, logprobs=logprobs, seed=seed, detect=detect
        )
        require_bool(progress, "progress")
        ids = prompt_ids(engine.model, prompts, engine.context_len, template_args)
        return texts.generate(engine, request, ids, progress=progress)

    def stream(
        self,
        prompt: Any,
        sampling: SamplingParams | str | None = None,
        *,
        stop: str | Sequence[str] | None = None,
        seed: int = 0,
        detect: bool = False,
        template_args: Mapping[str, Any] | None = None,
    ) -> Generator[str, None, Output]:
        """Continue one prompt and yield its text as it becomes certain; arguments as ``generate``.

        Held back is what may still become part of a character or of a stop string: the pieces
        together are the text that ``generate`` returns. Arguments are checked at once, the prompt
        is fed with the first piece. Closing the iterator releases the sequence; as a generator it
        returns the ``Output``.

        Raises:
            ValueError: as ``generate``, or several prompts.
            RuntimeError: while iterating, the sequence failed, or the model gave no finite
                distribution, or somebody else has stepped the engine.
        """
        engine = cast("Engine", self)
        request = texts.Request.of(
            engine, sampling, n=1, stop=stop, logprobs=None, seed=seed, detect=detect
        )
        ids = prompt_ids(engine.model, prompt, engine.context_len, template_args)
        require(len(ids) == 1, "prompt", "a single prompt", len(ids))
        texts.check_idle(engine)
        return texts.stream(engine, request, ids[0])
