"""The planner: cells, options, the joint problem, the search for the best plan under a memory cap. Free of torch."""

from autoplan.planner.assemble import assemble
from autoplan.planner.search import Candidate, Search, mesh_shapes

__all__ = ["Candidate", "Search", "assemble", "mesh_shapes"]
