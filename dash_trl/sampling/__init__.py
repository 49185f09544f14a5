"""Sampling from vLLM servers. Nothing is imported here: `vllm_plugin` runs inside the servers, without TRL."""
