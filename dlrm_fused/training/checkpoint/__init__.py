"""Checkpoints: complete or absent, written while training goes on, loadable on any number of ranks and any plan.

A run's ``checkpoints/`` holds one folder ``step_<step>`` per checkpoint: torch.distributed.checkpoint (DCP) decides who writes
and reads what, :mod:`~dlrm_fused.training.checkpoint.storage` is the files, ``progress.json`` says where the run stood, and
``checksums.json`` ties both to each other. A checkpoint is written to a folder of another name, read back, and renamed when all
of it is on disk.

Tensors are stored under names that do not depend on the plan:

===============================  ==========================  ==========================================
key                              global shape                content
===============================  ==========================  ==========================================
``dense.<parameter>``            as the parameter            dense weights and buffers
``dense_optimizer.<p>.<state>``  as the state                their optimizer's state
``table.<table>.weight``         [rows, dim]                 embedding weights
``table.<table>.<state>``        [rows, dim] or [rows, n]    state of the embedding optimizer, see below
``random.<rank>.<device>``       [bytes]                     state of a rank's random generators
===============================  ==========================  ==========================================

A parameter that is sharded over ranks, tensor-parallel or of experts, and its optimizer's state have the shape of the whole:
any number of ranks loads them.

A rowwise optimizer keeps one number for the columns of one shard: n is the number of column shards, 1 unless the plan shards
columns. Loading with another n gives every shard the mean over the n saved ones. For rowwise Adagrad, whose state is a sum of
row means of squared gradients, the mean is exactly the state of a whole row.
"""

from dlrm_fused.training.checkpoint.folder import CheckpointFolder, Progress, set_aside_damaged
from dlrm_fused.training.checkpoint.restoring import restore, restore_model, restore_tensors
from dlrm_fused.training.checkpoint.state import LocalShards, State, model_state, of_dense, optimizer_state
from dlrm_fused.training.checkpoint.storage import RawReader, RawWriter
from dlrm_fused.training.checkpoint.writer import CheckpointWriter
