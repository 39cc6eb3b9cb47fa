"""From a model to the stages that `mpirun.Model` takes: layers, an nn.Sequential, or any nn.Module that can be traced.

`split_module.py` lists the steps of `mpirun.split`: export the graph, find where each node's inputs come from, choose
where to cut, build a module for each stage. The public names are those of `mpirun` itself. No MPI.
"""
