"""Checkpoints one can trust: written aside, hashed, flushed, renamed; a run resumes from the newest that is whole."""

from qklab.train.checkpoint.saver import Checkpoints
from qklab.train.checkpoint.store import Checkpoint, CheckpointError, Snapshot

__all__ = ["Checkpoint", "CheckpointError", "Checkpoints", "Snapshot"]
