"""Attention implementations and what resources need from them. See :mod:`mstar.resources.attention.base`."""

from mstar.resources.attention.base import AttentionBackend, AttentionNeed, KVBatch, KVPlan, RaggedPlan, pick_backend
from mstar.resources.attention.memory import KVMemory

__all__ = ["AttentionBackend", "AttentionNeed", "KVBatch", "KVMemory", "KVPlan", "RaggedPlan", "pick_backend"]
