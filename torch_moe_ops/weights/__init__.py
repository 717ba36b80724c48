"""The experts of a layer as a checkpoint means them: made, described, quantized, divided among ranks, saved."""
