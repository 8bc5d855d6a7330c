"""Argosy: asynchronous reinforcement learning for coding agents.

SGLang actors bring episodes home, a durable Redis buffer holds every token, one Megatron-core learner trains on them.
The five folders beside this file are the five rooms of the house; each names its public face in its `__init__.py`.
"""

__version__ = "0.1.0"
