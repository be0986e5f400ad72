"""A discrete-event model of networks, collectives and steps, which predicts the gain of fusion on many hosts.

It reads in this order: ``topologies`` (which links a flow crosses), ``network`` (how flows divide links in time, as SimPy
events), ``collectives`` (what an algorithm sends, in which order), ``step`` (tasks on streams).

Equal ranks are simulated once: links and flows come in classes whose members all behave alike, so that the cost of a
collective grows with the number of classes and not with the number of ranks.
"""
