"""Says what a cluster is, what is wrong with it and what to do: ``python -m dlrm_fused.doctor``, alone or under torchrun.

Every rank gathers facts (:mod:`.facts`) and sends them to rank 0 through the store of the rendezvous, before there is any
process group: what keeps ranks from forming one is found all the same. Rank 0 judges them (:mod:`.findings`), lets pairs of
ranks measure the network (:mod:`.measure`), and prints for all (:mod:`.report`). No wait is without limit: a rank whose checks
fail, hang or never begin is named.

Exit status, of every rank:

* 0: all is well.
* 1: something is broken, so that training or ``comm=fused`` cannot run.
* 2: it works, but slower than it could.

torchrun makes 1 of both 1 and 2; ``status`` in the output of ``--json`` is that of the ranks.
"""
