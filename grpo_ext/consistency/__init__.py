"""Do rollouts and actor agree? The same token has a probability on both sides; with the same weights the two must be equal."""
