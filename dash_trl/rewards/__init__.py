"""Reward functions. Nothing is imported here: `dash_trl.rewards.math` needs no torch, `failures` does."""
