"""Sampling by vLLM within this process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

from dash_trl.evaluation.checkpoint import Checkpoint
from dash_trl.evaluation.sampler import Draw, Drawn, Sampler, end_tokens
from dash_trl.serve import CPU_CACHE_GIB, CPU_SEQUENCES, layout, parallelism, visible_gpus


class VLLMSampler(Sampler):
    """All prompts at once in vLLM's engine, each with a seed of its own.

    Raises:
        ValueError: vLLM is not installed.
    """

    def __init__(self, checkpoint: Checkpoint):
        super().__init__(checkpoint.tokenizer, end_tokens(checkpoint.generation_config, checkpoint.tokenizer))
        try:
            from vllm import LLM
        except ImportError as error:
            raise ValueError(
                "vLLM is not installed in this environment: `pip install dash_trl[vllm]`, or sample by transformers."
            ) from error
        gpus = visible_gpus()
        options: dict[str, Any] = {}
        if gpus:
            config = checkpoint.config.get_text_config()
            options["tensor_parallel_size"] = layout(len(gpus), 1, parallelism(()), config)[1]
        else:  # as `dash_trl.serve` starts a server
            options |= {"dtype": "float32", "enforce_eager": True, "max_num_seqs": CPU_SEQUENCES}
            options["enable_chunked_prefill"] = False  # with it and seeds the engine dies (`sampling.takes_seeds`)
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GIB)  # read by the engine's process
        with tempfile.TemporaryDirectory(prefix="dash_trl_merged_") as merged:
            path = checkpoint.base
            if checkpoint.is_adapter:
                checkpoint.load("auto").save_pretrained(merged)
                checkpoint.tokenizer.save_pretrained(merged)
                path = merged
            self._llm: Any = LLM(path, disable_log_stats=True, **options)

    def _draw(self, prompts: list[list[int]], draw: Draw, left: set[int]) -> Iterator[Drawn]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        engine = self._llm.llm_engine
        waiting = {str(index) for index in left}
        for index in sorted(left):
            parameters = SamplingParams(
                n=draw.num_samples,
                temperature=draw.temperature,
                max_tokens=draw.room(index),
                seed=draw.stream(index),
                stop_token_ids=self.end_tokens,
                output_kind=RequestOutputKind.FINAL_ONLY,
                detokenize=False,
            )
            engine.add_request(str(index), TokensPrompt(prompt_token_ids=prompts[index]), parameters)
        try:
            while waiting:
                for output in engine.step():
                    if output.finished:
                        waiting.discard(output.request_id)
                        yield int(output.request_id), [list(one.token_ids) for one in output.outputs]
        finally:
            if waiting:
                engine.abort_request(list(waiting))

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
