"""Sparse features go to the ranks of their tables without the host: the input dist of TorchRec as two kernels.

TorchRec's needs three collectives, of sizes, lengths and values, some thirty kernels around them, and a host that waits for the
sizes before the other two. Here every rank stores the lengths of its bags, and where its values begin, straight at the owners
of the tables, which then fetch the values from its memory, into the order in which the lookup reads them.

The host learns how many values there are from a copy that it waits for a step later (:meth:`SentFeatures.receive`).
"""

from dlrm_fused.ops.feature_all_to_all.exchange import FeatureExchange, ReceivedFeatures, SentFeatures

__all__ = ["FeatureExchange", "ReceivedFeatures", "SentFeatures"]
