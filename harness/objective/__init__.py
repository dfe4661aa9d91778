"""What a run is trained for. A class for each objective knows the training batches, the score of a
split, what the final check is, and the baselines. ``scoring`` computes nats of batches."""
