"""What everybody speaks of: schemes, activations, routing methods, schemas of the ops, the call and the problem
of a layer, and how an argument is refused. Imports nothing else of the package."""
