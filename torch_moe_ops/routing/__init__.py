"""Router logits to expert ids and weights: the options of a router, and the methods in plain torch."""
