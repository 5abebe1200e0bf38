"""The audit of a model: `dataflow` traces a forward pass, `joins` finds residual additions in it, `collect` makes facts of both."""
