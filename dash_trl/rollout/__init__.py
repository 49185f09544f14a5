"""Rollouts between birth and loss: the batch and its stages, the generation window, the order of prompts."""
